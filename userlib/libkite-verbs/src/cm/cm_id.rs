// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State machine of a communication identifier.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kite::{Error, Listener};

use super::event::{CmEvent, CmEventQueue};
use super::message::{CmMessage, ConnParam, MsgKind};
use super::wire::{ChannelEvent, CmChannel, ConnRequest};
use super::CmManager;
use crate::errno::{retry_interrupted, Errno, Result};
use crate::header::*;
use crate::pending::PendingRequestGuard;
use crate::poller::PollOutcome;
use crate::sync::lock;

/// Port of kite for port 0 of programs. The ports below are those of QP numbers.
const PORT_BASE: u32 = 1 << 24;

/// Time in TIME_WAIT before the last event of a connection. After it no message of the connection is in flight.
const TIMEWAIT: Duration = Duration::from_secs(1);

/// Time for the remote end to acknowledge a disconnect. Its library does so, not its program.
const DREP_TIMEOUT: Duration = Duration::from_secs(10);

/// Reject reasons of InfiniBand: no listener, and rejection by the program.
const REJ_INVALID_SERVICE_ID: u8 = 8;
pub(super) const REJ_CONSUMER_DEFINED: u8 = 28;

/// State of an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CmState {
    Idle,
    Listening,
    /// The node of the remote end is known.
    AddrResolved,
    /// The program has requested the route, which always exists.
    RouteResolved,
    /// Active end: the request was sent.
    ReqSent,
    /// Active end: the reply was received, and the program must establish the connection.
    RepReceived,
    /// Passive end: a request was received.
    ReqReceived,
    /// Passive end: the reply was sent.
    RepSent,
    Established,
    /// The program disconnected at this time. The remote end has not acknowledged it yet.
    DreqSent(Instant),
    /// The connection ended at this time.
    TimeWait(Instant),
    Closed,
}

/// Port that a program has bound.
pub(super) struct BoundPort {
    pub(super) number: u16,
    pub(super) listener: Listener,
}

pub(super) struct CmIdState {
    pub(super) cm_state: CmState,
    pub(super) events: Arc<CmEventQueue>,
    /// Functions of the identifier wait for the result of their operation.
    pub(super) is_sync: bool,
    pub(super) port: Option<BoundPort>,
    /// Node of the remote end, and the parameters that it sent.
    pub(super) remote_node: u32,
    pub(super) remote_param: ConnParam,
    /// Passive end: user that sent the request.
    pub(super) requester_uid: Option<u32>,
    /// Passive end: place of the request, until the program accepts or rejects it or destroys the identifier.
    pending: Option<PendingRequestGuard>,
    channel: Option<CmChannel>,
    /// The ready-to-use message was received, which is sent once.
    rtu_received: bool,
}

pub(crate) struct CmId {
    pub(super) id: u64,
    pub(super) manager: Arc<CmManager>,
    state: Mutex<CmIdState>,
}

impl CmId {
    pub(super) fn new(manager: &Arc<CmManager>, inbox: Arc<CmEventQueue>, sync: bool) -> Arc<Self> {
        Self::with_state(
            manager,
            CmIdState {
                cm_state: CmState::Idle,
                events: inbox,
                is_sync: sync,
                port: None,
                remote_node: 0,
                remote_param: ConnParam::default(),
                requester_uid: None,
                pending: None,
                channel: None,
                rtu_received: false,
            },
        )
    }

    fn with_state(manager: &Arc<CmManager>, state: CmIdState) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Self {
            id: NEXT.fetch_add(1, Relaxed),
            manager: manager.clone(),
            state: Mutex::new(state),
        })
    }

    /// Creates the passive end of a connection. Its events go to the queue of the listening identifier.
    pub(super) fn new_passive(listener: (&CmId, &CmIdState), request: ConnRequest) -> Arc<Self> {
        Self::with_state(
            &listener.0.manager,
            CmIdState {
                cm_state: CmState::ReqReceived,
                events: listener.1.events.clone(),
                is_sync: false,
                port: None,
                remote_node: request.peer.node,
                remote_param: request.param,
                requester_uid: Some(request.peer.uid),
                pending: Some(request.place),
                channel: Some(request.channel),
                rtu_received: false,
            },
        )
    }

    pub(super) fn with_locked<T>(&self, f: impl FnOnce(&mut CmIdState) -> T) -> T {
        f(&mut lock(&self.state))
    }

    /// Handles connection requests, one message and timeouts. Only one message, so that an end with many messages does
    /// not delay other identifiers.
    pub(super) fn poll(&self) -> PollOutcome {
        let Ok(mut state) = self.state.try_lock() else {
            // Another thread holds the lock, possibly for long, and must not delay other identifiers.
            return PollOutcome {
                recheck_ms: 1,
                ..PollOutcome::IDLE
            };
        };
        let accepted = state.accept_requests(self);
        let received = state.receive_message(self);
        let expires_ms = state.check_timers(self);
        PollOutcome {
            had_work: accepted || received,
            recheck_ms: if received { 0 } else { expires_ms },
        }
    }

    /// Reports the connection to the remote end, which waits for it.
    ///
    /// # Errors
    /// `EINVAL` if no reply was received.
    pub(super) fn establish(&self) -> Result<()> {
        self.with_locked(|state| match state.cm_state {
            CmState::RepReceived => {
                state.cm_state = CmState::Established;
                // The remote end may have closed since, which is reported later.
                let _ = state.send_message(&CmMessage::new(MsgKind::Rtu, ConnParam::default()));
                Ok(())
            }
            // The connection was established. The program receives the event of its end next.
            CmState::TimeWait(_) | CmState::Closed => Ok(()),
            _ => Err(Errno(libc::EINVAL)),
        })
    }

    /// Closes the identifier, and its connection if there is one.
    pub(super) fn close(&self) {
        self.with_locked(|state| {
            // Fails if there is no connection.
            let _ = state.disconnect();
            state.cm_state = CmState::Closed;
            state.pending = None;
            state.channel = None;
            state.port = None;
        });
    }
}

