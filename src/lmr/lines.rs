// SPDX-License-Identifier: GPL-2.0

//! Who has, or waits for, the locks and barriers of a region, at its home.
//!
//! A region has as many of either as there are numbers, and each that is in use is a line of tickets
//! (`kite_core::{lock, barrier, ticket}`). A ticket ends with the mapping by which it was asked for. Its
//! bearer is told in the background when what it waited for has come, and until then its place says so.

use crate::sys::payer::Payer;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
};
use kite_core::{
    barrier::{Arrival, Barrier},
    lock::{self, Claim, End, Rest, Turn},
    ticket::{Said, Wish},
    view::Life,
};

/// Tickets and barriers that one region has room for.
const ROOM: u32 = crate::bindings::KITE_TICKETS_MAX;

/// Which lock, or which barrier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LineKey {
    is_barrier: bool,
    number: u64,
}

impl LineKey {
    /// That of a wish, with the number that the user gave it.
    pub(crate) fn new(wish: Wish, number: u64) -> Self {
        Self {
            is_barrier: matches!(wish, Wish::Barrier { .. }),
            number,
        }
    }
}

/// Whose a ticket is, and its number there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bearer {
    pub(crate) life: Life,
    pub(crate) ticket: u64,
}

/// What its bearer is yet to hear of a ticket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum News {
    Nothing,
    /// It waited, and waits no more.
    Fresh,
    /// Somebody is about to tell.
    Told,
}

/// A place in a line.
struct Ticket {
    bearer: Bearer,
    mapping: u64,
    /// Of a barrier: it shares, and has it when all have come.
    claim: Claim,
    said: Said,
    news: News,
}

impl Ticket {
    /// Ends it, in a line with that barrier if any.
    fn end(&mut self, barrier: &mut Option<Barrier>, how: End) -> Rest {
        if let (Some(barrier), Said::Waits) = (barrier, self.said) {
            barrier.leave();
        }
        // Nobody hears of it any more.
        self.news = News::Nothing;
        self.claim.end(how)
    }
}

struct Line {
    /// Nothing if it is a lock.
    barrier: Option<Barrier>,
    /// In the order in which they came.
    tickets: RBTree<u64, Ticket>,
}

/// Memory for a ticket, and for the line if there is none yet.
pub(crate) struct Blank {
    line: RBTreeNodeReservation<LineKey, Line>,
    ticket: RBTreeNodeReservation<u64, Ticket>,
}

impl Blank {
    /// Gets the memory.
    pub(crate) fn new(payer: &Payer) -> Result<Self> {
        payer.pays(|| {
            Ok(Self {
                line: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
                ticket: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
            })
        })
    }
}

/// A ticket that is asked for.
pub(crate) struct Asked {
    pub(crate) bearer: Bearer,
    pub(crate) mapping: u64,
    pub(crate) number: u64,
    pub(crate) wish: Wish,
    pub(crate) waits: bool,
}

impl Asked {
    /// The line that it is for.
    pub(crate) fn key(&self) -> LineKey {
        LineKey::new(self.wish, self.number)
    }
}

/// The lines of a region.
pub(crate) struct Lines {
    lines: RBTree<LineKey, Line>,
    /// Where the next ticket stands.
    next: u64,
    tickets: u32,
    barriers: u32,
}

/// What is said of a ticket that there is not.
pub(crate) fn refused(error: Error) -> Said {
    Said::Refused(error.to_errno().unsigned_abs() as u16)
}

impl Lines {
    /// None.
    pub(crate) fn new() -> Self {
        Self {
            lines: RBTree::new(),
            next: 1,
            tickets: 0,
            barriers: 0,
        }
    }

