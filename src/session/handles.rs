// SPDX-License-Identifier: GPL-2.0

//! Handle table of a session: the mapped regions, by number, and the rights of each handle.
//!
//! # Operation
//!
//! A handle ties a mapping of a region to the rights of the handle and to its RPC state: the channel to the
//! server of the region, and the RPC service of the region. Requests find their handle by number.
//!
//! The rights of a handle are checked before each access, at this node only: [`Handle::mapping_for`] checks
//! the right to read or write, [`super::region`] the rights of fills, copies and atomic operations. The home
//! has granted the rights when the region was mapped (`src/region/home/acl.rs`).
//!
//! The session reports each handle whose mapping became stale once, as an event.
//!
//! # Locking
//!
//! The mutex `Session::handles` protects the table and `last_reported`. Scans of the table can be long, so
//! code on the poller thread only tries to lock `handles` and [`Handle::rpc_state`]. The mutex
//! [`Handle::rpc_state`] nests outside `served_regions`.

use super::Session;
use crate::{
    errno::{TryError, TryResult},
    fabric::send::inflight::Direction,
    region::map::Mapping,
    rpc::{channel::RpcChannel, server::RpcService},
};
use core::ops::DerefMut;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, AtomicFlag, Relaxed, Release},
        Arc, Mutex,
    },
};
use kite_core::rights::Rights;

/// Handle of a session. The number of handles is limited only by the memory limit of the user's cgroup.
#[pin_data]
pub(super) struct Handle {
    pub(super) id: u64,
    pub(super) mapping: Arc<Mapping>,
    pub(super) rights: Rights,
    /// `true` if closing the handle frees the region.
    pub(super) anonymous: bool,
    #[pin]
    pub(super) rpc_state: Mutex<HandleRpcState>,
    /// Set once the handle is unmapped or its region is freed. Written with `rpc_state` locked.
    closed: AtomicFlag,
}

/// RPC state of a handle.
#[derive(Default)]
pub(super) struct HandleRpcState {
    /// Channel to the server of the region, once attached.
    pub(super) channel: Option<Arc<RpcChannel>>,
    /// RPC service of the region, if this session serves the region.
    pub(super) service: Option<Arc<RpcService>>,
}

impl Handle {
    /// Returns the mapping for reads or writes.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the handle was mapped without the right to read or to write.
    pub(super) fn mapping_for(&self, direction: Direction) -> Result<Arc<Mapping>> {
        let required = match direction {
            Direction::Read => Rights::READ,
            Direction::Write => Rights::WRITE,
        };
        let is_allowed = self.rights.contains(required);
        is_allowed.then(|| self.mapping.clone()).ok_or(EACCES)
    }

    /// Locks and returns the RPC state.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the handle was closed.
    pub(super) fn lock_rpc_state(&self) -> Result<impl DerefMut<Target = HandleRpcState> + '_> {
        let rpc_state = self.rpc_state.lock();
        self.check_open().map(|()| rpc_state)
    }

    /// Checks that the handle was not closed. Takes no lock, so the poller thread may call it.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the handle was closed.
    pub(super) fn check_open(&self) -> Result {
        (!self.closed.load(Acquire)).then_some(()).ok_or(EBADF)
    }

    /// Closes the handle, and returns its RPC state.
    pub(super) fn take_rpc_state(&self) -> HandleRpcState {
        let mut rpc_state = self.rpc_state.lock();
        self.closed.store(true, Release);
        core::mem::take(&mut *rpc_state)
    }
}

impl HandleRpcState {
    /// Returns the channel to the server if the channel is open.
    pub(super) fn live_channel(&self) -> Option<Arc<RpcChannel>> {
        let channel = self.channel.as_ref();
        channel
            .filter(|channel| channel.check_open().is_ok())
            .cloned()
    }
}

impl Session {
    /// Inserts a handle for a mapping, and returns the number of the handle.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn insert_handle(
        &self,
        mapping: Arc<Mapping>,
        rights: Rights,
        anonymous: bool,
    ) -> Result<u64> {
        let handle_id = self.alloc_id();
        let handle = Arc::pin_init(
            pin_init!(Handle {
                id: handle_id,
                mapping,
                rights,
                anonymous,
                rpc_state <- new_mutex!(HandleRpcState::default(), "Handle::rpc_state"),
                closed: AtomicFlag::new(false),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let node = RBTreeNode::new(handle_id, handle, GFP_KERNEL_ACCOUNT)?;
        self.handles.lock().insert(node);
        Ok(handle_id)
    }

    /// Returns a handle.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the session has no handle of this number.
    /// - `ENOTCONN`: the session is not bound.
    pub(super) fn get(&self, handle_id: u64) -> Result<Arc<Handle>> {
        self.rnic()?;
        self.handles.lock().get(&handle_id).cloned().ok_or(EBADF)
    }

    /// Like [`Self::get`], but does not wait for a scan of the table: fails with
    /// [`TryError::WouldBlock`] instead.
    pub(super) fn try_get(&self, handle_id: u64) -> TryResult<Arc<Handle>> {
        let handles = self.handles.try_lock().ok_or(TryError::WouldBlock)?;
        Ok(handles.get(&handle_id).cloned().ok_or(EBADF)?)
    }

    /// Removes a handle from the table, and returns the handle. The caller closes the handle.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the session has no handle of this number.
    pub(super) fn remove_handle(&self, handle_id: u64) -> Result<Arc<Handle>> {
        let node = self.handles.lock().remove_node(&handle_id).ok_or(EBADF)?;
        let (_, handle) = node.to_key_value();
        Ok(handle)
    }

    /// Returns the length of a region in bytes, without blocking.
    pub(super) fn region_len(&self, handle_id: u64) -> Result<u64> {
        let mapping = self.try_get(handle_id)?.mapping.clone();
        mapping.layout().map(|layout| layout.len())
    }

    /// Returns the mapping and the rights of a handle.
    pub(super) fn mapping_and_rights(&self, handle_id: u64) -> Result<(Arc<Mapping>, Rights)> {
        self.get(handle_id)
            .map(|handle| (handle.mapping.clone(), handle.rights))
    }

    /// Returns a handle whose mapping became stale, and which was not reported before. Many mappings can
    /// become stale at once, so a search resumes behind the last reported handle instead of restarting.
    pub(super) fn next_stale_handle(&self) -> Option<u64> {
        if !self.events.has_pending() {
            return None;
        }
        let mut handles = self.handles.lock();
        let last = self.last_reported.load(Relaxed);
        let stale = Self::next_stale_handle_after(&mut handles, last)
            .or_else(|| Self::next_stale_handle_after(&mut handles, 0))?;
        self.last_reported.store(stale, Relaxed);
        Some(stale)
    }

    /// Returns the first stale, unreported handle with a number above `last`.
    fn next_stale_handle_after(handles: &mut RBTree<u64, Arc<Handle>>, last: u64) -> Option<u64> {
        let mut cursor = handles.cursor_lower_bound_mut(&(last + 1))?;
        while !cursor.current().1.mapping.report_event() {
            cursor = cursor.move_next()?;
        }
        Some(*cursor.current().0)
    }

    /// Returns the number of handles.
    pub(super) fn handle_count(&self) -> usize {
        self.handles.lock().keys().count()
    }
}
