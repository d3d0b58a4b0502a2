// SPDX-License-Identifier: GPL-2.0

//! Ends of virtual queue pairs by number, and those who listen for new ones (KRCORE, section 4.5).
//!
//! Who connects to a port tells nobody. Its first message makes the other end, which waits at the port until a process
//! accepts it; messages that have come are kept meanwhile. What nobody wants is answered, so that its sender learns.
//! Answers, and all else that may wait for other nodes, are for workers: packets come by the poller.

use super::{Ids, Vqp};
use crate::{
    cluster::Cluster,
    errno,
    rpc::Rpc,
    sys::{
        deadline::{settle, Deadline},
        event::Event,
        payer::Payer,
        queue::OwnQueue,
        watch::Watch,
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Relaxed, Release},
        Arc, Mutex,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::Life,
    wire::packet::{Body, Message, Packet, Phase, State},
};

/// New ends that may wait at a port.
const BACKLOG: usize = 32;

/// Packets that are kept of nodes that are not in the view.
const PARKED: usize = 256;

/// Workers that tell other nodes something at a time.
const WORKERS: c_int = 64;

/// How long to try to tell somebody, and to wait before that is tried again.
const TELL_MS: u32 = 3000;
const AGAIN_MS: i64 = 500;

/// How long somebody sleeps who waits, should nobody wake him.
const NAP_MS: u32 = 50;

/// Somebody who listens at a port.
#[pin_data]
pub(crate) struct Listener {
    port: u32,
    uid: u32,
    #[pin]
    arrived: Event,
    /// It listens no more.
    over: AtomicFlag,
    watch: Arc<Watch>,
    /// Pays for ends that are yet to be accepted.
    payer: Arc<Payer>,
}

impl Listener {
    /// Does what says `EAGAIN` while nobody waits to be accepted, whenever somebody has come.
    ///
    /// # Errors
    ///
    /// Those of `f`; `ETIMEDOUT`, `EINTR`.
    pub(crate) fn wait<T>(
        &self,
        deadline: Deadline,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            match f() {
                Err(error) if error == EAGAIN => deadline.check()?,
                done => return done,
            }
            let woken = self
                .arrived
                .wait_interruptible(deadline.left_ms().min(NAP_MS));
            woken.map(drop).or_else(|_| deadline.on_signal())?;
        }
    }
}

/// A new end that nobody has accepted yet.
struct Waiting {
    at: Arc<Listener>,
    number: u64,
    uid: u32,
}

/// A new end that somebody has accepted.
pub(crate) struct Accepted {
    pub(crate) vqp: Arc<Vqp>,
    /// The user at the other end.
    pub(crate) uid: u32,
}

struct Ends {
    all: RBTree<u64, Arc<Vqp>>,
    /// Those that messages to a port have made, by who sent them.
    by_source: RBTree<(Life, u64), u64>,
    listeners: KVec<Arc<Listener>>,
    waiting: KVec<Waiting>,
}

/// All ends of a node.
#[pin_data]
pub(crate) struct Exchange {
    #[pin]
    ends: Mutex<Ends>,
    /// Packets of nodes that are not in the view, perhaps not yet.
    #[pin]
    parked: Mutex<KVec<KVec<u8>>>,
    next: Atomic<u64>,
    workers: OwnQueue,
}

impl Ends {
    /// Makes the end for the first message of a source to a port, if somebody listens there and has room.
    fn make(
        &mut self,
        me: Life,
        number: u64,
        from: &Packet,
        message: &Message,
    ) -> Option<Arc<Vqp>> {
        let port = message.port;
        let listener = self.listeners.iter().find(|one| one.port == port)?;
        let at = |one: &&Waiting| Arc::ptr_eq(&one.at, listener);
        if message.number != 0 || self.waiting.iter().filter(at).count() >= BACKLOG {
            return None;
        }
        let ids = Ids {
            me,
            number,
            other: from.source,
            port,
            uid: listener.uid,
        };
        let (watch, listener) = (listener.watch.clone(), listener.clone());
        let vqp = Vqp::new(from.from, ids, true, watch, listener.payer.clone()).ok()?;
        let by_number = RBTreeNode::new(number, vqp.clone(), GFP_KERNEL_ACCOUNT).ok()?;
        let by_source =
            RBTreeNode::new((from.from, from.source), number, GFP_KERNEL_ACCOUNT).ok()?;
        let waiting = Waiting {
            at: listener.clone(),
            number,
            uid: message.uid,
        };
        self.waiting.push(waiting, GFP_KERNEL_ACCOUNT).ok()?;
        self.all.insert(by_number);
        self.by_source.insert(by_source);
        listener.arrived.signal();
        Some(vqp)
    }