    /// Gives out a ticket. Others may have news then.
    pub(crate) fn enter(&mut self, request: &Asked, blank: Blank) -> Said {
        let place = request.key();
        let found = self.lines.get(&place);
        // A barrier that is new needs room too. Who takes over from a dead one has the room of that.
        let needed = match found {
            None => 1 + u32::from(place.is_barrier),
            Some(line) => u32::from(!line.is_left_behind()),
        };
        let is_new = found.is_none();
        if self.tickets + self.barriers + needed > ROOM {
            return refused(ENOMEM);
        }
        if is_new {
            let line = Line {
                barrier: place.is_barrier.then(Barrier::default),
                tickets: RBTree::new(),
            };
            self.lines.insert(blank.line.into_node(place, line));
            self.barriers += u32::from(place.is_barrier);
        }
        let at = self.next;
        self.next += 1;
        let Some(line) = self.lines.get_mut(&place) else {
            return refused(EIO);
        };
        let said = match request.wish {
            Wish::Lock { shared } => line.claim(request, shared, at, blank.ticket),
            Wish::Barrier { count } => line.arrive(request, count, at, blank.ticket),
        };
        self.tickets += u32::from(matches!(said, Said::Waits | Said::Locked { .. }));
        said
    }

    /// Ends a ticket, if it is there. Others may have news then.
    pub(crate) fn leave(&mut self, place: LineKey, bearer: Bearer, how: End) {
        let Some(line) = self.lines.get_mut(&place) else {
            return;
        };
        self.tickets -= line.end(bearer, how);
        if line.is_over() {
            self.lines.remove(&place);
        }
    }

    /// Ends all tickets whose bearers or mappings are gone, as `is_gone` says; it is told too whether they
    /// wait still. Others may have news then.
    pub(crate) fn bury(&mut self, is_gone: impl Fn(Bearer, u64, bool) -> bool) {
        if self.tickets == 0 {
            return;
        }
        let mut next = self.lines.cursor_front_mut();
        while let Some(mut at) = next {
            let (_, line) = at.current_mut();
            self.tickets -= line.bury(&is_gone);
            next = if line.is_over() {
                at.remove_current().0
            } else {
                at.move_next()
            };
        }
    }

    /// A node whose tickets in a line have news, of which nobody is about to tell; who asks is.
    pub(crate) fn take_news(&mut self, place: LineKey) -> Option<u32> {
        self.lines.get_mut(&place)?.take_news()
    }

    /// As [`Self::take_news`], in any line.
    pub(crate) fn take_any_news(&mut self) -> Option<(LineKey, u32)> {
        let mut lines = self.lines.iter_mut();
        lines.find_map(|(place, line)| Some((*place, line.take_news()?)))
    }

    /// A ticket of a node that has news, in a line.
    pub(crate) fn news_of(&self, place: LineKey, life: Life) -> Option<(u64, Said)> {
        let line = self.lines.get(&place)?;
        let mut tickets = line.tickets.values();
        let ticket =
            tickets.find(|ticket| ticket.news != News::Nothing && ticket.bearer.life == life)?;
        Some((ticket.bearer.ticket, ticket.said))
    }

    /// The bearer has heard. Who passed a barrier is there no more.
    pub(crate) fn heard(&mut self, place: LineKey, bearer: Bearer) {
        let Some(line) = self.lines.get_mut(&place) else {
            return;
        };
        let Some(at) = line.find(|ticket| ticket.bearer == bearer) else {
            return;
        };
        if place.is_barrier {
            line.tickets.remove(&at);
            self.tickets -= 1;
        } else if let Some(ticket) = line.tickets.get_mut(&at) {
            ticket.news = News::Nothing;
        }
    }
}

impl Line {
    /// Where the first ticket stands that `which` chooses.
    fn find(&self, which: impl Fn(&Ticket) -> bool) -> Option<u64> {
        let mut tickets = self.tickets.iter();
        let found = tickets.find(|(_, ticket)| ticket.claim.turn != Turn::Died && which(ticket));
        found.map(|(at, _)| *at)
    }

    /// Whether there is one that died with the lock, and nobody else.
    fn is_left_behind(&self) -> bool {
        self.died().is_some() && self.tickets.iter().nth(1).is_none()
    }

    /// Where the one stands that died with the lock, if one did: before all others.
    fn died(&self) -> Option<u64> {
        let (at, first) = self.tickets.iter().next()?;
        (first.claim.turn == Turn::Died).then_some(*at)
    }

    fn add(
        &mut self,
        request: &Asked,
        shared: bool,
        at: u64,
        memory: RBTreeNodeReservation<u64, Ticket>,
    ) {
        let ticket = Ticket {
            bearer: request.bearer,
            mapping: request.mapping,
            claim: Claim {
                shared,
                turn: Turn::Waits,
            },
            said: Said::Waits,
            news: News::Nothing,
        };
        self.tickets.insert(memory.into_node(at, ticket));
    }

