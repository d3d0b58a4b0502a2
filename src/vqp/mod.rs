// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs (VQPs, KRCORE, section 4): verbs to one node each, over shared DCIs or RC connections.
//!
//! # Operation
//!
//! Connecting sends nothing. A VQP can post as soon as the DC address of the node is cached
//! ([`crate::cluster`]). All requests of a push are checked before the first is posted ([`send::check`]), so
//! no request can fail a QP that others use. A push becomes one or more batches ([`send::batch`]), each
//! posted with one doorbell. The batches in flight of a VQP share one DCI or connection, in order. The poller
//! or the thread that pops collects the completions ([`poll`]). An I/O queue can push, too
//! ([`send::push_builder`]), and receives its completions ([`sink`]).
//!
//! A VQP that was connected to a port, or accepted by a listener, is one of two endpoints and takes messages
//! ([`table`], [`recv`]).
//!
//! # Recovery
//!
//! - A DCI failed because of a request of another VQP: the unfinished requests are retried.
//! - A connection failed: the batch waits until packets of the old QP can no longer arrive, and is retried if
//!   that is safe ([`send::complete`]).
//! - The node did not respond, or an MR lease expired: the batch is blocked until a worker has looked up the
//!   address or the MR entry ([`resolve`]).
//! - A view change removed the node: its VQPs are closed.
//!
//! # Locking
//!
//! - `Vqp::state` protects [`VqpState`]. The holder may sleep, while it drains batches of a failed QP.
//! - `MrCache::entries` protects the cached MR entries. The holder does not sleep.
//! - The order is `state`, then `MrCache::entries`.
//! - The poller uses `try_lock` for `state` ([`poll`]).
//! - The dispatch of packets locks `state` under the poller's receive buffer and
//!   `VqpTable::deferred_packets`.
//! - Code under `state` takes the QP and slot locks of [`crate::fabric`], and the producer lock of an I/O
//!   queue's completion ring.

mod ids;
pub(crate) mod listener;
mod poll;
pub(crate) mod recv;
mod registry;
mod resolve;
pub(crate) mod send;
pub(crate) mod sink;
pub(crate) mod table;
mod wait;

pub(crate) use self::poll::VqpPollClient;

use self::{
    ids::EndpointIds,
    send::{
        batch::VqpBatch, mr_cache::MrCache, push_builder::wait_for_memory, request::VqpRequest,
        VqpState,
    },
    table::VqpTable,
    wait::UserPollWindow,
};
use crate::{
    cluster::Cluster,
    errno::{self, TryError, TryResult},
    fabric::{
        qos::{cost::RequestCost, tenant::Tenant},
        Fabric,
    },
    sys::{
        adaptive_spin::AdaptiveSpin,
        deadline::Deadline,
        event_counter::EventCounter,
        memcg::Memcg,
        thread::pi_mutex::{new_pi_mutex, PiMutex},
    },
};
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    new_condvar,
    prelude::*,
    sync::{atomic::AtomicFlag, Arc, CondVar},
};
use kite_core::view::NodeInstance;

/// Event for which a thread waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum VqpEvent {
    Completion,
    Message,
}

/// Completion: the tag and the result of a request.
pub(crate) type VqpCompletion = (u64, Result);

/// Virtual queue pair.
#[pin_data]
pub(crate) struct Vqp {
    pub(crate) peer: NodeInstance,
    /// Admission of the peer at the creation. A VQP is closed when its peer is fenced.
    pub(crate) admission: u64,
    #[pin]
    state: PiMutex<VqpState>,
    #[pin]
    mr_cache: MrCache,
    /// Notified when completions or messages arrive, or when the VQP is closed.
    #[pin]
    event_cv: CondVar,
    adaptive_spin: AdaptiveSpin,
    user_poll_window: UserPollWindow,
    /// Set if a batch is blocked and a worker must be queued, even while a process polls.
    needs_resolve: AtomicFlag,
    session_events: Arc<EventCounter>,
    /// Cgroup that is charged for queued messages.
    memcg: Arc<Memcg>,
}

impl Vqp {
    /// Creates a VQP to a node instance. `is_passive` marks an endpoint created by a message of the peer
    /// endpoint, which no process has accepted yet. `gfp` is used for all allocations.
    fn new(
        (peer, admission): (NodeInstance, u64),
        ids: EndpointIds,
        is_passive: bool,
        session_events: Arc<EventCounter>,
        (memcg, gfp): (Arc<Memcg>, Flags),
    ) -> Result<Arc<Self>> {
        let state = VqpState::new(peer, ids, is_passive, gfp)?;
        let mr_cache = MrCache::new(peer);
        Arc::pin_init(
            pin_init!(Self {
                peer,
                admission,
                state <- new_pi_mutex!(state, "Vqp::state"),
                mr_cache <- mr_cache,
                event_cv <- new_condvar!("Vqp::event_cv"),
                adaptive_spin: AdaptiveSpin::new(),
                user_poll_window: UserPollWindow::new(),
                needs_resolve: AtomicFlag::new(false),
                session_events,
                memcg,
            }),
            gfp,
        )
    }