impl CmIdState {
    pub(super) fn push_event(&self, id: &CmId, event: CmEvent) {
        // Fails if the program is destroying the identifier, which needs no event.
        let _ = self.events.push_event(id.id, event);
    }

    /// Binds a port, or if `number` is 0 an unused one.
    ///
    /// # Errors
    /// `EADDRINUSE`, or see [`kite::Cluster::listen`].
    pub(super) fn bind_port(&mut self, manager: &CmManager, number: u16) -> Result<u16> {
        let listen = |number: u16| {
            let listener = manager.cluster.listen(PORT_BASE + u32::from(number))?;
            Ok(BoundPort { number, listener })
        };
        let port = match number {
            0 => bind_ephemeral_port(listen)?,
            number => listen(number)?,
        };
        let number = port.number;
        self.port = Some(port);
        Ok(number)
    }

    /// Sends a connection request to a port of the remote node.
    pub(super) fn send_req(&mut self, id: &CmId, port: u16, request: &CmMessage) {
        let cluster = &id.manager.cluster;
        let connect = || {
            let kite_port = PORT_BASE + u32::from(port);
            let vqp = retry_interrupted(|| cluster.connect_to(self.remote_node, kite_port))?;
            let mut channel = CmChannel::new(cluster, vqp)?;
            channel.send(request)?;
            Ok(channel)
        };
        let result = connect();
        self.cm_state = CmState::ReqSent;
        match result {
            Ok(channel) => self.channel = Some(channel),
            Err(error) => self.on_channel_closed(id, error),
        }
    }

    /// Sends a message to the remote end.
    ///
    /// # Errors
    /// `ENOTCONN` if the channel is closed, or see [`CmChannel::send`].
    pub(super) fn send_message(&mut self, message: &CmMessage) -> Result<()> {
        let channel = self.channel.as_mut().ok_or(Errno(libc::ENOTCONN))?;
        Ok(channel.send(message)?)
    }

    /// Sends the reply to the connection request.
    ///
    /// # Errors
    /// See [`Self::send_message`].
    pub(super) fn send_reply(&mut self, param: ConnParam) -> Result<()> {
        self.send_message(&CmMessage::new(MsgKind::Rep, param))?;
        self.cm_state = CmState::RepSent;
        self.pending = None;
        Ok(())
    }

    /// Rejects a connection that is requested or about to be established.
    pub(super) fn send_reject(&mut self, data: Vec<u8>) -> Result<()> {
        let param = ConnParam {
            data,
            ..ConnParam::default()
        };
        let mut message = CmMessage::new(MsgKind::Rej, param);
        message.reason = REJ_CONSUMER_DEFINED;
        let result = self.send_message(&message);
        self.cm_state = CmState::Closed;
        self.pending = None;
        self.channel = None;
        result
    }

