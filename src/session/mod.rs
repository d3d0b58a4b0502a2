// SPDX-License-Identifier: GPL-2.0

//! What one open file, or one kernel user, owns: handles, events, and perhaps the cluster membership.
//!
//! Dropping a session gives everything back. [`device`] is the file, [`ioctl`] its requests, [`call`] those
//! that are about calls, of which long ones go by a [`relay`], [`lock`] those about locks and barriers, [`qos`]
//! those about priorities and limits; [`queue`] is another way to make them.

pub(crate) mod args;
pub(crate) mod call;
pub(crate) mod device;
mod export;
mod ioctl;
pub(crate) mod iovec;
mod lock;
mod qos;
mod queue;
pub(crate) mod rendezvous;
mod serve;
pub(crate) mod source;
pub(crate) mod uapi;
mod vqp;

use self::{iovec::IoVec, lock::HeldLock};
use crate::{
    bindings, errno,
    fabric::{
        qos::{limits::TenantCreds, tenant::Tenant},
        send::inflight::Direction,
    },
    region::{
        alloc::AllocRequest,
        grant::GrantRequest,
        map::{
            atomic::AtomicRequest,
            copy::{CopyOperand, CopyRequest, FillRequest},
            io::{AccessRequest, SubmitContext, SubmitResult, VectoredAccess},
            Mapping,
        },
        MemoryService,
    },
    rnic::{
        services::{MemoryServiceGuard, RnicServices, RpcGuard, VqpTableGuard},
        Rnic,
    },
    rpc::{
        channel::RpcChannel,
        server::{reply::PendingReply, RpcService},
        Rpc,
    },
    sys::{
        buffer::Buffer, deadline::Deadline, event_counter::EventCounter, pin::PinnedPages,
        revocable::RevocableGuard,
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed},
        Arc, Mutex, SetOnce,
    },
};
use kite_core::{atomic::WORD_BYTES, name::Name, rights::Rights};

/// A handle of a session. There may be as many as the memory allows that is granted to the user's cgroup.
#[pin_data]
struct Handle {
    id: u64,
    mapping: Arc<Mapping>,
    rights: Rights,
    /// The region ends with the handle.
    anonymous: bool,
    #[pin]
    rpc_state: Mutex<HandleRpcState>,
}

/// What a handle is used for besides its region's memory.
#[derive(Default)]
struct HandleRpcState {
    /// The way to whoever serves the region.
    channel: Option<Arc<RpcChannel>>,
    /// The region as served by this session.
    service: Option<Arc<RpcService>>,
    /// The handle was given back.
    closed: bool,
}

/// A call that was taken.
struct AcceptedCall {
    pending_reply: Arc<PendingReply>,
    /// The handle by which it was.
    handle_id: u64,
    /// Somebody is bringing its answer on the way.
    is_being_answered: bool,
}

impl Handle {
    /// The mapping, to read or write.
    ///
    /// # Errors
    ///
    /// `EACCES` if the handle was mapped without that right.
    fn mapping_for(&self, direction: Direction) -> Result<Arc<Mapping>> {
        let required = match direction {
            Direction::Read => Rights::READ,
            Direction::Write => Rights::WRITE,
        };
        let is_allowed = self.rights.contains(required);
        is_allowed.then(|| self.mapping.clone()).ok_or(EACCES)
    }
}

/// To who has no handle yet, a region that is freed the moment it was found is one that is not there.
fn stale_to_noent(error: Error) -> Error {
    if error == errno::stale() {
        ENOENT
    } else {
        error
    }
}

/// A session.
#[pin_data]
pub(crate) struct Session {
    rnic: SetOnce<Arc<Rnic>>,
    /// Who it is to others on the RNIC.
    tenant: SetOnce<Pin<KBox<Tenant>>>,
    /// A mutex, as there may be very many to look through for [`Self::next_stale`] or a count.
    #[pin]
    handles: Mutex<RBTree<u64, Arc<Handle>>>,
    /// The handle reported last: the search for the next one goes on there.
    last_reported: Atomic<u64>,
    next_id: Atomic<u64>,
    /// Calls that it has taken and not answered, by their numbers.
    #[pin]
    accepted_calls: Mutex<RBTree<u64, AcceptedCall>>,
    #[pin]
    buffer_pool: crate::session::rendezvous::pool::RendezvousBufferPool,
    /// What it serves, by handle.
    #[pin]
    served_regions: Mutex<KVec<(u64, Arc<RpcService>)>>,
    /// Locks that it has, by their numbers.
    #[pin]
    held_locks: Mutex<RBTree<u64, HeldLock>>,
    #[pin]
    io_queues: Mutex<KVec<queue::table::RegisteredQueue>>,
    #[pin]
    vqps: Mutex<vqp::SessionVqps>,
    pub(crate) events: Arc<EventCounter>,
    /// Whether closing the session leaves the cluster.
    is_daemon: Atomic<u32>,
}

