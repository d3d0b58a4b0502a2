// SPDX-License-Identifier: GPL-2.0 OR MIT
//! An open region: memory of one or more nodes, read and written in place.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crate::cluster::Cluster;
use crate::describe::RegionInfo;
use crate::error::{Error, Result};
use crate::lock::LockGuard;
use crate::rights::Rights;
use crate::service::{ServeOptions, Service};
use crate::sys;

/// An open region.
///
/// Clones share one handle, so a clone is cheap and can go to another thread; the region is closed
/// with the last of them. An anonymous region ends with its last handle, a named one does not.
#[derive(Clone, Debug)]
pub struct Region {
    handle: Arc<RegionHandle>,
    info: RegionInfo,
    timeout_ms: u32,
}

/// A handle of the kernel, given back on drop unless the region was freed through it.
#[derive(Debug)]
struct RegionHandle {
    cluster: Cluster,
    id: u64,
    freed: AtomicBool,
}

impl Drop for RegionHandle {
    fn drop(&mut self) {
        if self.cluster.is_owner_process() && !self.freed.load(Ordering::Acquire) {
            // It fails only for a handle that is gone, and then nothing is left to do.
            let _ = sys::unmap(
                self.cluster.as_fd(),
                &mut sys::kite_handle { handle: self.id },
            );
        }
    }
}

