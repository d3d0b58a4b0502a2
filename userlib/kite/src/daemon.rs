// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Operations of the membership daemon of an RNIC: join, and set the view. They need `CAP_NET_ADMIN`.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::cluster::{Cluster, Event};
use crate::describe::{Member, View};
use crate::error::Result;
use crate::sys;

/// Bytes of the secret that the kernels of a cluster share.
pub const SECRET_BYTES: usize = 16;

/// Session of a daemon. Dropping it leaves the cluster and ends all remote regions, unless another process has a
/// duplicate of its descriptor.
///
/// # Examples
/// ```no_run
/// use kite::daemon::{DaemonSession, SECRET_BYTES};
/// use kite::{Cluster, Member};
///
/// let cluster = Cluster::open()?;
/// let rnics = cluster.rnics()?;
/// let rnic = rnics.iter().find(|rnic| rnic.name == cluster.rnic_name());
/// let rnic = rnic.ok_or(kite::Error::NoRnic)?;
/// let this_node = Member {
///     node: 1,
///     incarnation: 17,
///     address: rnic.address,
///     admitted_epoch: 1,
///     unreachable_since: 0,
///     features: rnic.features,
/// };
/// let daemon = DaemonSession::join(cluster, this_node.node, this_node.incarnation, [0; SECRET_BYTES])?;
/// daemon.set_view(1, &[this_node])?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct DaemonSession {
    cluster: Cluster,
}

impl DaemonSession {
    /// Makes a session the daemon of its RNIC. `node` is the number of this node, 1 …
    /// [`NODE_ID_MAX`](crate::NODE_ID_MAX). `incarnation` identifies the membership of the node from now on. It is
    /// not 0, and differs from those of earlier memberships.
    ///
    /// Clones of `cluster` keep the session open.
    ///
    /// # Errors
    /// - [`Error::Busy`](crate::Error::Busy): the RNIC has a daemon.
    /// - [`Error::Invalid`](crate::Error::Invalid): a number is out of range.
    /// - [`Error::NotPermitted`](crate::Error::NotPermitted): the process lacks `CAP_NET_ADMIN`.
    pub fn join(
        cluster: Cluster,
        node: u32,
        incarnation: u64,
        secret: [u8; SECRET_BYTES],
    ) -> Result<Self> {
        let mut join = sys::kite_join {
            node,
            incarnation,
            secret,
            ..Default::default()
        };
        sys::join(cluster.as_fd(), &mut join)?;
        Ok(Self { cluster })
    }

    /// Continues the session that [`join`](Self::join) made in another process. `device` is a duplicate of its
    /// descriptor, `rnic` the name of its RNIC.
    pub fn resume(device: OwnedFd, rnic: &str) -> Self {
        let cluster = Cluster::from_device(File::from(device), rnic);
        Self { cluster }
    }

    /// Returns the view. See [`Cluster::view`].
    ///
    /// # Errors
    /// See [`Cluster::view`].
    pub fn view(&self) -> Result<View> {
        self.cluster.view()
    }

    /// Sets the view: an epoch above that of the last view, and 1 … [`MEMBERS_MAX`](crate::MEMBERS_MAX) members in
    /// ascending order of their numbers, this node included. Returns when removed and unreachable nodes can no longer
    /// reach the memory of this node.
    ///
    /// # Errors
    /// - [`Error::Invalid`](crate::Error::Invalid): the epoch or the members violate the rules above, an epoch of a
    ///   member is above that of the view, a member is unreachable since an epoch before its admission, this node is
    ///   unreachable or listed with another incarnation, or its address differs from that of the RNIC.
    /// - [`Error::NotPermitted`](crate::Error::NotPermitted): this session is not that of the daemon.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory): no memory. The last view stays in effect.
    pub fn set_view(&self, epoch: u64, members: &[Member]) -> Result<()> {
        let raw: Vec<sys::kite_member> = members.iter().map(|&m| m.into()).collect();
        sys::set_view(self.as_fd(), epoch, &raw)
    }

    /// Waits until the kernel of a node replies to a request over RDMA, at most for `timeout`: 1 ms to 60 s.
    ///
    /// # Errors
    /// - [`Error::HostDown`](crate::Error::HostDown): the node in this incarnation is not a reachable member.
    /// - [`Error::Invalid`](crate::Error::Invalid): the timeout is out of range.
    /// - [`Error::NotPermitted`](crate::Error::NotPermitted): the process lacks `CAP_NET_ADMIN`.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): no reply arrived.
    pub fn probe(&self, node: u32, incarnation: u64, timeout: Duration) -> Result<()> {
        let mut probe = sys::kite_probe {
            node,
            timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX),
            incarnation,
        };
        sys::probe(self.as_fd(), &mut probe)
    }

    /// Returns the next event. See [`Cluster::next_event`].
    ///
    /// # Errors
    /// See [`Cluster::next_event`].
    pub fn next_event(&self) -> Result<Option<Event>> {
        self.cluster.next_event()
    }
}

impl AsFd for DaemonSession {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.cluster.as_fd()
    }
}
