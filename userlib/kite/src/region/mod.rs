// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Open regions: handle, attributes, rights, migration and free.
//!
//! Each other subject has a file: `access` has reads, writes, fills and copies, `atomic` atomic
//! operations, `crate::rpc` calls and servers, `crate::lock` locks and barriers.

mod access;
mod alloc;
mod atomic;
mod list;
mod map;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crate::cluster::Cluster;
use crate::describe::RegionInfo;
use crate::error::{Error, Result};
use crate::rights::Rights;
use crate::sys;
use crate::timeout::timeout_to_ms;

pub use alloc::AllocOptions;
pub use list::Regions;
pub use map::MapOptions;

/// An open region: memory of one or more nodes, accessed in place by RDMA.
///
/// Clones share one handle. A clone is cheap and can be sent to another thread. The handle is closed with the last
/// clone. An anonymous region is freed with its last handle, a named region is not.
///
/// # Examples
/// ```no_run
/// use kite::{Cluster, Rights};
///
/// let cluster = Cluster::open()?;
/// let region = cluster.map("greeting", Rights::READ | Rights::WRITE)?;
/// region.write_at(b"hello", 0)?;
/// assert_eq!(region.fetch_add(8, 1)?, 0);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Region {
    handle: Arc<RegionHandle>,
    info: RegionInfo,
    timeout_ms: u32,
}

/// Handle of the kernel. Dropping it closes the handle, unless the region was freed through it.
#[derive(Debug)]
struct RegionHandle {
    cluster: Cluster,
    id: u64,
    freed: AtomicBool,
}

impl Drop for RegionHandle {
    fn drop(&mut self) {
        if self.cluster.is_owner_process() && !self.freed.load(Ordering::Acquire) {
            // An error means that the handle is closed already.
            let _ = sys::unmap(
                self.cluster.as_fd(),
                &mut sys::kite_handle { handle: self.id },
            );
        }
    }
}

impl Region {
    /// Takes ownership of a new handle of the kernel.
    pub(crate) fn from_handle(cluster: Cluster, id: u64) -> Result<Self> {
        let handle = RegionHandle {
            cluster,
            id,
            freed: AtomicBool::new(false),
        };
        let mut raw = sys::kite_query_region {
            handle: id,
            ..Default::default()
        };
        sys::query_region(handle.cluster.as_fd(), &mut raw)?;
        let info = RegionInfo {
            len: raw.len,
            chunk_size: raw.chunk_size,
            rights: Rights::from_bits_truncate(raw.rights),
            home: raw.home,
            id: raw.region,
            owner: raw.owner,
        };
        Ok(Self {
            handle: Arc::new(handle),
            info,
            timeout_ms: 0,
        })
    }

