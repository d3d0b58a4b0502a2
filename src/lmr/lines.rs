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

/// The lines of a region.
pub(crate) struct Lines {
    lines: RBTree<LineKey, Line>,
    /// Where the next ticket stands.
    next: u64,
    /// Tickets and barriers.
    count: u32,
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
            count: 0,
        }
    }

    /// Gives out a ticket. Others may have news then.
    pub(crate) fn enter(&mut self, request: &Asked, blank: Blank) -> Said {
        let place = LineKey::new(request.wish, request.number);
        let found = self.lines.get(&place);
        // A barrier that is new needs room too. Who takes over from a dead one has the room of that.
        let needed = match found {
            None => 1 + u32::from(place.is_barrier),
            Some(line) => u32::from(!line.has_died()),
        };
        let is_new = found.is_none();
        if self.count + needed > ROOM {
            return refused(ENOMEM);
        }
        if is_new {
            let line = Line {
                barrier: place.is_barrier.then(Barrier::default),
                tickets: RBTree::new(),
            };
            self.lines.insert(blank.line.into_node(place, line));
            self.count += u32::from(place.is_barrier);
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
        self.count += u32::from(matches!(said, Said::Waits | Said::Locked { .. }));
        said
    }

    /// Ends a ticket, if it is there. Others may have news then.
    pub(crate) fn leave(&mut self, place: LineKey, bearer: Bearer, how: End) {
        self.end(place, how, |ticket| ticket.bearer == bearer);
    }

    /// Ends all tickets whose bearers or mappings are gone. Others may have news then.
    pub(crate) fn bury(&mut self, is_gone: impl Fn(Bearer, u64) -> bool) {
        let mut next = self.place_from(None);
        while let Some(place) = next {
            while self.end(place, End::Died, |ticket| {
                is_gone(ticket.bearer, ticket.mapping)
            }) {}
            next = self.place_from(Some(place));
        }
    }

    /// The first place in use, or the first after that one.
    fn place_from(&self, after: Option<LineKey>) -> Option<LineKey> {
        let mut places = self.lines.keys();
        match after {
            None => places.next().copied(),
            Some(after) => {
                let cursor = self.lines.cursor_lower_bound(&after)?;
                let (place, _) = cursor.current();
                if *place == after {
                    cursor.peek_next().map(|(place, _)| *place)
                } else {
                    Some(*place)
                }
            }
        }
    }

    /// Ends the first ticket of a line that `which` chooses. Returns whether there was one.
    fn end(&mut self, place: LineKey, how: End, which: impl Fn(&Ticket) -> bool) -> bool {
        let Some(line) = self.lines.get_mut(&place) else {
            return false;
        };
        let Some(gone) = line.end(how, which) else {
            return false;
        };
        self.count -= gone;
        if !place.is_barrier && line.tickets.is_empty() {
            self.lines.remove(&place);
        }
        true
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
            self.count -= 1;
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

    /// Whether one died with the lock.
    fn has_died(&self) -> bool {
        let first = self.tickets.values().next();
        first.is_some_and(|ticket| ticket.claim.turn == Turn::Died)
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
            if let (Turn::Has { warned }, Said::Waits) = (ticket.claim.turn, ticket.said) {
                ticket.said = Said::Locked { warned };
                ticket.news = News::Fresh;
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

    /// Ends a ticket; returns how many are in line no more.
    fn end(&mut self, how: End, which: impl Fn(&Ticket) -> bool) -> Option<u32> {
        let at = self.find(which)?;
        let ticket = self.tickets.get_mut(&at)?;
        if let (Some(barrier), Said::Waits) = (&mut self.barrier, ticket.said) {
            barrier.leave();
        }
        let rest = ticket.claim.end(how);
        let mut gone = 0;
        if rest == Rest::Itself {
            // Nobody hears of it any more.
            ticket.news = News::Nothing;
        } else {
            self.tickets.remove(&at);
            gone += 1;
        }
        if rest == Rest::Neither {
            let mut tickets = self.tickets.iter();
            let died = tickets.find(|(_, ticket)| ticket.claim.turn == Turn::Died);
            if let Some(died) = died.map(|(at, _)| *at) {
                self.tickets.remove(&died);
                gone += 1;
            }
        }
        if self.barrier.is_none() {
            self.advance();
        }
        Some(gone)
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
