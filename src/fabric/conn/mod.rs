// SPDX-License-Identifier: GPL-2.0

//! RC connection to one peer, shared by all its users.
//!
//! `kite_core::proto::conn` makes the decisions. This module holds the QP and counts its users.
//!
//! # Operation
//!
//! The connector thread alone creates, connects and destroys QPs ([`Conn::step`]). A user acquires a
//! [`credit::ConnCredit`] once the connection has a ready QP with capacity ([`acquire`]). The credit is
//! dropped when the user's work requests have completed.
//!
//! # Recovery
//!
//! A user reports a failed QP with [`Conn::report_failure`]. The failed QP accepts no new users. When its
//! last user is gone, the connector destroys it and connects a successor. A request that failed with its QP
//! may therefore be retried as soon as [`Conn::acquire`] succeeds again.
//!
//! # Locking
//!
//! `Conn::state` is a spin lock for all fields of [`ConnState`], held for a few instructions. A sleeper waits
//! on `state_changed`, which releases the lock meanwhile. QP transitions sleep and run without it.
//!
//! Lock order: `Conn::state` → the free list of slots, which `Fabric::inflight_quota` locks.

mod acquire;
pub(crate) mod connector;
pub(crate) mod credit;
mod evict;
pub(crate) mod handshake;

pub(crate) use self::handshake::ConnOps;

use self::evict::ConnBudget;
use super::{
    endpoint::{Endpoint, RecvCqReservation},
    peer::{identity::PeerIdentity, suspicion::Suspicion},
    recv::wake::ThreadWaker,
    send::usage::SendQueueUsage,
};
use crate::{stats::Stats, sys::deadline::Deadline, verbs::log::rnic_err};
use kernel::{
    new_condvar, new_spinlock,
    prelude::*,
    sync::{Arc, CondVar, SpinLock},
    time::{delay::fsleep, Delta, Instant, Monotonic},
};
use kite_core::{
    proto::conn::{ConnPhase, ConnRole, ConnStateMachine as Logic},
    sync::fairness::FairAdmission,
    view::NodeInstance,
    wire::setup::SetupDatagram,
};

/// Idle time in ms after which a connection may be evicted.
const EVICT_AFTER_IDLE_MS: i64 = 1000;

/// Time in ms between eviction attempts of one connection: the peer may use it.
const EVICT_RETRY_MS: i64 = 5000;

/// Time in ms after which the drain of a closed connection is overdue. The slowest user is a batch of a
/// virtual queue pair: at most 31 s until its QP is moved to ERR, and 31 s until RESET.
const DRAIN_OVERDUE_MS: u32 = 120_000;

/// Packet size in bytes that every path supports.
const MIN_MTU_BYTES: u32 = 256;

struct ConnState {
    fsm: Logic,
    endpoint: Option<Arc<Endpoint>>,
    /// `true` if the QP of `endpoint` is connected and has not begun to drain.
    connected: bool,
    /// Generation of the last connected QP. 0 before the first, and after an eviction, which leaves no packet
    /// that could arrive late.
    last_generation: u32,
    /// Key to the peer's memory. Valid while the connection is ready.
    rkey: u32,
    /// Path MTU in bytes of the last connected QP.
    mtu: u32,
    /// First packet sequence number that this side sends.
    local_psn: u32,
    /// Work requests of all credits, at most `RC_SEND_DEPTH`, and bytes of virtual queue pairs.
    usage: SendQueueUsage,
    /// Control requests that wait for a reply. At most `MAX_CONTROL_REQUESTS`.
    control_requests: u32,
    /// Those of them that take long. At most `MAX_LONG_REQUESTS`.
    long_requests: u32,
    /// Segments of reads and writes with a credit. Each holds a slot of the RNIC or needs one.
    inflight_segments: u32,
    /// Datagrams retransmitted since the peer last responded.
    retransmits: u32,
    /// Threads that wait for a QP or for capacity.
    waiters: u32,
    /// Alternates between sleeping waiters and callers that poll for capacity.
    admission: FairAdmission,
    /// Reserved for the first endpoint, and kept for its successors. Returned after an eviction.
    recv_reservation: Option<RecvCqReservation>,
    /// Error that users receive after the connection was closed.
    close_error: Option<Error>,
    // Written for the connector, which consumes them:
    connect_requested: bool,
    /// The connection exceeds `max_idle_conns`. Evict it if it is idle.
    surplus: bool,
    /// Time at which `surplus` was last set.
    last_evict_attempt: Option<Instant<Monotonic>>,
    failed_generation: Option<u32>,
    pending_setup: Option<SetupDatagram>,
}

