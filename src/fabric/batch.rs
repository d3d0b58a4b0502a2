// SPDX-License-Identifier: GPL-2.0

//! Short parts that are posted together, with one doorbell (KRCORE, section 4.4).
//!
//! They go to one peer, share a slot with its buffer and the use of a connection, and end together: what each
//! request would look up and count by itself, which takes longer than the request, is done once for all.
//! What is in memory that is mapped for the RNIC goes straight from and to there.

use super::{
    conn::Conn,
    cut::{Bounds, Cutter},
    flight::{Direction, Flight, Mover, Part, Permit, Watched},
    sender::{Class, Held, BUFFER_SIZE},
    Fabric,
};
use crate::{
    sys::memory::Memory,
    verbs::{
        dma::DmaArena,
        work::{Remote, Sge, ShortWork, Verb, SHORT_SGES},
    },
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::view::Life;

/// Requests of a batch.
pub(crate) const MOST: usize = 16;

/// Longest part that goes straight from or to mapped memory with others.
pub(crate) const DIRECT_MAX: usize = 1 << 16;

/// Parts begin at multiples of this in the buffer, so that no two share what an RNIC writes at once.
const ALIGN: usize = 64;

/// Room for the requests of a batch.
#[derive(Default)]
pub(crate) struct Works(KVec<ShortWork>);

impl Works {
    /// Empty.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(KVec::with_capacity(MOST, GFP_KERNEL)?))
    }
}

/// Where a part is in the buffer of its batch.
#[derive(Clone, Copy)]
pub(crate) struct Placed {
    pub(crate) part: Part,
    /// Nothing if it is not there, but in mapped memory.
    pub(crate) place: Option<usize>,
    /// Requests of the batch up to the last of its own.
    pub(crate) upto: u32,
}

/// A batch to which parts are added. Dropping it gives them up.
pub(crate) struct Batch<G: Permit> {
    direction: Direction,
    bounds: Bounds,
    /// Its part is all of them.
    flight: Flight<G>,
    /// Bytes of the buffer that are taken.
    filled: usize,
    /// Requests.
    count: usize,
}

impl<G: Permit> Batch<G> {
    /// One for parts to the peer that this first one goes to, by `conn`, some of which may be in `arena`. There is
    /// none if the first is too long. Waits for nothing.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; those of `permit`, and as for [`Conn::begin`].
    pub(crate) fn new(
        mover: &Mover<'_>,
        conn: &Arc<Conn>,
        first: Part,
        arena: Option<&Arc<DmaArena>>,
        permit: impl FnOnce() -> Result<G>,
    ) -> Result<Option<Self>> {
        let (direction, mut bounds) = (mover.direction, mover.bounds(conn));
        bounds.entries = bounds.entries.min(SHORT_SGES);
        let entries = arena.map_or(1, |_| first.len / PAGE_SIZE + 2);
        let needed = bounds.requests(entries, first.len);
        if needed > MOST {
            return Ok(None);
        }
        let measure = mover.tenant.measure(first.len);
        let usage = conn.begin_batch(needed as u32, MOST as u32, mover.fabric)?;
        let mut claim = mover.fabric.sender().claim(Class::Data, None)?;
        if let Some(arena) = arena {
            claim.hold(Held::Arena(arena.clone()));
        }
        let permit = permit()?;
        let part = Part { len: 0, ..first };
        let flight = Flight {
            claim,
            usage,
            permit,
            part,
            measure,
        };
        Ok(Some(Self {
            direction,
            bounds,
            flight,
            filled: 0,
            count: 0,
        }))
    }

    /// Which way its parts go.
    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    /// To whom.
    pub(crate) fn life(&self) -> Life {
        self.flight.part.life
    }

    /// What allows them.
    pub(crate) fn permit(&self) -> &G {
        &self.flight.permit
    }

    /// Whether there is room for `len` bytes of `memory`.
    pub(crate) fn has_room(&self, memory: &Memory, len: usize) -> bool {
        let entries = match self.arena(memory, len) {
            Some(_) if len <= DIRECT_MAX => len / PAGE_SIZE + 2,
            None if len <= BUFFER_SIZE - self.filled => 1,
            _ => return false,
        };
        self.count + self.bounds.requests(entries, len) <= self.flight.usage.count as usize
    }