impl Region {
    /// Takes over a handle that the kernel just made.
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
        };
        Ok(Self {
            handle: Arc::new(handle),
            info,
            timeout_ms: 0,
        })
    }

    /// Length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.info.len
    }

    /// Bytes of each physically contiguous chunk but the last, a power of two.
    pub fn chunk_size(&self) -> u64 {
        self.info.chunk_size
    }

    /// The rights that the region was opened with.
    pub fn rights(&self) -> Rights {
        self.info.rights
    }

    /// All that is known of the region.
    pub fn info(&self) -> RegionInfo {
        self.info
    }

    /// What [`Event::Stale`](crate::Event::Stale) calls this region: unique in the session, never
    /// 0.
    pub fn id(&self) -> u64 {
        self.handle.id
    }

    /// Sets the deadline of reads, writes, copies, moves, atomic operations, calls, and waits for locks and at barriers,
    /// through this value, instead of the module's default. It is rounded up to milliseconds, 1 … `u32::MAX`.
    ///
    /// Signals do not prolong it. The module's default is not known here: a read or write that a
    /// signal interrupts has what is left of 10 s.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ms = timeout_to_ms(timeout);
        self
    }

    /// Gives a user these rights instead of those of others. Needs [`Rights::MASTER`].
    ///
    /// Handles of a user who has lost a right that these were mapped with end: they fail with
    /// [`Error::Denied`]. Nothing is done by them any more when this returns, but for calls that wait for room
    /// in the ring of their server.
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::Invalid`] (root and the owner have all rights), [`Error::HostDown`],
    /// [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`], [`Error::OutOfMemory`] (also if more than
    /// [`GRANTS_MAX`](crate::GRANTS_MAX) users are named), [`Error::Stale`], [`Error::TimedOut`];
    /// [`Error::BadHandle`] after [`free`](Self::free) through a clone. After any other than
    /// [`Error::Denied`] and [`Error::Invalid`] it may have been done, or may yet be. A user that was named
    /// stays named.
    pub fn grant(&self, uid: u32, rights: Rights) -> Result<()> {
        self.set_rights(uid, rights, 0)
    }

    /// As [`grant`](Self::grant), to all users that were not named by it.
    ///
    /// # Errors
    /// As of [`grant`](Self::grant).
    pub fn grant_others(&self, rights: Rights) -> Result<()> {
        self.set_rights(0, rights, sys::KITE_GRANT_OTHERS)
    }

    fn set_rights(&self, uid: u32, rights: Rights, flags: u32) -> Result<()> {
        let mut grant = sys::kite_grant {
            handle: self.transfer_at(0)?.handle,
            uid,
            rights: rights.bits(),
            flags,
            timeout_ms: self.timeout_ms,
        };
        sys::grant(self.handle.cluster.as_fd(), &mut grant)
    }

    /// Moves the region to these nodes, chunk by chunk, in this order; none means this node. It may be used
    /// meanwhile, by everybody: handles stay as they are, and nothing that was written is lost. Needs
    /// [`Rights::MASTER`].
    ///
    /// The deadline is that of [`with_timeout`](Self::with_timeout). The node that allocated the region goes on
    /// to be its owner. Memory that was [registered](Cluster::register_region) is let go.
    ///
    /// # Errors
    /// [`Error::Busy`] (it is moving already), [`Error::Denied`], [`Error::HostDown`], [`Error::Invalid`] (more
    /// than [`STRIPE_WIDTH_MAX`](crate::STRIPE_WIDTH_MAX) nodes), [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`],
    /// [`Error::OutOfMemory`] (also if a node has no pieces of the size of the chunks), [`Error::Stale`],
    /// [`Error::TimedOut`]; [`Error::BadHandle`] after [`free`](Self::free) through a clone. After any but the
    /// first three a part of the chunks may have moved.
    pub fn migrate_to(&self, nodes: &[u32]) -> Result<()> {
        let mut args = sys::kite_migrate {
            handle: self.transfer_at(0)?.handle,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        };
        sys::migrate_region(self.handle.cluster.as_fd(), nodes, &mut args)
    }

    /// Fills `buffer` from the bytes at `offset`. On error its content is unspecified. An empty
    /// buffer checks the region and the offset alone.
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::HostDown`], [`Error::Io`], [`Error::NoRnic`],
    /// [`Error::OutOfMemory`] (limit of locked memory), [`Error::OutOfRange`], [`Error::Stale`],
    /// [`Error::TimedOut`]; [`Error::BadHandle`] after [`free`](Self::free) through a clone.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        sys::read(
            self.handle.cluster.as_fd(),
            self.transfer_at(offset)?,
            buffer,
        )
    }

    /// As [`read_at`](Self::read_at), into memory that need not be initialised; returns it filled.
    ///
    /// # Errors
    /// As of [`read_at`](Self::read_at).
    pub fn read_uninit_at<'a>(
        &self,
        buffer: &'a mut [MaybeUninit<u8>],
        offset: u64,
    ) -> Result<&'a mut [u8]> {
        sys::read_uninit(
            self.handle.cluster.as_fd(),
            self.transfer_at(offset)?,
            buffer,
        )
    }

    /// Writes all of `data` to the bytes at `offset`. After success any later read, by any node,
    /// sees it; on error an unknown part is written. Bytes move in no particular order, and nothing
    /// larger than a byte is atomic.
    ///
    /// # Errors
    /// As of [`read_at`](Self::read_at).
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        sys::write(self.handle.cluster.as_fd(), self.transfer_at(offset)?, data)
    }

    /// Fills all buffers, each from the bytes at the offset that goes with it: as many calls of
    /// [`read_at`](Self::read_at), but several are under way at once. Up to [`SEGMENTS_MAX`](crate::SEGMENTS_MAX)
    /// are one request, with a deadline of its own, of which nothing is done if one of them is not all in the
    /// region.
    ///
    /// # Errors
    /// As of [`read_at`](Self::read_at).
    pub fn read_vectored_at(&self, segments: &mut [(u64, &mut [u8])]) -> Result<()> {
        let args = self.rwv_args()?;
        sys::read_vectored(self.handle.cluster.as_fd(), args, segments)
    }

    /// Writes all buffers, each to the bytes at the offset that goes with it, in no particular order: see
    /// [`read_vectored_at`](Self::read_vectored_at) and [`write_at`](Self::write_at).
    ///
    /// # Errors
    /// As of [`read_at`](Self::read_at).
    pub fn write_vectored_at(&self, segments: &[(u64, &[u8])]) -> Result<()> {
        let args = self.rwv_args()?;
        sys::write_vectored(self.handle.cluster.as_fd(), args, segments)
    }

    fn rwv_args(&self) -> Result<sys::kite_rwv> {
        Ok(sys::kite_rwv {
            handle: self.transfer_at(0)?.handle,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }

    /// Makes `len` bytes from `offset` on `byte`. It is done where they are. Needs [`Rights::WRITE`].
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::HostDown`], [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`],
    /// [`Error::OutOfMemory`], [`Error::OutOfRange`], [`Error::Stale`], [`Error::TimedOut`];
    /// [`Error::BadHandle`] after [`free`](Self::free) through a clone. After any other than
    /// [`Error::OutOfRange`] an unknown part was done, and of it up to 256 KiB may yet be.
    pub fn fill(&self, byte: u8, offset: u64, len: u64) -> Result<()> {
        let mut set = self.fill_args(byte, offset, len)?;
        sys::fill(self.handle.cluster.as_fd(), &mut set)
    }

    pub(crate) fn fill_args(&self, byte: u8, offset: u64, len: u64) -> Result<sys::kite_fill> {
        Ok(sys::kite_fill {
            handle: self.transfer_at(offset)?.handle,
            offset,
            len,
            byte: byte.into(),
            timeout_ms: self.timeout_ms,
        })
    }

    /// Copies `len` bytes from `offset` on to `to`, at `to_offset`. Both have to be open in one
    /// [`Cluster`], and may be the same region: where they overlap, the destination gets what the source was.
    /// Needs [`Rights::READ`] here and [`Rights::WRITE`] there.
    ///
    /// It is done by the node that has the memory where one node has both, else by way of this one. The
    /// deadline is that of `self`.
    ///
    /// # Errors
    /// As of [`fill`](Self::fill), of either region; [`Error::Invalid`] if they are not of one [`Cluster`].
    pub fn copy_to(&self, offset: u64, to: &Region, to_offset: u64, len: u64) -> Result<()> {
        let mut copy = self.copy_args(offset, to, to_offset, len)?;
        sys::copy(self.handle.cluster.as_fd(), &mut copy)
    }

    pub(crate) fn copy_args(
        &self,
        offset: u64,
        to: &Region,
        to_offset: u64,
        len: u64,
    ) -> Result<sys::kite_copy> {
        if !self.cluster().is_same_session(to.cluster()) {
            return Err(Error::Invalid);
        }
        Ok(sys::kite_copy {
            from: self.transfer_at(offset)?.handle,
            from_offset: offset,
            to: to.transfer_at(to_offset)?.handle,
            to_offset,
            len,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }

    pub(crate) fn rw_args(&self, offset: u64, addr: u64, len: u64) -> Result<sys::kite_rw> {
        Ok(sys::kite_rw {
            handle: self.transfer_at(offset)?.handle,
            offset,
            addr,
            len,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }

    /// Adds to the number of eight bytes at `offset`, a multiple of 8, modulo 2⁶⁴. Returns what it was.
    ///
    /// Atomic operations of all nodes on the same number take effect one after the other, each exactly
    /// once. The number is in the byte order of the machine. Needs [`Rights::READ`] and [`Rights::WRITE`].
    ///
    /// Until [`write_at`](Self::write_at) returns it may write its bytes more than once. So what atomic
    /// operations keep, such as a lock, is to be freed by [`swap`](Self::swap).
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::HostDown`], [`Error::Invalid`] (the offset), [`Error::Io`],
    /// [`Error::NoRnic`], [`Error::OutOfMemory`], [`Error::OutOfRange`], [`Error::Stale`],
    /// [`Error::NotJoined`], [`Error::TimedOut`]; [`Error::BadHandle`] after [`free`](Self::free) through a
    /// clone. After [`Error::HostDown`], [`Error::Io`], [`Error::NotJoined`], [`Error::Stale`] and
    /// [`Error::TimedOut`] it may have been done, or may yet be.
    pub fn fetch_add(&self, offset: u64, operand: u64) -> Result<u64> {
        self.atomic(offset, sys::KITE_ATOMIC_FETCH_ADD, operand, 0)
    }

    /// Replaces the number of eight bytes at `offset` by `new` if it is `expected`. Returns what it was:
    /// `expected` if it was replaced.
    ///
    /// # Errors
    /// As of [`fetch_add`](Self::fetch_add), where there is more.
    pub fn compare_swap(&self, offset: u64, expected: u64, new: u64) -> Result<u64> {
        self.atomic(offset, sys::KITE_ATOMIC_COMPARE_SWAP, new, expected)
    }

    /// Replaces the number of eight bytes at `offset` by `new`. Returns what it was.
    ///
    /// # Errors
    /// As of [`fetch_add`](Self::fetch_add), where there is more.
    pub fn swap(&self, offset: u64, new: u64) -> Result<u64> {
        self.atomic(offset, sys::KITE_ATOMIC_SWAP, new, 0)
    }

    /// Makes the number of eight bytes at `offset` 1 if it is 0. Returns whether it was.
    ///
    /// # Errors
    /// As of [`fetch_add`](Self::fetch_add), where there is more.
    pub fn test_and_set(&self, offset: u64) -> Result<bool> {
        Ok(self.compare_swap(offset, 0, 1)? == 0)
    }

    /// Calls who serves the region, with `data` for function `function`. Returns the bytes of the reply,
    /// which are in `reply`; the server is held to its length. Needs [`Rights::WRITE`].
    ///
    /// A call is made once at most. Data and reply have at most [`RPC_MAX_BYTES`](crate::RPC_MAX_BYTES) bytes, and the
    /// data as many as the server [takes](crate::ServeOptions::data_max). For a `reply` of more than
    /// [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) bytes this node sets as much memory aside.
    ///
    /// # Errors
    /// [`Error::ConnectionRefused`], [`Error::ConnectionReset`], [`Error::MessageTooLong`], [`Error::Denied`],
    /// [`Error::HostDown`], [`Error::Io`], [`Error::NoRnic`], [`Error::NotJoined`],
    /// [`Error::OutOfMemory`], [`Error::Stale`], [`Error::TimedOut`]; [`Error::BadHandle`] after
    /// [`free`](Self::free) through a clone. After [`Error::ConnectionReset`], [`Error::HostDown`],
    /// [`Error::Io`] and [`Error::TimedOut`] it may have been made, or may yet be.
    pub fn call(&self, function: u32, data: &[u8], reply: &mut [u8]) -> Result<usize> {
        let args = self.call_args(function, 0)?;
        sys::call(self.handle.cluster.as_fd(), args, data, reply)
    }

    /// Sends a message to who serves the region. It is at the server's node when this returns, or, with more
    /// than [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) bytes, a server has it; those of one thread come in order.
    ///
    /// # Errors
    /// As of [`call`](Self::call), where there is more.
    pub fn send(&self, function: u32, data: &[u8]) -> Result<()> {
        let args = self.call_args(function, sys::KITE_CALL_ONEWAY)?;
        sys::call(self.handle.cluster.as_fd(), args, data, &mut []).map(drop)
    }

    /// Serves the region, of which this node is the home, from now until the last clone of it and of the
    /// result is dropped. Of several servers the options of the first count. Needs [`Rights::MASTER`].
    ///
    /// # Errors
    /// [`Error::Busy`] (it is served by a clone), [`Error::Denied`], [`Error::HostDown`],
    /// [`Error::Invalid`], [`Error::NotJoined`], [`Error::OutOfMemory`], [`Error::NotLocal`],
    /// [`Error::Stale`].
    pub fn serve(&self, options: &ServeOptions) -> Result<Service> {
        let mut serve = options.to_raw(self.transfer_at(0)?.handle);
        sys::serve(self.handle.cluster.as_fd(), &mut serve)?;
        Ok(Service::new(self.clone()))
    }

    /// Takes lock `number` of the region, which has one for each number. All who want it stand in line for it,
    /// in order. Who has it sees what was written by those who had it before. Needs [`Rights::WRITE`].
    ///
    /// A lock binds only those who take it. It ends with the session, too, and with the node.
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::HostDown`], [`Error::Interrupted`] by a signal, [`Error::Io`],
    /// [`Error::NoRnic`], [`Error::NotJoined`], [`Error::OutOfMemory`] (also if more than
    /// [`WAITERS_MAX`](crate::WAITERS_MAX) locks of the region are held or waited for),
    /// [`Error::Stale`], [`Error::TimedOut`]; [`Error::BadHandle`] after [`free`](Self::free) through a clone.
    pub fn lock(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, 0)
    }

    /// As [`lock`](Self::lock), but shares it with others that do. Needs [`Rights::READ`] instead.
    ///
    /// # Errors
    /// As of [`lock`](Self::lock).
    pub fn lock_shared(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, sys::KITE_LOCK_SHARED)
    }

    /// As [`lock`](Self::lock), but waits for nobody.
    ///
    /// # Errors
    /// As of [`lock`](Self::lock), and [`Error::WouldBlock`] if others have it or wait for it.
    pub fn try_lock(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, sys::KITE_LOCK_TRY)
    }

    /// As [`lock_shared`](Self::lock_shared), but waits for nobody.
    ///
    /// # Errors
    /// As of [`try_lock`](Self::try_lock).
    pub fn try_lock_shared(&self, number: u64) -> Result<LockGuard> {
        self.acquire_lock(number, sys::KITE_LOCK_SHARED | sys::KITE_LOCK_TRY)
    }

    /// Waits until `count` have come to barrier `number` of the region, which has one for each number,
    /// besides its locks. Returns how often the barrier was passed, this time included. Needs
    /// [`Rights::WRITE`].
    ///
    /// # Errors
    /// As of [`lock`](Self::lock), and [`Error::Invalid`] for a count of 0, or another than others wait for.
    /// After [`Error::Interrupted`], [`Error::Io`] and [`Error::TimedOut`] the others may have passed all the
    /// same, as the next result shows.
    pub fn barrier(&self, number: u64, count: u32) -> Result<u64> {
        let mut barrier = sys::kite_barrier {
            handle: self.transfer_at(0)?.handle,
            number,
            count,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        };
        sys::barrier(self.handle.cluster.as_fd(), &mut barrier)?;
        Ok(barrier.generation)
    }

    fn acquire_lock(&self, number: u64, flags: u32) -> Result<LockGuard> {
        let args = sys::kite_lock {
            handle: self.transfer_at(0)?.handle,
            number,
            flags,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        };
        LockGuard::acquire(self, args)
    }

    /// The session that it is open in.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.handle.cluster
    }

    pub(crate) fn call_args(&self, function: u32, flags: u32) -> Result<sys::kite_call> {
        Ok(sys::kite_call {
            handle: self.transfer_at(0)?.handle,
            function,
            flags,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }

    /// Frees the region for everybody: its name goes, others see [`Error::Stale`], and nobody can
    /// reach its memory when this returns. Needs [`Rights::MASTER`].
    ///
    /// On error the region is closed like any other that is dropped.
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::BadHandle`], [`Error::HostDown`], [`Error::Stale`],
    /// [`Error::TimedOut`].
    pub fn free(self) -> Result<()> {
        let RegionHandle {
            cluster,
            id: number,
            freed,
        } = &*self.handle;
        if freed.load(Ordering::Acquire) {
            return Err(Error::BadHandle);
        }
        sys::free(cluster.as_fd(), &mut sys::kite_handle { handle: *number })?;
        freed.store(true, Ordering::Release);
        Ok(())
    }

    fn atomic(&self, offset: u64, operation: u32, operand: u64, expected: u64) -> Result<u64> {
        let mut atomic = self.atomic_args(offset, operation, operand, expected)?;
        sys::atomic(self.handle.cluster.as_fd(), &mut atomic)?;
        Ok(atomic.value)
    }

    pub(crate) fn atomic_args(
        &self,
        offset: u64,
        operation: u32,
        operand: u64,
        expected: u64,
    ) -> Result<sys::kite_atomic> {
        Ok(sys::kite_atomic {
            handle: self.transfer_at(offset)?.handle,
            offset,
            operand,
            expected,
            operation,
            timeout_ms: self.timeout_ms,
            ..Default::default()
        })
    }

    fn transfer_at(&self, offset: u64) -> Result<sys::Transfer> {
        if self.handle.freed.load(Ordering::Acquire) {
            return Err(Error::BadHandle);
        }
        Ok(sys::Transfer {
            handle: self.handle.id,
            offset,
            timeout_ms: self.timeout_ms,
        })
    }
}

/// Milliseconds for the ABI, rounded up.
pub(crate) fn timeout_to_ms(timeout: Duration) -> u32 {
    let ms = timeout.as_nanos().div_ceil(1_000_000).max(1);
    u32::try_from(ms).unwrap_or(u32::MAX)
}

/// Returns the flags and the milliseconds of a wait for the ABI. `None` does not wait.
pub(crate) fn wait_to_raw(timeout: Option<Duration>) -> (u32, u32) {
    timeout.map_or((sys::KITE_NOWAIT, 0), |timeout| (0, timeout_to_ms(timeout)))
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