impl Session {
    /// Makes a session that is bound to nothing.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let events = EventCounter::new()?;
        Arc::pin_init(
            pin_init!(Self {
                rnic: SetOnce::new(),
                tenant: SetOnce::new(),
                handles <- new_mutex!(RBTree::new()),
                last_reported: Atomic::new(0u64),
                next_id: Atomic::new(1u64),
                accepted_calls <- new_mutex!(RBTree::new()),
                buffer_pool <- crate::session::rendezvous::pool::RendezvousBufferPool::new(),
                served_regions <- new_mutex!(KVec::new()),
                held_locks <- new_mutex!(RBTree::new()),
                io_queues <- new_mutex!(KVec::new()),
                vqps <- new_mutex!(vqp::SessionVqps::default()),
                events,
                is_daemon: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Ties the session to an RNIC, for somebody who may have limits, or for the kernel.
    ///
    /// # Errors
    ///
    /// `EBUSY` if it is tied already, `ENODEV` if the RNIC is gone, `ENOMEM`.
    pub(crate) fn bind(&self, rnic: Arc<Rnic>, creds: Option<TenantCreds>) -> Result {
        let tenant = Tenant::new(
            rnic.enter_rpc()?.memory_service.cluster.fabric.qos.clone(),
            creds,
        );
        let tenant = KBox::pin_init(tenant, GFP_KERNEL_ACCOUNT)?;
        if !self.tenant.populate(tenant) {
            return Err(EBUSY);
        }
        self.rnic.populate(rnic.clone());
        rnic.stats.sessions.add(1);
        Ok(())
    }

    /// The RNIC.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` if the session is not bound.
    pub(crate) fn rnic(&self) -> Result<&Arc<Rnic>> {
        self.rnic.as_ref().ok_or_else(errno::notconn)
    }

    /// Who it is to others on the RNIC.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` if the session is not bound.
    fn tenant(&self) -> Result<&Tenant> {
        let tenant = self.tenant.as_ref();
        tenant.map(|tenant| &**tenant).ok_or_else(errno::notconn)
    }

    fn enter_services(&self) -> Result<RevocableGuard<'_, Arc<RnicServices>>> {
        self.rnic()?.enter_services()
    }

    fn enter_rpc(&self) -> Result<RpcGuard<'_>> {
        self.enter_services().map(RpcGuard)
    }

    fn enter_memory_service(&self) -> Result<MemoryServiceGuard<'_>> {
        self.enter_services().map(MemoryServiceGuard)
    }

