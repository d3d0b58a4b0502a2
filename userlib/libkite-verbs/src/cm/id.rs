// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a communication identifier is behind its functions: how far it has got, and what becomes of it when something is
//! heard of the other end.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kite::{Error, Listener, Vqp};

use super::event::{Child, Event, Inbox};
use super::message::{Kind, Message, Said};
use super::wire::{News, Wire};
use super::Manager;
use crate::errno::{despite_signals, Errno, Result};
use crate::header::*;
use crate::session::lock;
use crate::watcher::Found;

/// The port of kite for port 0 of programs. Below are the numbers of queue pairs.
const PORTS: u32 = 1 << 24;

/// How long after its end a connection is heard of a last time. Then nothing of it is on its way any more.
const TIMEWAIT: Duration = Duration::from_secs(1);

/// How long the other end has to say that it knows of the end. Its library does so, not its program.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reasons of rejections, as InfiniBand numbers them: nobody listens, and the program does not want to.
const INVALID_SERVICE: u8 = 8;
pub(super) const CONSUMER: u8 = 28;

/// How far it has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Listening,
    /// It is known which node is at the other end,
    Resolved,
    /// and the program knows that it can be reached.
    Routed,
    /// The active end has asked to be connected,
    Asked,
    /// was told that it may, and has to say that it is.
    Replied,
    /// The passive end was asked to connect,
    Requested,
    /// has said that it will, and is to hear that it is.
    Answered,
    Established,
    /// The program has ended it then, and waits for the other end to know.
    Leaving(Instant),
    /// It ended then.
    Left(Instant),
    Over,
}

/// A port of the program's.
pub(super) struct Port {
    pub(super) number: u16,
    listener: Listener,
}

pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) inbox: Arc<Inbox>,
    /// Its functions wait for what they begin.
    pub(super) sync: bool,
    pub(super) port: Option<Port>,
    /// Where the other end is, and what that has said of itself.
    pub(super) node: u32,
    pub(super) other: Said,
    wire: Option<Wire>,
    /// The active end has said that the connection is there, as it does once.
    ready: bool,
}

pub(crate) struct Id {
    pub(super) number: u64,
    pub(super) manager: Arc<Manager>,
    state: Mutex<State>,
}

impl Id {
    pub(super) fn new(manager: &Arc<Manager>, inbox: Arc<Inbox>, sync: bool) -> Arc<Self> {
        Self::with_state(
            manager,
            State {
                phase: Phase::Idle,
                inbox,
                sync,
                port: None,
                node: 0,
                other: Said::default(),
                wire: None,
                ready: false,
            },
        )
    }

    fn with_state(manager: &Arc<Manager>, state: State) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Self {
            number: NEXT.fetch_add(1, Relaxed),
            manager: manager.clone(),
            state: Mutex::new(state),
        })
    }

    /// The passive end of a connection that another node asks for. Events of it come where those of who listens do.
    fn requested(listens: (&Id, &State), wire: Wire, node: u32, other: Said) -> Arc<Self> {
        Self::with_state(
            &listens.0.manager,
            State {
                phase: Phase::Requested,
                inbox: listens.1.inbox.clone(),
                sync: false,
                port: None,
                node,
                other,
                wire: Some(wire),
                ready: false,
            },
        )
    }

    pub(super) fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut lock(&self.state))
    }

    /// Does what there is to do about what has come. Of what the other end says it hears one thing at a time: whoever
    /// says ever more does not keep others waiting.
    pub(super) fn proceed(&self) -> Found {
        let Ok(mut state) = self.state.try_lock() else {
            // Somebody is at work here who may take longer, and others are not to wait.
            return Found {
                again_ms: 1,
                ..Found::NOTHING
            };
        };
        let admitted = state.admit(self);
        let heard = state.hear(self);
        let expires_ms = state.expire(self);
        Found {
            busy: admitted || heard,
            again_ms: if heard { 0 } else { expires_ms },
        }
    }

    /// Ends it, and the connection if there is one.
    pub(super) fn close(&self) {
        self.with(|state| {
            // There may be no connection.
            let _ = state.leave();
            state.phase = Phase::Over;
            state.wire = None;
            state.port = None;
        });
    }
}

