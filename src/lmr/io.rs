// SPDX-License-Identifier: GPL-2.0

//! Reading and writing a mapped region.
//!
//! The request is checked whole before anything is posted (handle and rights by the session, range
//! here). Chunks of this node are copied, others go through the fabric.

use super::{
    mapping::{Found, Mapping},
    Lmr,
};
use crate::{
    fabric::transfer::{Direction, Part, Transfer},
    sys::{deadline::Deadline, memory::Memory},
    trace,
    verbs::dma::DmaPages,
};
use kernel::prelude::*;
use kite_core::layout::Piece;

/// Part of a region, and a deadline.
pub(crate) struct Access {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) deadline: Deadline,
}

impl Lmr {
    /// Moves bytes between a region and `memory`.
    ///
    /// # Errors
    ///
    /// As `struct kite_rw` in `include/uapi/kite.h` says.
    pub(crate) fn access(&self, mapping: &Mapping, access: &Access, memory: &Memory) -> Result {
        let result = self.try_access(mapping, access, memory);
        self.count(access, result.is_ok());
        trace::access(
            access.direction == Direction::Write,
            mapping.home,
            mapping.region,
            access.offset,
            access.len,
            result.err().map_or(0, Error::to_errno),
        );
        result
    }

    fn try_access(&self, mapping: &Mapping, access: &Access, memory: &Memory) -> Result {
        let layout = mapping.shape(|shape| shape.layout)?;
        let pieces = layout
            .pieces(access.offset, access.len)
            .map_err(|_| ERANGE)?;
        let (direction, deadline) = (access.direction, access.deadline);
        let permit = || mapping.enter();
        let mut transfer = Transfer::new(self.fabric(), direction, memory, deadline, permit);
        for piece in pieces {
            let (len, at) = (piece.len as usize, piece.at as usize);
            match mapping.shape(|shape| shape.find(piece))?? {
                Found::Remote(place) => transfer.add(Part {
                    life: place.life,
                    addr: place.addr,
                    len,
                    at,
                })?,
                Found::Local(pages) => {
                    deadline.check()?;
                    if self.try_copy(direction, &pages, piece, memory)? {
                        continue;
                    }
                    // The caller's memory may keep us waiting, which nobody else shall.
                    transfer.land_all()?;
                    self.copy(direction, &pages, piece, memory)?;
                }
            }
        }
        transfer.finish()
    }

    /// As [`Self::copy`], if the caller's memory is present. Returns whether it was.
    fn try_copy(
        &self,
        direction: Direction,
        pages: &DmaPages,
        piece: Piece,
        memory: &Memory,
    ) -> Result<bool> {
        let (offset, len, at) = (piece.offset as usize, piece.len as usize, piece.at as usize);
        let copied = match direction {
            Direction::Write => memory.try_copy_to(pages, offset, at, len),
            Direction::Read => memory.try_copy_from(pages, offset, at, len),
        };
        match copied {
            Ok(()) => {
                self.stats.local_bytes.add(piece.len.into());
                Ok(true)
            }
            Err(error) if error == EAGAIN => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Copies between memory of this node and the caller's. The mapping may end meanwhile; the memory is
    /// not reused before we let go of it.
    fn copy(
        &self,
        direction: Direction,
        pages: &DmaPages,
        piece: Piece,
        memory: &Memory,
    ) -> Result {
        let (offset, len, at) = (piece.offset as usize, piece.len as usize, piece.at as usize);
        self.stats.local_bytes.add(piece.len.into());
        match direction {
            Direction::Write => memory.copy_to(pages, offset, at, len),
            Direction::Read => memory.copy_from(pages, offset, at, len),
        }
    }

    fn count(&self, access: &Access, done: bool) {
        let stats = &self.stats;
        let (operations, bytes) = match access.direction {
            Direction::Read => (&stats.reads, &stats.read_bytes),
            Direction::Write => (&stats.writes, &stats.write_bytes),
        };
        if done {
            operations.add(1);
            bytes.add(access.len);
        } else {
            stats.errors.add(1);
        }
    }
}