    fn listens(&self, port: u32) -> bool {
        self.listeners.iter().any(|listener| listener.port == port)
    }

    /// Who pays for what comes to a port, if somebody listens there.
    fn payer_at(&self, port: u32) -> Option<Arc<Payer>> {
        let mut all = self.listeners.iter();
        let found = all.find(|listener| listener.port == port)?;
        Some(found.payer.clone())
    }

    /// The end that a packet is for.
    fn find(&self, packet: &Packet) -> Option<Arc<Vqp>> {
        let number = match packet.destination {
            0 => *self.by_source.get(&(packet.from, packet.source))?,
            number => number,
        };
        let vqp = self.all.get(&number)?;
        (vqp.life == packet.from).then(|| vqp.clone())
    }
}

impl Exchange {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Pin<KBox<Self>>> {
        let ends = Ends {
            all: RBTree::new(),
            by_source: RBTree::new(),
            listeners: KVec::new(),
            waiting: KVec::new(),
        };
        let workers = OwnQueue::new(c"kite_vqps", WORKERS)?;
        KBox::pin_init(
            try_pin_init!(Self {
                ends <- new_mutex!(ends),
                parked <- new_mutex!(KVec::with_capacity(PARKED, GFP_KERNEL)?),
                next: Atomic::new(1u64),
                workers,
            }),
            GFP_KERNEL,
        )
    }

