// SPDX-License-Identifier: GPL-2.0

//! What a node that calls has with one that serves: a ring in each direction.
//!
//! `kite_core::ring` decides who may use which part of a ring. Here it meets memory and wire: a message is
//! written to its place, again if need be, and if its sender gives up, a void one is in its stead. So each
//! place is filled at last, and its reader frees it.

use super::{
    attach::Ring,
    kept::Kept,
    long::{Fetches, Long, NoRoom},
    service::Service,
    wait_a_little, Message, Rpc, NAP_MS,
};
use crate::{
    fabric::{
        flight::Flight,
        notice::{Content, Lane, Notice},
        Fabric,
    },
    lmr::{
        lease::Lent,
        mapping::{KeptPass, Mapping},
        places::Chunk,
        reclaim::Haste,
        CONTROL_MS,
    },
    sys::{deadline::Deadline, patience::Patience},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_condvar, new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Full},
        Arc, CondVar, CondVarTimeoutResult, Mutex, SetOnce, SpinLock,
    },
    time::msecs_to_jiffies,
};
use kite_core::{
    ring::{self, Fifo, Head, Place, Tail, UNIT},
    turns::Turns,
    view::Life,
    wire::ring::{Immediate, Line, Relays, What, LINE_SIZE, RELAYS_MAX},
};

/// The ring at the other end.
struct Outbound {
    mapping: Arc<Mapping>,
    /// Its number there.
    number: u16,
    capacity: u32,
    /// How messages get there, if it is at another node: all by one way, so that they come in order.
    lane: Option<Lane>,
}

impl Outbound {
    fn immediate(&self, unit: u16) -> Immediate {
        let ring = self.number;
        Immediate { ring, unit }
    }
}

/// The room that is left at the other end, and whose turn it is to take it.
struct Room {
    tail: Tail<KVec<u8>>,
    turns: Turns,
}

impl Room {
    fn new(states: KVec<u8>) -> Self {
        Self {
            tail: Tail::new(states),
            turns: Turns::new(),
        }
    }

    /// A place for so many bytes, for who does not wait.
    fn try_reserve(&mut self, bytes: usize) -> Option<Place> {
        if !self.turns.may_look() {
            return None;
        }
        let place = self.tail.reserve(bytes)?;
        self.turns.admit(true);
        Some(place)
    }
}

/// Where a message goes.
pub(super) struct Target {
    unit: u16,
    /// Of the places of the ring.
    version: u32,
    pub(super) way: Way,
}

pub(super) enum Way {
    /// To this node itself.
    Local(Arc<Lent>),
    Remote(Notice),
}

/// A call that a server takes.
pub(super) enum Arrival {
    /// It is in the ring until it is freed.
    Short(Line),
    Long(Long),
}

/// What came of a call.
#[derive(Clone, Copy)]
pub(super) struct Settled {
    pub(super) call: u64,
    /// An errno, or 0.
    pub(super) code: u32,
}

/// What has come to this end.
struct Inbox {
    head: Head<KVec<u8>>,
    /// Calls that nobody has taken yet, by their units.
    waiting: Fifo<KVec<u16>>,
}

/// One end of a link.
#[pin_data]
pub(crate) struct Link {
    /// Number of the ring at this end.
    pub(crate) number: u16,
    /// The node at the other end, which may be this one.
    pub(crate) peer: Life,
    /// The region that is called.
    pub(crate) region: u64,
    /// Whom calls are for, if this end is its.
    service: Option<Arc<Service>>,
    inbound: Arc<Mapping>,
    capacity: u32,
    outbound: SetOnce<Outbound>,
    #[pin]
    tail: SpinLock<Room>,
    /// Signalled when there may be more room at the other end.
    #[pin]
    room: CondVar,
    #[pin]
    inbox: SpinLock<Inbox>,
    /// Of long calls that have come to this end.
    #[pin]
    pub(super) fetches: SpinLock<Fetches>,
    /// Whether the other end is being told how far this one has come.
    telling: AtomicFlag,
    /// Calls of which the other end is being told what came of them, without data.
    #[pin]
    settled: Mutex<KVec<Settled>>,
    /// Relays of callers at the other end.
    #[pin]
    pub(crate) kept: Kept,
    /// Handles that call by this link.
    #[pin]
    pub(super) users: Mutex<usize>,
    /// Of those who wait for replies.
    pub(super) patience: Patience,
}