    /// Creates a VQP to a node, and to a port there unless `port` is 0. No message is sent to the node. With
    /// `required_owner` the VQP fails with `EACCES` if the port has a listener of another user.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the node is the local node, and the RNIC has no DC. A node has no connection to itself.
    /// - `EHOSTDOWN`: the node is not a reachable member.
    /// - See also [`Cluster::resolve_address`].
    pub(crate) fn connect(
        table: &VqpTable,
        (node, port): (u32, u32),
        (uid, required_owner): (u32, Option<u32>),
        session_events: Arc<EventCounter>,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        let cluster = &table.memory_service.cluster;
        let local = cluster.instance_of(cluster.local_node()?)?;
        // An RC connection to the local node does not exist.
        if node == local.node && cluster.fabric.dc().is_none() {
            return Err(EINVAL);
        }
        let peer = cluster.instance_of(node)?;
        let admission = cluster.admission_of(peer)?;
        let address = cluster.resolve_address(peer, deadline)?;
        let vqpn = match port {
            0 => 0,
            _ => table.alloc_vqpn(),
        };
        let ids = EndpointIds {
            local_node: local,
            local_vqpn: vqpn,
            peer_vqpn: 0,
            port,
            uid,
            required_owner,
        };
        let memcg = Arc::new(Memcg::current(), GFP_KERNEL_ACCOUNT)?;
        let vqp = Self::new(
            (peer, admission),
            ids,
            false,
            session_events,
            (memcg, GFP_KERNEL_ACCOUNT),
        )?;
        vqp.state.lock().address = Some(address);
        if port != 0 {
            table.insert(vqpn, vqp.clone())?;
        }
        Ok(vqp)
    }

    /// Adds requests, to be posted later in this order. If one request is rejected, no request is added.
    ///
    /// # Errors
    ///
    /// See `struct kite_push` in `include/uapi/kite.h`.
    pub(crate) fn push(
        &self,
        cluster: &Cluster,
        mut requests: KVec<VqpRequest>,
        tenant: &Tenant,
        deadline: Deadline,
    ) -> Result {
        for request in &mut requests {
            if let Some(mr_use) = request.remote_use {
                let cached = self.mr_cache.resolve(cluster, mr_use.key, deadline)?;
                request.validate_mr(mr_use, cached)?;
            }
        }
        let address = cluster.resolve_address(self.peer, deadline)?;
        self.state.lock().check_requests(&requests)?;
        let (count, stats) = (requests.len(), &cluster.fabric.stats);
        let load = RequestCost {
            requests: count as u64,
            bytes: requests.iter().map(VqpRequest::bytes).sum(),
        };
        let admission = tenant.admit(load, deadline);
        admission.inspect_err(|_| stats.errors.add(1))?;
        tenant.charge_unmeasured(load);
        let mut batches = VqpBatch::split(requests, &address, GFP_KERNEL_ACCOUNT)?;
        loop {
            let mut state = self.state.lock();
            state.update_address(&address);
            let admitted = state.admit(&mut batches, None);
            if admitted != Err(ENOMEM) {
                admitted?;
                stats.vqp_requests.add(count as u64);
                self.make_progress_and_kick(&cluster.fabric, &mut state);
                return Ok(());
            }
            drop(state);
            deadline.check()?;
            wait_for_memory()?;
        }
    }

    /// Removes and returns up to `max` completions.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: no completion is available.
    /// - `ENOMEM`: there is no memory for the list.
    /// - The cause of the close, if the VQP is closed and no request is pending.
    pub(crate) fn pop(&self, fabric: &Fabric, max: usize) -> TryResult<KVec<VqpCompletion>> {
        let mut state = self.state.lock();
        self.make_progress_and_kick(fabric, &mut state);
        let completions = state.pop_completions(max)?;
        state.wake_blocked_push(fabric);
        match state.closed_with {
            // Report the close only when no request is pending: the process may then reuse its memory.
            Some(error) if completions.is_empty() && state.pending == 0 => Err(error.into()),
            _ if completions.is_empty() => Err(TryError::WouldBlock),
            _ => Ok(completions),
        }
    }

    fn wake_waiters(&self) {
        self.event_cv.notify_all();
        self.session_events.poll_condvar.notify_all();
    }

    /// Returns `true` if completions or messages are available.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state.lock();
        // An endpoint without a port receives no messages.
        let has_message = state.ids.local_vqpn != 0 && state.is_ready_for(VqpEvent::Message);
        state.is_ready_for(VqpEvent::Completion) || has_message
    }

    /// Rejects new requests with `error`. Requests in flight complete normally.
    pub(crate) fn shutdown(&self, error: Error) {
        let mut state = self.state.lock();
        state.closed_with = state.closed_with.or(Some(error));
        // Report unposted requests as failed now: a process that waits for messages only would not call
        // [`Self::pop`].
        state.deliver_completions();
        drop(state);
        self.wake_waiters();
    }

    /// Closes the VQP and waits for requests in flight. Returns `true` if the peer endpoint must receive an
    /// update.
    pub(crate) fn close(&self) -> bool {
        let mut state = self.state.lock();
        state.closed_with = Some(errno::canceled());
        state.pending = 0;
        let batches = core::mem::replace(&mut state.batches, KVec::new());
        state.recv_queue.clear();
        // A peer endpoint that received nothing from this one does not exist.
        let needs_update =
            (state.ids.peer_vqpn != 0 || state.send_window.has_sent()) && !state.peer_closed;
        drop(state);
        // Wait without `state`, so the poller is not blocked.
        for mut batch in batches {
            batch.drain(self.peer);
            batch.cancel_unreported();
        }
        needs_update
    }

    /// Returns the numbers of this endpoint and of the peer endpoint.
    fn vqp_numbers(&self) -> (u64, u64) {
        let ids = &self.state.lock().ids;
        (ids.local_vqpn, ids.peer_vqpn)
    }

    /// Returns `true` if requests are pending, or if the lock is held.
    pub(crate) fn has_pending(&self) -> bool {
        let state = self.state.try_lock();
        state.is_none_or(|state| state.pending != 0)
    }
}