impl State {
    pub(super) fn tell(&self, id: &Id, event: Event) {
        // Who destroys an identifier wants to hear no more.
        let _ = self.inbox.tell(id.number, event);
    }

    /// Takes a port for the program, any if it is 0.
    ///
    /// # Errors
    /// `EADDRINUSE`; those of [`kite::Cluster::listen`].
    pub(super) fn take_port(&mut self, manager: &Manager, number: u16) -> Result<u16> {
        let listen = |number: u16| {
            let listener = manager.cluster.listen(PORTS + u32::from(number))?;
            Ok(Port { number, listener })
        };
        let port = match number {
            0 => any_port(listen)?,
            number => listen(number)?,
        };
        let number = port.number;
        self.port = Some(port);
        Ok(number)
    }

    /// Asks the other end, which listens at a port of its node, to connect.
    pub(super) fn ask(&mut self, id: &Id, port: u16, request: &Message) {
        let cluster = &id.manager.cluster;
        let ask = || {
            let to = PORTS + u32::from(port);
            let vqp = despite_signals(|| cluster.connect_to(self.node, to))?;
            let mut wire = Wire::new(cluster, vqp)?;
            wire.send(request)?;
            Ok(wire)
        };
        let asked = ask();
        self.phase = Phase::Asked;
        match asked {
            Ok(wire) => self.wire = Some(wire),
            Err(error) => self.end(id, error),
        }
    }

    /// Says something to the other end.
    ///
    /// # Errors
    /// `ENOTCONN` if that has ended; those of [`Wire::send`].
    pub(super) fn say(&mut self, message: &Message) -> Result<()> {
        let wire = self.wire.as_mut().ok_or(Errno(libc::ENOTCONN))?;
        Ok(wire.send(message)?)
    }

    /// Refuses the connection that was asked for, or is about to be there.
    pub(super) fn reject(&mut self, data: Vec<u8>) -> Result<()> {
        let said = Said {
            data,
            ..Said::default()
        };
        let mut message = Message::new(Kind::Reject, said);
        message.reason = CONSUMER;
        let said = self.say(&message);
        self.phase = Phase::Over;
        self.wire = None;
        said
    }

