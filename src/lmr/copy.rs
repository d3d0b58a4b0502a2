// SPDX-License-Identifier: GPL-2.0

//! Setting the bytes of a region, and copying between regions (LITE: `LT_memset`, `LT_memcpy`,
//! `LT_memmove`).
//!
//! What can be done where the memory is, is done there, by the processor of the node that lends it: it is
//! asked for one piece at a time, as for an atomic operation ([`super::atomic`]). Bytes that go from one other
//! node to another are pushed by the one that has them ([`super::push`]).

use super::{
    io::Access,
    lease::{Key, Lent},
    mapping::Mapping,
    places::Found,
    Lmr,
};
use crate::{
    errno,
    fabric::{flight::Direction, qos::tenant::Tenant},
    stats::Stats,
    sys::{deadline::Deadline, memory::Memory},
    trace,
};
use core::ops::Deref;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{
    copy::{Place, Step, Steps},
    layout::Piece,
    wire::{Request, Span, PUSH},
};

/// Most bytes that a node is asked to copy, or to set, at a time: other numbered requests of the asking node wait
/// meanwhile.
const STEP_MAX: u32 = 64 << 10;
const FILL_MAX: u32 = 256 << 10;

/// Bytes to set.
pub(crate) struct Fill {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) byte: u8,
    pub(crate) deadline: Deadline,
}

/// One end of a copy.
#[derive(Clone, Copy)]
pub(crate) struct End<'a> {
    pub(crate) mapping: &'a Arc<Mapping>,
    pub(crate) offset: u64,
}

/// Bytes to copy.
pub(crate) struct Copy<'a> {
    pub(crate) from: End<'a>,
    pub(crate) to: End<'a>,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
    pub(crate) tenant: &'a Tenant,
}

impl Fill {
    /// Sets the bytes of a mapped region. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_set` in `include/uapi/kite.h` says.
    pub(crate) fn run<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        mapping: &Arc<Mapping>,
        tenant: &Tenant,
        stats: &Stats,
    ) -> Result {
        let result = self.try_run(enter, mapping, tenant);
        if result.is_ok() {
            stats.sets.add(1);
            stats.set_bytes.add(self.len);
        } else {
            stats.errors.add(1);
        }
        trace::set(
            mapping.home,
            mapping.region,
            self.offset,
            self.len,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn try_run<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        mapping: &Arc<Mapping>,
        tenant: &Tenant,
    ) -> Result {
        drop(enter()?);
        let layout = mapping.layout()?;
        let pieces = layout.pieces(self.offset, self.len).map_err(|_| ERANGE)?;
        for piece in pieces {
            for done in (0..piece.len).step_by(FILL_MAX as usize) {
                self.deadline.check()?;
                let part = Piece {
                    offset: piece.offset + done,
                    len: FILL_MAX.min(piece.len - done),
                    ..piece
                };
                if mapping.again(self.deadline, || mapping.is_elsewhere(part))? {
                    tenant.wait(u64::from(part.len), self.deadline)?;
                }
                mapping.again(self.deadline, || self.fill(&*enter()?, mapping, part))?;
            }
        }
        Ok(())
    }

    fn fill(&self, lmr: &Arc<Lmr>, mapping: &Arc<Mapping>, part: Piece) -> Result {
        let (len, byte) = (part.len, self.byte);
        // Our own memory stays while we are inside.
        let places = mapping.look()?;
        match places.find(part)? {
            Found::Local(chunk) => {
                chunk.fill(part.offset as usize, len as usize, byte)?;
                lmr.stats.local_bytes.add(len.into());
                Ok(())
            }
            Found::Remote(place) => {
                let asking = mapping.begin_asking()?;
                drop(places);
                let at = span(mapping, place.addr, part);
                let answer =
                    lmr.ask_numbered(asking, (place.life, 0), self.deadline, |number| {
                        Request::Fill {
                            number,
                            at,
                            len,
                            byte,
                        }
                    })?;
                answer.done()
            }
        }
    }
}

/// A piece as the node that lends it knows it; it is at `addr` there.
fn span(mapping: &Mapping, addr: u64, piece: Piece) -> Span {
    Span {
        home: mapping.home,
        region: mapping.region,
        chunk: addr - u64::from(piece.offset),
        offset: piece.offset,
    }
}

