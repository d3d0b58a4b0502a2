// SPDX-License-Identifier: GPL-2.0

//! The thread that takes what peers send (LITE, section 5.1: one poller on one receive queue).
//!
//! Under traffic it polls without pause, unless those who wait for messages do (`watch`). When nothing has come
//! for a while it arms the queues and sleeps until an interrupt, so an idle node costs nothing. It also polls
//! the send queue for those who sleep on it.

use super::{
    channel::{Channel, RECV_SIZE},
    peer::Peer,
    watch::{Naps, Watchers},
    Fabric, CONTROL, RECV_CQ_ENTRIES,
};
use crate::{
    sys::{
        bytes,
        gate::Gate,
        patience::Patience,
        thread::{give_way, Run},
    },
    verbs::cq::{Completion, Status},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, Mutex, SetOnce,
    },
    time::{Instant, Monotonic},
};
use kite_core::{
    view::Life,
    wire::{
        self,
        packet::is_packet,
        setup::{Setup, SetupKind},
        Body, Header, Request,
    },
    wrid::WrId,
};

/// How long the poller looks for more after it has driven something, so that who uses queues steadily has no
/// need to wake it.
const DRIVEN_SPIN_NS: i64 = 1_000_000;

/// How long what is driven may keep it from other things.
const PASS_NS: i64 = 200_000;

/// How long it sleeps between looks that need not come at once.
const NAP_US: u32 = 100;

/// How long it sleeps while something may take too long.
const NAP_MS: u32 = 50;

/// How long it sleeps for what was posted: who uses queues steadily has no need to wake it meanwhile.
const POSTED_MS: u32 = 1;

/// Bytes that precede a datagram: the global routing header.
const GRH: usize = 40;

/// Takes what came from peers.
pub(crate) trait Sink: Send + Sync + 'static {
    /// A request of a peer; `bytes` is the whole message, whose form has been checked. The peer is to be
    /// told of the end ([`Peer::end_answer`]). Who polls waits for this call, so it must not wait for
    /// anything but memory.
    fn on_request(&self, from: Arc<Peer>, header: Header, bytes: &[u8]);

    /// A peer acts on the view of `epoch`, and has nothing else to tell of it. Who polls waits for this call as well.
    fn on_view(&self, from: &Peer, epoch: u64);

    /// A node wrote to our memory, and says so with `immediate`. It, or its queue pair, may be gone by now.
    /// Who polls waits for this call as well.
    fn on_immediate(&self, from: Life, immediate: u32);

    /// A packet came to a target of ours, or by a connection from this node. Who polls waits for this call as well.
    fn on_packet(&self, from: Option<Life>, bytes: KVec<u8>);
}

/// What the poller has to do for something that it drives, from little to much.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rest {
    /// Nothing, until it is woken.
    Idle,
    /// To look again when something was sent or has come, and now and then.
    Waiting,
    /// To look again when what was posted completes, or after a moment.
    Posted,
    /// To look again soon.
    Soon,
    /// To go on.
    Busy,
}

/// What the poller thread drives besides.
pub(crate) trait Driven: Send + Sync + 'static {
    /// Goes on with what can go on, and waits for nothing but memory. Returns how much that was.
    fn drive(&self, fabric: &Fabric) -> usize;

    /// The poller is about to sleep. If it does not look again after a moment by itself, who has something for
    /// it has to wake it from now on.
    fn rest(&self) -> Rest;

    /// The RNIC goes. Ends what is under way.
    fn end(&self);
}

/// All that is driven, by number.
pub(super) struct Drivers {
    all: KVec<(u64, Arc<dyn Driven>)>,
    next: u64,
    /// Whose turn it is.
    turn: usize,
}

impl Drivers {
    /// None.
    pub(super) const fn new() -> Self {
        Self {
            all: KVec::new(),
            next: 0,
            turn: 0,
        }
    }

