// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs (KRCORE, section 4): verbs to one node each, over initiators of DC, or connections, that all share.
//!
//! Nothing is connected for them: who knows by which target the node is reached can post at once ([`crate::cluster`]).
//! What is pushed is checked whole before anything is posted ([`check`]), so nobody breaks what others use. A push
//! is posted as a [`batch`], with one doorbell; batches go by one initiator, in their order, and are looked after by
//! the poller or by who pops ([`state`]). If the initiator fails by another's request, what was not done of them goes
//! again.
//!
//! One that was made to a port, or for who listens there, is an end of two, and takes messages ([`exchange`],
//! [`deliver`], [`inbox`], [`tell`]). What is pushed may also come by a queue that a process shares with the kernel
//! ([`addition`], [`outlet`]).

pub(crate) mod recv;
pub(crate) mod registry;
pub(crate) mod send;
pub(crate) mod table;

pub(crate) use self::send::{VqpCompletion, VqpEvent};

use self::{
    send::{
        batch::{BatchBlocker, MrUse, VqpBatch, VqpBatchState, VqpRequest},
        mr_cache::MrCache,
        EndpointIds, VqpState,
    },
    table::VqpTable,
};
use crate::{
    cluster::Cluster,
    errno,
    fabric::{
        peer::PeerAddress,
        qos::tenant::{RequestCost, Tenant},
        recv::poller::{PollClient, PollHint},
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

/// How long it may take to find out by what name a node is reached, in a view in which it has another.
const RESOLVE_TIMEOUT_MS: u32 = 10_000;

/// How often we look.
const ADDRESS_RECHECK_MS: i64 = 20;

/// How long somebody sleeps who waits, should nobody wake him.
const WAIT_SLICE_MS: u32 = 50;

/// How long a process may look itself, and how long the poller waits for it to look again.
const USER_POLL_NS: u64 = 10_000_000;
const USER_POLL_GRACE_NS: u64 = 100_000;

/// A virtual queue pair.
#[pin_data]
pub(crate) struct Vqp {
    pub(crate) peer: NodeInstance,
    #[pin]
    state: Mutex<VqpState>,
    #[pin]
    mr_cache: Mutex<MrCache>,
    /// There are completions or messages, or it is over.
    #[pin]
    event_cv: CondVar,
    adaptive_spin: AdaptiveSpin,
    /// Until then a process looks itself, or is about to.
    user_polls_until: Atomic<u64>,
    /// Something is to be found out, or asked for, which the poller sees to in any case.
    needs_resolve: AtomicFlag,
    session_events: Arc<EventCounter>,
    /// Pays for messages that are kept.
    memcg: Arc<Memcg>,
}

impl Vqp {
    /// One to a node in this life. `open` says whether the other end has made it, which a process has. `memory` says how
    /// memory is asked for.
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

    /// Makes one to a node, which hears nothing of it, and to a port there unless that is 0.
    ///
    /// # Errors
    ///
    /// As for [`Cluster::reach`].
    pub(crate) fn connect(
        table: &VqpTable,
        (node, port): (u32, u32),
        uid: u32,
        session_events: Arc<EventCounter>,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        let cluster = &table.lmr.cluster;
        let local = cluster.instance_of(cluster.local_node()?)?;
        // Nothing is connected to itself.
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

    /// Adds requests, which are posted by and by, in this order. None of them is if one is refused.
    ///
    /// # Errors
    ///
    /// As `struct kite_push` in `include/uapi/kite.h` says.
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

    /// Takes completions, at most so many.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is none; why the queue pair is over; `ENOMEM`.
    pub(crate) fn pop(&self, fabric: &Fabric, max: usize) -> Result<KVec<VqpCompletion>> {
        let mut state = self.state.lock();
        self.make_progress_and_kick(fabric, &mut state);
        let completions = state.pop_completions(max)?;
        Self::wake_blocked_push(fabric, &mut state);
        match state.closed_with {
            // Who is told so may use his memory for something else.
            Some(error) if completions.is_empty() && state.pending == 0 => Err(error),
            _ if completions.is_empty() => Err(EAGAIN),
            _ => Ok(completions),
        }
    }

    /// Does what says `EAGAIN` while there is nothing of that kind: without a pause for a while, then whenever
    /// something has come.
    ///
    /// # Errors
    ///
    /// Those of `f`; `ETIMEDOUT`, `EINTR`.
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
        // Who uses it steadily is back in a moment.
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

    /// Does what says `EAGAIN` while there is nothing of that kind, now.
    ///
    /// # Errors
    ///
    /// Those of `f`.
    pub(crate) fn try_or_poll<T>(
        &self,
        table: impl Deref<Target = Arc<VqpTable>>,
        event: VqpEvent,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        match f() {
            Err(error) if error == EAGAIN && self.depends_on_peer_packets(event) => {
                // Who looks all the time need not wait until the poller was woken.
                table.lmr.cluster.fabric.try_poll_recv();
                f()
            }
            done => done,
        }
    }

    /// Whether that may depend on what the other end says: a message is done when that one has it.
    fn depends_on_peer_packets(&self, event: VqpEvent) -> bool {
        event == VqpEvent::Message || self.vqp_numbers().0 != 0
    }

    /// A process looks itself for so many nanoseconds.
    fn set_user_poll_window(&self, ns: u64) {
        self.user_polls_until.store(monotonic_ns() + ns, Relaxed);
    }

    fn is_user_polled(&self) -> bool {
        monotonic_ns() < self.user_polls_until.load(Relaxed)
    }

    /// Sleeps until something has come, but not for long.
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

    /// Whether there is something to pop or to receive.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state.lock();
        // Without a port there are no messages.
        let has_message = state.ids.local_vqpn != 0 && state.is_ready_for(VqpEvent::Message);
        state.is_ready_for(VqpEvent::Completion) || has_message
    }

    /// Nothing new begins, for this reason. What is under way ends.
    pub(crate) fn shutdown(&self, error: Error) {
        let mut state = self.state.lock();
        state.closed_with = state.closed_with.or(Some(error));
        // Who looks for messages alone would not find out what is not done.
        state.deliver_completions();
        drop(state);
        self.wake_waiters();
    }

    /// Lets what is under way end, and nothing new begin. Returns whether to tell the other end.
    pub(crate) fn close(&self) -> bool {
        let mut state = self.state.lock();
        state.closed_with = Some(errno::canceled());
        state.pending = 0;
        let batches = core::mem::replace(&mut state.batches, KVec::new());
        state.recv_queue.clear();
        // Who has heard nothing of it need not hear that it is over.
        let needs_update =
            (state.ids.peer_vqpn != 0 || state.send_window.has_sent()) && !state.peer_closed;
        drop(state);
        // The poller must not wait for it meanwhile.
        for mut batch in batches {
            batch.drain(self.peer);
            batch.cancel_unreported();
        }
        needs_update
    }

    /// As [`Self::proceed`], and has the poller do what is left to do.
    fn make_progress_and_kick(&self, fabric: &Fabric, state: &mut VqpState) -> usize {
        let progress = self.make_progress(fabric, state);
        if state.needs_poller() {
            self.needs_resolve.store(state.needs_resolve(), Release);
            fabric.wake_poller();
        }
        progress
    }

    /// As [`Self::proceed_or_leave`], unless somebody else does. Returns how much that was.
    pub(crate) fn try_make_progress(&self, fabric: &Fabric) -> usize {
        let state = self.state.try_lock();
        state.map_or(0, |mut state| {
            self.make_progress_and_kick(fabric, &mut state)
        })
    }

    /// Takes what has completed, and posts what can be. Returns how much that was.
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

    /// Finds out what keeps a batch from being posted: whether the node, which did not answer, is reached by another
    /// name, or whether remote memory is still there. Or asks for what is not posted.
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
                // What was read is remembered for a while.
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

    /// Whether the node is reached by another name than before, perhaps in a view that is yet to come.
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

    /// What the poller has to do for it.
    pub(crate) fn poll_hint(&self) -> PollHint {
        // The RNIC need not interrupt who looks, nor us on his behalf.
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

    /// Whether what became of some requests is not known yet.
    pub(crate) fn has_pending(&self) -> bool {
        let state = self.state.try_lock();
        state.is_none_or(|state| state.pending != 0)
    }

    /// The first batch that is in doubt.
    fn first_blocker(&self) -> Option<(u64, BatchBlocker)> {
        let state = self.state.lock();
        let mut batches = state.batches.iter();
        batches.find_map(|batch| Some((batch.number, batch.blocker()?)))
    }
}

/// Has the poller look after a queue pair.
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
