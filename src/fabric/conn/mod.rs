// SPDX-License-Identifier: GPL-2.0

//! One connection to a peer, shared by all who talk to it.
//!
//! `kite_core::proto::conn` decides; here are the queue pair and those who use it. The connector thread alone
//! makes, connects and drops queue pairs ([`Conn::step`]). Users [`Conn::begin`] when there is a ready
//! one with room, and report its failure with [`Conn::failed`]; the failed one gets no new users, is
//! dropped when the last has left, and then a new one is made. A request that failed with its queue
//! pair may therefore be replayed as soon as `begin` succeeds again.
//!
//! Lock: `inner`, a spin lock, held for a few instructions only.

pub(crate) mod connector;
pub(crate) mod credit;
pub(crate) mod evict;
pub(crate) mod handshake;
pub(crate) mod promotion;

pub(crate) use self::handshake::ConnOps;

use self::{credit::ConnCredit, evict::has_conn_budget};
use super::{
    endpoint::{Endpoint, RecvCqReservation, MAX_CONTROL_REQUESTS, RC_SEND_DEPTH},
    peer::suspicion::Suspicion,
    recv::wake::ThreadWaker,
    Fabric,
};
use crate::{errno, stats::Stats, sys::deadline::Deadline, trace};
use kernel::{
    new_condvar, new_spinlock,
    prelude::*,
    sync::{Arc, CondVar, CondVarTimeoutResult, SpinLock},
    time::{delay::fsleep, msecs_to_jiffies, Delta, Instant, Monotonic},
};
use kite_core::{
    proto::conn::{ConnPhase, ConnRole, ConnStateMachine as Logic},
    sync::fairness::FairAdmission,
    wire::setup::SetupDatagram,
};

/// How long a user sleeps before it looks again, in case a wake-up went elsewhere.
const WAIT_SLICE_MS: u32 = 50;

/// Bytes of virtual queue pairs that may be under way, besides a single batch: others wait behind them.
const MAX_INFLIGHT_VQP_BYTES: u64 = 16 << 20;

/// How long nobody has used a connection that may be given up.
const EVICT_AFTER_IDLE_MS: i64 = 1000;

/// How long it is not tried again to give up one that the peer uses.
const EVICT_RETRY_MS: i64 = 5000;

/// Bytes that a packet can have on any path.
const MIN_MTU_BYTES: u32 = 256;

struct ConnState {
    fsm: Logic,
    endpoint: Option<Arc<Endpoint>>,
    /// Whether the channel's queue pair is connected and has not failed.
    connected: bool,
    /// Generation of the queue pair that was connected last; 0 before the first, and when nothing of it can come late.
    last_generation: u32,
    /// Key to the peer's memory, valid while the connection is ready.
    rkey: u32,
    /// Bytes of the largest packet, once it was connected.
    mtu: u32,
    /// The first sequence number that we send.
    local_psn: u32,
    /// Send requests that users have announced.
    inflight_wrs: u32,
    /// Control requests that wait for a reply.
    control_requests: u32,
    /// Parts of reads and writes under way, each of which has a slot of the RNIC or waits for one.
    inflight_segments: u32,
    /// Bytes of virtual queue pairs under way.
    inflight_vqp_bytes: u64,
    /// When somebody's requests ended last.
    last_progress: Instant<Monotonic>,
    /// Datagrams repeated since the connection was last ready.
    retransmits: u32,
    /// Threads that wait for a queue pair or for room.
    waiters: u32,
    /// Of those that wait for room, and who only looks for it, whose turn it is.
    admission: FairAdmission,
    /// Taken for the first channel, and kept for its successors.
    recv_reservation: Option<RecvCqReservation>,
    /// Why nobody may use the connection any more.
    close_error: Option<Error>,
    // For the connector thread:
    connect_requested: bool,
    /// It is one too many.
    surplus: bool,
    /// When it was that last.
    last_evict_attempt: Option<Instant<Monotonic>>,
    failed_generation: Option<u32>,
    pending_setup: Option<SetupDatagram>,
}

