// SPDX-License-Identifier: GPL-2.0

//! Reading and writing a mapped region.
//!
//! The request is checked whole before anything is posted (handle and rights by the session, range
//! here). Chunks of this node are copied, others go through the fabric.
//!
//! The caller's memory may not be present, and its owner may let us wait for it for as long as he likes
//! (FUSE, userfaultfd). So an access stops there, leaves the RNIC, and goes on when the memory has come.

use super::{
    mapping::{KeptPass, Mapping},
    places::Found,
    Lmr,
};
use crate::{
    errno,
    fabric::{
        flight::{Direction, Mover, Part, Watched, BUFFER_SIZE},
        plug::Round,
        qos::tenant::{Tenant, Turn},
        transfer::{Absent, Left, Stop, Transfer},
    },
    stats::Stats,
    sys::{deadline::Deadline, memory::Memory},
    trace,
    verbs::dma::DmaPages,
};
use core::ops::Deref;
use kernel::{page::PAGE_SIZE, prelude::*, sync::Arc};
use kite_core::{
    layout::{Layout, Piece},
    wire::Place,
};

/// Bytes that are copied while parts are under way.
const COPIED_MAX: usize = 4 << 20;

/// Times in a row that the caller's memory may go away between being made present and being used.
const FAULTS_MAX: u32 = 16;

/// Part of a region.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Bytes to move between parts of a region, and as many of a buffer, which has them one after the other.
pub(crate) struct Moving<'a> {
    pub(crate) direction: Direction,
    pub(crate) spans: &'a [Span],
    pub(crate) deadline: Deadline,
    pub(crate) tenant: &'a Tenant,
}

impl Moving<'_> {
    /// Moves them. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_rw` in `include/uapi/kite.h` says.
    pub(crate) fn run<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        mapping: &Mapping,
        memory: &Memory,
    ) -> Result {
        let mut left = Left::default();
        let (mut moved, mut faults) = (0, 0);
        loop {
            let attempt = enter()?.access(mapping, self, moved, memory, &mut left);
            let absent = match attempt {
                Ok(()) => break,
                Err(Stop::Absent(absent)) => absent,
                Err(Stop::Held { due, moved: done }) => {
                    self.tenant.wait(due, self.deadline)?;
                    left.paid += due;
                    moved = done;
                    continue;
                }
                Err(Stop::Moved { moved: done }) => {
                    mapping.await_places(self.deadline)?;
                    moved = done;
                    continue;
                }
                Err(Stop::Failed(error)) => return Err(error),
            };
            faults = if absent.moved > moved { 1 } else { faults + 1 };
            if faults > FAULTS_MAX {
                return Err(ENOMEM);
            }
            moved = absent.moved;
            absent.fetch(memory)?;
        }
        left.late.iter().try_for_each(|late| late.store(memory))
    }

    /// The pieces of the region, each with its place in the buffer, but for the first `moved` bytes.
    ///
    /// # Errors
    ///
    /// `ERANGE` if not all are in the region.
    fn pieces<'a>(
        &'a self,
        layout: &'a Layout,
        moved: usize,
    ) -> Result<impl Iterator<Item = (Piece, usize)> + 'a> {
        for span in self.spans {
            layout.pieces(span.offset, span.len).map_err(|_| ERANGE)?;
        }
        let mut start = 0;
        Ok(self.spans.iter().flat_map(move |span| {
            let done = (moved as u64).saturating_sub(start).min(span.len);
            let at = (start + done) as usize;
            start += span.len;
            let pieces = layout.pieces(span.offset + done, span.len - done);
            let placed = move |piece: Piece| (piece, at + piece.at as usize);
            pieces.into_iter().flatten().map(placed)
        }))
    }
}

/// Part of a region, and a deadline.
pub(crate) struct Access {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
}

impl Access {
    /// Moves bytes between a region and `memory`. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_rw` in `include/uapi/kite.h` says.
    pub(crate) fn run<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        mapping: &Mapping,
        memory: &Memory,
        tenant: &Tenant,
        stats: &Stats,
    ) -> Result {
        let result = self.transfer(enter, mapping, memory, tenant);
        self.ended(mapping, stats, result.err());
        result
    }

    /// Takes note of its end, by an error or without.
    pub(crate) fn ended(&self, mapping: &Mapping, stats: &Stats, error: Option<Error>) {
        self.count(stats, error.is_none());
        trace::access(
            self.direction == Direction::Write,
            mapping.home,
            mapping.region,
            self.offset,
            self.len,
            error.map_or(0, Error::to_errno),
        );
    }

    /// Begins to move bytes between a region and `memory`, which has to be present, without waiting. When
    /// what flies has landed, [`Self::ended`] is to be told.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Self::run`].
    pub(crate) fn begin(
        &self,
        lmr: &Lmr,
        mapping: &Arc<Mapping>,
        memory: &Memory,
        (tenant, turn): (&Tenant, &mut Turn),
        round: &mut Round<'_>,
    ) -> Result<Begun> {
        let begun = lmr.begin(mapping, self, memory, (tenant, turn), round);
        // Signals to whoever looks are not the caller's.
        let in_time = |error| match error {
            error if error != EAGAIN && error != errno::inprogress() => error,
            _ if self.deadline.passed_at(round.now) => ETIMEDOUT,
            _ => EAGAIN,
        };
        let begun = begun.map_err(in_time);
        match &begun {
            Ok(Begun::Done) => self.ended(mapping, &lmr.stats, None),
            Err(error) if *error != EAGAIN => self.ended(mapping, &lmr.stats, Some(*error)),
            _ => {}
        }
        begun
    }

    /// As [`Self::run`], for what is no access of a user.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn transfer<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        mapping: &Mapping,
        memory: &Memory,
        tenant: &Tenant,
    ) -> Result {
        let moving = Moving {
            direction: self.direction,
            spans: &[Span {
                offset: self.offset,
                len: self.len,
            }],
            deadline: self.deadline,
            tenant,
        };
        moving.run(enter, mapping, memory)
    }

    fn count(&self, stats: &Stats, done: bool) {
        let (operations, bytes) = match self.direction {
            Direction::Read => (&stats.reads, &stats.read_bytes),
            Direction::Write => (&stats.writes, &stats.write_bytes),
        };
        if done {
            operations.add(1);
            bytes.add(self.len);
        } else {
            stats.errors.add(1);
        }
    }
}

