// SPDX-License-Identifier: GPL-2.0

//! Reading and writing a mapped region.
//!
//! The request is checked whole before anything is posted (handle and rights by the session, range
//! here). Chunks of this node are copied, others go through the fabric.
//!
//! The caller's memory may not be present, and its owner may let us wait for it for as long as he likes
//! (FUSE, userfaultfd). So an access stops there, leaves the RNIC, and goes on when the memory has come.

use super::{batch::Batch, mapping::Mapping, places::Found, Lmr};
use crate::{
    errno,
    fabric::{
        batch::{Placed, Works, DIRECT_MAX},
        flight::{Direction, Mover, Part, BUFFER_SIZE},
        qos::tenant::{Tenant, Turn},
        transfer::{Absent, Left, Stop, Transfer},
        Fabric,
    },
    stats::Stats,
    sys::{deadline::Deadline, memory::Memory},
    trace,
    verbs::dma::{DmaArena, DmaPages},
};
use core::ops::Deref;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
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
            moved = absent.moved;
            let fetched = match faults > FAULTS_MAX {
                true => Err(ENOMEM),
                false => absent.fetch(memory),
            };
            if absent.pinned && fetched == Err(ENOMEM) {
                // RLIMIT_MEMLOCK or the pins of other threads leave no room. Slot buffers need no pins.
                memory.fault_in(absent.at, absent.len, absent.writable)?;
                left.copied_to = absent.at.saturating_add(absent.len);
                faults = 0;
            } else {
                fetched?;
            }
            // Nothing is under way, so the memory's owner may take its time.
            left.store_late(memory)?;
        }
        left.store_late(memory)
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

/// Who looks after many accesses, and begins more, without waiting.
pub(crate) struct Looker<'a> {
    pub(crate) tenant: &'a Tenant,
    /// When it may go, by the priority and limits of the tenant.
    pub(crate) turn: &'a mut Turn,
    /// Where requests are put that are posted together.
    pub(crate) works: &'a mut Works,
    /// Memory that some of them may name.
    pub(crate) arena: Option<&'a Arc<DmaArena>>,
    pub(crate) now: Instant<Monotonic>,
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
    /// what is posted has landed, [`Self::ended`] is to be told.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Self::run`].
    pub(crate) fn begin(
        &self,
        lmr: &Lmr,
        mapping: &Arc<Mapping>,
        memory: &Memory,
        looker: &mut Looker<'_>,
    ) -> Result<Begun> {
        let begun = lmr.begin(mapping, self, memory, looker);
        if matches!(&begun, Ok(Begun::Done)) {
            self.ended(mapping, &lmr.stats, None);
        }
        self.at_once(mapping, &lmr.stats, looker.now, begun)
    }

    /// As [`Self::begin`], but it goes with others. Returns nothing if it cannot.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn join(
        &self,
        fabric: &Fabric,
        batch: &mut Batch,
        memory: &Memory,
        looker: &mut Looker<'_>,
    ) -> Result<Option<Placed>> {
        let joined = batch.join(fabric, self, memory, looker);
        self.at_once(batch.mapping(), &fabric.stats, looker.now, joined)
    }

    /// The piece of a region in which it is, if it is short and in one.
    ///
    /// # Errors
    ///
    /// `ERANGE` if it is not in the region.
    pub(super) fn one_piece(&self, layout: &Layout, looker: &Looker<'_>) -> Result<Option<Piece>> {
        let pieces = layout.pieces(self.offset, self.len);
        let mut pieces = pieces.map_err(|_| ERANGE)?;
        let piece = pieces.next().filter(|_| pieces.next().is_none());
        let most = looker.arena.map_or(BUFFER_SIZE, |_| DIRECT_MAX);
        Ok(piece.filter(|piece| piece.len as usize <= most))
    }

    /// All of it, which is at this place.
    pub(super) fn part(&self, place: Place) -> Part {
        Part {
            life: place.life,
            addr: place.addr,
            len: self.len as usize,
            at: 0,
        }
    }

    /// Takes note of an error, unless it is to be tried again.
    fn at_once<T>(
        &self,
        mapping: &Mapping,
        stats: &Stats,
        now: Instant<Monotonic>,
        begun: Result<T>,
    ) -> Result<T> {
        // Signals to whoever looks are not the caller's.
        let error = match begun {
            Err(error) if error != EAGAIN && error != errno::inprogress() => error,
            Err(_) if self.deadline.passed_at(now) => ETIMEDOUT,
            begun => return begun.map_err(|_| EAGAIN),
        };
        self.ended(mapping, stats, Some(error));
        Err(error)
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

impl Looker<'_> {
    /// Whether it may go now.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn may_go(&mut self, access: &Access) -> Result<bool> {
        self.tenant.may_go(self.turn, access.len, access.deadline)
    }
}

/// What became of an access at once.
pub(crate) enum Begun {
    /// It is done.
    Done,
    /// It is the first of a batch, which is to be posted.
    First(Batch, Placed),
    /// Nothing: it takes longer.
    Long,
}

impl Lmr {
    /// Begins an access, or does it, if it is short and of one piece.
    fn begin(
        &self,
        mapping: &Arc<Mapping>,
        access: &Access,
        memory: &Memory,
        looker: &mut Looker<'_>,
    ) -> Result<Begun> {
        let layout = mapping.layout()?;
        if access.len == 0 {
            layout.pieces(access.offset, 0).map_err(|_| ERANGE)?;
            return Ok(Begun::Done);
        }
        let Some(piece) = access.one_piece(&layout, looker)? else {
            return Ok(Begun::Long);
        };
        let places = mapping.look()?;
        match places.find(piece)? {
            // That would keep others waiting.
            Found::Local(_) if access.len as usize > BUFFER_SIZE => Ok(Begun::Long),
            Found::Local(pages) => {
                let absent = self.copy(access.direction, &pages, piece, 0, memory)?;
                Ok(absent.map_or(Begun::Done, |_| Begun::Long))
            }
            Found::Remote(place) => {
                let mover = Mover {
                    fabric: self.fabric(),
                    direction: access.direction,
                    memory,
                    tenant: looker.tenant,
                };
                let part = access.part(place);
                if !looker.may_go(access)? {
                    return Err(EAGAIN);
                }
                let batch =
                    Batch::new(&mover, mapping, layout, places.version, part, looker.arena)?;
                let Some(mut batch) = batch else {
                    return Ok(Begun::Long);
                };
                let placed = batch.add(self.fabric(), memory, part, looker.works)?;
                Ok(Begun::First(batch, placed))
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
