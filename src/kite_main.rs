// SPDX-License-Identifier: GPL-2.0

//! kite: remote memory by name, shared by every process of a host, over any RNIC.
//!
//! Arrows point down only: `session` (what one open file owns) uses `services`: `vqp` (virtual queue pairs), `rpc`
//! (calls to who serves a region) and `lmr` (the memory service), which use `cluster` (nodes and names) and `fabric`
//! (queue pairs shared by all), which uses `verbs` and `dc` (safe Rust over the RDMA core and over mlx5's DC) and `sys`
//! (safe Rust over the rest of the kernel).
//! `kite_core` holds the logic that needs no kernel.

use kernel::prelude::*;

mod bindings;
mod cluster;
mod errno;
mod fabric;
pub(crate) mod mlx5;
mod params;
pub(crate) mod region;
mod rnic;
mod rpc;
mod session;
mod stats;
mod sys;
mod trace;
mod verbs;
mod vqp;

module! {
    type: Kite,
    name: "kite",
    authors: ["The kite developers"],
    description: "Remote memory by name, shared by every process of a host, over RDMA",
    license: "GPL",
    params: {
        conns_per_peer: u8 {
            default: 2,
            description: "RC queue pairs per peer, 1 to 16; of two nodes' numbers the smaller counts (default 2)",
        },
        max_idle_conns: u32 {
            default: 256,
            description: "RC queue pairs per RNIC that are kept though nobody uses them (default 256)",
        },
        max_inflight: u32 {
            default: 256,
            description: "Operations in flight per RNIC, 16 to 4096 (default 256)",
        },
        max_promoted: u8 {
            default: 64,
            description: "Most nodes that virtual queue pairs reach by connections, up to 64; 0 means by DC alone (default 64)",
        },
        max_lent_mib: u32 {
            default: 0,
            description: "Most memory in MiB that other nodes get; 0 means half of all (default 0)",
        },
        max_local_mib: u32 {
            default: 0,
            description: "Most memory in MiB that users of this node get of it; 0 means no cap (default 0)",
        },
        max_poll_us: u32 {
            default: 200,
            description: "Most time in us that a waiter polls before it sleeps, up to 10000 (default 200)",
        },
        default_timeout_ms: u32 {
            default: 10000,
            description: "Time in ms after which what has no deadline of its own gives up (default 10000)",
        },
    },
}

/// The loaded module.
#[pin_data]
struct Kite {
    // The device goes first, so that nobody comes while the RNICs go: fields drop in this order.
    #[pin]
    misc_device: session::device::KiteMiscDevice,
    #[pin]
    ib_client: verbs::client::ClientRegistration<rnic::RnicClient>,
}

impl kernel::InPlaceModule for Kite {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        // SAFETY: Called once, first.
        unsafe { rnic::init() };
        try_pin_init!(Self {
            misc_device <- session::device::KiteMiscDevice::new(),
            ib_client <- verbs::client::ClientRegistration::new(),
        })
    }
}