/// What became of an access at once.
pub(crate) enum Begun {
    /// It is done.
    Done,
    /// It was posted.
    Flying(Watched<KeptPass>),
    /// Nothing: it takes longer.
    Long,
}

/// Has a short part posted at the end of the round, unless it would have to wait for anything.
fn post(
    mover: &Mover<'_>,
    mapping: &Arc<Mapping>,
    version: u32,
    part: Part,
    round: &mut Round<'_>,
) -> Result<Begun> {
    let peer = mover.fabric.peer_in(part.life)?;
    let conn = peer.pick(mover.tenant.share())?;
    let permit = || mapping.keep_pass(version);
    let flight = mover.launch_plugged(&conn, part, permit, round.plug())?;
    let watched = flight.map(|flight| Watched::new(flight, round.now));
    watched.map(Begun::Flying).ok_or(EAGAIN)
}

impl Lmr {
    /// Posts an access, or does it, if it is short and of one piece.
    fn begin(
        &self,
        mapping: &Arc<Mapping>,
        access: &Access,
        memory: &Memory,
        (tenant, turn): (&Tenant, &mut Turn),
        round: &mut Round<'_>,
    ) -> Result<Begun> {
        let mut pieces = mapping
            .layout()?
            .pieces(access.offset, access.len)
            .map_err(|_| ERANGE)?;
        let Some(piece) = pieces.next() else {
            return Ok(Begun::Done);
        };
        let len = piece.len as usize;
        if pieces.next().is_some() || len > BUFFER_SIZE {
            return Ok(Begun::Long);
        }
        let places = mapping.look()?;
        match places.find(piece)? {
            Found::Local(pages) => {
                let absent = self.copy(access.direction, &pages, piece, 0, memory)?;
                Ok(absent.map_or(Begun::Done, |_| Begun::Long))
            }
            Found::Remote(Place { life, addr }) => {
                let part = Part {
                    life,
                    addr,
                    len,
                    at: 0,
                };
                let mover = Mover {
                    fabric: self.fabric(),
                    direction: access.direction,
                    memory,
                    tenant,
                };
                if !tenant.may_go(turn, access.len, access.deadline)? {
                    return Err(EAGAIN);
                }
                post(&mover, mapping, places.version, part, round)
            }
        }
    }

    /// Moves bytes but for the first `moved`.
    fn access(
        &self,
        mapping: &Mapping,
        moving: &Moving<'_>,
        moved: usize,
        memory: &Memory,
        left: &mut Left,
    ) -> Result<(), Stop> {
        let layout = mapping.layout()?;
        let (direction, deadline) = (moving.direction, moving.deadline);
        let version = mapping
            .look()
            .map_err(|error| Stop::new(error, moved))?
            .version;
        let permit = || mapping.pass(version);
        let mover = Mover {
            fabric: self.fabric(),
            direction,
            memory,
            tenant: moving.tenant,
        };
        let mut transfer = Transfer::new(mover, deadline, permit, left);
        let mut copied = 0;
        for (piece, at) in moving.pieces(&layout, moved)? {
            let len = piece.len as usize;
            // Who ends the mapping, or moves the region, waits for this.
            let places = match mapping.look_at(version) {
                Ok(places) => places,
                Err(error) => {
                    transfer.land_all()?;
                    return Err(Stop::new(error, at));
                }
            };
            match places.find(piece)? {
                Found::Remote(place) => {
                    drop(places);
                    transfer.add(Part {
                        life: place.life,
                        addr: place.addr,
                        len,
                        at,
                    })?;
                }
                Found::Local(pages) => {
                    deadline.check()?;
                    copied += len;
                    if copied > COPIED_MAX {
                        // Others need what is held for parts that are under way.
                        transfer.land_all()?;
                        copied = len;
                    }
                    if let Some(absent) = self.copy(direction, &pages, piece, at, memory)? {
                        transfer.land_all()?;
                        return Err(Stop::Absent(absent));
                    }
                }
            }
        }
        transfer.land_all()
    }

    /// Copies between memory of this node and the caller's, page by page, until some of that is absent.
    /// The mapping may end meanwhile; the memory is not reused before we let go of it.
    fn copy(
        &self,
        direction: Direction,
        pages: &DmaPages,
        piece: Piece,
        at: usize,
        memory: &Memory,
    ) -> Result<Option<Absent>> {
        for done in (0..piece.len as usize).step_by(PAGE_SIZE) {
            let (offset, at) = (piece.offset as usize + done, at + done);
            let len = PAGE_SIZE.min(piece.len as usize - done);
            let copied = match direction {
                Direction::Write => memory.try_copy_to(pages, offset, at, len),
                Direction::Read => memory.try_copy_from(pages, offset, at, len),
            };
            match copied {
                Ok(()) => self.stats.local_bytes.add(len as u64),
                Err(error) if error == EAGAIN => {
                    return Ok(Some(Absent {
                        at,
                        len,
                        writable: direction == Direction::Read,
                        pinned: false,
                        moved: at,
                    }))
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}
