// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Listeners: accepting virtual queue pairs of other nodes.

use std::os::fd::AsFd;
use std::time::Duration;

use super::Vqp;
use crate::cluster::Cluster;
use crate::error::Result;
use crate::sys;
use crate::timeout::wait_to_raw;

/// Listener at a port of this node. Dropping it closes the port.
///
/// # Examples
/// ```no_run
/// let cluster = kite::Cluster::open()?;
/// let listener = cluster.listen(7)?;
/// let (vqp, peer) = listener.accept(Some(std::time::Duration::from_secs(60)))?;
/// println!("user {} of node {}", peer.uid, peer.node);
/// # drop(vqp);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    cluster: Cluster,
    id: u64,
}

/// Node and user of the other end of an accepted virtual queue pair.
///
/// # Examples
/// ```no_run
/// let listener = kite::Cluster::open()?.listen(7)?;
/// let (vqp, peer) = listener.accept(Some(std::time::Duration::from_secs(60)))?;
/// if peer.uid != 0 {
///     drop(vqp); // accepts root only
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCred {
    /// Node.
    pub node: u32,
    /// Effective user on that node.
    pub uid: u32,
}

impl Cluster {
    /// Listens at `port`, which is not 0.
    ///
    /// # Errors
    /// - [`Error::Busy`](crate::Error::Busy): the session has [`VQPS_MAX`](crate::VQPS_MAX) VQPs and listeners.
    /// - [`Error::Invalid`](crate::Error::Invalid): port 0.
    /// - [`Error::NotJoined`](crate::Error::NotJoined): this node is in no cluster.
    /// - [`Error::PortInUse`](crate::Error::PortInUse): the port has a listener.
    pub fn listen(&self, port: u32) -> Result<Listener> {
        let mut raw = sys::kite_listen {
            port,
            ..Default::default()
        };
        sys::listen(self.as_fd(), &mut raw)?;
        Ok(Listener {
            cluster: self.clone(),
            id: raw.listener,
        })
    }
}

impl Listener {
    /// Accepts a virtual queue pair whose other end has sent a message to the port. Waits for at most `timeout`, or
    /// not at all without one. While there is a VQP to accept, the descriptor of the [`Cluster`] is readable.
    ///
    /// # Errors
    /// - [`Error::Busy`](crate::Error::Busy): the session has [`VQPS_MAX`](crate::VQPS_MAX) VQPs and listeners.
    /// - [`Error::Interrupted`](crate::Error::Interrupted): a signal handler ran.
    /// - [`Error::NoRnic`](crate::Error::NoRnic): the RNIC was removed.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): there was none in time.
    /// - [`Error::WouldBlock`](crate::Error::WouldBlock): without a timeout, there is none.
    pub fn accept(&self, timeout: Option<Duration>) -> Result<(Vqp, PeerCred)> {
        let (flags, timeout_ms) = wait_to_raw(timeout);
        let mut raw = sys::kite_accept {
            listener: self.id,
            flags,
            timeout_ms,
            ..Default::default()
        };
        sys::accept(self.cluster.as_fd(), &mut raw)?;
        let peer = PeerCred {
            node: raw.node,
            uid: raw.uid,
        };
        Ok((Vqp::from_id(&self.cluster, raw.vqp), peer))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.cluster.is_owner_process() {
            return;
        }
        let mut raw = sys::kite_close_listener { listener: self.id };
        // An error means that the RNIC, and the listener with it, was removed.
        let _ = sys::close_listener(self.cluster.as_fd(), &mut raw);
    }
}