    fn enter_vqp_table(&self) -> Result<VqpTableGuard<'_>> {
        self.enter_services().map(VqpTableGuard)
    }

    /// A number for a handle, a call, a lock or a queue pair.
    fn alloc_id(&self) -> u64 {
        self.next_id.fetch_add(1u64, Relaxed)
    }

    fn insert_handle(&self, mapping: Arc<Mapping>, rights: Rights, anonymous: bool) -> Result<u64> {
        let handle_id = self.alloc_id();
        let handle = Arc::pin_init(
            pin_init!(Handle {
                id: handle_id,
                mapping,
                rights,
                anonymous,
                rpc_state <- new_mutex!(HandleRpcState::default()),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let node = RBTreeNode::new(handle_id, handle, GFP_KERNEL_ACCOUNT)?;
        self.handles.lock().insert(node);
        Ok(handle_id)
    }

    fn get(&self, handle_id: u64) -> Result<Arc<Handle>> {
        self.rnic()?;
        self.handles.lock().get(&handle_id).cloned().ok_or(EBADF)
    }

    /// As [`Self::get`], but does not wait for who looks through many handles: `EAGAIN`.
    fn try_get(&self, handle_id: u64) -> Result<Arc<Handle>> {
        let handles = self.handles.try_lock().ok_or(EAGAIN)?;
        handles.get(&handle_id).cloned().ok_or(EBADF)
    }

    fn remove_handle(&self, handle_id: u64) -> Result<Arc<Handle>> {
        let node = self.handles.lock().remove_node(&handle_id).ok_or(EBADF)?;
        let (_, handle) = node.to_key_value();
        Ok(handle)
    }

    /// Allocates a region, and returns a handle with all rights.
    pub(crate) fn alloc(&self, request: &AllocRequest<'_>) -> Result<u64> {
        let memory_service = self.enter_memory_service()?;
        let mapping = memory_service.alloc(request, self.events.clone())?;
        self.insert_region_handle(&memory_service, &mapping, request)
    }

    /// Makes a region of memory that is there, and returns a handle with all rights.
    pub(crate) fn register(&self, pinned: PinnedPages, request: &AllocRequest<'_>) -> Result<u64> {
        let pinned = Arc::new(pinned, GFP_KERNEL_ACCOUNT)?;
        let memory_service = self.enter_memory_service()?;
        let mapping = memory_service.register(&pinned, request, self.events.clone())?;
        self.insert_region_handle(&memory_service, &mapping, request)
    }

    /// A handle for a region that was just made.
    fn insert_region_handle(
        &self,
        memory_service: &Arc<MemoryService>,
        mapping: &Arc<Mapping>,
        request: &AllocRequest<'_>,
    ) -> Result<u64> {
        let anonymous = request.name.is_none();
        self.insert_handle(mapping.clone(), Rights::ALL, anonymous)
            .inspect_err(|_| {
                // Without a handle nobody could ever free it.
                memory_service.release_anonymous(mapping);
            })
    }

    /// Maps a region, and returns a handle and the region's length.
    pub(crate) fn map(&self, name: Name, uid: u32, rights: Rights) -> Result<(u64, u64)> {
        let memory_service = self.enter_memory_service()?;
        let mapping = memory_service.map_by_name(name, uid, rights, self.events.clone());
        let mapping = mapping.map_err(stale_to_noent)?;
        let len = mapping.layout().map(|layout| layout.len());
        match len.and_then(|len| Ok((self.insert_handle(mapping.clone(), rights, false)?, len))) {
            Ok(mapped) => Ok(mapped),
            Err(error) => {
                memory_service.unmap(&mapping);
                Err(stale_to_noent(error))
            }
        }
    }

    /// Gives a handle back.
    pub(crate) fn unmap(&self, handle_id: u64) -> Result {
        let rpc = self.enter_rpc()?;
        self.remove_handle(handle_id)
            .map(|handle| self.close_handle(&rpc, &handle))
    }

    /// Gives a handle back that is in the table no more. Nothing reaches the region by it when this
    /// returns, but for what its lenders were asked for; others are told in the background, after that.
    fn close_handle(&self, rpc: &Arc<Rpc>, handle: &Handle) {
        self.close_rpc_state(rpc, handle);
        self.remove_locks(handle.id);
        let memory_service = &rpc.memory_service;
        if handle.anonymous {
            memory_service.release_anonymous(&handle.mapping);
        } else {
            memory_service.unmap(&handle.mapping);
        }
    }

    /// Frees a region, and gives the handle back.
    pub(crate) fn free(&self, handle_id: u64) -> Result {
        let rpc = self.enter_rpc()?;
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        rpc.memory_service.free(&handle.mapping)?;
        self.close_rpc_state(&rpc, &handle);
        let _ = self.remove_handle(handle_id);
        self.remove_locks(handle_id);
        Ok(())
    }

    /// Changes the rights to a region.
    pub(crate) fn grant(&self, handle_id: u64, grant: &GrantRequest) -> Result {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        self.enter_memory_service()?
            .grant_rights(&handle.mapping, grant)
    }

    /// Moves a region to other nodes; none is this one.
    pub(crate) fn move_region(&self, handle_id: u64, nodes: &[u32], deadline: Deadline) -> Result {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        let nodes = if nodes.is_empty() { &[0] } else { nodes };
        self.enter_memory_service()?
            .move_region(&handle.mapping, nodes, deadline)
    }

    /// Reads or writes.
    pub(crate) fn access(&self, handle_id: u64, access: &AccessRequest, memory: &Buffer) -> Result {
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

    /// Reads or writes several parts of a region.
    fn access_segments(
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

    /// Begins to read or write, without waiting.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Self::access`].
    fn submit_access(
        &self,
        handle_id: u64,
        access: &AccessRequest,
        memory: &Buffer,
        context: &mut SubmitContext<'_>,
    ) -> Result<SubmitResult> {
        let memory_service = self.enter_memory_service()?;
        let mapping = self.try_get(handle_id)?.mapping_for(access.direction)?;
        access.submit(&memory_service, &mapping, memory, context)
    }

    /// Sets bytes.
    pub(crate) fn fill(&self, handle_id: u64, fill: &FillRequest) -> Result {
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

    /// Copies from an offset of one region to that of another.
    pub(crate) fn copy(
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

    /// Changes a word. Returns what it was.
    pub(crate) fn atomic_update(&self, handle_id: u64, request: &AtomicRequest) -> Result<u64> {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::READ | Rights::WRITE) {
            return Err(EACCES);
        }
        self.wait_admitted(WORD_BYTES, request.deadline)?;
        self.enter_memory_service()?
            .atomic_update(&handle.mapping, request)
    }

    /// Waits until a request of so many bytes may go by the session's priority and limits.
    fn wait_admitted(&self, bytes: u64, deadline: Deadline) -> Result {
        let stats = &self.rnic()?.stats;
        let admitted = self.tenant()?.admit(bytes, deadline);
        admitted.inspect_err(|_| stats.errors.add(1))
    }

    /// Changes its priority.
    pub(crate) fn set_low_priority(&self, is_low: bool) -> Result {
        self.tenant().map(|tenant| tenant.set_low_priority(is_low))
    }

    /// Bytes of the region behind a handle, without waiting.
    fn region_len(&self, handle_id: u64) -> Result<u64> {
        let mapping = self.try_get(handle_id)?.mapping.clone();
        mapping.layout().map(|layout| layout.len())
    }

    /// The mapping behind a handle, and its rights.
    fn mapping_and_rights(&self, handle_id: u64) -> Result<(Arc<Mapping>, Rights)> {
        self.get(handle_id)
            .map(|handle| (handle.mapping.clone(), handle.rights))
    }

    /// The next event: its kind and value, as `struct kite_event` has them.
    pub(crate) fn next_event(&self) -> Option<(u32, u64)> {
        if let Some(handle) = self.next_stale_handle() {
            return Some((bindings::KITE_EVENT_STALE, handle));
        }
        let memory_service = self
            .is_daemon()
            .then(|| self.enter_memory_service().ok())
            .flatten()?;
        let suspect = memory_service.cluster.fabric.next_suspect()?;
        Some((bindings::KITE_EVENT_PEER_UNREACHABLE, suspect.into()))
    }

    /// A handle whose mapping ended and that was not reported yet. Many may end at once, so this goes
    /// round instead of beginning anew each time.
    fn next_stale_handle(&self) -> Option<u64> {
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

    /// The first such handle of a higher number than `last`.
    fn next_stale_handle_after(handles: &mut RBTree<u64, Arc<Handle>>, last: u64) -> Option<u64> {
        let mut cursor = handles.cursor_lower_bound_mut(&(last + 1))?;
        while !cursor.current().1.mapping.report_event() {
            cursor = cursor.move_next()?;
        }
        Some(*cursor.current().0)
    }

    /// The number of handles.
    pub(crate) fn handle_count(&self) -> usize {
        self.handles.lock().keys().count()
    }

    /// Makes the session the one that speaks for the cluster's daemon.
    pub(crate) fn mark_as_daemon(&self) {
        self.is_daemon.xchg(1, Full);
    }

    /// Whether it is.
    pub(crate) fn is_daemon(&self) -> bool {
        self.is_daemon.load(Acquire) != 0
    }

    /// Gives everything back.
    pub(crate) fn close(&self) {
        let Ok(rnic) = self.rnic() else { return };
        self.destroy_queues();
        self.close_vqps();
        rnic.stats.sessions.sub(1);
        let handles = core::mem::replace(&mut *self.handles.lock(), RBTree::new());
        // They end with their handles.
        drop(core::mem::replace(
            &mut *self.held_locks.lock(),
            RBTree::new(),
        ));
        self.buffer_pool.clear();
        let Ok(rpc) = rnic.enter_rpc() else { return };
        self.abandon_calls(&rpc, None);
        for handle in handles.values() {
            self.close_handle(&rpc, handle);
        }
        if self.is_daemon() {
            rpc.memory_service
                .cluster
                .fabric
                .suspect_listener
                .set_counter(None);
            if let Ok(services) = rnic.enter_services() {
                services.leave();
            }
        }
    }
}
