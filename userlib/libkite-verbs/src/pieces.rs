// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Lists of pieces of memory, for programs that send or receive several at a time.
//!
//! A request of kite's has one piece of memory at either end. So several are copied: together into memory of ours before
//! they go, and apart from there when they have come.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Memory, Registered};

use crate::errno::Result;
use crate::header::ibv_sge;
use crate::memory::Area;
use crate::pair::Pair;

/// Most pieces of a request.
pub(crate) const MOST_PIECES: u32 = 16;

/// Memory that a queue pair keeps to spare, and most bytes of each.
const MOST_SPARE: usize = 16;
const LONGEST_SPARE: usize = 64 << 10;

/// Bytes of memory that was registered.
pub(crate) struct Piece {
    area: Arc<Area>,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// Where the bytes of a message are.
pub(crate) enum Place {
    One(Piece),
    Many(Pieces),
}

/// Pieces in the order of their bytes.
pub(crate) struct Pieces(Vec<Piece>);

/// What kite has instead of pieces.
pub(crate) struct Through {
    pieces: Pieces,
    pub(crate) memory: Arc<Registered>,
    /// The bytes are to come.
    comes: bool,
}

/// A list as verbs have it.
///
/// # Safety
/// There are so many, if any.
pub(crate) unsafe fn list<'a>(first: *const ibv_sge, count: c_int) -> &'a [ibv_sge] {
    match usize::try_from(count) {
        // SAFETY: the caller vouches for it.
        Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(first, count) },
        _ => &[],
    }
}

/// The bytes of all.
pub(crate) fn total(list: &[ibv_sge]) -> u64 {
    list.iter().map(|sge| u64::from(sge.length)).sum()
}

impl Piece {
    /// None if the program may not use it so.
    fn find(pair: &Pair, sge: &ibv_sge, writes: bool) -> Option<Self> {
        let area = pair.session.area(sge.lkey)?;
        let at = area.place(&pair.domain, sge, writes)?;
        let len = sge.length as usize;
        Some(Self { area, at, len })
    }

    pub(crate) fn registered(&self) -> &Arc<Registered> {
        &self.area.registered
    }
}

impl Place {
    /// That of a list with some bytes. None if the program may not use it so.
    pub(crate) fn find(pair: &Pair, list: &[ibv_sge], writes: bool) -> Option<Self> {
        // Of no bytes there need not be a key.
        let mut some = list.iter().filter(|sge| sge.length != 0);
        let first = Piece::find(pair, some.next()?, writes)?;
        let Some(second) = some.next() else {
            return Some(Self::One(first));
        };
        let others = std::iter::once(second).chain(some);
        let others = others.map(|sge| Piece::find(pair, sge, writes));
        let all = std::iter::once(Some(first)).chain(others);
        all.collect::<Option<_>>()
            .map(|all| Self::Many(Pieces(all)))
    }
}

impl Pieces {
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|piece| piece.len).sum()
    }

    /// Copies them together.
    fn gather(&self, to: &Memory) -> kite::Result<()> {
        let mut at = 0;
        for piece in &self.0 {
            let mut bytes = vec![0; piece.len];
            piece.registered().memory().load(piece.at, &mut bytes)?;
            to.store(at, &bytes)?;
            at += piece.len;
        }
        Ok(())
    }

    /// Copies the first bytes of what came together apart.
    pub(crate) fn scatter(&self, from: &Memory, len: usize) -> kite::Result<()> {
        let mut at = 0;
        for piece in &self.0 {
            let mut bytes = vec![0; piece.len.min(len - at)];
            from.load(at, &mut bytes)?;
            piece.registered().memory().store(piece.at, &bytes)?;
            at += bytes.len();
        }
        Ok(())
    }
}

impl Through {
    /// Memory for the bytes of the pieces: those that are to go, or those that are to come. There may be some to spare.
    ///
    /// # Errors
    /// Those of registering memory.
    pub(crate) fn new(
        pair: &Pair,
        pieces: Pieces,
        comes: bool,
        spare: &mut Vec<Arc<Registered>>,
    ) -> Result<Self> {
        let fits = |memory: &Arc<Registered>| memory.memory().len() >= pieces.len();
        let memory = match spare.iter().position(fits) {
            Some(at) => spare.swap_remove(at),
            None => pair.session.own_memory(pieces.len())?,
        };
        if !comes {
            pieces.gather(memory.memory())?;
        }
        Ok(Self {
            pieces,
            memory,
            comes,
        })
    }

    /// The request has ended, and may have been done. Its memory is to spare, unless there is much of that.
    pub(crate) fn end(self, done: bool, spare: &mut Vec<Arc<Registered>>) {
        if self.comes && done {
            // Each piece was found inside of its memory, which cannot become shorter.
            let _ = self.pieces.scatter(self.memory.memory(), self.pieces.len());
        }
        if spare.len() < MOST_SPARE && self.memory.memory().len() <= LONGEST_SPARE {
            spare.push(self.memory);
        }
    }
}