impl ConnState {
    fn is_ready(&self) -> bool {
        self.is_connected() && self.fsm.phase() != ConnPhase::Evicting
    }

    fn is_connected(&self) -> bool {
        self.connected && self.has_not_failed()
    }

    /// Returns `true` if a user holds a credit, or waits for the reply to a control request.
    fn has_users(&self) -> bool {
        !self.usage.is_idle() || self.control_requests != 0
    }

    /// Returns the idle time in ms if it suffices for an eviction.
    fn idle_ms(&self) -> Option<i64> {
        let (last_progress, _) = self.usage.last_progress();
        let idle = last_progress.elapsed().as_millis();
        let is_used = self.has_users() || idle < EVICT_AFTER_IDLE_MS;
        (self.is_ready() && !is_used).then_some(idle)
    }

    fn has_not_failed(&self) -> bool {
        self.failed_generation != Some(self.fsm.generation())
            && self.fsm.phase() != ConnPhase::Draining
    }

    /// Returns `true` if the current endpoint has this ID and its QP has not failed. The QP is connected or
    /// being connected.
    fn has_endpoint(&self, endpoint_id: u32) -> bool {
        let has_id = self.endpoint.as_ref().map(|endpoint| endpoint.id()) == Some(endpoint_id);
        has_id && self.has_not_failed()
    }
}

/// An RC connection that the connector replaces when its QP fails.
#[pin_data]
pub(crate) struct Conn {
    /// Peer, and the admission of the connection. See [`PeerIdentity`].
    peer: NodeInstance,
    admission: u64,
    index: u8,
    #[pin]
    state: SpinLock<ConnState>,
    /// Notified when `state` changes in a way for which a user may wait.
    #[pin]
    state_changed: CondVar,
    connector_waker: Arc<ThreadWaker>,
    suspicion: Arc<Suspicion>,
    stats: Arc<Stats>,
}

