// SPDX-License-Identifier: GPL-2.0

//! Standing in line for the locks of a region, and at its barriers (LITE, section 7.2).
//!
//! The home gives out tickets ([`super::lines`]) and says at once what it can; who has to wait is told when
//! the time has come. A request whose fate is not known is taken back, in the background if need be, so
//! nobody holds a lock without knowing it: the tests of `kite_core::lock` try out what can happen. The
//! tickets of a node that died end when no other node can be reached by it any more, since until then it may
//! believe that it has its locks.

use super::{
    lines::{refused, Asked, Bearer, LineKey},
    mapping::Mapping,
    reclaim::{Haste, INSIST_MS, LATE_MS},
    region::Region,
    Lmr, CONTROL_MS,
};
use crate::{
    errno,
    fabric::{contact::Numbered, peer::Peer},
    sys::{
        deadline::{settle, Deadline},
        event::Event,
        patience::Patience,
    },
    trace,
};
use core::cell::Cell;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, SpinLock,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    lock::End,
    ticket::{Said, Wish},
    view::Life,
    wire::{Reply, Request},
};

/// How long who gave up waits for the home to know, so that he does not meet himself in line.
const LEAVE_MS: u32 = 500;

/// Time between looks whether the region is still there.
const NAP_MS: u32 = 50;

/// What a user wants of a region besides its memory.
pub(crate) struct Wanted {
    /// Number of the lock or barrier.
    pub(crate) number: u64,
    pub(crate) wish: Wish,
    pub(crate) waits: bool,
    pub(crate) deadline: Deadline,
}

/// A ticket of this node.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    /// The lives in which it was given out.
    me: Life,
    home: Life,
    region: u64,
    number: u64,
    line: u64,
    wish: Wish,
}

/// Who waits for word of a ticket.
#[pin_data]
struct Waiter {
    /// A word of [`Said`], or 0.
    said: Atomic<u64>,
    #[pin]
    event: Event,
}

impl Waiter {
    fn said(&self) -> Option<Said> {
        let said = Said::from_word(self.said.load(Acquire));
        said.filter(|said| *said != Said::Never)
    }
}

/// The tickets of this node of which somebody waits to hear, by their homes.
#[pin_data]
pub(super) struct Waiters {
    #[pin]
    table: SpinLock<RBTree<(Life, u64), Arc<Waiter>>>,
    patience: Patience,
}

/// Somebody waits, until this is dropped.
struct Waiting<'a> {
    waiters: &'a Waiters,
    key: (Life, u64),
    waiter: Arc<Waiter>,
}