    /// Drives all, or as many as there is time for: messages do not wait for more. Returns how much was done.
    fn drive(&mut self, fabric: &Fabric) -> usize {
        let (mut done, start) = (0, Instant::<Monotonic>::now());
        for _ in 0..self.all.len() {
            self.turn = (self.turn + 1) % self.all.len();
            if let Some((_, driven)) = self.all.get(self.turn) {
                done += driven.drive(fabric);
            }
            // With one there is nobody to wait for.
            if self.all.len() > 1 && start.elapsed().as_nanos() > PASS_NS {
                break;
            }
        }
        done
    }
}

/// Who polls the receive queue, one at a time.
#[pin_data]
pub(super) struct Receiver {
    /// Taken away when the RNIC goes.
    #[pin]
    sink: Gate<SetOnce<Arc<dyn Sink>>>,
    /// Held by who polls; what was received is copied there.
    #[pin]
    turn: Mutex<[u8; RECV_SIZE]>,
    pub(super) watchers: Watchers,
}

impl Receiver {
    /// Nobody hears yet.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            sink <- Gate::new(SetOnce::new()),
            turn <- new_mutex!([0; RECV_SIZE]),
            watchers: Watchers::new(),
        })
    }
}

impl Fabric {
    /// Has `sink` take what comes, from now on.
    pub(crate) fn listen(&self, sink: Arc<dyn Sink>) {
        if let Some(receiver) = self.receiver.sink.enter() {
            receiver.populate(sink);
        }
    }

    /// Drops the sink: nothing is taken any more.
    pub(crate) fn deafen(&self) {
        drop(self.receiver.sink.close());
    }

    /// Takes all that was received before. Who sent it by a queue pair that goes has been told that it came,
    /// and drivers forget what was not polled when they reset one.
    pub(super) fn take_all(&self) {
        let Some(sink) = self.receiver.sink.enter() else {
            return;
        };
        let Some(sink) = sink.as_ref() else {
            return;
        };
        let mut scratch = self.receiver.turn.lock();
        for _ in 0..RECV_CQ_ENTRIES {
            let recv = &self.parts.recv;
            let messages = recv.poll(|completion| self.receive(&**sink, completion, &mut scratch));
            if messages + self.poll_packets(&**sink) == 0 {
                return;
            }
        }
    }