impl Conn {
    /// Creates an idle connection, number `index` to the peer of `identity`, with the local role `role`.
    pub(crate) fn new(
        identity: &PeerIdentity,
        index: u8,
        role: ConnRole,
        suspicion: Arc<Suspicion>,
    ) -> Result<Arc<Self>> {
        let state = ConnState {
            fsm: Logic::new(role),
            endpoint: None,
            connected: false,
            last_generation: 0,
            rkey: 0,
            mtu: MIN_MTU_BYTES,
            local_psn: 0,
            usage: SendQueueUsage::new(),
            control_requests: 0,
            long_requests: 0,
            inflight_segments: 0,
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
                peer: identity.peer,
                admission: identity.admission,
                index,
                state <- new_spinlock!(state, "Conn::state"),
                state_changed <- new_condvar!("Conn::state_changed"),
                connector_waker: identity.local.connector_waker.clone(),
                suspicion,
                stats: identity.local.stats.clone(),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns `true` if users need not wait for a QP.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state.lock();
        state.close_error.is_none() && state.is_ready()
    }

    /// Returns `true` if the last connected QP is not that of `generation`. The peer has destroyed its half
    /// of that QP then, so late packets are rejected.
    pub(super) fn is_stale_generation(&self, generation: u32) -> bool {
        self.state.lock().last_generation != generation
    }

    /// Returns the generation of the last connected QP if it has failed.
    pub(super) fn stale_generation(&self) -> Option<u32> {
        let state = self.state.lock();
        (state.last_generation != 0 && !state.is_connected()).then_some(state.last_generation)
    }

    /// Returns `true` if an eviction is in progress.
    pub(super) fn is_evicting(&self) -> bool {
        self.state.lock().fsm.phase() == ConnPhase::Evicting
    }

    /// Returns the idle time in ms if the connection may be evicted. Returns `None` for `EVICT_RETRY_MS`
    /// after an attempt, because the peer may have used the connection.
    pub(super) fn evictable_idle_ms(&self) -> Option<i64> {
        let state = self.state.lock();
        let is_recent = |attempt: Instant<_>| attempt.elapsed().as_millis() < EVICT_RETRY_MS;
        let recently_tried = state.last_evict_attempt.is_some_and(is_recent);
        state
            .idle_ms()
            .filter(|_| state.close_error.is_none() && !recently_tried)
    }

    /// Requests eviction. The connector evicts the connection if it is still idle then.
    pub(super) fn mark_surplus(&self) {
        let mut state = self.state.lock();
        state.surplus = true;
        state.last_evict_attempt = Some(Instant::now());
    }

    /// Returns `true` if the current endpoint has this ID and its QP has not failed.
    pub(super) fn has_endpoint(&self, endpoint_id: u32) -> bool {
        self.state.lock().has_endpoint(endpoint_id)
    }

    /// Like [`Self::request_connect`], but does nothing if the budget of idle connections is exhausted.
    pub(crate) fn request_connect_if_budget(&self) {
        if ConnBudget(&self.stats).has_room() {
            self.request_connect();
        }
    }

    /// Requests a QP if the connection has none and none is requested.
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

    /// Returns the path MTU in bytes, at least `MIN_MTU_BYTES`.
    pub(crate) fn mtu(&self) -> usize {
        self.state.lock().mtu.max(MIN_MTU_BYTES) as usize
    }

    /// Reports that the QP of `generation` failed.
    pub(super) fn report_failure(&self, generation: u32) {
        let mut state = self.state.lock();
        if state.fsm.generation() == generation {
            state.failed_generation = Some(generation);
            self.connector_waker.event.complete();
        }
    }

    /// Reports that the peer did not respond on the QP of `generation`.
    pub(super) fn report_no_response(&self, generation: u32) {
        self.suspicion.raise();
        self.report_failure(generation);
    }

    /// Stores a datagram from the peer for [`Self::step`]. A newer one replaces an unprocessed one: the peer
    /// retransmits what matters.
    pub(crate) fn on_setup(&self, setup: SetupDatagram) {
        self.state.lock().pending_setup = Some(setup);
        self.connector_waker.event.complete();
    }

    /// Closes the connection permanently: users receive `error`. On return, the peer cannot access local
    /// memory through it. [`Self::drain`] waits for the users.
    pub(crate) fn close(&self, error: Error) {
        let mut state = self.state.lock();
        state.close_error = Some(error);
        let endpoint = state.endpoint.clone();
        drop(state);
        self.state_changed.notify_all();
        let Some(endpoint) = endpoint else {
            return;
        };
        if let Err(error) = endpoint.qp().modify_to_err() {
            rnic_err!(
                endpoint.qp().device(),
                "node {}: QP cannot be moved to ERR: {error:?}\n",
                self.peer.node
            );
        }
    }

    /// Waits until the connection has no users. It must be closed. Returns its last endpoint and its
    /// reservation.
    ///
    /// # Bound
    ///
    /// The wait ends without the peer and without any process, since all users are bounded:
    ///
    /// - A closed connection admits no new users.
    /// - A user with work requests in flight waits only for the RNIC. [`Self::close`] moved the QP to ERR,
    ///   which flushes the work requests. If completions are missing, the user moves the QP to RESET, which
    ///   ends the wait ([`super::send::slots`]).
    /// - A user that waits for a slot holds its credit meanwhile. The users of slots are bounded likewise.
    /// - A user that waits for the reply to a control request checks the connection every `WAIT_SLICE_MS`.
    ///
    /// The function does not give up: a user may still post on the QP, which the caller destroys next. After
    /// [`DRAIN_OVERDUE_MS`] the function logs an error, because a user has violated the bound.
    pub(crate) fn drain(&self) -> (Option<Arc<Endpoint>>, Option<RecvCqReservation>) {
        let mut overdue = Some(Deadline::after_ms(DRAIN_OVERDUE_MS));
        let mut state = self.state.lock();
        while state.has_users() {
            drop(state);
            if overdue.take_if(|overdue| overdue.has_expired()).is_some() {
                self.log_overdue_drain();
            }
            fsleep(Delta::from_millis(1));
            state = self.state.lock();
        }
        if core::mem::take(&mut state.connected) {
            self.stats.connected_qps.sub(1);
        }
        (state.endpoint.take(), state.recv_reservation.take())
    }

    fn log_overdue_drain(&self) {
        let endpoint = self.state.lock().endpoint.clone();
        if let Some(endpoint) = endpoint {
            rnic_err!(
                endpoint.qp().device(),
                "node {}: closed connection still has users after {DRAIN_OVERDUE_MS} ms\n",
                self.peer.node
            );
        }
    }

    /// Returns the time of the last progress, and the bytes of virtual queue pairs in flight.
    pub(super) fn last_progress(&self) -> (Instant<Monotonic>, u64) {
        let state = self.state.lock();
        state.usage.last_progress()
    }

    /// Returns `true` if the QP of `generation` can still deliver a reply.
    pub(super) fn is_current(&self, generation: u32) -> bool {
        let state = self.state.lock();
        state.close_error.is_none() && state.is_ready() && state.fsm.generation() == generation
    }
}
