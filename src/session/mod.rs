// SPDX-License-Identifier: GPL-2.0

//! Sessions: the state owned by one open file of `/dev/kite` or by one kernel user.
//!
//! # Operation
//!
//! [`Session::new`] creates an unbound session. [`Session::bind`] ties the session to one RNIC, once.
//! Requests name objects by numbers: handles, accepted calls, locks, I/O queues, virtual queue pairs (VQPs).
//! [`device`] holds the file operations and [`ioctl`] the system calls. [`export`] holds the functions for
//! other kernel modules. [`handles`] holds the handle table. [`call`] makes RPCs and [`serve`] receives and answers RPCs. [`rendezvous`]
//! transfers data that do not fit into a ring. [`lock`] handles locks and barriers, [`qos`] priorities and
//! limits, [`vqp`] VQPs. [`queue`] submits requests through I/O queues in shared memory, without system
//! calls.
//!
//! # Recovery
//!
//! [`Session::close`] releases all objects, and leaves the cluster if the session is the daemon's. Every
//! request enters the services of the RNIC through a guard. After RNIC removal requests fail with `ENODEV`.
//!
//! # Locking
//!
//! All locks are mutexes, so a holder may sleep.
//!
//! - `handles`: the handle table and `last_reported`. Scans of the table can be long.
//! - `Handle::rpc_state`: the RPC channel and the RPC service of one handle. Nests outside `served_regions`.
//! - `served_regions`: the served regions. Nests outside the locks of [`RpcService`].
//! - `accepted_calls`, `held_locks`: the tables of these names. No other session lock is taken under either.
//! - `io_queues`: the I/O queues. Nests outside the poll client table of the fabric.
//! - `vqps`: VQPs, listeners, and MR keys. Nests outside the VQP table, the MR table, and the poll client
//!   table of the fabric.
//!
//! The poller thread runs its clients with the poll client table locked. Code on that path therefore only
//! tries to lock `handles`, `rpc_state` (to find objects) and `vqps`.
//!
//! `next_id` only has to yield unique numbers, so its increments are relaxed. The full-barrier store to
//! `is_daemon` pairs with the acquire load in [`Session::is_daemon`].

mod args;
mod call;
mod call_args;
pub(crate) mod device;
mod export;
mod handles;
mod ioctl;
mod iovec;
mod lock;
mod qos;
mod queue;
mod rendezvous;
mod serve;
mod source;
mod uapi;
mod vqp;

use self::{handles::Handle, iovec::IoVec, lock::HeldLock, rendezvous::pool::RendezvousBufferPool};
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
    rbtree::RBTree,
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed},
        Arc, Mutex, SetOnce,
    },
};
use kite_core::{atomic::WORD_BYTES, name::Name, rights::Rights};

/// Received call without a reply.
struct AcceptedCall {
    pending_reply: Arc<PendingReply>,
    /// Handle through which the call was received.
    handle_id: u64,
    /// `true` while a thread sends the reply.
    is_being_answered: bool,
}

/// Converts `ESTALE` to `ENOENT`, for callers without a handle: a region freed during the lookup counts as
/// missing.
fn stale_to_noent(error: Error) -> Error {
    if error == errno::stale() {
        ENOENT
    } else {
        error
    }
}

/// Session: the objects of one open file or kernel user on one RNIC.
#[pin_data]
pub(crate) struct Session {
    rnic: SetOnce<Arc<Rnic>>,
    /// Identity of the session for priorities and limits.
    tenant: SetOnce<Pin<KBox<Tenant>>>,
    /// Handles, by number. A mutex: scans by [`Self::next_stale_handle`] and [`Self::handle_count`] can be
    /// long.
    #[pin]
    handles: Mutex<RBTree<u64, Arc<Handle>>>,
    /// Number of the last handle reported as stale: the next search starts behind this handle. Accessed under
    /// `handles`.
    last_reported: Atomic<u64>,
    next_id: Atomic<u64>,
    /// Received calls without a reply, by number.
    #[pin]
    accepted_calls: Mutex<RBTree<u64, AcceptedCall>>,
    #[pin]
    buffer_pool: RendezvousBufferPool,
    /// Services of the regions that this session serves, with the numbers of their handles.
    #[pin]
    served_regions: Mutex<KVec<(u64, Arc<RpcService>)>>,
    /// Locks that this session owns, by number.
    #[pin]
    held_locks: Mutex<RBTree<u64, HeldLock>>,
    #[pin]
    io_queues: Mutex<KVec<queue::table::RegisteredQueue>>,
    #[pin]
    vqps: Mutex<vqp::SessionVqps>,
    pub(crate) events: Arc<EventCounter>,
    /// 1 if closing the session leaves the cluster, else 0.
    is_daemon: Atomic<u32>,
}

