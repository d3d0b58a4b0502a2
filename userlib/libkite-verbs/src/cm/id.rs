// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a communication identifier is behind its functions: how far it has got, and what becomes of it when something is
//! heard of the other end.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kite::{Error, Listener, Vqp};

use super::event::{CmEvent, CmEventQueue, UndeliveredId};
use super::message::{CmMessage, ConnParam, MsgKind};
use super::wire::{ChannelEvent, CmChannel};
use super::CmManager;
use crate::errno::{retry_interrupted, Errno, Result};
use crate::header::*;
use crate::session::lock;
use crate::watcher::PollOutcome;

/// The port of kite for port 0 of programs. Below are the numbers of queue pairs.
const PORT_BASE: u32 = 1 << 24;

/// How long after its end a connection is heard of a last time. Then nothing of it is on its way any more.
const TIMEWAIT: Duration = Duration::from_secs(1);

/// How long the other end has to say that it knows of the end. Its library does so, not its program.
const DREP_TIMEOUT: Duration = Duration::from_secs(10);

/// Reasons of rejections, as InfiniBand numbers them: nobody listens, and the program does not want to.
const REJ_INVALID_SERVICE_ID: u8 = 8;
pub(super) const REJ_CONSUMER_DEFINED: u8 = 28;

/// How far it has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CmState {
    Idle,
    Listening,
    /// It is known which node is at the other end,
    AddrResolved,
    /// and the program knows that it can be reached.
    RouteResolved,
    /// The active end has asked to be connected,
    ReqSent,
    /// was told that it may, and has to say that it is.
    RepReceived,
    /// The passive end was asked to connect,
    ReqReceived,
    /// has said that it will, and is to hear that it is.
    RepSent,
    Established,
    /// The program has ended it then, and waits for the other end to know.
    DreqSent(Instant),
    /// It ended then.
    TimeWait(Instant),
    Closed,
}

/// A port of the program's.
pub(super) struct BoundPort {
    pub(super) number: u16,
    listener: Listener,
}

pub(super) struct CmIdState {
    pub(super) cm_state: CmState,
    pub(super) events: Arc<CmEventQueue>,
    /// Its functions wait for what they begin.
    pub(super) is_sync: bool,
    pub(super) port: Option<BoundPort>,
    /// Where the other end is, and what that has said of itself.
    pub(super) remote_node: u32,
    pub(super) remote_param: ConnParam,
    channel: Option<CmChannel>,
    /// The active end has said that the connection is there, as it does once.
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

    /// The passive end of a connection that another node asks for. Events of it come where those of who listens do.
    fn new_passive(
        listener: (&CmId, &CmIdState),
        channel: CmChannel,
        node: u32,
        remote_param: ConnParam,
    ) -> Arc<Self> {
        Self::with_state(
            &listener.0.manager,
            CmIdState {
                cm_state: CmState::ReqReceived,
                events: listener.1.events.clone(),
                is_sync: false,
                port: None,
                remote_node: node,
                remote_param,
                channel: Some(channel),
                rtu_received: false,
            },
        )
    }

    pub(super) fn with_locked<T>(&self, f: impl FnOnce(&mut CmIdState) -> T) -> T {
        f(&mut lock(&self.state))
    }

