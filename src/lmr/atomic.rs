// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on words of regions (LITE, section 7.2).
//!
//! Drivers refuse them to the kernel, or do them in the RNIC, where they are atomic with respect to each
//! other alone. So the processor of the node that holds the word does all of them, its own and those of
//! others, which ask it to. Such a request must not be done twice (`kite_core::once`), so it ends with the
//! life of either node. And it names the region: one that comes late finds no memory that has become
//! another's.

use super::{
    mapping::{Asking, Mapping},
    places::Found,
    Lmr,
};
use crate::{sys::deadline::Deadline, trace};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::{Atomic, WORD},
    layout::Piece,
    wire::{Place, Request},
};

/// A word of a region, and what to do to it.
pub(crate) struct Update {
    pub(crate) offset: u64,
    pub(crate) atomic: Atomic,
    pub(crate) deadline: Deadline,
}

impl Lmr {
    /// Changes a word of a mapped region. Returns what it was.
    ///
    /// # Errors
    ///
    /// As `struct kite_atomic` in `include/uapi/kite.h` says.
    pub(crate) fn update(self: &Arc<Self>, mapping: &Arc<Mapping>, update: &Update) -> Result<u64> {
        let result = mapping.again(update.deadline, || self.try_update(mapping, update));
        match result {
            Ok(_) => self.stats.atomics.add(1),
            Err(_) => self.stats.errors.add(1),
        }
        trace::atomic(
            mapping.home,
            mapping.region,
            update.offset,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn try_update(self: &Arc<Self>, mapping: &Arc<Mapping>, update: &Update) -> Result<u64> {
        if update.offset % WORD != 0 {
            return Err(EINVAL);
        }
        let pieces = mapping.layout()?.pieces(update.offset, WORD);
        let piece = pieces.map_err(|_| ERANGE)?.next().ok_or(ERANGE)?;
        // The memory stays while we are inside. It is for the lender to see that it does for others.
        let places = mapping.look()?;
        match places.find(piece)? {
            Found::Local(chunk) => {
                update.deadline.check()?;
                chunk.change(piece.offset as usize, update.atomic)
            }
            Found::Remote(place) => {
                let asking = mapping.begin_asking()?;
                drop(places);
                self.ask_lender(mapping, asking, place, piece, update)
            }
        }
    }

    fn ask_lender(
        self: &Arc<Self>,
        mapping: &Mapping,
        asking: Asking,
        place: Place,
        piece: Piece,
        update: &Update,
    ) -> Result<u64> {
        let answered = self.ask_numbered(asking, (place.life, 0), update.deadline, |number| {
            Request::Atomic {
                number,
                home: mapping.home,
                region: mapping.region,
                chunk: place.addr - u64::from(piece.offset),
                offset: piece.offset,
                atomic: update.atomic,
            }
        })?;
        answered.was()
    }

    /// Changes a word of memory that this node lends, for a peer. Returns what it was.
    ///
    /// # Errors
    ///
    /// As for [`Self::find_lent`]; `ERANGE`, `EINVAL`.
    pub(super) fn serve_atomic(
        &self,
        node: u32,
        number: u64,
        (home, region, chunk): (u32, u64, u64),
        offset: u32,
        atomic: Atomic,
    ) -> Result<u64> {
        let peer = self.fabric().peer(node)?;
        peer.once(number, || {
            let chunk = self.find_lent(home, region, chunk)?;
            chunk.change(offset as usize, atomic)
        })
    }
}