    /// Has the poller thread drive something. Returns a number for it.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn drive(&self, driven: Arc<dyn Driven>) -> Result<u64> {
        let mut drivers = self.drivers.lock();
        let number = drivers.next;
        drivers.all.push((number, driven), GFP_KERNEL)?;
        drivers.next += 1;
        drop(drivers);
        self.poller.event.signal();
        Ok(number)
    }

    /// Has the poller thread look at once at what it drives.
    pub(crate) fn wake_poller(&self) {
        self.poller.event.signal();
    }

    /// Has the poller thread drive it no more.
    pub(crate) fn drive_no_more(&self, number: u64) {
        let mut drivers = self.drivers.lock();
        let at = drivers.all.iter().position(|(other, _)| *other == number);
        let removed = at.and_then(|at| drivers.all.remove(at).ok());
        drop(drivers);
        drop(removed);
    }

    /// Ends all that is driven.
    fn end_drivers(&self) {
        let all = core::mem::replace(&mut self.drivers.lock().all, KVec::new());
        for (_, driven) in all {
            driven.end();
        }
    }

    /// Takes what was received. Returns how many messages there were. No lock may be held.
    pub(crate) fn poll_received(&self) -> usize {
        let Some(sink) = self.receiver.sink.enter() else {
            return 0;
        };
        let (Some(sink), Some(mut scratch)) = (sink.as_ref(), self.receiver.turn.try_lock()) else {
            return 0;
        };
        let recv = &self.parts.recv;
        let messages = recv.poll(|completion| self.receive(&**sink, completion, &mut scratch));
        messages + self.poll_packets(&**sink)
    }

    fn poll_packets(&self, sink: &dyn Sink) -> usize {
        let dynamic = self.dynamic.as_ref();
        dynamic.map_or(0, |dynamic| {
            dynamic.poll_packets(|bytes| sink.on_packet(None, bytes))
        })
    }

    /// Asks for an interrupt when a packet comes. Returns whether some have.
    fn arm_packets(&self) -> bool {
        self.dynamic.as_ref().is_some_and(|dynamic| {
            dynamic.arm_packets();
            // Who polls may have looked before that, and goes.
            let polled = self.receiver.turn.try_lock().is_none();
            polled || self.poll_received() != 0
        })
    }

    fn receive(&self, sink: &dyn Sink, completion: Completion, scratch: &mut [u8; RECV_SIZE]) {
        let id = WrId::from_u64(completion.wr_id);
        if completion.status != Status::Success {
            // A queue pair that failed or is gone gives its receives back. Its users find out by
            // themselves, but the control queue pair may have none.
            if id.generation == CONTROL {
                self.ud_failed();
            }
            return;
        }
        let Some(channel) = self.channel(id.generation) else {
            return self.stats.stray_completions.add(1);
        };
        if let Some(immediate) = completion.immediate {
            let _ = channel.post_recv(id.slot);
            return sink.on_immediate(channel.peer(), immediate);
        }
        let len = (completion.len as usize).min(RECV_SIZE);
        let read = channel.read_recv(id.slot, &mut scratch[..len]);
        // Posted again before it is acted on: whoever gets an answer finds room for the next.
        let _ = channel.post_recv(id.slot);
        if read.is_ok() {
            self.dispatch(sink, &channel, &scratch[..len]);
        }
    }

    fn dispatch(&self, sink: &dyn Sink, channel: &Channel, bytes: &[u8]) {
        let understood = match channel.peer() {
            Life { node: 0, .. } => bytes
                .get(GRH..)
                .is_some_and(|bytes| self.on_datagram(sink, bytes)),
            peer => self.on_message(sink, peer, channel.number(), bytes),
        };
        if !understood {
            self.stats.bad_messages.add(1);
        }
    }

    /// A datagram sets up a connection, or tells of a view. Who does not know the secret is not heard.
    fn on_datagram(&self, sink: &dyn Sink, bytes: &[u8]) -> bool {
        let Ok(setup) = Setup::decode(bytes) else {
            return false;
        };
        let Ok(peer) = self.peer(setup.from) else {
            return false;
        };
        if !peer.identity.accepts(&setup) {
            return false;
        }
        match setup.kind {
            SetupKind::Acting => sink.on_view(&peer, setup.epoch),
            SetupKind::Answer => peer.on_answer(setup.epoch),
            _ => return peer.deliver(setup),
        }
        true
    }

    fn on_message(&self, sink: &dyn Sink, peer: Life, by: u32, bytes: &[u8]) -> bool {
        if is_packet(bytes) {
            let mut packet = bytes::wait_for(bytes.len());
            packet.copy_from_slice(bytes);
            sink.on_packet(Some(peer), packet);
            return true;
        }
        match wire::decode(bytes) {
            Ok((header, Body::Request(request))) => {
                self.on_request(sink, (peer, by), header, &request, bytes);
            }
            Ok((header, Body::Reply(_))) => self.calls.reply(header.call, peer.node, bytes),
            Err(_) => return false,
        }
        true
    }

    /// Of a peer that is gone, or whose call is, nothing is wanted any more.
    fn on_request(
        &self,
        sink: &dyn Sink,
        (from, by): (Life, u32),
        header: Header,
        request: &Request<'_>,
        bytes: &[u8],
    ) {
        let Ok(peer) = self.peer_in(from) else {
            return;
        };
        if peer.begin_answer(&header, request, by) {
            sink.on_request(peer, header, bytes);
        } else {
            self.stats.late_calls.add(1);
        }
    }
}

/// The poller thread of one RNIC.
pub(crate) struct Poller {
    fabric: Arc<Fabric>,
    /// How long it looks for more before it sleeps.
    patience: Patience,
    stopping: Atomic<u32>,
}

