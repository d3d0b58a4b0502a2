// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Parameters of the loaded module.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::sys::{self, kite_parameters};

/// Module parameters in effect, each limited to its range. They are set when the module is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Parameters {
    /// RC queue pairs per peer.
    pub pairs: u32,
    /// Maximum idle RC queue pairs kept per RNIC.
    pub connections: u32,
    /// Maximum operations in flight per RNIC.
    pub slots: u32,
    /// Maximum peers that virtual queue pairs reach by RC.
    pub promote: u32,
    /// Maximum memory lent to other nodes, in MiB; 0 is half of RAM.
    pub lend_mib: u32,
    /// Maximum memory of this node in regions of its own users, in MiB; 0 is no limit.
    pub own_mib: u32,
    /// Maximum time that a waiter polls before it sleeps, in microseconds.
    pub spin_us: u32,
    /// Deadline of requests that set none, in milliseconds.
    pub timeout_ms: u32,
}

/// Reads the parameters of the module; needs no session.
///
/// # Errors
/// [`Error::NotLoaded`](crate::Error::NotLoaded), [`Error::OpenDenied`](crate::Error::OpenDenied),
/// [`Error::Unsupported`](crate::Error::Unsupported) (the module is older than this request).
///
/// # Examples
/// ```no_run
/// let parameters = kite::parameters()?;
/// println!("{} RC queue pairs per peer", parameters.pairs);
/// # Ok::<(), kite::Error>(())
/// ```
pub fn parameters() -> Result<Parameters> {
    let mut raw = kite_parameters::default();
    sys::parameters(sys::open()?.as_fd(), &mut raw)?;
    let kite_parameters {
        pairs,
        connections,
        slots,
        promote,
        lend_mib,
        own_mib,
        spin_us,
        timeout_ms,
    } = raw;
    Ok(Parameters {
        pairs,
        connections,
        slots,
        promote,
        lend_mib,
        own_mib,
        spin_us,
        timeout_ms,
    })
}

impl Parameters {
    /// Returns name and value of each parameter, in the order of the ABI.
    pub fn entries(&self) -> [(&'static str, u32); 8] {
        [
            ("pairs", self.pairs),
            ("connections", self.connections),
            ("slots", self.slots),
            ("promote", self.promote),
            ("lend_mib", self.lend_mib),
            ("own_mib", self.own_mib),
            ("spin_us", self.spin_us),
            ("timeout_ms", self.timeout_ms),
        ]
    }
}