    /// Does what there is to do about what has come. Of what the other end says it hears one thing at a time: whoever
    /// says ever more does not keep others waiting.
    pub(super) fn poll(&self) -> PollOutcome {
        let Ok(mut state) = self.state.try_lock() else {
            // Somebody is at work here who may take longer, and others are not to wait.
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

    /// Ends it, and the connection if there is one.
    pub(super) fn close(&self) {
        self.with_locked(|state| {
            // There may be no connection.
            let _ = state.disconnect();
            state.cm_state = CmState::Closed;
            state.channel = None;
            state.port = None;
        });
    }
}

impl CmIdState {
    pub(super) fn push_event(&self, id: &CmId, event: CmEvent) {
        // Who destroys an identifier wants to hear no more.
        let _ = self.events.push_event(id.id, event);
    }

    /// Takes a port for the program, any if it is 0.
    ///
    /// # Errors
    /// `EADDRINUSE`; those of [`kite::Cluster::listen`].
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

    /// Asks the other end, which listens at a port of its node, to connect.
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

    /// Says something to the other end.
    ///
    /// # Errors
    /// `ENOTCONN` if that has ended; those of [`Wire::send`].
    pub(super) fn send_message(&mut self, message: &CmMessage) -> Result<()> {
        let channel = self.channel.as_mut().ok_or(Errno(libc::ENOTCONN))?;
        Ok(channel.send(message)?)
    }

    /// Refuses the connection that was asked for, or is about to be there.
    pub(super) fn send_reject(&mut self, data: Vec<u8>) -> Result<()> {
        let param = ConnParam {
            data,
            ..ConnParam::default()
        };
        let mut message = CmMessage::new(MsgKind::Rej, param);
        message.reason = REJ_CONSUMER_DEFINED;
        let result = self.send_message(&message);
        self.cm_state = CmState::Closed;
        self.channel = None;
        result
    }

    /// Ends the connection. Returns whether there is something to be told of that yet.
    ///
    /// # Errors
    /// `EINVAL` if there was none.
    pub(super) fn disconnect(&mut self) -> Result<bool> {
        use CmState::*;
        match self.cm_state {
            Established | RepSent | RepReceived => {
                self.cm_state = DreqSent(Instant::now());
                // If it does not arrive, that is heard of.
                let _ = self.send_message(&CmMessage::new(MsgKind::Dreq, ConnParam::default()));
                Ok(true)
            }
            DreqSent(_) | TimeWait(_) => Ok(true),
            Closed => Ok(false),
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    /// Takes who asks to connect here. Returns whether there were any.
    fn accept_requests(&mut self, id: &CmId) -> bool {
        let mut any = false;
        while let Some(Ok((vqp, peer))) = self.port.as_ref().map(|port| port.listener.accept(None))
        {
            any = true;
            if let Some(event) = self.connect_request_event(id, vqp, peer.node) {
                self.push_event(id, event);
            }
        }
        any
    }

    /// What the program is told of who asks. Who gets no answer sees that the other end has gone.
    fn connect_request_event(&self, id: &CmId, vqp: Vqp, node: u32) -> Option<CmEvent> {
        let mut channel = CmChannel::new(&id.manager.cluster, vqp).ok()?;
        match channel.poll() {
            ChannelEvent::Message(request)
                if request.kind == MsgKind::Req && self.cm_state == CmState::Listening =>
            {
                let param = request.param.clone();
                let passive_id = CmId::new_passive((id, self), channel, node, param.clone());
                let new_id = UndeliveredId::new(passive_id, request.addrs);
                Some(CmEvent {
                    param,
                    new_id: Some(new_id),
                    ..CmEvent::new(RDMA_CM_EVENT_CONNECT_REQUEST, 0)
                })
            }
            _ => None,
        }
    }

    /// Hears what the other end says. Returns whether that was anything.
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
            // It did not know yet.
            (DreqSent(_), MsgKind::Rtu) if !self.rtu_received => self.rtu_received = true,
            (Established | RepReceived | RepSent, MsgKind::Dreq) => {
                // Who has said so may have gone since.
                let _ = self.send_message(&CmMessage::new(MsgKind::Drep, ConnParam::default()));
                self.enter_timewait(id);
            }
            // Nothing that this library says.
            _ => self.on_channel_closed(id, Error::Io),
        }
    }

    /// Nothing more comes from the other end.
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

    /// The other end does not want to.
    fn on_rejected(&mut self, id: &CmId, reason: u8, param: ConnParam) {
        self.cm_state = CmState::Closed;
        self.channel = None;
        let event = CmEvent::new(RDMA_CM_EVENT_REJECTED, reason.into());
        self.push_event(id, CmEvent { param, ..event });
    }

    /// The connection is over.
    fn enter_timewait(&mut self, id: &CmId) {
        self.cm_state = CmState::TimeWait(Instant::now());
        self.channel = None;
        self.push_event(id, CmEvent::new(RDMA_CM_EVENT_DISCONNECTED, 0));
    }

    /// Goes on when a connection has ended, or been over, for long enough; returns after how many ms that will be, or -1.
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

/// Not a bit too early.
fn duration_to_ms(remaining: Duration) -> i32 {
    remaining.as_millis() as i32 + 1
}

/// Takes a port that nobody has, of those that are for that.
fn bind_ephemeral_port(listen: impl Fn(u16) -> kite::Result<BoundPort>) -> kite::Result<BoundPort> {
    const FIRST: u16 = 49152;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Processes begin at different places.
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
