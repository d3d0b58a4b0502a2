// SPDX-License-Identifier: GPL-2.0

//! Placement of the chunks of a region, as managed by its home: location and loan of each chunk.
//!
//! # Operation
//!
//! Mappers receive the locations. The home uses the loans to return chunks to their lenders. The move of a
//! chunk replaces both ([`Placement::set_chunk`]). A loan without a chunk of the region is returned as a
//! whole ([`Placement::remove_unused_loan`]), and its index is used again.
//!
//! # Locking
//!
//! `Region::placement` (mutex) protects the placement.

use crate::region::lend::loan::NodeScopedId;
use core::num::NonZeroUsize;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*};
use kite_core::wire::ChunkLocation;

/// Maximum number of loans of a region, including those of the old and the new location during a move.
const MAX_LOANS: usize = 1 << 14;

/// Loan, and the number of its chunks that belong to the region.
struct LoanUsage {
    key: NodeScopedId,
    chunks_in_use: u32,
}

/// Loan and index within the loan from which a chunk comes.
#[derive(Clone, Copy, Default)]
pub(in crate::region) struct ChunkSource {
    /// Index of the loan in [`Placement::loans`].
    pub(in crate::region) loan_index: u16,
    /// Index of the chunk in the loan.
    pub(in crate::region) chunk: u32,
}

/// Location and loan of each chunk of a region.
pub(crate) struct Placement {
    locations: KVVec<ChunkLocation>,
    sources: KVVec<ChunkSource>,
    /// Loans by index. `None`: the loan was returned.
    loans: KVec<Option<LoanUsage>>,
}

impl Placement {
    /// Creates a placement of chunks at `locations`, which belong to `loans` round robin.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `loans` is empty.
    /// - `ENOMEM`: out of memory.
    pub(in crate::region) fn new(
        locations: KVVec<ChunkLocation>,
        loans: &[NodeScopedId],
    ) -> Result<Self> {
        let loan_count = NonZeroUsize::new(loans.len()).ok_or(EINVAL)?;
        let count = locations.len();
        let mut placement = Self {
            sources: KVVec::from_elem(ChunkSource::default(), count, GFP_KERNEL_ACCOUNT)?,
            locations,
            loans: KVec::with_capacity(loan_count.get(), GFP_KERNEL_ACCOUNT)?,
        };
        for (i, source) in placement.sources.iter_mut().enumerate() {
            *source = ChunkSource {
                loan_index: (i % loan_count) as u16,
                chunk: (i / loan_count) as u32,
            };
        }
        for (i, &key) in loans.iter().enumerate() {
            let chunks = (i..count).step_by(loan_count.get()).len() as u32;
            placement.loans.push(
                Some(LoanUsage {
                    key,
                    chunks_in_use: chunks,
                }),
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        Ok(placement)
    }

    /// Returns the locations of all chunks.
    pub(in crate::region) fn locations(&self) -> &[ChunkLocation] {
        &self.locations
    }

    /// Returns the loans by index. `None`: the loan was returned.
    pub(in crate::region) fn loans(
        &self,
    ) -> impl ExactSizeIterator<Item = Option<NodeScopedId>> + '_ {
        let key = |loan: &Option<LoanUsage>| loan.as_ref().map(|loan| loan.key);
        self.loans.iter().map(key)
    }

    /// Adds a loan of which no chunk belongs to the region yet. Returns its index.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory, or [`MAX_LOANS`] is reached.
    pub(in crate::region) fn add_loan(&mut self, key: NodeScopedId) -> Result<u16> {
        let loan = Some(LoanUsage {
            key,
            chunks_in_use: 0,
        });
        if let Some(free) = self.loans.iter().position(Option::is_none) {
            self.loans[free] = loan;
            return Ok(free as u16);
        }
        if self.loans.len() == MAX_LOANS {
            return Err(ENOMEM);
        }
        self.loans.push(loan, GFP_KERNEL)?;
        Ok(self.loans.len() as u16 - 1)
    }

    fn adjust_use(&mut self, loan: u16, delta: i32) {
        if let Some(Some(loan)) = self.loans.get_mut(usize::from(loan)) {
            loan.chunks_in_use = loan.chunks_in_use.wrapping_add_signed(delta);
        }
    }

    /// Records the move of a chunk. Returns its previous source.
    pub(in crate::region) fn set_chunk(
        &mut self,
        chunk: u32,
        location: ChunkLocation,
        source: ChunkSource,
    ) -> ChunkSource {
        let chunk = chunk as usize;
        let old_source = core::mem::replace(&mut self.sources[chunk], source);
        self.locations[chunk] = location;
        self.adjust_use(old_source.loan_index, -1);
        self.adjust_use(source.loan_index, 1);
        old_source
    }

    /// Returns the loan with this index, if a chunk of the loan belongs to the region.
    pub(in crate::region) fn loan_in_use(&self, loan: u16) -> Option<NodeScopedId> {
        let loan = self.loans.get(usize::from(loan))?.as_ref()?;
        (loan.chunks_in_use != 0).then_some(loan.key)
    }

    /// Removes and returns a loan of which no chunk belongs to the region.
    pub(in crate::region) fn remove_unused_loan(&mut self) -> Option<NodeScopedId> {
        let is_unused =
            |loan: &Option<LoanUsage>| loan.as_ref().is_some_and(|loan| loan.chunks_in_use == 0);
        let index = self.loans.iter().position(is_unused)?;
        self.loans[index].take().map(|loan| loan.key)
    }
}