impl Session {
    /// Returns a session that is not bound to an RNIC.
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
                buffer_pool <- RendezvousBufferPool::new(),
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

    /// Binds the session to an RNIC. `creds` determine the limits that apply; `None` stands for the kernel.
    ///
    /// # Errors
    ///
    /// - `EBUSY`: the session is already bound.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
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

    /// Returns the RNIC.
    ///
    /// # Errors
    ///
    /// - `ENOTCONN`: the session is not bound.
    pub(crate) fn rnic(&self) -> Result<&Arc<Rnic>> {
        self.rnic.as_ref().ok_or_else(errno::notconn)
    }

    /// Returns the identity of the session for priorities and limits.
    ///
    /// # Errors
    ///
    /// - `ENOTCONN`: the session is not bound.
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

    /// Returns a new number for a handle, call, lock, I/O queue, VQP, or listener.
    fn alloc_id(&self) -> u64 {
        self.next_id.fetch_add(1u64, Relaxed)
    }

    /// Allocates a region. Returns a handle with all rights.
    pub(crate) fn alloc(&self, request: &AllocRequest<'_>) -> Result<u64> {
        let memory_service = self.enter_memory_service()?;
        let mapping = memory_service.alloc(request, self.events.clone())?;
        self.insert_region_handle(&memory_service, &mapping, request)
    }

    /// Creates a region from existing pinned memory. Returns a handle with all rights.
    pub(crate) fn register(&self, pinned: PinnedPages, request: &AllocRequest<'_>) -> Result<u64> {
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

    /// Maps a region by name. Returns a handle and the length of the region in bytes.
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

    /// Closes a handle.
    pub(crate) fn unmap(&self, handle_id: u64) -> Result {
        let rpc = self.enter_rpc()?;
        self.remove_handle(handle_id)
            .map(|handle| self.close_handle(&rpc, &handle))
    }

    /// Closes a handle that was removed from the table. On return no access through the handle is in flight,
    /// except requests already sent to lenders. Other nodes are notified in the background, after the return.
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

    /// Frees a region, and closes the handle.
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

    /// Changes access rights to a region.
    pub(crate) fn grant(&self, handle_id: u64, grant: &GrantRequest) -> Result {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        self.enter_memory_service()?
            .grant_rights(&handle.mapping, grant)
    }

    /// Migrates a region to `nodes`. An empty list stands for this node.
    pub(crate) fn move_region(&self, handle_id: u64, nodes: &[u32], deadline: Deadline) -> Result {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        let nodes = if nodes.is_empty() { &[0] } else { nodes };
        self.enter_memory_service()?
            .move_region(&handle.mapping, nodes, deadline)
    }

    /// Reads or writes a range of a region.
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

    /// Reads or writes several ranges of a region.
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

    /// Starts a read or write without blocking.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the access would block.
    /// - Otherwise see [`Self::access`].
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

    /// Fills a range of a region with one byte value.
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

    /// Copies `len` bytes between regions. `from` and `to` are pairs of handle and offset.
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

    /// Executes an atomic operation on a word. Returns the previous value.
    pub(crate) fn atomic_update(&self, handle_id: u64, request: &AtomicRequest) -> Result<u64> {
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::READ | Rights::WRITE) {
            return Err(EACCES);
        }
        self.wait_admitted(WORD_BYTES, request.deadline)?;
        self.enter_memory_service()?
            .atomic_update(&handle.mapping, request)
    }

    /// Waits until the session's priority and limits admit a request of `bytes` bytes.
    fn wait_admitted(&self, bytes: u64, deadline: Deadline) -> Result {
        let stats = &self.rnic()?.stats;
        let admitted = self.tenant()?.admit(bytes, deadline);
        admitted.inspect_err(|_| stats.errors.add(1))
    }

    /// Sets the priority of the session: low or high.
    pub(crate) fn set_low_priority(&self, is_low: bool) -> Result {
        self.tenant().map(|tenant| tenant.set_low_priority(is_low))
    }

    /// Returns the kind and the value of the next event, as in `struct kite_event`.
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

    /// Marks the session as the daemon's: closing the session leaves the cluster.
    pub(crate) fn mark_as_daemon(&self) {
        self.is_daemon.xchg(1, Full);
    }

    /// Returns `true` if the session is the daemon's.
    pub(crate) fn is_daemon(&self) -> bool {
        self.is_daemon.load(Acquire) != 0
    }

    /// Closes the session: destroys all of its objects, and leaves the cluster if the session is the
    /// daemon's.
    pub(crate) fn close(&self) {
        let Ok(rnic) = self.rnic() else { return };
        self.destroy_queues();
        self.close_vqps();
        rnic.stats.sessions.sub(1);
        let handles = core::mem::replace(&mut *self.handles.lock(), RBTree::new());
        // Closing the handles below releases the locks themselves.
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
