// SPDX-License-Identifier: GPL-2.0

//! Handshake of a connection with its peer: creates, connects and destroys QPs, as `kite_core::proto::conn`
//! decides.
//!
//! # Operation
//!
//! The connector thread calls [`Conn::step`]. A step passes the pending events of the connection to the state
//! machine: a requested QP, a failed QP, a datagram of the peer, an eviction, a tick. Then the step executes
//! the actions that the state machine returned, by [`ConnOps`]. A requested QP and a datagram of the peer
//! stay pending until the route to the peer is resolved.
//!
//! # Recovery
//!
//! The state machine repeats datagrams at each tick until the peer responds. After every
//! [`SUSPECT_AFTER_RETRANSMITS`] repetitions the peer is suspected, and its route is resolved again. A failed
//! QP is moved to ERR at once, which flushes its work requests, and destroyed after its last credit is
//! returned.
//!
//! # Locking
//!
//! `Conn::state` is taken for each access to the state, and never held during a QP transition or a send. The
//! connection may therefore be closed between two accesses. A new QP is stored only if the connection is
//! still open under the lock.

use super::Conn;
use crate::{
    fabric::{
        endpoint::{Endpoint, RecvCqReservation},
        peer::identity::PeerIdentity,
    },
    trace,
    verbs::{device::IbDevice, log::rnic_warn, qp::RemoteQp},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    proto::conn::{ConnAction, ConnEvent, ConnPhase},
    wire::setup::{SetupDatagram, SetupKind},
};

/// Number of repetitions without a response after which the peer is suspected: 500 ms at 50 ms per tick.
const SUSPECT_AFTER_RETRANSMITS: u32 = 10;

/// Operations by which a connection acts on the fabric and on its peer.
pub(crate) trait ConnOps {
    /// Returns the RNIC.
    fn device(&self) -> IbDevice;

    /// Returns `true` if the route to the peer is resolved. Otherwise starts the resolution.
    fn try_resolve_route(&self) -> bool;

    /// Discards the route to the peer, which is then resolved again: the peer may have another address.
    fn invalidate_route(&self);

    /// Reserves receive CQ entries for one endpoint at a time.
    ///
    /// # Errors
    ///
    /// - The error of the receive CQ budget if too few entries are free.
    fn reserve_recv_cq(&self) -> Result<RecvCqReservation>;

    /// Creates an RC endpoint, and registers it by its ID.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - The error of the RNIC if it rejects the QP.
    fn create_endpoint(&self) -> Result<Arc<Endpoint>>;

    /// Destroys the QP of an endpoint, and unregisters the endpoint.
    fn destroy_endpoint(&self, endpoint: Arc<Endpoint>);

    /// Connects an endpoint to the QP of the peer. The first packet of the local side has number `psn`.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: the route is not resolved.
    /// - The error of the RNIC if it rejects the QP transition.
    fn connect_endpoint(&self, endpoint: &Endpoint, remote: RemoteQp, psn: u32) -> Result;

    /// Sends a datagram to the peer, which may get lost.
    fn send_setup(&self, setup: &SetupDatagram);

    /// Returns the identities of the local node and of the peer.
    fn identity(&self) -> &PeerIdentity;
}

/// Converts a datagram to an event. `idle` is `true` if the connection has no local users. Returns `None` for
/// a datagram about a view.
fn conn_event(message: &SetupDatagram, idle: bool) -> Option<ConnEvent> {
    let generation = message.generation;
    Some(match message.kind {
        SetupKind::Connect => ConnEvent::Connect(generation),
        SetupKind::Accept => ConnEvent::Accept(generation),
        SetupKind::ConnectRequest => ConnEvent::ConnectRequest(generation),
        SetupKind::EvictRequest => ConnEvent::EvictRequest {
            generation,
            attempt: message.psn,
            is_idle: idle,
        },
        SetupKind::Evicted => ConnEvent::Evicted(generation),
        SetupKind::EvictRefused => ConnEvent::EvictRefused(message.psn),
        // Announcements of views concern no connection.
        SetupKind::ViewAnnounce | SetupKind::ViewAck => return None,
    })
}

impl Conn {
    /// Processes the pending events of the connection. `tick` is `true` in a round for retransmissions.
    /// Returns `true` if another tick is needed.
    pub(crate) fn step(&self, ops: &impl ConnOps, tick: bool) -> bool {
        let needs_route = self.needs_route();
        let has_route = needs_route && ops.try_resolve_route();
        let mut state = self.state.lock();
        if state.close_error.is_some() {
            return false;
        }
        let mut actions = [ConnAction::Nothing; 5];
        let mut setup = None;
        if has_route && core::mem::take(&mut state.connect_requested) {
            actions[0] = state.fsm.handle_event(ConnEvent::UseRequested);
        }
        if let Some(generation) = state.failed_generation.take() {
            actions[1] = state.fsm.handle_event(ConnEvent::QpFailed(generation));
        }
        if let Some(message) = state.pending_setup.take_if(|_| has_route) {
            let idle = state.idle_ms().is_some();
            if let Some(event) = conn_event(&message, idle) {
                actions[2] = state.fsm.handle_event(event);
            }
            setup = Some(message);
        }
        if core::mem::take(&mut state.surplus) && state.idle_ms().is_some() {
            actions[4] = state.fsm.handle_event(ConnEvent::Surplus);
        }
        if tick {
            actions[3] = state.fsm.tick();
            state.retransmits += u32::from(actions[3] != ConnAction::Nothing);
        }
        let is_unresponsive =
            state.retransmits != 0 && state.retransmits % SUSPECT_AFTER_RETRANSMITS == 0 && tick;
        drop(state);
        if is_unresponsive {
            self.suspicion.raise();
            ops.invalidate_route();
        }
        for action in actions {
            self.execute_action(ops, action, setup.as_ref());
        }
        self.reap_failed_qp(ops);
        (needs_route && !has_route) || self.state.lock().fsm.needs_tick()
    }