impl Copy<'_> {
    /// Copies between mapped regions. The service is entered by `enter`.
    ///
    /// # Errors
    ///
    /// As `struct kite_copy` in `include/uapi/kite.h` says.
    pub(crate) fn run<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        stats: &Stats,
    ) -> Result {
        let result = self.try_run(enter, stats);
        if result.is_ok() {
            stats.copies.add(1);
            stats.copy_bytes.add(self.len);
        } else {
            stats.errors.add(1);
        }
        let (from, to) = (self.from.mapping, self.to.mapping);
        trace::copy(
            from.home,
            from.region,
            to.home,
            to.region,
            self.len,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn try_run<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        stats: &Stats,
    ) -> Result {
        drop(enter()?);
        let (from, to) = (self.from.mapping, self.to.mapping);
        let same = (from.home, from.region) == (to.home, to.region);
        let steps = Steps::new(
            self.from.place()?,
            self.to.place()?,
            self.len,
            same,
            STEP_MAX,
        );
        let mut bounce = KVec::new();
        for step in steps.map_err(|_| ERANGE)? {
            self.deadline.check()?;
            if self.again(|| self.is_elsewhere(step))? {
                self.tenant.wait(u64::from(step.len), self.deadline)?;
            }
            if !self.again(|| self.copy_there(&*enter()?, step))? {
                self.copy_by_us(&enter, step, &mut bounce, stats)?;
            }
        }
        Ok(())
    }

    /// Calls `f`, and again when either region has moved meanwhile.
    fn again<T>(&self, mut f: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match f() {
                Err(error) if error == errno::inprogress() => {
                    self.from.mapping.await_places(self.deadline)?;
                    self.to.mapping.await_places(self.deadline)?;
                }
                result => return result,
            }
        }
    }

    /// Whether others do it. What comes from or to this node asks by itself.
    fn is_elsewhere(&self, step: Step) -> Result<bool> {
        let (from, to) = (self.from, self.to);
        Ok(from.mapping.is_elsewhere(from.piece(step)?)?
            && to.mapping.is_elsewhere(to.piece(step)?)?)
    }

    /// Copies what is all at this node, or all at others. Returns whether it is.
    fn copy_there(&self, lmr: &Arc<Lmr>, step: Step) -> Result<bool> {
        let (from_piece, to_piece) = (self.from.piece(step)?, self.to.piece(step)?);
        // Our own memory stays while we are inside.
        let (sources, targets) = (self.from.mapping.look()?, self.to.mapping.look()?);
        match (sources.find(from_piece)?, targets.find(to_piece)?) {
            (Found::Local(from), Found::Local(to)) => {
                copy((&from, from_piece.offset), (&to, to_piece.offset), step.len)?;
                lmr.stats.local_bytes.add(step.len.into());
                Ok(true)
            }
            (Found::Remote(source), Found::Remote(target)) => {
                let reading = self.from.mapping.begin_asking()?;
                let asking = (reading, self.to.mapping.begin_asking()?);
                drop((sources, targets));
                let from = span(self.from.mapping, source.addr, from_piece);
                let to = span(self.to.mapping, target.addr, to_piece);
                let (len, life) = (step.len, source.life);
                let answer = if life == target.life {
                    lmr.ask_numbered(asking, (life, 0), self.deadline, |number| Request::Copy {
                        number,
                        from,
                        to,
                        len,
                    })
                } else {
                    lmr.ask_numbered(asking, (life, PUSH), self.deadline, |number| {
                        Request::Push {
                            number,
                            from,
                            home: self.to.mapping.life,
                            to: target,
                            len,
                        }
                    })
                }?;
                answer.done().map(|()| true)
            }
            _ => Ok(false),
        }
    }

    /// Reads or writes what comes from or goes to this node.
    fn copy_by_us<L: Deref<Target = Arc<Lmr>>>(
        &self,
        enter: impl Fn() -> Result<L>,
        step: Step,
        bounce: &mut KVec<u8>,
        stats: &Stats,
    ) -> Result {
        if bounce.is_empty() {
            bounce.resize(STEP_MAX as usize, 0, GFP_KERNEL_ACCOUNT)?;
        }
        // SAFETY: The buffer has so many bytes, stays where it is while this lives, and is used by nothing
        // else meanwhile.
        let memory = unsafe { Memory::kernel(bounce.as_mut_ptr(), step.len as usize) };
        let ends = [(&self.from, Direction::Read), (&self.to, Direction::Write)];
        let moved = ends.into_iter().try_for_each(|(end, direction)| {
            let access = Access {
                direction,
                offset: end.offset + step.at,
                len: step.len.into(),
                deadline: self.deadline,
            };
            access.run(&enter, end.mapping, &memory, self.tenant, stats)
        });
        if moved == Err(EIO) {
            // The RNIC may not let go of it: better lost than used again.
            core::mem::forget(core::mem::take(bounce));
        }
        moved
    }
}

impl End<'_> {
    fn place(&self) -> Result<Place> {
        Ok(Place {
            layout: self.mapping.layout()?,
            offset: self.offset,
        })
    }

    /// The piece of a step, which is in one chunk.
    fn piece(&self, step: Step) -> Result<Piece> {
        let layout = self.mapping.layout()?;
        let pieces = layout.pieces(self.offset + step.at, step.len.into());
        pieces.map_err(|_| ERANGE)?.next().ok_or(EIO)
    }
}

/// Copies within this node.
fn copy((from, from_offset): (&Lent, u32), (to, to_offset): (&Lent, u32), len: u32) -> Result {
    to.copy_from(to_offset as usize, from, from_offset as usize, len as usize)
}

/// At the node that lends the memory.
impl Lmr {
    /// Finds memory that this node lends.
    ///
    /// # Errors
    ///
    /// `ESTALE` if it is not lent to that region any more, `EHOSTDOWN` if the home of it died.
    pub(super) fn find_lent(&self, home: u32, region: u64, chunk: u64) -> Result<Arc<Lent>> {
        // Else the memory of a home that died would be taken for freed.
        self.cluster.life_of(home)?;
        let key: Key = (home, region);
        self.leases.find(key, chunk).ok_or_else(errno::stale)
    }

    /// Sets bytes of memory that this node lends, for a peer.
    pub(super) fn serve_fill(
        &self,
        node: u32,
        number: u64,
        at: Span,
        len: u32,
        byte: u8,
    ) -> Result {
        let done = self.fabric().peer(node)?.once(number, || {
            let chunk = self.find_lent(at.home, at.region, at.chunk)?;
            chunk.fill(at.offset as usize, len as usize, byte)?;
            Ok(0)
        });
        done.map(drop)
    }

    /// Copies within memory that this node lends, for a peer.
    pub(super) fn serve_copy(
        &self,
        node: u32,
        number: u64,
        from: Span,
        to: Span,
        len: u32,
    ) -> Result {
        let done = self.fabric().peer(node)?.once(number, || {
            let source = self.find_lent(from.home, from.region, from.chunk)?;
            let target = self.find_lent(to.home, to.region, to.chunk)?;
            copy((&source, from.offset), (&target, to.offset), len)?;
            Ok(0)
        });
        done.map(drop)
    }
}