impl<'a> ConnCreditRequest<'a> {
    /// For requests of a virtual queue pair, of so many bytes.
    fn for_vqp(wr_count: u32, vqp_bytes: u64, fabric: &'a Fabric) -> Self {
        Self {
            min_wrs: wr_count,
            max_wrs: wr_count,
            control_requests: 0,
            vqp_bytes,
            quota_fabric: Some(fabric),
            endpoint_id: None,
        }
    }
}

impl ConnState {
    fn is_ready(&self) -> bool {
        self.is_connected() && self.fsm.phase() != ConnPhase::Evicting
    }

    fn is_connected(&self) -> bool {
        self.connected && self.has_not_failed()
    }

    /// For how many milliseconds nobody has used it, if long enough to give it up.
    fn idle_ms(&self) -> Option<i64> {
        let idle = self.last_progress.elapsed().as_millis();
        let is_used =
            self.inflight_wrs != 0 || self.control_requests != 0 || idle < EVICT_AFTER_IDLE_MS;
        (self.is_ready() && !is_used).then_some(idle)
    }

    fn has_not_failed(&self) -> bool {
        self.failed_generation != Some(self.fsm.generation())
            && self.fsm.phase() != ConnPhase::Draining
    }

    /// Whether its channel is that of number `number`, which has been or is being connected.
    fn has_endpoint(&self, endpoint_id: u32) -> bool {
        let has_id = self.endpoint.as_ref().map(|endpoint| endpoint.id()) == Some(endpoint_id);
        has_id && self.has_not_failed()
    }
}

/// What a user announces.
struct ConnCreditRequest<'a> {
    /// Send requests.
    min_wrs: u32,
    /// So many are welcome, if there is room.
    max_wrs: u32,
    /// Control requests.
    control_requests: u32,
    /// Bytes of a virtual queue pair.
    vqp_bytes: u64,
    /// Where it takes a slot, if it is for a part of a read or write.
    quota_fabric: Option<&'a Fabric>,
    /// The number of the one channel that will do, if not any does.
    endpoint_id: Option<u32>,
}

impl ConnCreditRequest<'_> {
    /// Requests that may be announced when this one is. Parts leave room for control requests, which take no
    /// turns.
    fn wr_limit(&self) -> u32 {
        match self.quota_fabric {
            Some(_) => RC_SEND_DEPTH - MAX_CONTROL_REQUESTS,
            None => RC_SEND_DEPTH,
        }
    }
}

/// A connection.
#[pin_data]
pub(crate) struct Conn {
    node: u32,
    index: u8,
    #[pin]
    state: SpinLock<ConnState>,
    /// Signalled when `inner` changes in a way that somebody may wait for.
    #[pin]
    state_changed: CondVar,
    connector_waker: Arc<ThreadWaker>,
    suspicion: Arc<Suspicion>,
    stats: Arc<Stats>,
}