impl Poller {
    /// Makes the body of the thread.
    pub(crate) fn new(fabric: Arc<Fabric>) -> Result<Arc<Self>> {
        let poller = Self {
            fabric,
            patience: Patience::new(),
            stopping: Atomic::new(0u32),
        };
        Ok(Arc::new(poller, GFP_KERNEL)?)
    }

    /// Returns how much there was to do, and how much to drive.
    fn poll(&self) -> (usize, usize) {
        let mut done = self.fabric.poll_received();
        if self.fabric.sender().has_sleepers() {
            done += self.fabric.sender().poll();
        }
        (done, self.fabric.drivers.lock().drive(&self.fabric))
    }

    /// The most that is left to do for what it drives.
    fn rest(&self) -> Rest {
        let drivers = self.fabric.drivers.lock();
        let rests = drivers.all.iter().map(|(_, driven)| driven.rest());
        rests.max().unwrap_or(Rest::Idle)
    }

    /// Sleeps for a moment, or until it is woken.
    fn nap(&self, us: u32) {
        self.fabric.poller.event.wait_us(us);
        self.fabric.poller.event.forget();
    }

    /// For how many microseconds to leave messages to those who wait for some.
    fn left_to_watchers(&self, naps: &mut Naps, now: Instant<Monotonic>) -> Option<u32> {
        let fabric = &self.fabric;
        let has_other = fabric.sender().has_sleepers() || !fabric.drivers.lock().all.is_empty();
        naps.next(&fabric.receiver.watchers, now, has_other)
    }

    /// Arms the queues and sleeps, unless something came meanwhile. (Who goes to sleep on the send queue
    /// arms it; the notification that woke us was the last, so whoever still sleeps needs another.)
    /// Returns whether there may be more than a little to do.
    fn sleep(&self) -> bool {
        let mut missed = self.fabric.parts.recv.arm() | self.fabric.arm_packets();
        let drives = !self.fabric.drivers.lock().all.is_empty();
        let before = self.rest();
        // To look again soon anyway takes no interrupt.
        if self.fabric.sender().has_sleepers() || drives && before != Rest::Soon {
            missed |= self.fabric.sender().arm();
        }
        // After that: what completes from now on wakes us.
        let rest = self.rest();
        missed |= rest != before;
        if missed || rest == Rest::Busy || self.stopping.load(Acquire) != 0 {
            return true;
        }
        match rest {
            Rest::Soon => {
                self.nap(NAP_US);
                return false;
            }
            Rest::Idle => self.fabric.poller.event.wait_idle(),
            Rest::Posted => drop(self.fabric.poller.event.wait_timeout(POSTED_MS)),
            _ => drop(self.fabric.poller.event.wait_timeout(NAP_MS)),
        }
        // Many may have woken us since we last slept.
        self.fabric.poller.event.forget();
        self.fabric.stats.wakeups.add(1);
        true
    }
}

impl Run for Poller {
    fn run(&self) {
        let mut busy = Instant::<Monotonic>::now();
        let mut naps = Naps::new();
        let mut drove: Option<Instant<Monotonic>> = None;
        while self.stopping.load(Acquire) == 0 {
            let (done, driven) = self.poll();
            let now = Instant::now();
            if driven != 0 {
                drove = Some(now);
            }
            let drives = drove.is_some_and(|last| (now - last).as_nanos() < DRIVEN_SPIN_NS);
            if done != 0 {
                busy = now;
            } else if drives {
                core::hint::spin_loop();
            } else if let Some(us) = self.left_to_watchers(&mut naps, now) {
                self.nap(us);
                busy = Instant::now();
            } else if self.patience.lasts(busy, now) {
                core::hint::spin_loop();
            } else if self.sleep() {
                self.patience.learn(busy);
                busy = Instant::now();
            }
            give_way();
        }
        self.fabric.end_drivers();
    }

    fn stop(&self) {
        self.stopping.store(1, Release);
        self.fabric.poller.event.signal_all();
    }
}
