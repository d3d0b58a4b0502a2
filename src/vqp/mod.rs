// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs (VQPs, KRCORE, section 4): verbs to one node each, over shared DCIs or RC connections.
//!
//! # Operation
//!
//! Connecting sends nothing. A VQP can post as soon as the DC address of the node is cached
//! ([`crate::cluster`]). All requests of a push are checked before the first is posted ([`send::check`]), so
//! no request can fail a QP that others use. A push becomes one or more batches ([`send::batch`]), each
//! posted with one doorbell. The batches in flight of a VQP share one DCI or connection, in order. The poller
//! or the thread that pops collects the completions ([`send`]). An I/O queue can push, too
//! ([`send::push_builder`]), and receives its completions ([`sink`]).
//!
//! A VQP that was connected to a port, or accepted by a listener, is one of two endpoints and takes messages
//! ([`table`], [`recv`]).
//!
//! # Recovery
//!
//! - A DCI failed because of a request of another VQP: the unfinished requests are posted again.
//! - A connection failed: the batch waits until packets of the old QP can no longer arrive, and is posted
//!   again if that is safe.
//! - The node did not respond, or an MR lease expired: the batch is blocked until a worker has looked up the
//!   address or the MR entry (`Vqp::resolve_blocker`).
//! - A view change removed the node: its VQPs are closed.
//!
//! # Locking
//!
//! - `Vqp::state` protects [`VqpState`]. The holder may sleep, while it drains batches of a failed QP.
//! - `Vqp::mr_cache` protects [`MrCache`]. The holder does not sleep.
//! - The order is `state`, then `mr_cache`.
//! - [`VqpPollClient`] runs with the poller's client list locked, and so uses `try_lock` for `state`. Its
//!   `on_device_removed` runs without the client list and uses `lock`.
//! - The dispatch of packets locks `state` under the poller's receive buffer and
//!   `VqpTable::deferred_packets`.
//! - Code under `state` takes the QP and slot locks of [`crate::fabric`], and the producer lock of an I/O
//!   queue's completion ring.
//! - `user_polls_until` is relaxed, since it is only a hint.
//! - `needs_resolve` is stored with `Release` under `state`. The poller loads it with `Acquire` before it
//!   takes `state`.

mod ids;
pub(crate) mod recv;
pub(crate) mod registry;
pub(crate) mod send;
pub(crate) mod sink;
pub(crate) mod table;

use self::{
    ids::EndpointIds,
    send::{
        batch::{BatchBlocker, VqpBatch, VqpBatchState},
        mr_cache::MrCache,
        request::{MrUse, VqpRequest},
        VqpState,
    },
    table::VqpTable,
};
use crate::{
    cluster::Cluster,
    errno,
    fabric::{
        peer::PeerAddress,
        qos::{cost::RequestCost, tenant::Tenant},
        recv::poll_client::{PollClient, PollHint},
        Fabric,
    },
    sys::{
        adaptive_spin::AdaptiveSpin,
        deadline::{monotonic_ns, Deadline},
        event_counter::EventCounter,
        memcg::Memcg,
    },
};
use core::ops::Deref;
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    new_condvar, new_mutex,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Relaxed, Release},
        Arc, CondVar, CondVarTimeoutResult, Mutex,
    },
    time::{delay::fsleep, msecs_to_jiffies, Delta},
};
use kite_core::view::NodeInstance;

/// Timeout of one revalidation of a blocked batch, in milliseconds.
const RESOLVE_TIMEOUT_MS: u32 = 10_000;

/// Interval at which the address of a node is checked for a change, in milliseconds.
const ADDRESS_RECHECK_MS: i64 = 20;

/// Maximum sleep of a waiting thread in milliseconds, in case a wake-up is lost.
const WAIT_SLICE_MS: u32 = 50;

