// SPDX-License-Identifier: GPL-2.0

//! Regions of a session: allocation, mapping, rights, migration, and access through handles.
//!
//! # Operation
//!
//! Each function finds the handle, checks its rights, and calls the memory service of the RNIC. Accesses pass
//! admission by the session's priority and limits. Reads, writes, fills and copies enter the services again
//! after each stop, so no service guard is held while user memory is faulted in.
//!
//! # Recovery
//!
//! If no handle can be inserted for a new region, the region is released at once, because no request could
//! free the region later. Closing a handle also detaches its channel, aborts the calls received through the
//! handle, stops its RPC service, and releases its locks.

use super::{handles::Handle, iovec::IoVec, Session};
use crate::{
    errno::{self, TryResult},
    fabric::send::inflight::Direction,
    region::{
        alloc::AllocRequest,
        grant::GrantRequest,
        home::change::{Change, ChangeRequest},
        map::{
            access::{AccessRequest, SubmitContext},
            atomic::AtomicRequest,
            copy::{CopyOperand, CopyRequest, FillRequest},
            io::VectoredAccess,
            open::MapRequest,
            submit::SubmitResult,
            Mapping,
        },
        MemoryService,
    },
    rpc::Rpc,
    sys::{buffer::Buffer, deadline::Deadline, pin::PinnedPages},
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{atomic::WORD_BYTES, rights::Rights};

/// Converts `ESTALE` to `ENOENT`, for callers without a handle: a region freed during the lookup counts as
/// missing.
fn stale_to_noent(error: Error) -> Error {
    if error == errno::stale() {
        ENOENT
    } else {
        error
    }
}

/// Handle of a region that was mapped.
pub(super) struct MappedHandle {
    pub(super) id: u64,
    /// Length of the region in bytes.
    pub(super) len: u64,
    /// Owner of the region, in the initial user namespace.
    pub(super) owner_uid: u32,
}

impl Session {
    /// Allocates a region. Returns a handle with all rights.
    pub(super) fn alloc(&self, request: &AllocRequest<'_>) -> Result<u64> {
        let memory_service = self.enter_memory_service()?;
        let mapping = memory_service.alloc(request, self.events.clone())?;
        self.insert_region_handle(&memory_service, &mapping, request)
    }

    /// Creates a region from existing pinned memory. Returns a handle with all rights.
    pub(super) fn register(&self, pinned: PinnedPages, request: &AllocRequest<'_>) -> Result<u64> {
        let pinned = Arc::new(pinned, GFP_KERNEL_ACCOUNT)?;
        let memory_service = self.enter_memory_service()?;
        let mapping = memory_service.register(&pinned, request, self.events.clone())?;
        self.insert_region_handle(&memory_service, &mapping, request)
    }

    /// Inserts a handle for a new region, and returns the number of the handle.
    fn insert_region_handle(
        &self,
        memory_service: &Arc<MemoryService>,
        mapping: &Arc<Mapping>,
        request: &AllocRequest<'_>,
    ) -> Result<u64> {
        let anonymous = request.name.is_none();
        self.insert_handle(mapping.clone(), Rights::ALL, anonymous)
            .inspect_err(|_| {
                // A region without a handle could never be freed.
                memory_service.release_anonymous(mapping);
            })
    }

    /// Maps a named region. Returns a handle.
    pub(super) fn map(&self, request: &MapRequest) -> Result<MappedHandle> {
        let memory_service = self.enter_memory_service()?;
        let mapping = request.run(&memory_service, self.events.clone());
        let mapping = mapping.map_err(stale_to_noent)?;
        let insert = || {
            Ok(MappedHandle {
                len: mapping.layout()?.len(),
                owner_uid: mapping.region_traits()?.owner_uid,
                id: self.insert_handle(mapping.clone(), request.rights, false)?,
            })
        };
        insert().map_err(|error| {
            memory_service.unmap(&mapping);
            stale_to_noent(error)
        })
    }

    /// Closes a handle.
    pub(super) fn unmap(&self, handle_id: u64) -> Result {
        let rpc = self.enter_rpc()?;
        self.remove_handle(handle_id)
            .map(|handle| self.close_handle(&rpc, &handle))
    }

    /// Closes a handle that was removed from the table. On return no access through the handle is in flight,
    /// except requests already sent to lenders. Other nodes are notified in the background, after the return.
    pub(super) fn close_handle(&self, rpc: &Arc<Rpc>, handle: &Handle) {
        self.close_rpc_state(rpc, handle);
        self.remove_locks(handle.id);
        let memory_service = &rpc.memory_service;
        if handle.anonymous {
            memory_service.release_anonymous(&handle.mapping);
        } else {
            memory_service.unmap(&handle.mapping);
        }
    }

    /// Frees a region, and closes the handle.
    pub(super) fn free(&self, handle_id: u64) -> Result {
        let rpc = self.enter_rpc()?;
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        rpc.memory_service.free(&handle.mapping)?;
        self.close_rpc_state(&rpc, &handle);
        // Fails if another thread has closed the handle meanwhile.
        let _ = self.remove_handle(handle_id);
        self.remove_locks(handle_id);
        Ok(())
    }

    /// Changes access rights to a region.
    pub(super) fn grant(&self, handle_id: u64, grant: &GrantRequest) -> Result {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        let memory_service = self.enter_memory_service()?;
        grant.run(&memory_service, &handle.mapping)
    }

    /// Migrates a region to `nodes`. An empty list stands for this node.
    pub(super) fn move_region(&self, handle_id: u64, nodes: &[u32], deadline: Deadline) -> Result {
        let nodes = if nodes.is_empty() { &[0] } else { nodes };
        self.change_region(handle_id, Change::Migrate(nodes), deadline)
    }

    /// Changes a region in the background of its home.
    pub(super) fn change_region(
        &self,
        handle_id: u64,
        change: Change<'_>,
        deadline: Deadline,
    ) -> Result {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        let request = ChangeRequest {
            mapping: &handle.mapping,
            change,
            deadline,
        };
        let memory_service = self.enter_memory_service()?;
        request.run(&memory_service)
    }

    /// Reads or writes a range of a region.
    pub(super) fn access(&self, handle_id: u64, access: &AccessRequest, memory: &Buffer) -> Result {
        let stats = &self.rnic()?.stats;
        let mapping = self.get(handle_id)?.mapping_for(access.direction)?;
        access.run(
            || self.enter_memory_service(),
            &mapping,
            memory,
            self.tenant()?,
            stats,
        )
    }

    /// Reads or writes several ranges of a region.
    pub(super) fn access_segments(
        &self,
        handle_id: u64,
        direction: Direction,
        segments: &IoVec,
        deadline: Deadline,
    ) -> Result {
        let stats = &self.rnic()?.stats;
        let mapping = self.get(handle_id)?.mapping_for(direction)?;
        let request = VectoredAccess {
            direction,
            ranges: segments.ranges(),
            deadline,
            tenant: self.tenant()?,
        };
        let result = request.run(|| self.enter_memory_service(), &mapping, segments.buffer());
        let total = AccessRequest {
            direction,
            offset: segments.ranges().first().map_or(0, |span| span.offset),
            len: segments.len(),
            deadline,
        };
        total.account(&mapping, stats, result.err());
        result
    }

    /// Starts a read or write without blocking.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the access would block.
    /// - Otherwise see [`Self::access`].
    pub(super) fn submit_access(
        &self,
        handle_id: u64,
        access: &AccessRequest,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> TryResult<SubmitResult> {
        let memory_service = self.enter_memory_service()?;
        let mapping = self.try_get(handle_id)?.mapping_for(access.direction)?;
        access.submit(&memory_service, &mapping, memory, context)
    }

    /// Fills a range of a region with one byte value.
    pub(super) fn fill(&self, handle_id: u64, fill: &FillRequest) -> Result {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::WRITE) {
            return Err(EACCES);
        }
        let stats = &self.rnic()?.stats;
        fill.run(
            || self.enter_memory_service(),
            &handle.mapping,
            self.tenant()?,
            stats,
        )
    }

    /// Copies `len` bytes between regions. `from` and `to` are pairs of handle and offset.
    pub(super) fn copy(
        &self,
        from: (u64, u64),
        to: (u64, u64),
        len: u64,
        deadline: Deadline,
    ) -> Result {
        let stats = &self.rnic()?.stats;
        let (source, target) = (self.get(from.0)?, self.get(to.0)?);
        if !source.rights.contains(Rights::READ) || !target.rights.contains(Rights::WRITE) {
            return Err(EACCES);
        }
        let request = CopyRequest {
            from: CopyOperand {
                mapping: &source.mapping,
                offset: from.1,
            },
            to: CopyOperand {
                mapping: &target.mapping,
                offset: to.1,
            },
            len,
            deadline,
            tenant: self.tenant()?,
        };
        request.run(|| self.enter_memory_service(), stats)
    }

    /// Executes an atomic operation on a word. Returns the previous value.
    pub(super) fn atomic_update(&self, handle_id: u64, request: &AtomicRequest) -> Result<u64> {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::READ | Rights::WRITE) {
            return Err(EACCES);
        }
        self.wait_admitted(WORD_BYTES, request.deadline)?;
        let memory_service = self.enter_memory_service()?;
        request.run(&memory_service, &handle.mapping)
    }
}