    /// Returns `true` if an event is pending that needs a route to the peer.
    fn needs_route(&self) -> bool {
        let state = self.state.lock();
        state.close_error.is_none()
            && (state.connect_requested || state.pending_setup.is_some() || state.fsm.needs_tick())
    }

    /// Destroys a draining QP if its last credit was returned.
    fn reap_failed_qp(&self, ops: &impl ConnOps) {
        let endpoint = {
            let mut state = self.state.lock();
            if state.fsm.phase() != ConnPhase::Draining || !state.usage.is_idle() {
                return;
            }
            state.endpoint.take()
        };
        if let Some(endpoint) = endpoint {
            ops.destroy_endpoint(endpoint);
        }
        let action = self.state.lock().fsm.handle_event(ConnEvent::Drained);
        self.execute_action(ops, action, None);
        self.release_recv_reservation();
    }

    /// Releases the receive CQ entries after an eviction, unless another QP is requested.
    fn release_recv_reservation(&self) {
        let mut state = self.state.lock();
        let is_idle = state.fsm.phase() == ConnPhase::Idle && !state.fsm.needs_tick();
        let is_evicted = is_idle && state.last_generation == 0;
        let reservation = state.recv_reservation.take_if(|_| is_evicted);
        drop(state);
        drop(reservation);
    }

    fn execute_action(
        &self,
        ops: &impl ConnOps,
        action: ConnAction,
        setup: Option<&SetupDatagram>,
    ) {
        let result = match (action, setup) {
            (ConnAction::Nothing, _) => Ok(()),
            (ConnAction::StartConnect(_), _) => self.open_active(ops),
            (ConnAction::AcceptConnect(_), Some(setup)) => self.open_passive(ops, setup),
            (ConnAction::CompleteConnect, Some(setup)) => self.complete_open(ops, setup),
            (ConnAction::ResendConnect, _) => self.send_handshake(ops, SetupKind::Connect),
            (ConnAction::ResendAccept, _) => self.send_handshake(ops, SetupKind::Accept),
            (ConnAction::SendConnectRequest(generation), _) => {
                self.send_without_qp(ops, SetupKind::ConnectRequest, generation, 0)
            }
            (ConnAction::SendEvictRequest(attempt), _) => {
                let generation = self.state.lock().fsm.generation();
                self.send_without_qp(ops, SetupKind::EvictRequest, generation, attempt)
            }
            (ConnAction::SendEvicted(generation), _) => {
                self.send_without_qp(ops, SetupKind::Evicted, generation, 0)
            }
            (ConnAction::SendEvictRefused(attempt), Some(setup)) => {
                self.send_without_qp(ops, SetupKind::EvictRefused, setup.generation, attempt)
            }
            (ConnAction::Drain, _) => self.start_drain(ops),
            (ConnAction::DrainIdle, _) => self.evict(),
            (ConnAction::Resume, _) => self.cancel_eviction(),
            _ => Err(EINVAL),
        };
        if let Err(error) = result {
            // The next tick repeats the action.
            rnic_warn!(
                ops.device(),
                "node {}: connection step failed: {error:?}\n",
                self.peer.node
            );
        }
    }

    /// Creates and stores an endpoint, unless the connection was closed meanwhile.
    ///
    /// # Errors
    ///
    /// - The error passed to [`Self::close`], if the connection is closed.
    /// - The error of [`ConnOps::reserve_recv_cq`] or [`ConnOps::create_endpoint`]. The creation is deferred.
    fn install_endpoint(&self, ops: &impl ConnOps, psn: u32) -> Result<Arc<Endpoint>> {
        let endpoint = self
            .create_endpoint(ops)
            .inspect_err(|_| self.defer_creation())?;
        let mut state = self.state.lock();
        if let Some(error) = state.close_error {
            drop(state);
            ops.destroy_endpoint(endpoint);
            return Err(error);
        }
        state.endpoint = Some(endpoint.clone());
        state.local_psn = psn;
        Ok(endpoint)
    }

    fn create_endpoint(&self, ops: &impl ConnOps) -> Result<Arc<Endpoint>> {
        if self.state.lock().recv_reservation.is_none() {
            let reservation = ops.reserve_recv_cq()?;
            self.state.lock().recv_reservation = Some(reservation);
        }
        ops.create_endpoint()
    }