    /// Whether it is to be posted without others: there is no room, or it is measured how long it takes.
    pub(crate) fn is_full(&self) -> bool {
        let most = self.flight.usage.count as usize;
        self.flight.measure.is_some() || self.count == most || self.filled == BUFFER_SIZE
    }

    /// The arena with `len` bytes of `memory`, and where they begin there, if they go straight from or to it.
    fn arena(&self, memory: &Memory, len: usize) -> Option<(&DmaArena, usize)> {
        let Flight { claim, usage, .. } = &self.flight;
        let straight = self.direction == Direction::Read || len > usage.inline_max();
        let arena = claim.arena().filter(|_| straight)?;
        let (_, base) = memory.pinned().filter(|(pinned, _)| arena.is(pinned))?;
        Some((arena, base))
    }

    /// Adds a part for which there is room, and copies what is to be written, unless it goes straight.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if the memory is not present; `EFAULT`; `EINVAL` if there is no room.
    pub(crate) fn add(
        &mut self,
        fabric: &Fabric,
        memory: &Memory,
        part: Part,
        works: &mut Works,
    ) -> Result<Placed> {
        if !self.has_room(memory, part.len) {
            return Err(EINVAL);
        }
        let remote = Remote {
            addr: part.addr,
            key: self.flight.usage.key,
        };
        let (count, place) = match self.arena(memory, part.len) {
            Some((arena, base)) => {
                let at = base.wrapping_add(part.at);
                let sges = arena.sges(fabric.local_key(), at, part.len).ok_or(EFAULT)?;
                let verb = self.direction.verb();
                (self.cut(verb, sges, remote, works)?, None)
            }
            None => {
                let (verb, sge) = self.copy(fabric, memory, part)?;
                let count = self.cut(verb, Some(sge).into_iter(), remote, works)?;
                (count, Some(self.filled))
            }
        };
        if let Some(place) = place {
            self.filled = (place + part.len).next_multiple_of(ALIGN).min(BUFFER_SIZE);
        }
        self.count += count;
        self.flight.part.len += part.len;
        let upto = self.count as u32;
        Ok(Placed { part, place, upto })
    }

    /// Copies what is to be written to the next place in the buffer.
    fn copy(&self, fabric: &Fabric, memory: &Memory, part: Part) -> Result<(Verb, Sge)> {
        let (place, Flight { claim, usage, .. }) = (self.filled, &self.flight);
        if self.direction == Direction::Write {
            memory.try_copy_to(claim.buffer(), place, part.at, part.len)?;
        }
        let request = self
            .direction
            .request(fabric, usage, claim, place, part.len);
        request.ok_or(EINVAL)
    }

    /// Makes requests for what is in these entries, and returns how many.
    fn cut(
        &self,
        verb: Verb,
        entries: impl Iterator<Item = Sge>,
        mut remote: Remote,
        works: &mut Works,
    ) -> Result<usize> {
        let (wr_id, before) = (self.flight.claim.wr_id(), works.0.len());
        let mut entries = Cutter::new(entries, self.bounds);
        let mut room = [Sge::new(0, 0, 0); SHORT_SGES];
        loop {
            let sges = entries.next(&mut room);
            if sges.is_empty() {
                return Ok(works.0.len() - before);
            }
            // There is room, as there are no more requests than were reckoned.
            let work = ShortWork::new(verb, wr_id, sges, remote);
            works.0.push(work, GFP_ATOMIC)?;
            remote.addr += sges.iter().map(|sge| u64::from(sge.len())).sum::<u64>();
        }
    }

    /// Posts them.
    pub(crate) fn post(
        mut self,
        fabric: &Fabric,
        works: &mut Works,
        now: Instant<Monotonic>,
    ) -> Watched<G> {
        let Flight { claim, usage, .. } = &mut self.flight;
        usage.keep(self.count as u32);
        claim.buffer().for_device(self.filled);
        claim.before_post(self.count as u32);
        // SAFETY: The claim has what they name until they complete.
        let posted = unsafe { usage.channel.qp().post_all(&mut works.0) };
        for work in works.0.iter().skip(posted) {
            fabric.sender().refused(work.wr_id());
        }
        works.0.clear();
        Watched::new(self.flight, now)
    }
}
