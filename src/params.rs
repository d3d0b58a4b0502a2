// SPDX-License-Identifier: GPL-2.0

//! Module parameters.
//!
//! `module!` in the crate root declares the parameters. The kernel sets them before the module starts, and
//! their values never change afterwards. Each function returns one parameter, clamped to its range.

use crate::{bindings, module_parameters, sys::compat};
use core::num::NonZeroU8;

/// Returns the number of RC QPs per peer: 1 to 16.
pub(crate) fn conns_per_peer() -> NonZeroU8 {
    let conns = compat::read_parameter(&module_parameters::conns_per_peer);
    NonZeroU8::new(conns.min(16)).unwrap_or(NonZeroU8::MIN)
}

/// Returns the maximum number of idle RC QPs kept per RNIC.
pub(crate) fn max_idle_conns() -> u32 {
    compat::read_parameter(&module_parameters::max_idle_conns)
}

/// Returns the maximum number of operations in flight per RNIC: 16 to 4096.
pub(crate) fn max_inflight() -> u32 {
    compat::read_parameter(&module_parameters::max_inflight).clamp(16, 4096)
}

/// Returns the maximum number of peers that VQPs reach by RC: 0 (DC only) to 64.
pub(crate) fn max_promoted() -> u8 {
    compat::read_parameter(&module_parameters::max_promoted).min(64)
}

/// Returns the maximum memory lent to other nodes, in bytes. `None` is the default: half of RAM.
pub(crate) fn lend_bytes() -> Option<u64> {
    mib_to_bytes(compat::read_parameter(&module_parameters::max_lent_mib))
}

/// Returns the maximum memory of this node in regions of its own users, in bytes. `None` is the default: no
/// limit.
pub(crate) fn own_bytes() -> Option<u64> {
    mib_to_bytes(compat::read_parameter(&module_parameters::max_local_mib))
}

/// Returns the maximum time that a waiter polls before it sleeps, in microseconds: 0 to 10,000.
pub(crate) fn max_poll_us() -> u32 {
    compat::read_parameter(&module_parameters::max_poll_us).min(10_000)
}

/// Returns the deadline of requests that set none, in milliseconds.
pub(crate) fn default_timeout_ms() -> u32 {
    compat::read_parameter(&module_parameters::default_timeout_ms)
}

/// Returns all parameters for user space. 0 stands for a default that is no number.
pub(crate) fn read_all() -> bindings::kite_parameters {
    bindings::kite_parameters {
        conns_per_peer: conns_per_peer().get().into(),
        max_idle_conns: max_idle_conns(),
        max_inflight: max_inflight(),
        max_promoted: max_promoted().into(),
        max_lent_mib: compat::read_parameter(&module_parameters::max_lent_mib),
        max_local_mib: compat::read_parameter(&module_parameters::max_local_mib),
        max_poll_us: max_poll_us(),
        default_timeout_ms: default_timeout_ms(),
    }
}

/// Converts a parameter in MiB to bytes. Returns `None` for 0, which selects the default.
fn mib_to_bytes(value: u32) -> Option<u64> {
    (value != 0).then(|| u64::from(value) << 20)
}