    /// Defers the creation of an endpoint, for which this node lacks resources. The peer must not be
    /// suspected for this delay.
    fn defer_creation(&self) {
        let mut state = self.state.lock();
        state.fsm.on_create_failed();
        state.retransmits = 0;
    }

    fn open_active(&self, ops: &impl ConnOps) -> Result {
        self.install_endpoint(ops, ops.identity().random_psn())?;
        self.send_handshake(ops, SetupKind::Connect)
    }

    fn open_passive(&self, ops: &impl ConnOps, setup: &SetupDatagram) -> Result {
        let psn = ops.identity().random_psn();
        let endpoint = self.install_endpoint(ops, psn)?;
        self.connect_endpoint(ops, &endpoint, setup, psn)?;
        self.send_handshake(ops, SetupKind::Accept)
    }

    fn complete_open(&self, ops: &impl ConnOps, setup: &SetupDatagram) -> Result {
        let (endpoint, psn) = {
            let state = self.state.lock();
            (state.endpoint.clone().ok_or(EIO)?, state.local_psn)
        };
        self.connect_endpoint(ops, &endpoint, setup, psn)
    }

    fn connect_endpoint(
        &self,
        ops: &impl ConnOps,
        endpoint: &Endpoint,
        setup: &SetupDatagram,
        psn: u32,
    ) -> Result {
        let remote = RemoteQp {
            qpn: setup.qpn,
            psn: setup.psn,
            mtu: u32::from(setup.mtu).min(ops.identity().local.mtu),
            max_rd_atomic: setup.rd_atomic.min(ops.identity().local.rd_atomic),
        };
        if let Err(error) = ops.connect_endpoint(endpoint, remote, psn) {
            self.report_failure(setup.generation);
            return Err(error);
        }
        let mut state = self.state.lock();
        if let Some(error) = state.close_error {
            return Err(error);
        }
        state.rkey = setup.rkey;
        state.mtu = remote.mtu;
        state.connected = true;
        state.last_generation = setup.generation;
        state.retransmits = 0;
        state.usage.note_progress();
        self.stats.connected_qps.add(1);
        drop(state);
        self.suspicion.clear();
        self.stats.qp_connects.add(1);
        trace::qp_state(self.peer.node, self.index.into(), setup.generation, true);
        self.state_changed.notify_all();
        Ok(())
    }

    fn start_drain(&self, ops: &impl ConnOps) -> Result {
        ops.invalidate_route();
        self.stats.qp_errors.add(1);
        self.fail_qp()
    }

    /// Evicts an idle QP. Both sides have agreed that no packet of the QP can arrive late.
    fn evict(&self) -> Result {
        self.state.lock().last_generation = 0;
        self.stats.qp_evictions.add(1);
        self.note_peer_response();
        self.fail_qp()
    }

    /// Keeps the QP, because the peer uses it.
    fn cancel_eviction(&self) -> Result {
        self.note_peer_response();
        self.state_changed.notify_all();
        Ok(())
    }

    /// Records that the peer responded.
    fn note_peer_response(&self) {
        self.state.lock().retransmits = 0;
        self.suspicion.clear();
    }

    /// Excludes the QP from use, and moves it to ERR, which flushes its work requests.
    ///
    /// # Errors
    ///
    /// - The error of the RNIC if it rejects the QP transition.
    fn fail_qp(&self) -> Result {
        let mut state = self.state.lock();
        if core::mem::take(&mut state.connected) {
            self.stats.connected_qps.sub(1);
        }
        let (endpoint, generation) = (state.endpoint.clone(), state.fsm.generation());
        drop(state);
        trace::qp_state(self.peer.node, self.index.into(), generation, false);
        self.state_changed.notify_all();
        endpoint.map_or(Ok(()), |endpoint| endpoint.qp().modify_to_err())
    }

    /// Sends a datagram about the local QP.
    fn send_handshake(&self, ops: &impl ConnOps, kind: SetupKind) -> Result {
        let (generation, qpn, psn) = {
            let state = self.state.lock();
            let endpoint = state.endpoint.as_ref().ok_or(EIO)?;
            (state.fsm.generation(), endpoint.qp().qpn(), state.local_psn)
        };
        ops.send_setup(&self.build_setup(ops, kind, generation, qpn, psn));
        Ok(())
    }

    /// Sends a datagram that names no QP.
    fn send_without_qp(
        &self,
        ops: &impl ConnOps,
        kind: SetupKind,
        generation: u32,
        attempt: u32,
    ) -> Result {
        ops.send_setup(&self.build_setup(ops, kind, generation, 0, attempt));
        Ok(())
    }

    fn build_setup(
        &self,
        ops: &impl ConnOps,
        kind: SetupKind,
        generation: u32,
        qpn: u32,
        psn: u32,
    ) -> SetupDatagram {
        ops.identity()
            .conn_setup(kind, self.index, generation, qpn, psn)
    }
}
