// SPDX-License-Identifier: GPL-2.0

//! kite: remote memory by name, shared by all processes of a host, over any RNIC.
//!
//! Layers, from top to bottom. A module uses only modules of lower layers.
//!
//! | module                 | purpose                                               |
//! | ---------------------- | ----------------------------------------------------- |
//! | `session`              | one open file of `/dev/kite`, and the kernel API      |
//! | `rnic`                 | lifecycle of RNICs and services, dispatch of requests |
//! | `vqp`, `rpc`           | virtual queue pairs, remote procedure calls           |
//! | `region`               | memory service: regions, locks, loans, migration      |
//! | `control`              | control requests with retry, and deferred work        |
//! | `cluster`              | membership, region names, directory of DC addresses   |
//! | `fabric`               | QPs and MRs shared by all processes                   |
//! | `verbs`, `mlx5`        | safe Rust over the RDMA core, and over mlx5 for DC    |
//! | `sys`                  | safe Rust over other parts of the kernel              |
//!
//! The crate `kite_core` holds wire formats, protocol state machines and policies that need no kernel.
//! `docs/development/architecture.md` lists the file of each task, and all locks with their order.

use kernel::prelude::*;

mod bindings;
mod cluster;
mod control;
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
            description: "RC queue pairs per peer, 1 to 16; the smaller number of two nodes applies (default 2)",
        },
        max_idle_conns: u32 {
            default: 256,
            description: "Maximum idle RC queue pairs kept per RNIC (default 256)",
        },
        max_inflight: u32 {
            default: 256,
            description: "Maximum operations in flight per RNIC, 16 to 4096 (default 256)",
        },
        max_promoted: u8 {
            default: 64,
            description: "Maximum peers that virtual queue pairs reach by RC, 0 to 64 (0: DC only; default 64)",
        },
        max_lent_mib: u32 {
            default: 0,
            description: "Maximum memory lent to other nodes, in MiB (0: half of RAM; default 0)",
        },
        max_local_mib: u32 {
            default: 0,
            description: "Maximum memory of this node in regions of its own users, in MiB (0: no limit; default 0)",
        },
        max_poll_us: u32 {
            default: 200,
            description: "Maximum time that a waiter polls before it sleeps, in us, 0 to 10000 (default 200)",
        },
        default_timeout_ms: u32 {
            default: 10000,
            description: "Deadline of requests that set none, in ms (default 10000)",
        },
    },
}

/// State of the loaded module.
#[pin_data]
struct Kite {
    // Fields drop in this order: the misc device must be deregistered before the RNICs are removed, so that
    // no session is opened during removal.
    #[pin]
    misc_device: session::device::KiteMiscDevice,
    #[pin]
    ib_client: verbs::client::ClientRegistration<rnic::RnicClient>,
}

impl kernel::InPlaceModule for Kite {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        // SAFETY: The kernel calls `init` once. No other function of `rnic` was called before: the
        // registrations follow.
        unsafe { rnic::init() };
        try_pin_init!(Self {
            misc_device <- session::device::KiteMiscDevice::new(),
            ib_client <- verbs::client::ClientRegistration::new(),
        })
    }
}