/// Nanoseconds for which the poller leaves a VQP to a process that is polling, and to a process that has just
/// received what it polled for.
const USER_POLL_NS: u64 = 10_000_000;
const USER_POLL_GRACE_NS: u64 = 100_000;

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
    #[pin]
    state: Mutex<VqpState>,
    #[pin]
    mr_cache: Mutex<MrCache>,
    /// Notified when completions or messages arrive, or when the VQP is closed.
    #[pin]
    event_cv: CondVar,
    adaptive_spin: AdaptiveSpin,
    /// Monotonic time in nanoseconds until which a process polls this VQP, or is about to poll it again.
    user_polls_until: Atomic<u64>,
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
        peer: NodeInstance,
        ids: EndpointIds,
        is_passive: bool,
        session_events: Arc<EventCounter>,
        (memcg, gfp): (Arc<Memcg>, Flags),
    ) -> Result<Arc<Self>> {
        let state = VqpState::new(peer, ids, is_passive, gfp)?;
        Arc::pin_init(
            pin_init!(Self {
                peer,
                state <- new_mutex!(state),
                mr_cache <- new_mutex!(MrCache::new()),
                event_cv <- new_condvar!(),
                adaptive_spin: AdaptiveSpin::new(),
                user_polls_until: Atomic::new(0u64),
                needs_resolve: AtomicFlag::new(false),
                session_events,
                memcg,
            }),
            gfp,
        )
    }

    /// Creates a VQP to a node, and to a port there unless `port` is 0. No message is sent to the node.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the node is the local node, and the RNIC has no DC. A node has no connection to itself.
    /// - `EHOSTDOWN`: the node left the view.
    /// - See also [`Cluster::resolve_address`].
    pub(crate) fn connect(
        table: &VqpTable,
        (node, port): (u32, u32),
        uid: u32,
        session_events: Arc<EventCounter>,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        let cluster = &table.lmr.cluster;
        let local = cluster.instance_of(cluster.local_node()?)?;
        // An RC connection to the local node does not exist.
        if node == local.node && cluster.fabric.dc().is_none() {
            return Err(EINVAL);
        }
        let peer = cluster.instance_of(node)?;
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
        };
        let memcg = Arc::new(Memcg::current(), GFP_KERNEL_ACCOUNT)?;
        let vqp = Self::new(
            peer,
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
                let cached = crate::vqp::send::mr_cache::resolve_mr(
                    &self.mr_cache,
                    cluster,
                    self.peer,
                    mr_use.key,
                    deadline,
                )?;
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
            Self::wait_for_memory()?;
        }
    }

    /// Removes and returns up to `max` completions.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: no completion is available.
    /// - `ENOMEM`: there is no memory for the list.
    /// - The cause of the close, if the VQP is closed and no request is pending.
    pub(crate) fn pop(&self, fabric: &Fabric, max: usize) -> Result<KVec<VqpCompletion>> {
        let mut state = self.state.lock();
        self.make_progress_and_kick(fabric, &mut state);
        let completions = state.pop_completions(max)?;
        Self::wake_blocked_push(fabric, &mut state);
        match state.closed_with {
            // Report the close only when no request is pending: the process may then reuse its memory.
            Some(error) if completions.is_empty() && state.pending == 0 => Err(error),
            _ if completions.is_empty() => Err(EAGAIN),
            _ => Ok(completions),
        }
    }

    /// Calls `f` until the result is not `EAGAIN`. Polls for the adaptive spin time at first, then sleeps
    /// until events arrive.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`, `EINTR`: the deadline passed, or a signal arrived.
    /// - Any other error of `f`.
    pub(crate) fn wait<T>(
        &self,
        event: VqpEvent,
        deadline: Deadline,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut result = Err(EAGAIN);
        let mut is_ready = || {
            result = f();
            !matches!(&result, Err(error) if *error == EAGAIN)
        };
        self.set_user_poll_window(USER_POLL_NS);
        let spin_sample = self.adaptive_spin.spin_until(&mut is_ready);
        // A process that uses the VQP steadily calls again within the grace time.
        self.set_user_poll_window(if spin_sample.is_none() {
            USER_POLL_GRACE_NS
        } else {
            0
        });
        if spin_sample.is_some() {
            while !is_ready() {
                deadline.check()?;
                self.sleep_slice(event, deadline)?;
            }
        }
        result
    }

    /// Calls `f`, and calls `f` once more after polling the receive queue if the result was `EAGAIN`.
    ///
    /// # Errors
    ///
    /// Any error of `f`.
    pub(crate) fn try_or_poll<T>(
        &self,
        table: impl Deref<Target = Arc<VqpTable>>,
        event: VqpEvent,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        match f() {
            Err(error) if error == EAGAIN && self.depends_on_peer_packets(event) => {
                // A process that polls without pause then does not depend on the wake-up of the poller.
                table.lmr.cluster.fabric.try_poll_recv();
                f()
            }
            done => done,
        }
    }

    /// Returns `true` if `event` can depend on packets of the peer endpoint. A message has to arrive, and the
    /// completion of a sent message needs the acknowledgment of the peer.
    fn depends_on_peer_packets(&self, event: VqpEvent) -> bool {
        event == VqpEvent::Message || self.vqp_numbers().0 != 0
    }

    /// Leaves the VQP to the polling process for `ns` nanoseconds from now.
    fn set_user_poll_window(&self, ns: u64) {
        self.user_polls_until.store(monotonic_ns() + ns, Relaxed);
    }

    fn is_user_polled(&self) -> bool {
        monotonic_ns() < self.user_polls_until.load(Relaxed)
    }

    /// Sleeps until an event arrives, for at most [`WAIT_SLICE_MS`] milliseconds.
    fn sleep_slice(&self, event: VqpEvent, deadline: Deadline) -> Result {
        let mut state = self.state.lock();
        if state.is_ready_for(event) {
            return Ok(());
        }
        let slice = msecs_to_jiffies(deadline.remaining_ms().min(WAIT_SLICE_MS));
        let woken = self.event_cv.wait_interruptible_timeout(&mut state, slice);
        drop(state);
        match woken {
            CondVarTimeoutResult::Signal { .. } => deadline.handle_signal(),
            _ => Ok(()),
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

    /// Makes progress, and wakes the poller if work is left that only the poller can do.
    fn make_progress_and_kick(&self, fabric: &Fabric, state: &mut VqpState) -> usize {
        let progress = self.make_progress(fabric, state);
        if state.needs_poller() {
            self.needs_resolve.store(state.needs_resolve(), Release);
            fabric.wake_poller();
        }
        progress
    }

    /// Makes progress unless another thread holds the lock. Returns the number of requests that completed and
    /// of batches that were posted.
    pub(crate) fn try_make_progress(&self, fabric: &Fabric) -> usize {
        let state = self.state.try_lock();
        state.map_or(0, |mut state| {
            self.make_progress_and_kick(fabric, &mut state)
        })
    }

    /// Reaps completed batches and posts ready ones. Returns the number of requests that completed and of
    /// batches that were posted.
    fn make_progress(&self, fabric: &Fabric, state: &mut VqpState) -> usize {
        let pending_before = state.pending;
        if let Some(VqpBatchState::Posted(claim, ..)) = state.first_posted() {
            claim.poll_cq();
        }
        let requeued = state.reap_batches();
        state.check_quiesced(fabric);
        fabric.stats.dc_replays.add(requeued as u64);
        state.deliver_completions();
        let posted = state.post_ready(fabric);
        let completed = pending_before - state.pending;
        if completed != 0 {
            self.wake_waiters();
            Self::wake_blocked_push(fabric, state);
        }
        completed + posted
    }

    /// Resolves the reason why a batch cannot be posted, on a worker.
    ///
    /// After a timeout it waits for a new address of the node. After a lease expired it reads the entries of
    /// remote MRs again. Atomics that the RNICs do not support are executed in the peer's kernel.
    fn resolve_blocker(&self, table: &VqpTable) {
        let (deadline, cluster) = (Deadline::after_ms(RESOLVE_TIMEOUT_MS), &table.lmr.cluster);
        let (mut atomics_batch, mut old_values) = (u64::MAX, (KVec::new(), Ok(())));
        let resolution = match self.first_blocker() {
            Some((number, BatchBlocker::AddressChange(old_address, timeout_ms))) => (
                number,
                self.wait_address_change(cluster, (&old_address, timeout_ms), deadline),
            ),
            Some((number, BatchBlocker::KernelAtomics(atomics))) => {
                let should_continue = || self.state.lock().closed_with.is_none();
                let execute = |(word, atomic)| {
                    table
                        .lmr
                        .atomic_via_owner(self.peer, word, atomic, deadline)
                };
                (atomics_batch, old_values) = (
                    number,
                    crate::vqp::send::kernel_atomic::execute_atomics(
                        &atomics,
                        should_continue,
                        execute,
                    ),
                );
                (u64::MAX, Ok(false))
            }
            Some((number, BatchBlocker::StaleMrs(uses))) => {
                let fetch_mr = |mr_use: &MrUse| {
                    crate::vqp::send::mr_cache::resolve_mr(
                        &self.mr_cache,
                        cluster,
                        self.peer,
                        mr_use.key,
                        deadline,
                    )
                };
                // `resolve_mr` keeps the entries in the cache until their leases expire.
                (
                    number,
                    uses.iter()
                        .try_for_each(|mr_use| fetch_mr(mr_use).map(drop))
                        .map(|()| true),
                )
            }
            None => (u64::MAX, Ok(false)),
        };
        let address = cluster.resolve_address(self.peer, deadline).ok();
        let mut state = self.state.lock();
        state.resolving = false;
        state.address = address.or(state.address.take());
        state.apply_resolution(resolution, &self.mr_cache);
        state.apply_old_values(atomics_batch, old_values);
        self.make_progress_and_kick(&cluster.fabric, &mut state);
        drop(state);
        self.wake_waiters();
    }

    /// Returns `true` if the address of the node differs from `old_address`, now or in a view received within
    /// `timeout_ms`.
    ///
    /// # Errors
    ///
    /// See [`Cluster::resolve_address`].
    fn wait_address_change(
        &self,
        cluster: &Cluster,
        (old_address, timeout_ms): (&Arc<PeerAddress>, u32),
        deadline: Deadline,
    ) -> Result<bool> {
        let change_deadline = Deadline::after_ms(timeout_ms);
        loop {
            if !Arc::ptr_eq(old_address, &cluster.resolve_address(self.peer, deadline)?) {
                return Ok(true);
            }
            if change_deadline.has_expired() {
                return Ok(false);
            }
            fsleep(Delta::from_millis(ADDRESS_RECHECK_MS));
        }
    }

    /// Returns the urgency with which the poller must return to this VQP.
    pub(crate) fn poll_hint(&self) -> PollHint {
        // No interrupt is needed for a process that polls.
        if self.is_user_polled() {
            return PollHint::Soon;
        }
        let Some(state) = self.state.try_lock() else {
            return PollHint::Posted;
        };
        let is_in_flight = |batch: &VqpBatch| batch.is_posted() || batch.is_quiescing();
        match state.needs_poller() || state.batches.iter().any(is_in_flight) {
            true => PollHint::Posted,
            false => PollHint::Idle,
        }
    }

    /// Returns `true` if requests are pending, or if the lock is held.
    pub(crate) fn has_pending(&self) -> bool {
        let state = self.state.try_lock();
        state.is_none_or(|state| state.pending != 0)
    }

    /// Returns the number and the blocker of the first blocked batch.
    fn first_blocker(&self) -> Option<(u64, BatchBlocker)> {
        let state = self.state.lock();
        let mut batches = state.batches.iter();
        batches.find_map(|batch| Some((batch.number, batch.blocker()?)))
    }
}

/// Poll client that makes the poller thread serve a VQP.
pub(crate) struct VqpPollClient {
    pub(crate) vqp: Arc<Vqp>,
    pub(crate) table: Arc<VqpTable>,
}

impl PollClient for VqpPollClient {
    fn poll_work(&self, fabric: &Fabric) -> usize {
        let user_polls = self.vqp.is_user_polled();
        if user_polls && !self.vqp.needs_resolve.load(Acquire) {
            return 0;
        }
        let Some(mut state) = self.vqp.state.try_lock() else {
            return 0;
        };
        let progress = match user_polls {
            true => 0,
            false => self.vqp.make_progress(fabric, &mut state),
        };
        self.vqp.needs_resolve.store(false, Release);
        if state.needs_resolve() {
            let (vqp, table) = (self.vqp.clone(), self.table.clone());
            let resolve = move || vqp.resolve_blocker(&table);
            let queued = match state.has_kernel_atomics() {
                true => self.table.defer_atomics(resolve),
                false => self.table.defer(resolve),
            };
            state.resolving = queued.is_ok();
        }
        progress
    }

    fn poll_hint(&self) -> PollHint {
        self.vqp.poll_hint()
    }

    fn on_device_removed(&self) {
        let mut state = self.vqp.state.lock();
        state.closed_with = state.closed_with.or(Some(ENODEV));
        state.fail_from(0, ENODEV);
        state.deliver_completions();
        drop(state);
        self.vqp.wake_waiters();
    }
}
