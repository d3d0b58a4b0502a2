// SPDX-License-Identifier: GPL-2.0

//! Standing in line for the locks of a region, and at its barriers (LITE, section 7.2).
//!
//! The home gives out tickets ([`super::lines`]) and says at once what it can; who has to wait is told when
//! the time has come. A request whose fate is not known is taken back in the background, so nobody holds a
//! lock without knowing it: `kite_core::lock` tries out what can happen. The tickets of a node that died end
//! when no other node can be reached by it any more, since until then it may believe that it has its locks.

use super::{
    lines::{Asked, Bearer, LineKey},
    mapping::Mapping,
    reclaim::Haste,
    region::Region,
    Answer, Lmr,
};
use crate::{
    errno,
    fabric::peer::Numbered,
    sys::{deadline::Deadline, event::Event, thread::spin},
    trace,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, SpinLock,
    },
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
        pin_init!(Self { table <- new_spinlock!(RBTree::new()) })
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
        drop(mapping.enter()?);
        let home = self.cluster.life_of(mapping.home)?;
        let numbered = self.number_for(home, wanted.deadline)?;
        let ticket = Ticket {
            home,
            region: mapping.region,
            number: match &numbered {
                Some(numbered) => numbered.number,
                None => self.new_id(),
            },
            line: wanted.number,
            wish: wanted.wish,
        };
        let waiting = self.waiters.add(&ticket)?;
        let said = self.ask_for(&ticket, mapping.id, wanted, numbered)?;
        let said = match said {
            Said::Waits => self.await_turn(mapping, &ticket, &waiting.waiter, wanted.deadline)?,
            said => said,
        };
        match said {
            Said::Refused(errno) => Err(refusal(errno)),
            said => Ok((ticket, said)),
        }
    }

    /// A number for a request that another node must not do twice; nothing if it is this one.
    fn number_for(&self, home: Life, deadline: Deadline) -> Result<Option<Numbered>> {
        if self.cluster.node()? == home.node {
            return Ok(None);
        }
        let peer = self.fabric().peer_in(home)?;
        self.settle(deadline, || peer.number()).map(Some)
    }

    /// Asks the home for a ticket. If it is not known what came of it, it is taken back.
    fn ask_for(
        self: &Arc<Self>,
        ticket: &Ticket,
        mapping: u64,
        wanted: &Wanted,
        numbered: Option<Numbered>,
    ) -> Result<Said> {
        let request = Request::Enter {
            ticket: ticket.number,
            region: ticket.region,
            mapping,
            line: ticket.line,
            wish: ticket.wish,
            waits: wanted.waits,
        };
        let Some(numbered) = numbered else {
            return self.enter(ticket.home, &request);
        };
        let epoch = self.cluster.epoch();
        let peer = &numbered.peer;
        let answer = self
            .fabric()
            .call_peer(peer, &request, epoch, wanted.deadline);
        let said = answer.and_then(|answer| match Answer(answer).reply()? {
            Reply::Was { word } => Said::from_word(word).ok_or(EIO),
            _ => Err(EIO),
        });
        // Its number is not used again before that is certain.
        said.inspect_err(|_| self.end_ticket_later(*ticket, false, Some(numbered)))
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
        spin(|| {
            self.fabric().look();
            waiter.said().is_some()
        });
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
                let _ = self.end_ticket(ticket, false, Deadline::after_ms(LEAVE_MS));
                return Err(error);
            }
        }
    }

    /// Gives a lock back.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the region was freed, `EHOSTDOWN` if its home died. If the home does not answer in time it
    /// is told later.
    pub(crate) fn unlock(self: &Arc<Self>, ticket: &Ticket, deadline: Deadline) -> Result {
        match self.end_ticket(ticket, true, deadline) {
            Err(error) if error == ENOENT => Err(errno::stale()),
            Err(error) if error == errno::hostdown() => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends a ticket. If the home does not answer in time it is told later.
    fn end_ticket(self: &Arc<Self>, ticket: &Ticket, unlocks: bool, deadline: Deadline) -> Result {
        if !self.cluster.has(ticket.home) {
            return Err(errno::hostdown());
        }
        let asked = self.ask(ticket.home.node, &ticket.leave(unlocks), deadline);
        let left = asked.and_then(|answer| answer.done());
        left.inspect_err(|_| self.end_ticket_later(*ticket, unlocks, None))
    }

    /// Ends a ticket in the background. Its number is kept until then.
    fn end_ticket_later(self: &Arc<Self>, ticket: Ticket, unlocks: bool, number: Option<Numbered>) {
        self.errand(ticket.home.node, Haste::Awaited, move |lmr, life| {
            if life == ticket.home {
                lmr.insist(life, &ticket.leave(unlocks));
            }
            drop(number);
        });
    }
}

impl Ticket {
    fn leave(&self, unlocks: bool) -> Request<'static> {
        Request::Leave {
            ticket: self.number,
            region: self.region,
            line: self.line,
            wish: self.wish,
            unlocks,
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
    /// Gives a node, which may be this one, a ticket; [`Self::enter_once`] is to see that it is done once.
    fn enter(self: &Arc<Self>, from: Life, request: &Request<'_>) -> Result<Said> {
        let Request::Enter {
            ticket,
            region,
            mapping,
            line,
            wish,
            waits,
        } = *request
        else {
            return Err(EINVAL);
        };
        let region = match self.regions.get(region) {
            Ok(region) => region,
            Err(error) => return Ok(super::lines::refused(error)),
        };
        let bearer = Bearer { life: from, ticket };
        let said = region.enter(&Asked {
            bearer,
            mapping,
            number: line,
            wish,
            waits,
        });
        self.spread_news(&region, Some(LineKey::new(wish, line)));
        Ok(said)
    }

    /// Answers a peer that asks for a ticket.
    pub(super) fn serve_enter(
        self: &Arc<Self>,
        node: u32,
        ticket: u64,
        request: &Request<'_>,
    ) -> Result<Reply<'static>> {
        let peer = self.fabric().peer(node)?;
        let word = peer.once(ticket, || {
            self.enter(peer.life(), request).map(|said| said.to_word())
        })?;
        Ok(Reply::Was { word })
    }

    /// Ends a ticket of a node, which may be this one, and sees to it that it comes into being no more.
    pub(super) fn serve_leave(
        self: &Arc<Self>,
        node: u32,
        (ticket, region): (u64, u64),
        line: LineKey,
        unlocks: bool,
    ) -> Result {
        let life = self.cluster.life_of(node)?;
        if self.cluster.node() != Ok(node) {
            let peer = self.fabric().peer_in(life)?;
            // It may be too late for that too: then it was answered.
            let _ = peer.once(ticket, || Ok(Said::Never.to_word()));
        }
        let how = if unlocks { End::Unlocked } else { End::GivenUp };
        let region = self.regions.get(region)?;
        region.leave(line, Bearer { life, ticket }, how);
        self.spread_news(&region, Some(line));
        Ok(())
    }

    /// Takes word from a home: what a ticket waited for has come.
    pub(super) fn serve_granted(&self, home: u32, ticket: u64, said: Said) -> Result {
        let home = self.cluster.life_of(home)?;
        self.waiters.tell(home, ticket, said);
        Ok(())
    }

    /// Tells, in the background, those whose tickets have what they waited for: of one line, or of all.
    pub(super) fn spread_news(self: &Arc<Self>, region: &Arc<Region>, line: Option<LineKey>) {
        while let Some((line, node)) = region.take_news(line) {
            let region = region.clone();
            self.errand(node, Haste::Awaited, move |lmr, life| {
                while let Some((ticket, said)) = region.news_of(line, life) {
                    lmr.insist(life, &Request::Granted { ticket, said });
                    region.heard(line, Bearer { life, ticket });
                }
            });
        }
    }

    /// Ends the tickets of nodes that are out of the view, once all have heard that they are.
    pub(super) fn bury_tickets(self: &Arc<Self>) {
        for region in self.regions.iter() {
            region.bury(|life| !self.cluster.has(life));
            self.spread_news(&region, None);
        }
    }
}