    /// Ends the connection. Returns whether there is something to be told of that yet.
    ///
    /// # Errors
    /// `EINVAL` if there was none.
    pub(super) fn leave(&mut self) -> Result<bool> {
        use Phase::*;
        match self.phase {
            Established | Answered | Replied => {
                self.phase = Leaving(Instant::now());
                // If it does not arrive, that is heard of.
                let _ = self.say(&Message::new(Kind::Leave, Said::default()));
                Ok(true)
            }
            Leaving(_) | Left(_) => Ok(true),
            Over => Ok(false),
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    /// Takes who asks to connect here. Returns whether there were any.
    fn admit(&mut self, id: &Id) -> bool {
        let mut any = false;
        while let Some(Ok((vqp, peer))) = self.port.as_ref().map(|port| port.listener.accept(None))
        {
            any = true;
            if let Some(event) = self.request(id, vqp, peer.node) {
                self.tell(id, event);
            }
        }
        any
    }

    /// What the program is told of who asks. Who gets no answer sees that the other end has gone.
    fn request(&self, id: &Id, vqp: Vqp, node: u32) -> Option<Event> {
        let mut wire = Wire::new(&id.manager.cluster, vqp).ok()?;
        match wire.look() {
            News::Said(request)
                if request.kind == Kind::Request && self.phase == Phase::Listening =>
            {
                let said = request.said.clone();
                let child = Id::requested((id, self), wire, node, said.clone());
                let child = Child::new(child, request.ends);
                Some(Event {
                    said,
                    child: Some(child),
                    ..Event::new(RDMA_CM_EVENT_CONNECT_REQUEST, 0)
                })
            }
            _ => None,
        }
    }

    /// Hears what the other end says. Returns whether that was anything.
    fn hear(&mut self, id: &Id) -> bool {
        let Some(wire) = &mut self.wire else {
            return false;
        };
        match wire.look() {
            News::Nothing => return false,
            News::Said(message) => self.obey(id, message),
            News::Ended(error) => self.end(id, error),
        }
        true
    }

    fn obey(&mut self, id: &Id, message: Message) {
        use Phase::*;
        match (self.phase, message.kind) {
            (Asked, Kind::Reply) => {
                self.phase = Replied;
                self.other = message.said.clone();
                let said = message.said;
                let event = Event::new(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
                self.tell(id, Event { said, ..event });
            }
            (Answered, Kind::Ready) => {
                (self.phase, self.ready) = (Established, true);
                self.tell(id, Event::new(RDMA_CM_EVENT_ESTABLISHED, 0));
            }
            (Asked | Replied | Requested | Answered, Kind::Reject) => {
                self.refused(id, message.reason, message.said);
            }
            (Leaving(_), Kind::Leave | Kind::Left) => self.left(id),
            // It did not know yet.
            (Leaving(_), Kind::Ready) if !self.ready => self.ready = true,
            (Established | Replied | Answered, Kind::Leave) => {
                // Who has said so may have gone since.
                let _ = self.say(&Message::new(Kind::Left, Said::default()));
                self.left(id);
            }
            // Nothing that this library says.
            _ => self.end(id, Error::Io),
        }
    }

    /// Nothing more comes from the other end.
    fn end(&mut self, id: &Id, error: Error) {
        use Phase::*;
        match (self.phase, error) {
            (Asked, Error::NotServed) => self.refused(id, INVALID_SERVICE, Said::default()),
            (Asked | Requested | Answered, Error::ServerEnded) => {
                self.refused(id, CONSUMER, Said::default());
            }
            (Asked | Requested | Answered, error) => {
                self.phase = Over;
                self.wire = None;
                self.tell(id, Event::new(RDMA_CM_EVENT_UNREACHABLE, -error.errno()));
            }
            _ => self.left(id),
        }
    }

    /// The other end does not want to.
    fn refused(&mut self, id: &Id, reason: u8, said: Said) {
        self.phase = Phase::Over;
        self.wire = None;
        let event = Event::new(RDMA_CM_EVENT_REJECTED, reason.into());
        self.tell(id, Event { said, ..event });
    }

    /// The connection is over.
    fn left(&mut self, id: &Id) {
        self.phase = Phase::Left(Instant::now());
        self.wire = None;
        self.tell(id, Event::new(RDMA_CM_EVENT_DISCONNECTED, 0));
    }

    /// Goes on when a connection has ended, or been over, for long enough; returns after how many ms that will be, or -1.
    fn expire(&mut self, id: &Id) -> i32 {
        if let Phase::Leaving(since) = self.phase {
            match PATIENCE.checked_sub(since.elapsed()) {
                Some(left) => return in_ms(left),
                None => self.left(id),
            }
        }
        let Phase::Left(since) = self.phase else {
            return -1;
        };
        match TIMEWAIT.checked_sub(since.elapsed()) {
            Some(left) => in_ms(left),
            None => {
                self.phase = Phase::Over;
                self.tell(id, Event::new(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0));
                -1
            }
        }
    }
}

/// Not a bit too early.
fn in_ms(left: Duration) -> i32 {
    left.as_millis() as i32 + 1
}

/// Takes a port that nobody has, of those that are for that.
fn any_port(listen: impl Fn(u16) -> kite::Result<Port>) -> kite::Result<Port> {
    const FIRST: u16 = 49152;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Processes begin at different places.
    let begin = u64::from(std::process::id()).wrapping_mul(1021);
    let _ = NEXT.compare_exchange(0, begin, Relaxed, Relaxed);
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