impl Conn {
    /// An idle connection: the `index`th to `node`, of which we have `role`'s side.
    pub(crate) fn new(
        node: u32,
        index: u8,
        role: ConnRole,
        connector_waker: Arc<ThreadWaker>,
        suspicion: Arc<Suspicion>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let state = ConnState {
            fsm: Logic::new(role),
            endpoint: None,
            connected: false,
            last_generation: 0,
            rkey: 0,
            mtu: MIN_MTU_BYTES,
            local_psn: 0,
            inflight_wrs: 0,
            control_requests: 0,
            inflight_segments: 0,
            inflight_vqp_bytes: 0,
            last_progress: Instant::now(),
            retransmits: 0,
            waiters: 0,
            admission: FairAdmission::new(),
            recv_reservation: None,
            close_error: None,
            connect_requested: false,
            surplus: false,
            last_evict_attempt: None,
            failed_generation: None,
            pending_setup: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                node,
                index,
                state <- new_spinlock!(state),
                state_changed <- new_condvar!(),
                connector_waker,
                suspicion,
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Whether a user would not have to wait for a queue pair.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state.lock();
        state.close_error.is_none() && state.is_ready()
    }

    /// Whether another queue pair took the place of that of `generation`, for which the peer gave up its half.
    pub(super) fn is_stale_generation(&self, generation: u32) -> bool {
        self.state.lock().last_generation != generation
    }

    /// The generation of the last queue pair, if it failed.
    pub(super) fn stale_generation(&self) -> Option<u32> {
        let state = self.state.lock();
        (state.last_generation != 0 && !state.is_connected()).then_some(state.last_generation)
    }

    /// Whether it is being given up, and counts no more.
    pub(super) fn is_evicting(&self) -> bool {
        self.state.lock().fsm.phase() == ConnPhase::Evicting
    }

    /// For how many milliseconds nobody has used it, if it may be given up, and nobody tried that of late: the peer
    /// may have used it.
    pub(super) fn evictable_idle_ms(&self) -> Option<i64> {
        let state = self.state.lock();
        let is_recent = |attempt: Instant<_>| attempt.elapsed().as_millis() < EVICT_RETRY_MS;
        let recently_tried = state.last_evict_attempt.is_some_and(is_recent);
        state
            .idle_ms()
            .filter(|_| state.close_error.is_none() && !recently_tried)
    }

    /// It is one too many: is given up, unless somebody uses it after all.
    pub(super) fn mark_surplus(&self) {
        let mut state = self.state.lock();
        state.surplus = true;
        state.last_evict_attempt = Some(Instant::now());
    }

    /// Whether its channel is that of number `number`, and has not failed.
    pub(super) fn has_endpoint(&self, endpoint_id: u32) -> bool {
        self.state.lock().has_endpoint(endpoint_id)
    }

    /// As [`Self::need`], if there is room for one more connection.
    pub(crate) fn request_connect_if_budget(&self) {
        if has_conn_budget(&self.stats) {
            self.request_connect();
        }
    }

    /// Has a queue pair made if there is none, and nobody who asked for one.
    pub(super) fn request_connect(&self) {
        let mut state = self.state.lock();
        let idle = state.fsm.phase() == ConnPhase::Idle && !state.fsm.needs_tick();
        if idle && state.close_error.is_none() {
            self.request_connect_locked(&mut state);
        }
    }

    fn request_connect_locked(&self, state: &mut ConnState) {
        if !core::mem::replace(&mut state.connect_requested, true) {
            self.connector_waker.event.complete();
        }
    }

    /// Bytes of the largest packet.
    pub(crate) fn mtu(&self) -> usize {
        self.state.lock().mtu.max(MIN_MTU_BYTES) as usize
    }

    /// Announces `count` send requests and `calls` control requests; waits until there is a queue pair
    /// with room for them.
    ///
    /// # Errors
    ///
    /// - What [`Self::shut`] was given, if it was shut.
    /// - `EAGAIN` if it would have to wait, and there is no deadline.
    /// - `ETIMEDOUT`, `EINTR`.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        wr_count: u32,
        control_requests: u32,
        deadline: Option<Deadline>,
    ) -> Result<ConnCredit> {
        let request = ConnCreditRequest {
            min_wrs: wr_count,
            max_wrs: wr_count,
            control_requests,
            vqp_bytes: 0,
            quota_fabric: None,
            endpoint_id: None,
        };
        self.acquire_credits(&request, deadline)
    }

    /// Announces `count` send requests for a part of a read or write, which is to have a slot of `fabric`:
    /// see [`Fabric::share`].
    ///
    /// # Errors
    ///
    /// As for [`Self::begin`].
    pub(crate) fn acquire_segment(
        self: &Arc<Self>,
        wr_count: u32,
        fabric: &Fabric,
        deadline: Option<Deadline>,
    ) -> Result<ConnCredit> {
        let request = ConnCreditRequest {
            min_wrs: wr_count,
            max_wrs: wr_count,
            control_requests: 0,
            vqp_bytes: 0,
            quota_fabric: Some(fabric),
            endpoint_id: None,
        };
        self.acquire_credits(&request, deadline)
    }