    /// Returns the length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.info.len
    }

    /// Returns the bytes of each physically contiguous chunk but the last: a power of two.
    pub fn chunk_size(&self) -> u64 {
        self.info.chunk_size
    }

    /// Returns the rights of this handle.
    pub fn rights(&self) -> Rights {
        self.info.rights
    }

    /// Returns the attributes of the region.
    pub fn info(&self) -> RegionInfo {
        self.info
    }

    /// Returns the number of the handle in [`Event::Stale`](crate::Event::Stale): unique in the session, never 0.
    pub fn id(&self) -> u64 {
        self.handle.id
    }

    /// Sets the deadline of operations through this value, rounded up to milliseconds, at least 1. A deadline of
    /// more than one hour counts as one hour. The deadline applies to reads, writes, fills, copies, migrations,
    /// renames, atomic operations, calls, locks and barriers. Without this method the deadline is the module
    /// parameter `default_timeout_ms`.
    ///
    /// Signals do not extend the deadline. A read or write without its own deadline that a signal interrupts has
    /// the remainder of 10 s, since this crate does not read the module parameter.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ms = timeout_to_ms(timeout);
        self
    }

    /// Grants these rights to a user, in place of the rights of others. Needs [`Rights::MASTER`].
    ///
    /// A handle of the user ends with [`Error::Denied`] if it was opened with a right that the user loses. When this
    /// method returns, such handles have no operation in flight, except calls that wait for space in the ring of
    /// their server. The entry of the user in the grants of the region remains, also with no rights.
    ///
    /// # Errors
    /// - [`Error::Denied`]: the handle lacks [`Rights::MASTER`].
    /// - [`Error::Invalid`]: the user is root or the owner, which always have all rights, or the user namespace of this
    ///   process does not map the user.
    /// - [`Error::OutOfMemory`]: no memory, or the region has grants for [`GRANTS_MAX`](crate::GRANTS_MAX) users.
    /// - [`Error::HostDown`], [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`], [`Error::Stale`],
    ///   [`Error::TimedOut`], [`Error::BadHandle`]: see [`read_at`](Self::read_at).
    ///
    /// After any error but the first two the grant may have been made, or may be made later.
    pub fn grant(&self, uid: u32, rights: Rights) -> Result<()> {
        self.set_rights(uid, rights, 0)
    }

    /// Grants these rights to all users without a grant of their own. See [`grant`](Self::grant).
    ///
    /// # Errors
    /// See [`grant`](Self::grant).
    pub fn grant_others(&self, rights: Rights) -> Result<()> {
        self.set_rights(0, rights, sys::KITE_GRANT_OTHERS)
    }

    fn set_rights(&self, uid: u32, rights: Rights, flags: u32) -> Result<()> {
        let mut grant = sys::kite_grant {
            handle: self.open_handle()?,
            uid,
            rights: rights.bits(),
            flags,
            timeout_ms: self.timeout_ms,
        };
        sys::grant(self.handle.cluster.as_fd(), &mut grant)
    }

    /// Migrates the region to these nodes, striped chunk by chunk in this order; no nodes means this node. Needs
    /// [`Rights::MASTER`].
    ///
    /// All users may access the region meanwhile. Handles stay valid, and no write is lost. The home of the region
    /// does not change. Memory that was [registered](Cluster::register_region) is released.
    ///
    /// # Errors
    /// - [`Error::Busy`]: another migration of the region, or a rename, is in progress.
    /// - [`Error::Denied`]: the handle lacks [`Rights::MASTER`].
    /// - [`Error::Invalid`]: more than [`STRIPE_WIDTH_MAX`](crate::STRIPE_WIDTH_MAX) nodes.
    /// - [`Error::OutOfMemory`]: no memory, or a node has no free memory in pieces of the chunk size.
    /// - [`Error::HostDown`], [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`], [`Error::Stale`],
    ///   [`Error::TimedOut`], [`Error::BadHandle`]: see [`read_at`](Self::read_at).
    ///
    /// After any error but the first three some chunks may have been migrated.
    pub fn migrate_to(&self, nodes: &[u32]) -> Result<()> {
        let mut args = sys::kite_migrate {
            handle: self.open_handle()?,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        };
        sys::migrate_region(self.handle.cluster.as_fd(), nodes, &mut args)
    }

    /// Gives a named region another name, unique in the cluster, of at most [`NAME_MAX`](crate::NAME_MAX) bytes. Needs
    /// [`Rights::MASTER`]. Handles stay valid. The old name is free afterwards. The region has one of the names at
    /// any time.
    ///
    /// # Errors
    /// - [`Error::Busy`]: a migration of the region, or another rename, is in progress.
    /// - [`Error::Denied`]: the handle lacks [`Rights::MASTER`].
    /// - [`Error::Exists`]: a region has the name.
    /// - [`Error::Invalid`]: the region is anonymous, or the name is empty.
    /// - [`Error::NameTooLong`]: more than [`NAME_MAX`](crate::NAME_MAX) bytes.
    /// - [`Error::NotSupported`]: the module of the home lacks [`FEATURE_RENAME`](crate::FEATURE_RENAME).
    /// - [`Error::HostDown`], [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`], [`Error::OutOfMemory`],
    ///   [`Error::Stale`], [`Error::TimedOut`], [`Error::BadHandle`]: see [`read_at`](Self::read_at). The region has the
    ///   old or the new name, or is renamed until the deadline.
    ///
    /// # Examples
    /// ```no_run
    /// use kite::{Cluster, MapOptions, Rights};
    ///
    /// let cluster = Cluster::open()?;
    /// for entry in cluster.regions(kite::NODE_SELF) {
    ///     let entry = entry?;
    ///     if entry.in_conflict {
    ///         let region = cluster.map_with(&MapOptions::by_id(entry.home, entry.id), Rights::MASTER)?;
    ///         region.rename(&format!("{}.{}", entry.name, entry.home))?;
    ///     }
    /// }
    /// # Ok::<(), kite::Error>(())
    /// ```
    pub fn rename(&self, name: &str) -> Result<()> {
        let mut args = sys::kite_rename {
            handle: self.open_handle()?,
            timeout_ms: self.timeout_ms,
            name: sys::pack_name(name)?,
            ..Default::default()
        };
        sys::rename(self.handle.cluster.as_fd(), &mut args)
    }

    /// Frees the region for all users. Its name becomes free, other handles fail with [`Error::Stale`], and no node
    /// can reach the memory when this method returns. Needs [`Rights::MASTER`].
    ///
    /// After an error the handle is closed as if dropped.
    ///
    /// # Errors
    /// - [`Error::BadHandle`]: the region was freed through a clone.
    /// - [`Error::Denied`]: the handle lacks [`Rights::MASTER`].
    /// - [`Error::HostDown`], [`Error::Stale`], [`Error::TimedOut`]: see [`read_at`](Self::read_at).
    pub fn free(self) -> Result<()> {
        let mut raw = sys::kite_handle {
            handle: self.open_handle()?,
        };
        sys::free(self.handle.cluster.as_fd(), &mut raw)?;
        self.handle.freed.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns the session of the handle.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.handle.cluster
    }

    /// Returns the deadline for the ABI, in milliseconds; 0 is the default of the module.
    pub(crate) fn timeout_ms(&self) -> u32 {
        self.timeout_ms
    }

    /// Returns the handle for the ABI.
    ///
    /// # Errors
    /// - [`Error::BadHandle`]: the region was freed through a clone.
    pub(crate) fn open_handle(&self) -> Result<u64> {
        match self.handle.freed.load(Ordering::Acquire) {
            true => Err(Error::BadHandle),
            false => Ok(self.handle.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_and_cluster_are_send_and_sync() {
        fn assert_send_sync_clone<T: Send + Sync + Clone>() {}
        assert_send_sync_clone::<Region>();
        assert_send_sync_clone::<Cluster>();
    }
}