    fn claim(
        &mut self,
        request: &Asked,
        shared: bool,
        at: u64,
        memory: RBTreeNodeReservation<u64, Ticket>,
    ) -> Said {
        self.add(request, shared, at, memory);
        self.advance();
        let Some(ticket) = self.tickets.get_mut(&at) else {
            return refused(EIO);
        };
        // It hears by the answer.
        ticket.news = News::Nothing;
        let said = ticket.said;
        if said == Said::Waits && !request.waits {
            self.tickets.remove(&at);
            return refused(EAGAIN);
        }
        said
    }

    /// Gives the lock to those whose turn it is.
    fn advance(&mut self) {
        lock::advance(self.tickets.values_mut().map(|ticket| &mut ticket.claim));
        for ticket in self.tickets.values_mut() {
            match (ticket.claim.turn, ticket.said) {
                // Nobody behind it has the lock.
                (Turn::Waits, _) => return,
                (Turn::Has { warned }, Said::Waits) => {
                    (ticket.said, ticket.news) = (Said::Locked { warned }, News::Fresh);
                }
                _ => {}
            }
        }
    }

    fn arrive(
        &mut self,
        request: &Asked,
        count: u32,
        at: u64,
        memory: RBTreeNodeReservation<u64, Ticket>,
    ) -> Said {
        let Some(barrier) = &mut self.barrier else {
            return refused(EIO);
        };
        match barrier.arrive(count) {
            Arrival::OtherCount => refused(EINVAL),
            Arrival::Waits => {
                self.add(request, true, at, memory);
                Said::Waits
            }
            Arrival::Passes(generation) => {
                let said = Said::Passed(generation);
                let waiting = self.tickets.values_mut();
                for ticket in waiting.filter(|ticket| ticket.said == Said::Waits) {
                    (ticket.said, ticket.news) = (said, News::Fresh);
                }
                said
            }
        }
    }

    /// Whether nobody stands in it, or ever will.
    fn is_over(&self) -> bool {
        self.barrier.is_none() && self.tickets.is_empty()
    }

    /// Ends a ticket; returns how many are in line no more.
    fn end(&mut self, bearer: Bearer, how: End) -> u32 {
        let Some(at) = self.find(|ticket| ticket.bearer == bearer) else {
            return 0;
        };
        let before = self.died();
        let Some(ticket) = self.tickets.get_mut(&at) else {
            return 0;
        };
        let rest = ticket.end(&mut self.barrier, how);
        let mut gone = 0;
        if rest != Rest::Itself {
            self.tickets.remove(&at);
            gone += 1;
        }
        if let (Rest::Neither, Some(died)) = (rest, before) {
            self.tickets.remove(&died);
            gone += 1;
        }
        self.go_on();
        gone
    }

    /// Ends all tickets that are gone; returns how many are in line no more.
    fn bury(&mut self, is_gone: impl Fn(Bearer, u64, bool) -> bool) -> u32 {
        let mut gone = 0;
        let mut next = self.tickets.cursor_front_mut();
        while let Some(mut at) = next {
            let (_, ticket) = at.current_mut();
            let waits = ticket.said == Said::Waits;
            let goes =
                ticket.claim.turn != Turn::Died && is_gone(ticket.bearer, ticket.mapping, waits);
            next = if goes && ticket.end(&mut self.barrier, End::Died) != Rest::Itself {
                gone += 1;
                at.remove_current().0
            } else {
                at.move_next()
            };
        }
        self.go_on();
        gone
    }

    /// After some have ended.
    fn go_on(&mut self) {
        if self.barrier.is_none() {
            self.advance();
        }
    }

    fn take_news(&mut self) -> Option<u32> {
        let fresh = |ticket: &&mut Ticket| ticket.news == News::Fresh;
        let first = self.tickets.values_mut().find(fresh)?.bearer.life.node;
        let all = self.tickets.values_mut().filter(fresh);
        for ticket in all.filter(|ticket| ticket.bearer.life.node == first) {
            ticket.news = News::Told;
        }
        Some(first)
    }
}
