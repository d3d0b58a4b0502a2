// SPDX-License-Identifier: GPL-2.0

//! Module parameters.
//!
//! `module!` in the crate root declares them. The kernel sets them before the module starts, and they
//! never change after that. Each function returns one parameter, limited to its range.

use crate::{bindings, module_parameters, sys::compat};
use core::num::NonZeroU8;

/// RC queue pairs per peer: 1 to 16.
pub(crate) fn pairs() -> NonZeroU8 {
    let pairs = compat::read_parameter(&module_parameters::pairs);
    NonZeroU8::new(pairs.min(16)).unwrap_or(NonZeroU8::MIN)
}

/// Maximum idle RC queue pairs kept per RNIC.
pub(crate) fn connections() -> u32 {
    compat::read_parameter(&module_parameters::connections)
}

/// Maximum operations in flight per RNIC: 16 to 4096.
pub(crate) fn slots() -> u32 {
    compat::read_parameter(&module_parameters::slots).clamp(16, 4096)
}

/// Maximum peers that virtual queue pairs reach by RC: 0 (DC only) to 64.
pub(crate) fn promote() -> u8 {
    compat::read_parameter(&module_parameters::promote).min(64)
}

/// Maximum memory lent to other nodes, in bytes. `None` is the default: half of RAM.
pub(crate) fn lend_bytes() -> Option<u64> {
    mib_to_bytes(compat::read_parameter(&module_parameters::lend_mib))
}

/// Maximum memory of this node in regions of its own users, in bytes. `None` is the default: no limit.
pub(crate) fn own_bytes() -> Option<u64> {
    mib_to_bytes(compat::read_parameter(&module_parameters::own_mib))
}

/// Maximum time that a waiter polls before it sleeps, in microseconds: 0 to 10,000.
pub(crate) fn spin_us() -> u32 {
    compat::read_parameter(&module_parameters::spin_us).min(10_000)
}

/// Deadline of requests that set none, in milliseconds.
pub(crate) fn timeout_ms() -> u32 {
    compat::read_parameter(&module_parameters::timeout_ms)
}

/// All parameters as user space reads them, with 0 for a default that is no number.
pub(crate) fn read_all() -> bindings::kite_parameters {
    bindings::kite_parameters {
        pairs: pairs().get().into(),
        connections: connections(),
        slots: slots(),
        promote: promote().into(),
        lend_mib: compat::read_parameter(&module_parameters::lend_mib),
        own_mib: compat::read_parameter(&module_parameters::own_mib),
        spin_us: spin_us(),
        timeout_ms: timeout_ms(),
    }
}

/// Converts a parameter in MiB to bytes. 0 is the default of the parameter.
fn mib_to_bytes(value: u32) -> Option<u64> {
    (value != 0).then(|| u64::from(value) << 20)
}
