// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What only the membership daemon of an RNIC does: join, and set the view. Needs `CAP_NET_ADMIN`.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::cluster::{Cluster, Event};
use crate::describe::{Member, View};
use crate::error::Result;
use crate::sys;

/// Bytes of what the kernels of a cluster know each other by.
pub const SECRET_BYTES: usize = 16;

/// The session of a daemon. Dropping it leaves the cluster, and every remote region goes stale, unless another
/// process has a duplicate of its descriptor.
#[derive(Debug)]
pub struct DaemonSession {
    cluster: Cluster,
}

impl DaemonSession {
    /// Makes a session the daemon of its RNIC. `node` is the number of this node, 1 …
    /// [`NODE_ID_MAX`](crate::NODE_ID_MAX); `incarnation` tells apart its lives and is not 0.
    ///
    /// Clones of `cluster` keep the session open.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) (the RNIC has a daemon),
    /// [`Error::Invalid`](crate::Error::Invalid), [`Error::NotPermitted`](crate::Error::NotPermitted).
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

    /// See [`Cluster::view`].
    ///
    /// # Errors
    /// [`Error::NoRnic`](crate::Error::NoRnic).
    pub fn view(&self) -> Result<View> {
        self.cluster.view()
    }

    /// Sets the view: an epoch above that of the view before, and 1 …
    /// [`MEMBERS_MAX`](crate::MEMBERS_MAX) members in ascending order of their numbers, this node among
    /// them. Returns when nodes that are gone can no longer reach this node's memory.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid),
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn set_view(&self, epoch: u64, members: &[Member]) -> Result<()> {
        let raw: Vec<sys::kite_member> = members.iter().map(|&m| m.into()).collect();
        sys::set_view(self.as_fd(), epoch, &raw)
    }

    /// As [`Cluster::next_event`].
    ///
    /// # Errors
    /// As there.
    pub fn next_event(&self) -> Result<Option<Event>> {
        self.cluster.next_event()
    }
}

impl AsFd for DaemonSession {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.cluster.as_fd()
    }
}