    /// Ends the connection. Returns `true` if an event follows.
    ///
    /// # Errors
    /// `EINVAL` if there was no connection.
    pub(super) fn disconnect(&mut self) -> Result<bool> {
        use CmState::*;
        match self.cm_state {
            Established | RepSent | RepReceived => {
                self.cm_state = DreqSent(Instant::now());
                // If the message does not arrive, the end of the channel or the timeout ends the connection.
                let _ = self.send_message(&CmMessage::new(MsgKind::Dreq, ConnParam::default()));
                Ok(true)
            }
            DreqSent(_) | TimeWait(_) => Ok(true),
            Closed => Ok(false),
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    /// Receives a message of the remote end. Returns `true` if there was an event of the channel.
    fn receive_message(&mut self, id: &CmId) -> bool {
        let Some(channel) = &mut self.channel else {
            return false;
        };
        match channel.poll() {
            ChannelEvent::Empty => return false,
            ChannelEvent::Message(message) => self.handle_message(id, message),
            ChannelEvent::Closed(error) => self.on_channel_closed(id, error),
        }
        true
    }

    fn handle_message(&mut self, id: &CmId, message: CmMessage) {
        use CmState::*;
        match (self.cm_state, message.kind) {
            (ReqSent, MsgKind::Rep) => {
                self.cm_state = RepReceived;
                self.remote_param = message.param.clone();
                let param = message.param;
                let event = CmEvent::new(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
                self.push_event(id, CmEvent { param, ..event });
            }
            (RepSent, MsgKind::Rtu) => {
                (self.cm_state, self.rtu_received) = (Established, true);
                self.push_event(id, CmEvent::new(RDMA_CM_EVENT_ESTABLISHED, 0));
            }
            (ReqSent | RepReceived | ReqReceived | RepSent, MsgKind::Rej) => {
                self.on_rejected(id, message.reason, message.param);
            }
            (DreqSent(_), MsgKind::Dreq | MsgKind::Drep) => self.enter_timewait(id),
            // Sent before the remote end received the disconnect.
            (DreqSent(_), MsgKind::Rtu) if !self.rtu_received => self.rtu_received = true,
            (Established | RepReceived | RepSent, MsgKind::Dreq) => {
                // The remote end may have closed its channel since.
                let _ = self.send_message(&CmMessage::new(MsgKind::Drep, ConnParam::default()));
                self.enter_timewait(id);
            }
            // Protocol error: this library sends no such message.
            _ => self.on_channel_closed(id, Error::Io),
        }
    }

    /// Handles the end of the channel.
    fn on_channel_closed(&mut self, id: &CmId, error: Error) {
        use CmState::*;
        match (self.cm_state, error) {
            (ReqSent, Error::ConnectionRefused) => {
                self.on_rejected(id, REJ_INVALID_SERVICE_ID, ConnParam::default())
            }
            (ReqSent | ReqReceived | RepSent, Error::ConnectionReset) => {
                self.on_rejected(id, REJ_CONSUMER_DEFINED, ConnParam::default());
            }
            (ReqSent | ReqReceived | RepSent, error) => {
                self.cm_state = Closed;
                self.channel = None;
                self.push_event(id, CmEvent::new(RDMA_CM_EVENT_UNREACHABLE, -error.errno()));
            }
            _ => self.enter_timewait(id),
        }
    }

    /// Handles a rejection by the remote end.
    fn on_rejected(&mut self, id: &CmId, reason: u8, param: ConnParam) {
        self.cm_state = CmState::Closed;
        self.channel = None;
        let event = CmEvent::new(RDMA_CM_EVENT_REJECTED, reason.into());
        self.push_event(id, CmEvent { param, ..event });
    }

    /// Ends the connection and starts TIME_WAIT.
    fn enter_timewait(&mut self, id: &CmId) {
        self.cm_state = CmState::TimeWait(Instant::now());
        self.channel = None;
        self.push_event(id, CmEvent::new(RDMA_CM_EVENT_DISCONNECTED, 0));
    }

    /// Handles timeouts of a disconnect and of TIME_WAIT. Returns the time until the next timeout in ms, or -1.
    fn check_timers(&mut self, id: &CmId) -> i32 {
        if let CmState::DreqSent(since) = self.cm_state {
            match DREP_TIMEOUT.checked_sub(since.elapsed()) {
                Some(remaining) => return duration_to_ms(remaining),
                None => self.enter_timewait(id),
            }
        }
        let CmState::TimeWait(since) = self.cm_state else {
            return -1;
        };
        match TIMEWAIT.checked_sub(since.elapsed()) {
            Some(remaining) => duration_to_ms(remaining),
            None => {
                self.cm_state = CmState::Closed;
                self.push_event(id, CmEvent::new(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0));
                -1
            }
        }
    }
}

/// Rounds up, so that a wait does not end early.
fn duration_to_ms(remaining: Duration) -> i32 {
    remaining.as_millis() as i32 + 1
}

/// Binds an unused port of the dynamic range.
fn bind_ephemeral_port(listen: impl Fn(u16) -> kite::Result<BoundPort>) -> kite::Result<BoundPort> {
    const FIRST: u16 = 49152;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Processes start at different ports.
    let start = u64::from(std::process::id()).wrapping_mul(1021);
    let _ = NEXT.compare_exchange(0, start, Relaxed, Relaxed);
    let count = u64::from(u16::MAX - FIRST) + 1;
    for _ in 0..count {
        let number = FIRST + (NEXT.fetch_add(1, Relaxed) % count) as u16;
        match listen(number) {
            Err(Error::PortInUse) => continue,
            port => return port,
        }
    }
    Err(Error::PortInUse)
}