    /// A number for an end.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1u64, Relaxed)
    }

    /// Enters an end, for packets to find, unless its node has left.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN`, `ENOMEM`.
    pub(super) fn enter(&self, cluster: &Cluster, number: u64, vqp: Arc<Vqp>) -> Result {
        let life = vqp.life;
        let node = RBTreeNode::new(number, vqp, GFP_KERNEL_ACCOUNT)?;
        let mut ends = self.ends.lock();
        if !cluster.has(life) {
            return Err(errno::hostdown());
        }
        ends.all.insert(node);
        Ok(())
    }

    /// Has a worker do something.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn later(&self, f: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.workers.try_spawn(GFP_KERNEL, f)?)
    }

    /// Waits until the workers have done all that they were given.
    pub(crate) fn flush(&self) {
        self.workers.flush();
    }

    /// Sends a packet to a node, and waits until it has come.
    ///
    /// # Errors
    ///
    /// As for [`crate::cluster::Cluster::reach`] and [`crate::fabric::Fabric::send_packet`].
    pub(super) fn send(
        &self,
        rpc: &Rpc,
        life: Life,
        packet: &Packet,
        deadline: Deadline,
    ) -> Result {
        let (bytes, cluster) = (packet.encode(), &rpc.lmr.cluster);
        settle(deadline, || {
            let reach = cluster.reach(life, deadline)?;
            cluster.fabric.send_packet((life, &reach), &bytes, deadline)
        })
    }

    /// Has a worker send one. If it cannot, the other end is not told, and learns when it sends something.
    fn send_later(&self, rpc: &Arc<Rpc>, life: Life, packet: Packet) {
        let rpc = rpc.clone();
        let _ = self.later(move || {
            let deadline = Deadline::after_ms(TELL_MS);
            let _ = rpc.exchange.send(&rpc, life, &packet, deadline);
        });
    }

    /// Ends a queue pair, and tells the other end if there is one.
    pub(crate) fn close(&self, rpc: &Arc<Rpc>, vqp: &Arc<Vqp>) {
        self.forget(vqp);
        if vqp.close() {
            self.tell_later(rpc, vqp);
        }
    }

    /// Packets find it no more.
    fn forget(&self, vqp: &Vqp) {
        let (number, source) = vqp.numbers();
        let mut ends = self.ends.lock();
        ends.waiting.retain(|waiting| waiting.number != number);
        let gone = ends.all.remove_node(&number);
        let by = ends.by_source.get(&(vqp.life, source)) == Some(&number);
        let by = by.then(|| ends.by_source.remove_node(&(vqp.life, source)));
        drop(ends);
        drop((gone, by));
    }

    /// Listens at a port.
    ///
    /// # Errors
    ///
    /// `EADDRINUSE` if somebody does; `ENOMEM`.
    pub(crate) fn listen(&self, port: u32, uid: u32, watch: Arc<Watch>) -> Result<Arc<Listener>> {
        let payer = Arc::new(Payer::current(), GFP_KERNEL_ACCOUNT)?;
        let listener = Arc::pin_init(
            pin_init!(Listener { port, uid, arrived <- Event::new(), over: AtomicFlag::new(false), watch, payer }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let mut ends = self.ends.lock();
        if ends.listens(port) {
            return Err(errno::addrinuse());
        }
        ends.listeners.push(listener.clone(), GFP_KERNEL_ACCOUNT)?;
        Ok(listener)
    }

    /// Listens no more. Those that nobody has accepted end.
    pub(crate) fn listen_no_more(&self, rpc: &Arc<Rpc>, listener: &Arc<Listener>) {
        listener.over.store(true, Release);
        listener.arrived.signal_all();
        let mut ends = self.ends.lock();
        ends.listeners.retain(|other| !Arc::ptr_eq(other, listener));
        drop(ends);
        while let Ok(accepted) = self.take(listener) {
            self.close(rpc, &accepted.vqp);
        }
    }

    fn take(&self, listener: &Arc<Listener>) -> Result<Accepted> {
        let mut ends = self.ends.lock();
        let mut waiting = ends.waiting.iter();
        let at = waiting.position(|one| Arc::ptr_eq(&one.at, listener));
        let waiting = ends.waiting.remove(at.ok_or(EAGAIN)?).map_err(|_| EAGAIN)?;
        let vqp = ends.all.get(&waiting.number).cloned().ok_or(EAGAIN)?;
        Ok(Accepted {
            vqp,
            uid: waiting.uid,
        })
    }

    /// Accepts a new end, and tells the other.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if none waits, `EBADF` if nobody listens any more.
    pub(crate) fn accept(&self, rpc: &Arc<Rpc>, listener: &Arc<Listener>) -> Result<Accepted> {
        if listener.over.load(Acquire) {
            return Err(EBADF);
        }
        let accepted = self.take(listener)?;
        accepted.vqp.state.lock().accepted = true;
        self.tell_later(rpc, &accepted.vqp);
        Ok(accepted)
    }

    /// Whether somebody waits to be accepted.
    pub(crate) fn has_waiting(&self, listener: &Arc<Listener>) -> bool {
        let ends = self.ends.lock();
        let mut waiting = ends.waiting.iter();
        waiting.any(|one| Arc::ptr_eq(&one.at, listener))
    }

    /// Tells the other end how this one is: now, if that works, or else a worker does.
    pub(super) fn tell(&self, rpc: &Arc<Rpc>, vqp: &Arc<Vqp>, deadline: Deadline) {
        if self.try_tell(rpc, vqp, deadline).is_err() {
            self.tell_later(rpc, vqp);
        }
    }

    fn try_tell(&self, rpc: &Rpc, vqp: &Vqp, deadline: Deadline) -> Result {
        let packet = vqp.answer();
        self.send(rpc, vqp.life, &packet, deadline)?;
        vqp.note_told(&packet);
        Ok(())
    }

    /// Has a worker tell the other end how this one is, for as long as both are there, unless one does that already.
    pub(super) fn tell_later(&self, rpc: &Arc<Rpc>, vqp: &Arc<Vqp>) {
        if !vqp.begin_to_tell() {
            return;
        }
        let (rpc, told) = (rpc.clone(), vqp.clone());
        let queued = self.later(move || loop {
            // What changes from here on is told anew.
            told.end_to_tell();
            let deadline = Deadline::after_ms(TELL_MS);
            let done = rpc.exchange.try_tell(&rpc, &told, deadline).is_ok();
            if done || !told.has_other(&rpc) || !told.begin_to_tell() {
                return;
            }
            fsleep(Delta::from_millis(AGAIN_MS));
        });
        if queued.is_err() {
            vqp.end_to_tell();
        }
    }

    /// Ends of nodes that left are over.
    pub(crate) fn prune(&self, stays: impl Fn(Life) -> bool, error: Error) {
        let mut next = 0;
        while let Some((number, vqp)) = self.end_from(next) {
            next = number + 1;
            if !stays(vqp.life) {
                vqp.shut(error);
            }
        }
    }

    fn end_from(&self, number: u64) -> Option<(u64, Arc<Vqp>)> {
        let ends = self.ends.lock();
        let cursor = ends.all.cursor_lower_bound(&number)?;
        let (number, vqp) = cursor.current();
        Some((*number, vqp.clone()))
    }
}

impl Vqp {
    /// Of this end, and of the other.
    fn numbers(&self) -> (u64, u64) {
        let ids = &self.state.lock().ids;
        (ids.number, ids.other)
    }

    /// What to say to a message that is not kept.
    fn answer(&self) -> Packet {
        let state = self.state.lock();
        let phase = match state.over {
            None => Phase::Open,
            Some(_) => Phase::Closed,
        };
        state.packet(phase)
    }

    /// Somebody is to tell the other end. Returns whether nobody was.
    fn begin_to_tell(&self) -> bool {
        !core::mem::replace(&mut self.state.lock().telling, true)
    }

    fn end_to_tell(&self) {
        self.state.lock().telling = false;
    }

    fn note_told(&self, packet: &Packet) {
        if let Body::State(state) = &packet.body {
            self.state.lock().inbox.incoming.note_told(state);
        }
    }

    /// Whether there still is somebody to tell.
    fn has_other(&self, rpc: &Rpc) -> bool {
        !self.state.lock().left && rpc.lmr.cluster.has(self.life)
    }
}

/// The view has changed: what has come from nodes that were not in it before is taken now, and what is from others is
/// forgotten.
pub(crate) fn deliver_parked(rpc: &Arc<Rpc>) {
    let mut parked = rpc.exchange.parked.lock();
    take_known(rpc, &mut parked);
    parked.clear();
}

/// Takes what has come from nodes that are in the view by now, in its order.
fn take_known(rpc: &Arc<Rpc>, parked: &mut KVec<KVec<u8>>) {
    let known = |bytes: &KVec<u8>| {
        let packet = Packet::decode(bytes);
        packet.is_ok_and(|packet| rpc.lmr.cluster.has(packet.from))
    };
    while let Some(at) = parked.iter().position(known) {
        let bytes = parked.remove(at).unwrap_or_default();
        if let Ok(packet) = Packet::decode(&bytes) {
            take(rpc, &packet, &bytes);
        }
    }
}

/// A packet has come.
pub(crate) fn deliver(rpc: &Arc<Rpc>, bytes: KVec<u8>) {
    let Ok(packet) = Packet::decode(&bytes) else {
        return rpc.lmr.stats.bad_messages.add(1);
    };
    // Held meanwhile, so that packets are taken in their order.
    let mut parked = rpc.exchange.parked.lock();
    if rpc.lmr.cluster.has(packet.from) {
        take_known(rpc, &mut parked);
        take(rpc, &packet, &bytes);
    } else {
        // Views do not come to all at the same time.
        let _ = parked.push_within_capacity(bytes);
        take_known(rpc, &mut parked);
    }
}

fn take(rpc: &Arc<Rpc>, packet: &Packet, bytes: &[u8]) {
    let exchange = &rpc.exchange;
    let found = exchange.ends.lock().find(packet);
    match (packet.body, found) {
        (Body::State(state), Some(vqp)) => vqp.hear(packet.source, &state, rpc),
        (Body::State(_), None) => {}
        (Body::Message(message), Some(vqp)) => {
            if vqp.arrive(message, bytes) {
                exchange.tell_later(rpc, &vqp);
            }
        }
        (Body::Message(message), None) => first_message(rpc, packet, message, bytes),
    }
}

/// A message has come that is for nobody yet.
fn first_message(rpc: &Arc<Rpc>, packet: &Packet, message: Message, bytes: &[u8]) {
    let (cluster, exchange) = (&rpc.lmr.cluster, &rpc.exchange);
    let Ok(me) = cluster.node().and_then(|me| cluster.life_of(me)) else {
        return;
    };
    let number = exchange.number();
    let made = match packet.destination {
        0 => {
            let mut ends = exchange.ends.lock();
            // Nobody prunes what is made for who has left.
            let stays = cluster.has(packet.from);
            let payer = ends.payer_at(message.port).filter(|_| stays);
            payer.and_then(|payer| payer.pays(|| ends.make(me, number, packet, &message)))
        }
        _ => None,
    };
    if let Some(vqp) = made {
        vqp.arrive(message, bytes);
        return;
    }
    // Answers to several may come in any order, so it is the same for all.
    let phase = match packet.destination {
        0 => Phase::Refused,
        _ => Phase::Closed,
    };
    let state = State {
        phase,
        limit: 0,
        taken: 0,
    };
    let answer = Packet {
        from: me,
        source: packet.destination,
        destination: packet.source,
        body: Body::State(state),
    };
    exchange.send_later(rpc, packet.from, answer);
}