impl Waiters {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            table <- new_spinlock!(RBTree::new()),
            patience: Patience::new(),
        })
    }

    fn add(&self, ticket: &Ticket) -> Result<Waiting<'_>> {
        let waiter = Arc::pin_init(
            pin_init!(Waiter { said: Atomic::new(0u64), event <- Event::new() }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let key = (ticket.home, ticket.number);
        let node = RBTreeNode::new(key, waiter.clone(), GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(Waiting {
            waiters: self,
            key,
            waiter,
        })
    }

    fn tell(&self, home: Life, ticket: u64, said: Said) {
        let waiter = self.table.lock().get(&(home, ticket)).cloned();
        if let Some(waiter) = waiter {
            waiter.said.store(said.to_word(), Release);
            waiter.event.signal();
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let gone = self.waiters.table.lock().remove_node(&self.key);
        drop(gone);
    }
}

impl Lmr {
    /// Takes a lock of a mapped region, or passes a barrier; says which, and by which ticket.
    ///
    /// # Errors
    ///
    /// As `struct kite_lock` and `struct kite_barrier` in `include/uapi/kite.h` say.
    pub(crate) fn line_up(
        self: &Arc<Self>,
        mapping: &Mapping,
        wanted: &Wanted,
    ) -> Result<(Ticket, Said)> {
        let result = self.try_line_up(mapping, wanted);
        match (&result, wanted.wish) {
            (Err(_), _) => self.stats.errors.add(1),
            (Ok(_), Wish::Lock { .. }) => self.stats.locks.add(1),
            (Ok(_), Wish::Barrier { .. }) => self.stats.barriers.add(1),
        }
        let errno = result.as_ref().err().map_or(0, |error| error.to_errno());
        let is_barrier = matches!(wanted.wish, Wish::Barrier { .. });
        trace::line(
            is_barrier,
            mapping.home,
            mapping.region,
            wanted.number,
            errno,
        );
        result
    }

    fn try_line_up(self: &Arc<Self>, mapping: &Mapping, wanted: &Wanted) -> Result<(Ticket, Said)> {
        let home = self.cluster.life_of(mapping.home)?;
        // In which the region is, if it is not lost by now.
        drop(mapping.enter()?);
        mapping.line_up();
        let numbered = self.number_for(home, wanted.deadline)?;
        let (me, number) = match &numbered {
            Some(numbered) => (numbered.peer.identity.own.life, numbered.number),
            None => (home, self.new_id()),
        };
        let ticket = Ticket {
            me,
            home,
            region: mapping.region,
            number,
            line: wanted.number,
            wish: wanted.wish,
        };
        let waiting = self.waiters.add(&ticket)?;
        let said = match self.ask_for(&ticket, mapping.id, wanted, numbered)? {
            Said::Waits => self.await_turn(mapping, &ticket, &waiting.waiter, wanted.deadline)?,
            said => said,
        };
        match (ticket.wish, said) {
            (_, Said::Refused(errno)) => Err(refusal(errno)),
            (Wish::Lock { .. }, Said::Locked { .. }) => Ok((ticket, said)),
            (Wish::Barrier { .. }, Said::Passed(_)) => Ok((ticket, said)),
            _ => {
                self.give_up(&ticket, None);
                Err(EIO)
            }
        }
    }

    /// A number for a request that another node must not do twice; nothing if it is this one.
    fn number_for(&self, home: Life, deadline: Deadline) -> Result<Option<Numbered>> {
        if self.cluster.node()? == home.node {
            return Ok(None);
        }
        let peer = self.fabric().peer_in(home)?;
        settle(deadline, || peer.number(0)).map(Some)
    }

    /// Asks the home for a ticket. If it is not known what came of it, it is taken back.
    fn ask_for(
        self: &Arc<Self>,
        ticket: &Ticket,
        mapping: u64,
        wanted: &Wanted,
        numbered: Option<Numbered>,
    ) -> Result<Said> {
        let Some(numbered) = numbered else {
            let asked = Asked {
                bearer: ticket.bearer(),
                mapping,
                number: ticket.line,
                wish: ticket.wish,
                waits: wanted.waits,
            };
            return self.admit(ticket.region, &asked, None);
        };
        let request = Request::Enter {
            ticket: ticket.number,
            region: ticket.region,
            mapping,
            line: ticket.line,
            wish: ticket.wish,
            waits: wanted.waits,
        };
        let answer = self.ask_peer(&numbered.peer, &request, wanted.deadline);
        let said = answer.and_then(|answer| match answer.reply()? {
            Reply::Was { word } => Said::from_word(word).ok_or(EIO),
            _ => Err(EIO),
        });
        // Its number is not used again before that is certain.
        said.inspect_err(|_| self.give_up(ticket, Some(numbered)))
    }

    /// Waits until the ticket has what it is for. If that does not happen, it is given up.
    fn await_turn(
        self: &Arc<Self>,
        mapping: &Mapping,
        ticket: &Ticket,
        waiter: &Waiter,
        deadline: Deadline,
    ) -> Result<Said> {
        self.stats.line_waits.add(1);
        let _impatient = self
            .fabric()
            .watch(&self.waiters.patience, || waiter.said().is_some());
        loop {
            if let Some(said) = waiter.said() {
                return Ok(said);
            }
            let woken = waiter
                .event
                .wait_interruptible(deadline.left_ms().min(NAP_MS));
            let signal = woken.map(drop).or_else(|_| deadline.on_signal());
            let goes_on = mapping.enter().map(drop).and(signal);
            let in_time = goes_on.and_then(|()| deadline.check());
            // The word may have come meanwhile.
            if let (Err(error), None) = (in_time, waiter.said()) {
                self.give_up(ticket, None);
                return Err(error);
            }
        }
    }

    /// Ends a ticket of which it may not be known whether it is there, soon if not at once.
    pub(crate) fn give_up(self: &Arc<Self>, ticket: &Ticket, number: Option<Numbered>) {
        let ended = self.end_ticket(ticket, End::GivenUp, Deadline::after_ms(LEAVE_MS));
        if ended.is_err_and(|error| !is_over(error)) {
            self.end_ticket_later(*ticket, End::GivenUp, number, None);
        }
    }

    /// Gives a lock back that was taken by `mapping`, when nothing that was written by it can come late.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the region was freed, `EACCES` if the rights were revoked, `EHOSTDOWN` if its home died, or
    /// this node did. If it takes longer than until the deadline, it is done in the background.
    pub(crate) fn unlock(
        self: &Arc<Self>,
        ticket: &Ticket,
        how: End,
        mapping: &Arc<Mapping>,
        deadline: Deadline,
    ) -> Result {
        // If that has ended, so has the lock.
        drop(mapping.enter()?);
        let quiet = settle(deadline, || self.check_quiet(mapping));
        match quiet.and_then(|()| self.end_ticket(ticket, how, deadline)) {
            Ok(()) => Ok(()),
            Err(error) if error == ENOENT => Err(errno::stale()),
            Err(error) if is_over(error) => Err(errno::hostdown()),
            Err(_) => {
                self.end_ticket_later(*ticket, how, None, Some(mapping.clone()));
                Ok(())
            }
        }
    }

    fn check_quiet(&self, mapping: &Mapping) -> Result {
        let quiet = self.is_quiet(mapping);
        quiet.then_some(()).ok_or(EAGAIN)
    }

    /// Ends a ticket.
    ///
    /// # Errors
    ///
    /// Those for which [`is_over`] holds if there is nothing to end any more; others if it is not known
    /// whether it has ended.
    fn end_ticket(self: &Arc<Self>, ticket: &Ticket, how: End, deadline: Deadline) -> Result {
        match self.peer_of(ticket)? {
            None => self.dismiss(ticket.region, ticket.key(), ticket.bearer(), how),
            Some(peer) => self.ask_peer(&peer, &ticket.leave(how), deadline)?.done(),
        }
    }

    /// The home of a ticket, if both nodes are in the life in which it was given out: in another its number
    /// is another's. Nothing if it is this node.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if they are not.
    fn peer_of(&self, ticket: &Ticket) -> Result<Option<Arc<Peer>>> {
        if ticket.home == ticket.me {
            let lives = self.cluster.has(ticket.home);
            return lives.then_some(None).ok_or_else(errno::hostdown);
        }
        let peer = self.fabric().peer_in(ticket.home)?;
        let same = peer.identity.own.life == ticket.me;
        same.then_some(Some(peer)).ok_or_else(errno::hostdown)
    }

    /// Ends a ticket in the background, when the mapping is quiet. Its number is kept until then.
    fn end_ticket_later(
        self: &Arc<Self>,
        ticket: Ticket,
        how: End,
        number: Option<Numbered>,
        mapping: Option<Arc<Mapping>>,
    ) {
        let waits = move |lmr: &Self, mapping: &Option<Arc<Mapping>>| {
            mapping
                .as_ref()
                .is_some_and(|mapping| !lmr.is_quiet(mapping))
        };
        let line = if waits(self, &mapping) {
            Haste::Idle
        } else {
            Haste::Turn
        };
        self.errand(ticket.home.node, line, move |lmr, _| {
            if waits(lmr, &mapping) {
                fsleep(Delta::from_millis(LATE_MS));
                return lmr.end_ticket_later(ticket, how, number, mapping);
            }
            while let Err(error) = lmr.end_ticket(&ticket, how, Deadline::after_ms(CONTROL_MS)) {
                if is_over(error) {
                    break;
                }
                fsleep(Delta::from_millis(INSIST_MS));
            }
            drop(number);
        });
    }
}

/// Whether an error says that there is nothing to end any more: the region was freed, or the life of the node
/// asked is over, or ours.
pub(super) fn is_over(error: Error) -> bool {
    error == ENOENT || error == errno::hostdown() || error == errno::hostunreach()
}

impl Ticket {
    fn key(&self) -> LineKey {
        LineKey::new(self.wish, self.line)
    }

    fn bearer(&self) -> Bearer {
        Bearer {
            life: self.me,
            ticket: self.number,
        }
    }

    fn leave(&self, how: End) -> Request<'static> {
        Request::Leave {
            ticket: self.number,
            region: self.region,
            line: self.line,
            wish: self.wish,
            how,
        }
    }
}

fn refusal(errno: u16) -> Error {
    let error = Error::from_errno(-c_int::from(errno));
    // The region is being freed.
    if error == ENOENT {
        errno::stale()
    } else {
        error
    }
}

/// At the home.
impl Lmr {
    /// Gives out a ticket; if to a peer, once.
    pub(super) fn admit(
        self: &Arc<Self>,
        region: u64,
        asked: &Asked,
        peer: Option<&Peer>,
    ) -> Result<Said> {
        let found = self.regions.get(region);
        // Before others of the peer wait for us: whose memory it is may have to wait for some.
        let blank = match &found {
            Ok(region) => region.blank_ticket().map(|blank| (region, blank)),
            Err(error) => Err(*error),
        };
        let enter = || match blank {
            Ok((region, blank)) => region.enter(asked, blank),
            Err(error) => refused(error),
        };
        let said = match peer {
            None => enter(),
            Some(peer) => {
                let word = peer.once(asked.bearer.ticket, || Ok(enter().to_word()))?;
                Said::from_word(word).ok_or(EIO)?
            }
        };
        if let Ok(region) = found {
            self.spread_news(&region, Some(asked.key()));
        }
        Ok(said)
    }

    /// Ends a ticket of a peer, and sees to it that it comes into being no more.
    pub(super) fn serve_leave(
        self: &Arc<Self>,
        node: u32,
        ticket: u64,
        (region, key): (u64, LineKey),
        how: End,
    ) -> Result {
        let peer = self.fabric().peer(node)?;
        // It may be too late for that too: then it was answered.
        let _ = peer.once(ticket, || Ok(Said::Never.to_word()));
        let life = peer.life();
        self.dismiss(region, key, Bearer { life, ticket }, how)
    }

    fn dismiss(self: &Arc<Self>, region: u64, key: LineKey, bearer: Bearer, how: End) -> Result {
        let region = self.regions.get(region)?;
        region.leave(key, bearer, how);
        self.spread_news(&region, Some(key));
        Ok(())
    }

    /// Takes word from a home: what a ticket waited for has come.
    pub(super) fn serve_granted(&self, home: u32, ticket: u64, said: Said) -> Result {
        let home = self.cluster.life_of(home)?;
        self.waiters.tell(home, ticket, said);
        Ok(())
    }

    /// Tells, in the background, those whose tickets have what they waited for: of one line, or of all.
    pub(super) fn spread_news(self: &Arc<Self>, region: &Arc<Region>, key: Option<LineKey>) {
        while let Some((key, node)) = region.take_news(key) {
            let region = region.clone();
            self.errand(node, Haste::Turn, move |lmr, life| {
                while let Some((ticket, said)) = region.news_of(key, life) {
                    lmr.insist_on(life, ticket, said);
                    region.heard(key, Bearer { life, ticket });
                }
            });
        }
    }

    /// Tells a node, which may be this one, until it has heard or its life is over.
    fn insist_on(self: &Arc<Self>, life: Life, ticket: u64, said: Said) {
        if self.cluster.node() == Ok(life.node) {
            return self.waiters.tell(life, ticket, said);
        }
        let request = Request::Granted { ticket, said };
        while let Ok(peer) = self.fabric().peer_in(life) {
            let deadline = Deadline::after_ms(CONTROL_MS);
            let heard = self.ask_peer(&peer, &request, deadline);
            if heard.is_ok_and(|answer| answer.done().is_ok()) {
                return;
            }
            fsleep(Delta::from_millis(INSIST_MS));
        }
    }

    /// Ends the tickets of nodes that are out of the view, once all have heard that they are.
    pub(super) fn bury_tickets(self: &Arc<Self>) {
        // Most tickets of a line are often of one node, and who is forgotten stays so.
        let last = Cell::new(None);
        let is_forgotten = |life| match last.get() {
            Some((known, forgotten)) if known == life => forgotten,
            _ => {
                let forgotten = self.cluster.is_forgotten(life);
                last.set(Some((life, forgotten)));
                forgotten
            }
        };
        for region in self.regions.iter() {
            region.bury(is_forgotten);
            self.spread_news(&region, None);
        }
    }
}
