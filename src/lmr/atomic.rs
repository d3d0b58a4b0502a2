// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on words of regions (LITE, section 7.2).
//!
//! Drivers refuse them to the kernel, or do them in the RNIC, where they are atomic with respect to each
//! other alone. So the processor of the node that holds the word does all of them, its own and those of
//! others, which ask it to. Such a request must not be done twice (`kite_core::once`), so it ends with the
//! life of either node. And it names the region: one that comes late finds no memory that has become
//! another's.

use super::{
    lease::Key,
    mapping::{Found, Mapping},
    Answer, Lmr,
};
use crate::{errno, sys::deadline::Deadline, trace};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::{Atomic, WORD},
    layout::Piece,
    wire::{Place, Reply, Request},
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
    pub(crate) fn update(self: &Arc<Self>, mapping: &Mapping, update: &Update) -> Result<u64> {
        let result = self.try_update(mapping, update);
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

    fn try_update(self: &Arc<Self>, mapping: &Mapping, update: &Update) -> Result<u64> {
        if update.offset % WORD != 0 {
            return Err(EINVAL);
        }
        let layout = mapping.shape(|shape| shape.layout)?;
        let pieces = layout.pieces(update.offset, WORD);
        let piece = pieces.map_err(|_| ERANGE)?.next().ok_or(ERANGE)?;
        // The memory stays while we are inside. It is for the lender to see that it does for others.
        let inside = mapping.enter()?;
        match mapping.shape(|shape| shape.find(piece))?? {
            Found::Local(chunk) => {
                update.deadline.check()?;
                chunk.change(piece.offset as usize, update.atomic)
            }
            Found::Remote(place) => {
                drop(inside);
                self.ask_lender(mapping, place, piece, update)
            }
        }
    }

    fn ask_lender(
        self: &Arc<Self>,
        mapping: &Mapping,
        place: Place,
        piece: Piece,
        update: &Update,
    ) -> Result<u64> {
        let peer = self.fabric().peer_in(place.life)?;
        let numbered = self.settle(update.deadline, || peer.number())?;
        let request = Request::Atomic {
            number: numbered.number,
            home: mapping.home,
            region: mapping.region,
            chunk: place.addr - u64::from(piece.offset),
            offset: piece.offset,
            atomic: update.atomic,
        };
        let epoch = self.cluster.epoch();
        let answer = self
            .fabric()
            .call_peer(&numbered.peer, &request, epoch, update.deadline)?;
        match Answer(answer).reply()? {
            Reply::Was { word } => Ok(word),
            _ => Err(EIO),
        }
    }

    /// Changes a word of memory that this node lends. Returns what it was.
    ///
    /// # Errors
    ///
    /// `ESTALE` if it is not lent to that region any more; `ERANGE`, `EINVAL`.
    pub(super) fn change(
        &self,
        region: Key,
        chunk: u64,
        offset: u32,
        atomic: Atomic,
    ) -> Result<u64> {
        let chunk = self.leases.find_of(region, chunk);
        let chunk = chunk.ok_or_else(errno::stale)?;
        chunk.change(offset as usize, atomic)
    }
}