    /// As [`Self::begin_part`], for so many bytes of a virtual queue pair. Waits for nothing.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn try_acquire_vqp(
        self: &Arc<Self>,
        wr_count: u32,
        vqp_bytes: u64,
        fabric: &Fabric,
    ) -> Result<ConnCredit> {
        self.acquire_credits(
            &ConnCreditRequest::for_vqp(wr_count, vqp_bytes, fabric),
            None,
        )
    }

    /// Whether [`Self::begin_bytes`] would find room, which is not taken.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn can_acquire_vqp(
        &self,
        wr_count: u32,
        vqp_bytes: u64,
        fabric: &Fabric,
    ) -> Result<bool> {
        self.has_credits(
            &mut self.state.lock(),
            &ConnCreditRequest::for_vqp(wr_count, vqp_bytes, fabric),
        )
    }

    /// As [`Self::begin_part`], for parts that are to be posted together and share a slot: the result says for
    /// how many requests there is room, and [`Use::keep`] is to be told how many there are. Waits for nothing.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn try_acquire_batch(
        self: &Arc<Self>,
        wr_count: u32,
        max_wrs: u32,
        fabric: &Fabric,
    ) -> Result<ConnCredit> {
        let request = ConnCreditRequest {
            min_wrs: wr_count,
            max_wrs,
            control_requests: 0,
            vqp_bytes: 0,
            quota_fabric: Some(fabric),
            endpoint_id: None,
        };
        self.acquire_credits(&request, None)
    }

    /// Announces one send request for the channel of number `by`.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` if the channel is not in use any more, and as for [`Self::begin`].
    pub(crate) fn acquire_on_endpoint(
        self: &Arc<Self>,
        endpoint_id: u32,
        deadline: Deadline,
    ) -> Result<ConnCredit> {
        let request = ConnCreditRequest {
            min_wrs: 1,
            max_wrs: 1,
            control_requests: 0,
            vqp_bytes: 0,
            quota_fabric: None,
            endpoint_id: Some(endpoint_id),
        };
        self.acquire_credits(&request, Some(deadline))
    }

    fn acquire_credits(
        self: &Arc<Self>,
        request: &ConnCreditRequest<'_>,
        deadline: Option<Deadline>,
    ) -> Result<ConnCredit> {
        let mut state = self.state.lock();
        while !self.has_credits(&mut state, request)?
            || (deadline.is_none() && !state.admission.can_admit_poller())
        {
            let deadline = deadline.ok_or(EAGAIN)?;
            deadline.check()?;
            // Who waits for an answer to a control request waits for no room of theirs.
            let waits_for_credits = request.control_requests == 0;
            if waits_for_credits {
                state.admission.add_sleeper();
            }
            state.waiters += 1;
            let slice = msecs_to_jiffies(deadline.remaining_ms().min(WAIT_SLICE_MS));
            let woken = self
                .state_changed
                .wait_interruptible_timeout(&mut state, slice);
            state.waiters -= 1;
            if waits_for_credits {
                state.admission.remove_sleeper();
            }
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                // A signal that does not end the wait must not make it spin either.
                drop(state);
                deadline.handle_signal()?;
                state = self.state.lock();
            }
        }
        let endpoint = state.endpoint.clone().ok_or(EIO)?;
        state.admission.note_admission(deadline.is_none());
        let wr_count = request.max_wrs.min(request.wr_limit() - state.inflight_wrs);
        state.inflight_wrs += wr_count;
        state.control_requests += request.control_requests;
        let segments = u32::from(request.quota_fabric.is_some());
        state.inflight_segments += segments;
        state.inflight_vqp_bytes += request.vqp_bytes;
        if state.inflight_wrs == wr_count {
            state.last_progress = Instant::now();
        }
        if request.max_wrs == request.min_wrs {
            trace::post(self.node, self.index.into(), wr_count, state.inflight_wrs);
        }
        let (generation, rkey) = (state.fsm.generation(), state.rkey);
        Ok(ConnCredit {
            conn: self.clone(),
            endpoint,
            generation,
            rkey,
            wr_count,
            control_requests: request.control_requests,
            segments,
            vqp_bytes: request.vqp_bytes,
        })
    }

    /// Whether the requests can be posted now; if there is no queue pair, one is asked for.
    fn has_credits(&self, state: &mut ConnState, request: &ConnCreditRequest<'_>) -> Result<bool> {
        if let Some(error) = state.close_error {
            return Err(error);
        }
        if request
            .endpoint_id
            .is_some_and(|endpoint_id| !state.has_endpoint(endpoint_id))
        {
            return Err(errno::notconn());
        }
        if !state.is_ready() {
            self.request_connect_locked(state);
            return Ok(false);
        }
        let has_credits = state.inflight_wrs + request.min_wrs <= request.wr_limit()
            && state.control_requests + request.control_requests <= MAX_CONTROL_REQUESTS
            && (request.vqp_bytes == 0
                || state.inflight_vqp_bytes == 0
                || state.inflight_vqp_bytes + request.vqp_bytes <= MAX_INFLIGHT_VQP_BYTES)
            && request
                .quota_fabric
                .is_none_or(|fabric| state.inflight_segments < fabric.inflight_quota());
        if !has_credits {
            self.stats.credit_waits.add(1);
        }
        Ok(has_credits)
    }

    /// Reports that the queue pair of `generation` failed.
    pub(super) fn report_failure(&self, generation: u32) {
        let mut state = self.state.lock();
        if state.fsm.generation() == generation {
            state.failed_generation = Some(generation);
            self.connector_waker.event.complete();
        }
    }

    /// Reports that the peer did not answer, on the queue pair of `generation`.
    pub(super) fn report_no_response(&self, generation: u32) {
        self.suspicion.raise();
        self.report_failure(generation);
    }

    /// Takes a datagram from the peer, for [`Self::step`]. A newer one replaces one not yet seen: the
    /// sender repeats what matters.
    pub(crate) fn on_setup(&self, setup: SetupDatagram) {
        self.state.lock().pending_setup = Some(setup);
        self.connector_waker.event.complete();
    }

    /// Ends the connection for good: users get `error`. When this returns the peer cannot reach our
    /// memory through it; [`Self::leave`] waits for the users.
    pub(crate) fn close(&self, error: Error) {
        let mut state = self.state.lock();
        state.close_error = Some(error);
        let endpoint = state.endpoint.clone();
        drop(state);
        self.state_changed.notify_all();
        if let Some(Err(error)) = endpoint.map(|endpoint| endpoint.qp().modify_to_err()) {
            pr_err!("QP cannot be moved to RESET: {error:?}\n");
        }
    }

    /// Waits until nobody uses the connection, which must be shut, and returns its last channel and place.
    pub(crate) fn drain(&self) -> (Option<Arc<Endpoint>>, Option<RecvCqReservation>) {
        let mut state = self.state.lock();
        while state.inflight_wrs != 0 || state.control_requests != 0 {
            drop(state);
            fsleep(Delta::from_millis(1));
            state = self.state.lock();
        }
        if core::mem::take(&mut state.connected) {
            self.stats.connected_qps.sub(1);
        }
        (state.endpoint.take(), state.recv_reservation.take())
    }

    /// So many requests are posted, and so many that were announced are not.
    pub(super) fn release_unused(&self, wr_count: u32, unused: u32) {
        let mut state = self.state.lock();
        state.inflight_wrs -= unused;
        trace::post(self.node, self.index.into(), wr_count, state.inflight_wrs);
        let waiters = state.waiters;
        drop(state);
        if unused != 0 && waiters != 0 {
            self.state_changed.notify_all();
        }
    }

    pub(super) fn release_credits(
        &self,
        wr_count: u32,
        control_requests: u32,
        (segments, vqp_bytes): (u32, u64),
    ) {
        let mut state = self.state.lock();
        state.inflight_wrs -= wr_count;
        state.control_requests -= control_requests;
        state.inflight_segments -= segments;
        state.inflight_vqp_bytes -= vqp_bytes;
        state.last_progress = Instant::now();
        let drained = state.fsm.phase() == ConnPhase::Draining && state.inflight_wrs == 0;
        let waiters = state.waiters;
        drop(state);
        if drained {
            self.connector_waker.event.complete();
        }
        if waiters != 0 {
            self.state_changed.notify_all();
        }
    }

    /// Since when nobody's requests have ended, and how many bytes of virtual queue pairs are under way.
    pub(super) fn last_progress(&self) -> (Instant<Monotonic>, u64) {
        let state = self.state.lock();
        (state.last_progress, state.inflight_vqp_bytes)
    }

    /// Whether the queue pair of `generation` may still bring an answer.
    pub(super) fn is_current(&self, generation: u32) -> bool {
        let state = self.state.lock();
        state.close_error.is_none() && state.is_ready() && state.fsm.generation() == generation
    }
}
