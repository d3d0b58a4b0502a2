// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State and counters of virtual queue pairs.

use std::os::fd::AsFd;

use crate::cluster::Cluster;
use crate::error::Result;
use crate::sys;

/// State and counters of a virtual queue pair of any process. [`Cluster::vqps`] lists them.
///
/// # Examples
/// ```no_run
/// for vqp in kite::Cluster::open()?.vqps()? {
///     println!("process {}: {} requests to node {}", vqp.pid, vqp.requests, vqp.node);
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct VqpInfo {
    /// Other node.
    pub node: u32,
    /// Port of the other node, or of this node if it was accepted here; 0 for none.
    pub port: u32,
    /// User that owns the VQP.
    pub uid: u32,
    /// Process that created or accepted the VQP.
    pub pid: u32,
    /// `true` if its work requests use RC, `false` if DC.
    pub uses_rc: bool,
    /// `true` if it rejects work requests.
    pub closed: bool,
    /// `true` if a message can be received.
    pub readable: bool,
    /// Work requests that have not completed.
    pub pending: u32,
    /// Work requests pushed.
    pub requests: u64,
    /// Bytes of the pushed work requests.
    pub bytes: u64,
    /// Messages received.
    pub messages: u64,
}

impl From<&sys::kite_vqp_info> for VqpInfo {
    fn from(raw: &sys::kite_vqp_info) -> Self {
        let has = |flag| raw.flags & flag != 0;
        Self {
            node: raw.node,
            port: raw.port,
            uid: raw.uid,
            pid: raw.pid,
            uses_rc: has(sys::KITE_VQP_STATE_RC),
            closed: has(sys::KITE_VQP_STATE_CLOSED),
            readable: has(sys::KITE_VQP_STATE_READABLE),
            pending: raw.pending,
            requests: raw.requests,
            bytes: raw.bytes,
            messages: raw.messages,
        }
    }
}

impl Cluster {
    /// Lists the virtual queue pairs of the caller's user on this node, for root those of all users.
    ///
    /// # Errors
    /// - [`Error::NoRnic`](crate::Error::NoRnic): the RNIC was removed.
    pub fn vqps(&self) -> Result<Vec<VqpInfo>> {
        let mut raw = vec![sys::kite_vqp_info::default(); 16];
        loop {
            let count = sys::list_vqps(self.as_fd(), &mut raw)?;
            if count <= raw.len() {
                return Ok(raw[..count].iter().map(VqpInfo::from).collect());
            }
            raw.resize(count, Default::default());
        }
    }
}
