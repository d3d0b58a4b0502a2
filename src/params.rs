// SPDX-License-Identifier: GPL-2.0

//! Module parameters.
//!
//! `module!` in the crate root declares them. The kernel sets them before the module starts, and they
//! never change after that. Each function returns one parameter, limited to its range.

use crate::{bindings, module_parameters, sys::compat};
use core::num::NonZeroU8;

/// RC queue pairs per peer: 1 to 16.
pub(crate) fn conns_per_peer() -> NonZeroU8 {
    let conns = compat::read_parameter(&module_parameters::conns_per_peer);
    NonZeroU8::new(conns.min(16)).unwrap_or(NonZeroU8::MIN)
}

/// Maximum idle RC queue pairs kept per RNIC.
pub(crate) fn max_idle_conns() -> u32 {
    compat::read_parameter(&module_parameters::max_idle_conns)
}

/// Maximum operations in flight per RNIC: 16 to 4096.
pub(crate) fn max_inflight() -> u32 {
    compat::read_parameter(&module_parameters::max_inflight).clamp(16, 4096)
}

/// Maximum peers that virtual queue pairs reach by RC: 0 (DC only) to 64.
pub(crate) fn max_promoted() -> u8 {
    compat::read_parameter(&module_parameters::max_promoted).min(64)
}

/// Maximum memory lent to other nodes, in bytes. `None` is the default: half of RAM.
pub(crate) fn lend_bytes() -> Option<u64> {
    mib_to_bytes(compat::read_parameter(&module_parameters::max_lent_mib))
}

/// Maximum memory of this node in regions of its own users, in bytes. `None` is the default: no limit.
pub(crate) fn own_bytes() -> Option<u64> {
    mib_to_bytes(compat::read_parameter(&module_parameters::max_local_mib))
}

/// Maximum time that a waiter polls before it sleeps, in microseconds: 0 to 10,000.
pub(crate) fn max_poll_us() -> u32 {
    compat::read_parameter(&module_parameters::max_poll_us).min(10_000)
}

/// Deadline of requests that set none, in milliseconds.
pub(crate) fn default_timeout_ms() -> u32 {
    compat::read_parameter(&module_parameters::default_timeout_ms)
}

/// All parameters as user space reads them, with 0 for a default that is no number.
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

/// Converts a parameter in MiB to bytes. 0 is the default of the parameter.
fn mib_to_bytes(value: u32) -> Option<u64> {
    (value != 0).then(|| u64::from(value) << 20)
}