/// The one chunk of a ring at this node.
fn local(mapping: &Mapping) -> Result<Arc<Lent>> {
    match mapping.look()?.chunks.first() {
        Some(Chunk::Local(chunk)) => Ok(chunk.clone()),
        _ => Err(EIO),
    }
}

/// Units of the ring in a mapped region.
///
/// # Errors
///
/// `ENOMEM` if the region is in pieces, as there was no memory in one; `EIO` if it is no ring.
fn capacity(mapping: &Mapping) -> Result<u32> {
    let layout = mapping.layout()?;
    if layout.chunks() != 1 {
        return Err(ENOMEM);
    }
    ring::capacity(layout.len()).ok_or(EIO)
}

impl Link {
    /// An end with its own ring in `inbound`, a region of this node.
    pub(super) fn new(
        number: u16,
        peer: Life,
        region: u64,
        service: Option<Arc<Service>>,
        inbound: Arc<Mapping>,
    ) -> Result<Arc<Self>> {
        let capacity = capacity(&inbound)?;
        let inbox = Inbox {
            head: Head::new(KVec::from_elem(0u8, capacity as usize, GFP_KERNEL_ACCOUNT)?),
            waiting: Fifo::new(KVec::from_elem(
                0u16,
                capacity as usize,
                GFP_KERNEL_ACCOUNT,
            )?),
        };
        let fetches = Fetches::new()?;
        Arc::pin_init(
            pin_init!(Self {
                number,
                peer,
                region,
                service,
                inbound,
                capacity,
                fetches <- new_spinlock!(fetches),
                outbound: SetOnce::new(),
                tail <- new_spinlock!(Room::new(KVec::new())),
                room <- new_condvar!(),
                inbox <- new_spinlock!(inbox),
                telling: AtomicFlag::new(false),
                settled <- new_mutex!(KVec::new()),
                kept <- Kept::new(),
                users <- new_mutex!(1),
                patience: Patience::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Says where the ring at the other end is, once.
    pub(super) fn connect(&self, fabric: &Fabric, mapping: Arc<Mapping>, number: u16) -> Result {
        let here = local(&mapping).is_ok();
        let lane = (!here).then(|| fabric.lane(self.peer)).transpose()?;
        let capacity = capacity(&mapping)?;
        let states = KVec::from_elem(0u8, capacity as usize, GFP_KERNEL_ACCOUNT)?;
        *self.tail.lock() = Room::new(states);
        self.outbound.populate(Outbound {
            mapping,
            number,
            capacity,
            lane,
        });
        Ok(())
    }

    /// The ring at this end, and that at the other if it is known.
    pub(super) fn rings(&self) -> (&Arc<Mapping>, Option<&Arc<Mapping>>) {
        let outbound = self.outbound.as_ref();
        (&self.inbound, outbound.map(|out| &out.mapping))
    }

    /// The ring at the other end, as its node names it.
    pub(super) fn partner(&self) -> Option<Ring> {
        self.outbound.as_ref().map(|out| Ring {
            region: out.mapping.region,
            number: out.number,
        })
    }

    /// Whom calls are for, if this end is its.
    pub(super) fn service(&self) -> Option<Arc<Service>> {
        self.service.clone()
    }

    fn outbound(&self) -> Result<&Outbound> {
        self.outbound.as_ref().ok_or(EIO)
    }

    /// Whether both ends are still there.
    ///
    /// # Errors
    ///
    /// Why they are not: `ESTALE` if the other end closed its ring, `EHOSTDOWN` if its node died.
    pub(crate) fn check(&self) -> Result {
        self.outbound()?.mapping.enter().map(drop)
    }

    /// The memory of the ring at this end.
    pub(crate) fn ring(&self) -> Result<Arc<Lent>> {
        local(&self.inbound)
    }

    /// Where the data of a message at this end are.
    pub(crate) fn data_at(&self, place: &Place) -> usize {
        place.offset(self.capacity) as usize + LINE_SIZE
    }

    /// Writes a message to the other end. After an error it may have been taken, or may yet be.
    ///
    /// # Errors
    ///
    /// - As for [`Self::check`].
    /// - `ETIMEDOUT`, also while the ring is full; `EINTR` if the deadline is interruptible.
    /// - `EIO` if the RNIC or the peer refused; `ENOMEM`.
    pub(crate) fn send(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        message: &mut Message,
        deadline: Deadline,
    ) -> Result {
        let place = self.reserve(rpc, message.bytes.len(), deadline)?;
        self.send_at(rpc, message, place, deadline)
    }

    /// As [`Self::send`], but waits for no room.
    ///
    /// # Errors
    ///
    /// As there, and `EAGAIN`.
    pub(super) fn try_send(self: &Arc<Self>, rpc: &Arc<Rpc>, message: &mut Message) -> Result {
        let place = self.tail.lock().try_reserve(message.bytes.len());
        let deadline = Deadline::after_ms(CONTROL_MS);
        self.send_at(rpc, message, place.ok_or(EAGAIN)?, deadline)
    }

    fn send_at(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        message: &mut Message,
        place: Place,
        deadline: Deadline,
    ) -> Result {
        let target = self.put(message, place)?;
        let sent = self.write(rpc, &target, message.content(), deadline);
        match sent {
            Ok(()) => self.land(&place),
            Err(_) => self.fill(rpc, target, message.line),
        }
        sent
    }

    /// Gives a message its place.
    pub(super) fn put(&self, message: &mut Message, place: Place) -> Result<Target> {
        let target = self.target(place.unit(self.outbound()?.capacity) as u16)?;
        message.line.place = place;
        message.line.head = self.inbox.lock().head.tell();
        let written = message.line.encode(&mut message.bytes);
        written.map(|_| target).ok_or(EIO)
    }

    /// A place for a message, if there is one now.
    ///
    /// # Errors
    ///
    /// As for [`Self::check`], if there is none.
    pub(super) fn try_reserve(&self, message: &Message) -> Result<Option<Place>> {
        let place = self.tail.lock().try_reserve(message.bytes.len());
        if place.is_none() {
            self.check()?;
        }
        Ok(place)
    }

    /// A place for a message; waits while there is none.
    fn reserve(&self, rpc: &Rpc, len: usize, deadline: Deadline) -> Result<Place> {
        let mut room = self.tail.lock();
        loop {
            if let Some(place) = room.tail.reserve(len) {
                room.turns.admit(false);
                return Ok(place);
            }
            self.check()?;
            deadline.check()?;
            rpc.lmr.stats.ring_waits.add(1);
            let nap = msecs_to_jiffies(deadline.left_ms().min(NAP_MS));
            room.turns.sleep();
            let woken = self.room.wait_interruptible_timeout(&mut room, nap);
            room.turns.wake();
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                drop(room);
                deadline.on_signal()?;
                room = self.tail.lock();
            }
        }
    }

    /// Where unit `unit` of the ring at the other end is.
    fn target(&self, unit: u16) -> Result<Target> {
        let out = self.outbound()?;
        let places = out.mapping.look()?;
        let way = match places.chunks.first().ok_or(EIO)? {
            Chunk::Local(ring) => Way::Local(ring.clone()),
            Chunk::Remote(at) => {
                let addr = at.addr + u64::from(unit) * UNIT as u64;
                let immediate = out.immediate(unit).to_u32();
                Way::Remote(Notice::new(at.life, addr, immediate))
            }
        };
        let version = places.version;
        Ok(Target { unit, version, way })
    }

    fn write(
        &self,
        rpc: &Arc<Rpc>,
        target: &Target,
        content: Content<'_>,
        deadline: Deadline,
    ) -> Result {
        let out = self.outbound()?;
        match (&target.way, &out.lane) {
            (Way::Remote(notice), Some(lane)) => {
                let permit = || out.mapping.pass(target.version);
                let fabric = &rpc.lmr.cluster.fabric;
                fabric.notify(lane, notice, content, permit, deadline)
            }
            (Way::Local(ring), _) => {
                let _places = out.mapping.look_at(target.version)?;
                ring.write(usize::from(target.unit) * UNIT, content.bytes)?;
                rpc.on_immediate(self.peer, out.immediate(target.unit));
                Ok(())
            }
            _ => Err(EIO),
        }
    }

    /// Posts a message that has its place at another node, without waiting; or returns nothing if it would have
    /// to wait first.
    ///
    /// # Errors
    ///
    /// As for [`Self::send`].
    pub(super) fn post(
        &self,
        rpc: &Rpc,
        target: &Target,
        message: &Message,
    ) -> Result<Option<Flight<KeptPass>>> {
        let out = self.outbound()?;
        match (&target.way, &out.lane) {
            (Way::Remote(notice), Some(lane)) => {
                let permit = || out.mapping.keep_pass(target.version);
                let fabric = &rpc.lmr.cluster.fabric;
                fabric.post_notice(lane, notice, message.content(), permit)
            }
            _ => Err(EIO),
        }
    }

    /// Writes a message that has its place, and waits.
    ///
    /// # Errors
    ///
    /// As for [`Self::send`].
    pub(super) fn write_message(
        &self,
        rpc: &Arc<Rpc>,
        target: &Target,
        message: &Message,
        deadline: Deadline,
    ) -> Result {
        self.write(rpc, target, message.content(), deadline)
    }

    /// Nothing is written to a place any more.
    pub(super) fn land(&self, place: &Place) {
        if self.tail.lock().tail.land(place) {
            self.room.notify_all();
        }
    }

    /// The other end has freed its ring up to `head`.
    fn release(&self, head: u64) {
        if self.tail.lock().tail.release(head) {
            self.room.notify_all();
        }
    }

    /// Fills a place with nothing in the background, as its message was given up.
    pub(super) fn fill(self: &Arc<Self>, rpc: &Arc<Rpc>, target: Target, line: Line) {
        let (link, rpc) = (self.clone(), rpc.clone());
        let line = Line {
            what: What::Void,
            ..line
        };
        rpc.clone().errand(self.peer.node, Haste::Awaited, move || {
            let mut bytes = [0; LINE_SIZE];
            let _ = line.encode(&mut bytes);
            while link.check().is_ok() {
                let deadline = Deadline::after_ms(CONTROL_MS);
                if link
                    .write(&rpc, &target, Content::ours(&bytes), deadline)
                    .is_ok()
                {
                    return link.land(&line.place);
                }
                wait_a_little();
            }
        });
    }

    /// A message, or news of how far the other end has come, is in the ring at this end. If this end is
    /// closed nobody wants it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is malformed.
    pub(super) fn arrive(self: &Arc<Self>, rpc: &Arc<Rpc>, unit: u16) -> Result {
        let Ok(ring) = self.ring() else {
            rpc.lmr.stats.stray_completions.add(1);
            return Ok(());
        };
        if unit == 0 {
            let mut head = [0; 8];
            ring.read(0, &mut head)?;
            self.release(u64::from_le_bytes(head));
            return Ok(());
        }
        let line = self.line(&ring, unit)?;
        self.release(line.head);
        if !self.inbox.lock().head.arrive(&line.place) {
            rpc.lmr.stats.late_calls.add(1);
            return Ok(());
        }
        match (line.what, &self.service) {
            (What::Call | What::Send, Some(service)) => {
                // There is room: each has a unit of its own.
                let _ = self.inbox.lock().waiting.push(unit);
                service.arrived();
            }
            (What::Reply, None) => {
                if rpc.calls.reply(self, &line, &ring) {
                    // Nobody waits for it: the poller looks.
                    rpc.lmr.cluster.fabric.poller.event.signal();
                }
                self.free(rpc, &line.place);
            }
            _ => self.free(rpc, &line.place),
        }
        Ok(())
    }

    /// The line of the message at a unit of the ring at this end.
    fn line(&self, ring: &Lent, unit: u16) -> Result<Line> {
        let mut bytes = [0; LINE_SIZE];
        ring.read(usize::from(unit) * UNIT, &mut bytes)?;
        let line = Line::decode(&bytes).map_err(|_| EINVAL)?;
        let here = line.place.unit(self.capacity) == u32::from(unit);
        here.then_some(line).ok_or(EINVAL)
    }

    /// Adds a call to tell of. Returns whether it is the first, and somebody has to see to them.
    pub(super) fn add_settled(&self, call: Settled) -> Result<bool> {
        let mut settled = self.settled.lock();
        let first = settled.is_empty();
        settled.push(call, GFP_KERNEL)?;
        Ok(first)
    }

    /// The call to tell of next.
    pub(super) fn first_settled(&self) -> Option<Settled> {
        self.settled.lock().first().copied()
    }

    /// The other end was told of that, or is gone.
    pub(super) fn remove_settled(&self) {
        let _ = self.settled.lock().remove(0);
    }

    /// The relays of a message at this end.
    pub(super) fn relays(&self, ring: &Lent, line: &Line) -> Result<Relays> {
        let mut numbers = [0; RELAYS_MAX];
        let numbers = numbers.get_mut(..line.relays_len()).ok_or(EINVAL)?;
        ring.read(self.data_at(&line.place) + line.inline_len(), numbers)?;
        Ok(Relays::decode(line, numbers))
    }

    /// Whether a call waits that can be taken.
    pub(super) fn has_waiting(&self) -> bool {
        let in_ring = !self.inbox.lock().waiting.is_empty();
        in_ring || self.fetches.lock().has_ready()
    }

    /// Whether a call waits.
    pub(super) fn has_any(&self) -> bool {
        self.has_waiting() || self.fetches.lock().has_parked()
    }

    /// Takes the call that has waited longest, but for long ones that are not to be fetched now, or not by whoever
    /// asks.
    pub(super) fn take(self: &Arc<Self>, rpc: &Arc<Rpc>, longs: bool) -> Option<Arrival> {
        if !longs {
            return self.take_from_ring(rpc, longs);
        }
        let resume = || Long::resume(self).map(Arrival::Long);
        let parked_first = self.fetches.lock().flip();
        let first = parked_first.then(resume).flatten();
        first
            .or_else(|| self.take_from_ring(rpc, longs))
            .or_else(resume)
    }

    fn take_from_ring(self: &Arc<Self>, rpc: &Arc<Rpc>, longs: bool) -> Option<Arrival> {
        loop {
            let (line, ring) = self.pop()?;
            if !line.has_data_relay() {
                return Some(Arrival::Short(line));
            }
            // What is in the ring was checked when it came.
            let relays = self.relays(&ring, &line).unwrap_or_default();
            match Long::admit(self, line, relays, longs) {
                Ok(long) => {
                    self.free(rpc, &line.place);
                    if let Some(long) = long {
                        return Some(Arrival::Long(long));
                    }
                }
                Err(NoRoom) => {
                    self.put_back(&line);
                    // Who ends a fetch looks whether something waits.
                    if self.fetches.lock().is_full() {
                        return None;
                    }
                }
            }
        }
    }

    /// The line of the call that has waited longest in the ring, and the ring.
    fn pop(&self) -> Option<(Line, Arc<Lent>)> {
        let unit = self.inbox.lock().waiting.pop()?;
        let ring = self.ring().ok()?;
        // What has come stays as it is until it is freed, or becomes void.
        let line = self.line(&ring, unit).ok()?;
        Some((line, ring))
    }

    /// Takes a call that nobody is to have.
    pub(super) fn drain(&self) -> Option<Line> {
        let parked = self.fetches.lock().drain();
        parked.or_else(|| self.pop().map(|(line, _)| line))
    }

    /// Puts a call back that was taken, and is still in the ring.
    pub(super) fn put_back(&self, line: &Line) {
        let unit = line.place.unit(self.capacity) as u16;
        let _ = self.inbox.lock().waiting.put_back(unit);
    }

    /// Frees the place of a message that has come, and tells the other end, now and then.
    pub(crate) fn free(self: &Arc<Self>, rpc: &Arc<Rpc>, place: &Place) {
        let mut inbox = self.inbox.lock();
        inbox.head.free(place);
        let owes = inbox.head.owes();
        drop(inbox);
        if owes && !self.telling.xchg(true, Full) {
            let (link, rpc) = (self.clone(), rpc.clone());
            rpc.clone()
                .errand(self.peer.node, Haste::Awaited, move || link.tell(&rpc));
        }
    }

    /// Tells the other end how far this one has come.
    fn tell(&self, rpc: &Arc<Rpc>) {
        self.telling.xchg(false, Full);
        let Ok(target) = self.target(0) else {
            return;
        };
        while self.check().is_ok() {
            let head = self.inbox.lock().head.tell();
            let deadline = Deadline::after_ms(CONTROL_MS);
            let told = self.write(rpc, &target, Content::ours(&head.to_le_bytes()), deadline);
            if told.is_ok() {
                return;
            }
            wait_a_little();
        }
    }
}
