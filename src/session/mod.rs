// SPDX-License-Identifier: GPL-2.0

//! Sessions: the state owned by one open file of `/dev/kite` or by one kernel user.
//!
//! # Operation
//!
//! [`Session::new`] creates an unbound session. [`Session::bind`] ties the session to one RNIC, once.
//! Requests name objects by numbers: handles, accepted calls, locks, I/O queues, virtual queue pairs (VQPs).
//! [`device`] holds the file operations and [`ioctl`] the system calls. [`export`] holds the functions for
//! other kernel modules. [`handles`] holds the handle table, and [`region`] the operations on regions.
//! [`call`] makes RPCs and [`serve`] receives and answers RPCs. [`rendezvous`] transfers data that do not fit
//! into a ring. [`lock`] handles locks and barriers, [`qos`] priorities and limits, [`vqp`] VQPs. [`queue`]
//! submits requests through I/O queues in shared memory, without system calls.
//!
//! # Recovery
//!
//! [`Session::close`] releases all objects, and leaves the cluster if the session is the daemon's. Every
//! request enters the services of the RNIC through a guard. After RNIC removal requests fail with `ENODEV`.
//!
//! # Locking
//!
//! All locks are mutexes. Holders of `handles`, `accepted_calls` and `held_locks` do not sleep.
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
mod region;
mod rendezvous;
mod serve;
mod source;
mod uapi;
mod user_ns;
mod vqp;

use self::{
    handles::Handle, lock::HeldLock, rendezvous::pool::RendezvousBufferPool,
    serve::accepted::AcceptedCall,
};
use crate::{
    bindings, errno,
    fabric::qos::{limits::TenantCreds, tenant::Tenant},
    rnic::{
        services::{MemoryServiceGuard, RnicServices, RpcGuard, VqpTableGuard},
        Rnic,
    },
    rpc::server::RpcService,
    sys::{
        deadline::Deadline,
        event_counter::EventCounter,
        revocable::RevocableGuard,
        thread::pi_mutex::{new_pi_mutex, PiMutex},
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

/// Session: the objects of one open file or kernel user on one RNIC.
#[pin_data]
struct Session {
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
    accepted_calls: PiMutex<RBTree<u64, AcceptedCall>>,
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
    events: Arc<EventCounter>,
    /// 1 if closing the session leaves the cluster, else 0.
    is_daemon: Atomic<u32>,
}

impl Session {
    /// Returns a session that is not bound to an RNIC.
    fn new() -> Result<Arc<Self>> {
        let events = EventCounter::new()?;
        Arc::pin_init(
            pin_init!(Self {
                rnic: SetOnce::new(),
                tenant: SetOnce::new(),
                handles <- new_mutex!(RBTree::new(), "Session::handles"),
                last_reported: Atomic::new(0u64),
                next_id: Atomic::new(1u64),
                accepted_calls <- new_pi_mutex!(RBTree::new(), "Session::accepted_calls"),
                buffer_pool <- RendezvousBufferPool::new(),
                served_regions <- new_mutex!(KVec::new(), "Session::served_regions"),
                held_locks <- new_mutex!(RBTree::new(), "Session::held_locks"),
                io_queues <- new_mutex!(KVec::new(), "Session::io_queues"),
                vqps <- new_mutex!(vqp::SessionVqps::default(), "Session::vqps"),
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
    fn bind(&self, rnic: Arc<Rnic>, creds: Option<TenantCreds>) -> Result {
        let tenant = Tenant::new(rnic.enter_rpc()?.fabric().qos.clone(), creds);
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
    fn rnic(&self) -> Result<&Arc<Rnic>> {
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

    /// See [`Rnic::or_device_gone`].
    fn or_device_gone(&self, error: Error) -> Error {
        self.rnic().map_or(error, |rnic| rnic.or_device_gone(error))
    }

    /// See [`Rnic::refine_unreachable`].
    fn refine_unreachable(&self, error: Error) -> Error {
        self.rnic()
            .map_or(error, |rnic| rnic.refine_unreachable(error))
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

    /// Waits until the session's priority and limits admit a request of `bytes` bytes.
    fn wait_admitted(&self, bytes: u64, deadline: Deadline) -> Result {
        let stats = &self.rnic()?.stats;
        let admitted = self.tenant()?.admit(bytes, deadline);
        admitted.inspect_err(|_| stats.errors.add(1))
    }

    /// Sets the priority of the session: low or high.
    fn set_low_priority(&self, is_low: bool) -> Result {
        self.tenant().map(|tenant| tenant.set_low_priority(is_low))
    }

    /// Returns the kind and the value of the next event, as in `struct kite_event`.
    fn next_event(&self) -> Option<(u32, u64)> {
        if let Some(handle) = self.next_stale_handle() {
            return Some((bindings::KITE_EVENT_STALE, handle));
        }
        let memory_service = self
            .is_daemon()
            .then(|| self.enter_memory_service().ok())
            .flatten()?;
        let suspect = memory_service.fabric().peers.pop_suspect()?;
        Some((bindings::KITE_EVENT_PEER_UNREACHABLE, suspect.into()))
    }

    /// Marks the session as the daemon's: closing the session leaves the cluster.
    fn mark_as_daemon(&self) {
        self.is_daemon.xchg(1, Full);
    }

    /// Returns `true` if the session is the daemon's.
    fn is_daemon(&self) -> bool {
        self.is_daemon.load(Acquire) != 0
    }

    /// Closes the session: destroys all of its objects, and leaves the cluster if the session is the
    /// daemon's.
    fn close(&self) {
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
        self.abort_calls(&rpc, None);
        for handle in handles.values() {
            self.close_handle(&rpc, handle);
        }
        if self.is_daemon() {
            rpc.fabric().suspect_listener.set_counter(None);
            if let Ok(services) = rnic.enter_services() {
                services.leave();
            }
        }
    }
}
