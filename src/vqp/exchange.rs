// SPDX-License-Identifier: GPL-2.0

//! Ends of virtual queue pairs by number, and those who listen for new ones (KRCORE, section 4.5).
//!
//! Who connects to a port tells nobody. Its first message makes the other end, which waits at the port until a process
//! accepts it; messages that have come are kept meanwhile. How packets find their ends is in [`super::deliver`], and what
//! ends say to each other in [`super::tell`].

use super::{accounts::Kept, state::Ids, Vqp};
use crate::{
    errno,
    lmr::Lmr,
    sys::{
        deadline::Deadline,
        event::Event,
        payer::{self, Payer},
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
};
use kite_core::{
    view::Life,
    wire::packet::{Message, Packet},
};

/// New ends that may wait at a port.
const BACKLOG: usize = 32;

/// Ends that are over, and remembered.
const REMEMBERED: usize = 1024;

/// Packets that are kept of nodes that are not in the view.
pub(super) const PARKED: usize = 1024;

/// Workers at a time that tell other nodes something, and that find something out.
const WORKERS: c_int = 64;

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

/// The last ends that messages to a port had made, by who sent them, of those that are over.
struct Over {
    ends: KVec<(Life, u64)>,
    next: usize,
}

impl Over {
    fn add(&mut self, source: (Life, u64)) {
        if let Some(place) = self.ends.get_mut(self.next) {
            *place = source;
        }
        self.next = (self.next + 1) % REMEMBERED;
    }
}

pub(super) struct Ends {
    all: RBTree<u64, Arc<Vqp>>,
    /// Those that messages to a port have made, by who sent them.
    by_source: RBTree<(Life, u64), u64>,
    /// Of those that are over: their first message may come again.
    over: Over,
    listeners: KVec<Arc<Listener>>,
    waiting: KVec<Waiting>,
}

/// All ends of a node.
#[pin_data]
pub(crate) struct Exchange {
    #[pin]
    pub(super) ends: Mutex<Ends>,
    /// Packets of nodes that are not in the view, perhaps not yet.
    #[pin]
    pub(super) parked: Mutex<KVec<KVec<u8>>>,
    /// Those that processes have.
    #[pin]
    pub(super) kept: Mutex<KVec<Kept>>,
    next: Atomic<u64>,
    workers: OwnQueue,
    /// Those who ask other nodes for what RNICs do not do, which may take as long.
    askers: OwnQueue,
    /// Those who tell other ends, for as long as that takes: nothing else waits for them.
    pub(super) tellers: OwnQueue,
    pub(crate) lmr: Arc<Lmr>,
}

impl Ends {
    /// Makes the end for the first message of a source to a port, if somebody listens there and has room. The poller does
    /// so, which waits for no cgroup that is full.
    pub(super) fn make(
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
        let (payer, memory) = (listener.payer.clone(), payer::beyond());
        let vqp = Vqp::new(from.from, ids, true, watch, (payer, memory)).ok()?;
        let by_number = RBTreeNode::new(number, vqp.clone(), memory).ok()?;
        let by_source = RBTreeNode::new((from.from, from.source), number, memory).ok()?;
        let waiting = Waiting {
            at: listener.clone(),
            number,
            uid: message.uid,
        };
        self.waiting.push(waiting, GFP_KERNEL).ok()?;
        self.all.insert(by_number);
        self.by_source.insert(by_source);
        listener.arrived.signal();
        Some(vqp)
    }

    /// Whether the end that messages of a source had made is over.
    pub(super) fn was_over(&self, packet: &Packet) -> bool {
        self.over.ends.contains(&(packet.from, packet.source))
    }

    fn listens(&self, port: u32) -> bool {
        self.listeners.iter().any(|listener| listener.port == port)
    }

    /// Who pays for what comes to a port, if somebody listens there.
    pub(super) fn payer_at(&self, port: u32) -> Option<Arc<Payer>> {
        let mut all = self.listeners.iter();
        let found = all.find(|listener| listener.port == port)?;
        Some(found.payer.clone())
    }

    /// The end that a packet is for.
    pub(super) fn find(&self, packet: &Packet) -> Option<Arc<Vqp>> {
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
    pub(crate) fn new(lmr: Arc<Lmr>) -> Result<Arc<Self>> {
        let ends = Ends {
            all: RBTree::new(),
            by_source: RBTree::new(),
            over: Over {
                ends: KVec::from_elem(Default::default(), REMEMBERED, GFP_KERNEL)?,
                next: 0,
            },
            listeners: KVec::new(),
            waiting: KVec::new(),
        };
        let workers = OwnQueue::new(c"kite_vqps", WORKERS)?;
        let askers = OwnQueue::new(c"kite_vqp_asks", WORKERS)?;
        let tellers = OwnQueue::new(c"kite_vqp_tells", WORKERS)?;
        Arc::pin_init(
            try_pin_init!(Self {
                ends <- new_mutex!(ends),
                parked <- new_mutex!(KVec::with_capacity(PARKED, GFP_KERNEL)?),
                kept <- new_mutex!(KVec::new()),
                next: Atomic::new(1u64),
                workers,
                askers,
                tellers,
                lmr,
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
    pub(super) fn enter(&self, number: u64, vqp: Arc<Vqp>) -> Result {
        let life = vqp.life;
        let node = RBTreeNode::new(number, vqp, GFP_KERNEL_ACCOUNT)?;
        let mut ends = self.ends.lock();
        if !self.lmr.cluster.has(life) {
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

    /// Has a worker ask another node for something.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn ask_later(&self, f: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.askers.try_spawn(GFP_KERNEL, f)?)
    }

    /// Waits until the workers have done all that they were given.
    pub(crate) fn flush(&self) {
        self.workers.flush();
        self.askers.flush();
        self.tellers.flush();
        // Who was at it may have left it for later, when there is nobody to tell any more.
        self.tellers.flush();
    }

    /// Ends a queue pair, and tells the other end if there is one.
    pub(crate) fn close(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        self.keep_no_more(vqp);
        self.forget(vqp);
        if vqp.close() {
            self.tell_later(vqp);
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
        if by.is_some() {
            ends.over.add((vqp.life, source));
        }
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
        ends.listeners.push(listener.clone(), GFP_KERNEL)?;
        Ok(listener)
    }

    /// Listens no more. Those that nobody has accepted end.
    pub(crate) fn listen_no_more(self: &Arc<Self>, listener: &Arc<Listener>) {
        listener.over.store(true, Release);
        listener.arrived.signal_all();
        let mut ends = self.ends.lock();
        ends.listeners.retain(|other| !Arc::ptr_eq(other, listener));
        drop(ends);
        while let Ok(accepted) = self.take(listener) {
            self.close(&accepted.vqp);
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
    pub(crate) fn accept(self: &Arc<Self>, listener: &Arc<Listener>) -> Result<Accepted> {
        if listener.over.load(Acquire) {
            return Err(EBADF);
        }
        let accepted = self.take(listener)?;
        accepted.vqp.state.lock().accepted = true;
        self.tell_later(&accepted.vqp);
        Ok(accepted)
    }

    /// Whether somebody waits to be accepted.
    pub(crate) fn has_waiting(&self, listener: &Arc<Listener>) -> bool {
        let ends = self.ends.lock();
        let mut waiting = ends.waiting.iter();
        waiting.any(|one| Arc::ptr_eq(&one.at, listener))
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
    pub(super) fn numbers(&self) -> (u64, u64) {
        let ids = &self.state.lock().ids;
        (ids.number, ids.other)
    }
}
