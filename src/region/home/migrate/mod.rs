// SPDX-License-Identifier: GPL-2.0

//! Moves of a region to other nodes while the region is used (LITE, section 4: a master may move it).
//!
//! # Operation
//!
//! [`super::change`] starts a [`Migration`] on `move_queue`. The migration borrows the destination memory of
//! all chunks, and then moves the region window by window ([`window`]). Afterwards it returns the memory that
//! the region does not use any longer.
//!
//! # Recovery
//!
//! No written byte is lost. Accesses are blocked while one window moves. If a node does not reply, they are
//! blocked per attempt for about 2 s to quiesce plus 5 s to copy. If a move fails or its deadline expires,
//! windows that have moved stay moved, and the remaining chunks stay at the old location.

mod window;

use super::{
    borrowed_loan::BorrowedLoan,
    latch::Latch,
    placement::{ChunkSource, Placement},
    Region,
};
use crate::{
    control::{priority::WorkPriority, retry::retry_alloc},
    errno,
    region::MemoryService,
    sys::deadline::Deadline,
    trace,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    layout::{stripe_index, StripeShare},
    wire::ChunkLocation,
};

/// Destination of a chunk.
#[derive(Clone, Copy)]
struct MoveTarget {
    chunk: u32,
    location: ChunkLocation,
    source: ChunkSource,
}

/// Move in progress of a region of this home.
pub(super) struct Migration<'a> {
    service: &'a Arc<MemoryService>,
    region: &'a Region,
    deadline: Deadline,
    /// Counts the pushes with unknown outcome.
    push_latch: Latch,
    /// Counts the background operations that must complete before the next step.
    step_latch: Latch,
    /// Counts the returns of memory to lenders.
    return_latch: Latch,
}

impl<'a> Migration<'a> {
    pub(super) fn new(
        service: &'a Arc<MemoryService>,
        region: &'a Region,
        deadline: Deadline,
    ) -> Result<Self> {
        Ok(Self {
            service,
            region,
            deadline,
            push_latch: Latch::new()?,
            step_latch: Latch::new()?,
            return_latch: Latch::new()?,
        })
    }

    /// Moves the region to `nodes`, and returns the memory that the region does not use any longer.
    pub(super) fn run(&self, nodes: &[u32]) -> Result {
        let mut targets = KVVec::new();
        let reserve = || self.reserve_destination(nodes, &mut targets);
        let reserved = self.region.with_owner_memcg(reserve);
        let mut remaining = &targets[..];
        let result = reserved.and_then(|()| self.move_chunks(&mut remaining));
        self.return_unused(remaining);
        if result.is_ok() {
            self.service.stats.migrations.add(1);
        }
        // `ENOENT` means that a lender has restarted and lost its loans.
        let result = result.map_err(|error| {
            if error == ENOENT {
                errno::hostdown()
            } else {
                error
            }
        });
        let errno = result.err().map_or(0, Error::to_errno);
        trace::migrate(self.region.id, targets.len() as u32, errno);
        result
    }

    /// Borrows memory for all chunks that are not on their destination node.
    fn reserve_destination(&self, nodes: &[u32], targets: &mut KVVec<MoveTarget>) -> Result {
        for (position, &node) in nodes.iter().enumerate() {
            self.check_live()?;
            let is_for_node = |chunk| stripe_index(chunk, nodes.len()) == position;
            let chunks = self.misplaced_chunks(is_for_node, node)?;
            self.borrow_for(node, &chunks, targets)?;
        }
        Ok(())
    }

    /// Borrows memory from `node` for `chunks`.
    fn borrow_for(&self, node: u32, chunks: &[u32], targets: &mut KVVec<MoveTarget>) -> Result {
        let Some(&last) = chunks.last() else {
            return Ok(());
        };
        let (key, layout) = ((node, self.service.new_id()), self.region.spec.layout);
        let loan_index = self
            .region
            .with_placement(|placement| placement.add_loan(key))?;
        let stripe = StripeShare {
            chunk_count: chunks.len() as u32,
            last_chunk_len: layout.chunk_len(last),
        };
        let add_target = |i, location| {
            let target = MoveTarget {
                chunk: *chunks.get(i as usize).ok_or(EIO)?,
                location,
                source: ChunkSource {
                    loan_index,
                    chunk: i,
                },
            };
            Ok(targets.push(target, GFP_KERNEL)?)
        };
        let (loan, shape) = (
            BorrowedLoan::new(self.service, key),
            (layout.shift(), stripe),
        );
        let borrowed = loan.borrow(shape, self.region.id, self.deadline, add_target);
        // The chunk size of the region is fixed, so smaller chunks do not help.
        borrowed.map_err(|error| if error == ENOSPC { ENOMEM } else { error })
    }

    /// Checks that the deadline has not expired and that the region is not being freed.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`, `EINTR`: see [`Deadline::check`].
    /// - `ESTALE`: the region is being freed.
    fn check_live(&self) -> Result {
        self.deadline.check()?;
        let freeing = self.region.is_freeing();
        (!freeing).then_some(()).ok_or_else(errno::stale)
    }

    /// Returns the chunks that belong on `node` and are not there.
    fn misplaced_chunks(
        &self,
        belongs_to_node: impl Fn(u32) -> bool,
        node: u32,
    ) -> Result<KVVec<u32>> {
        let mut chunks = KVVec::new();
        self.region.with_placement(|placement| {
            for (chunk, location) in (0..).zip(placement.locations()) {
                if belongs_to_node(chunk) && location.instance.node != node {
                    chunks.push(chunk, GFP_KERNEL)?;
                }
            }
            Ok(chunks)
        })
    }

    /// Returns the destination memory of the chunks that have not moved, and the loans that are not used any
    /// longer.
    fn return_unused(&self, remaining: &[MoveTarget]) {
        // Wait for pushes with unknown outcome before returning their destination memory.
        self.push_latch.wait();
        self.return_chunks(remaining.iter().map(|target| target.source));
        while let Some(unused_loan) = self.region.with_placement(Placement::remove_unused_loan) {
            let latch_guard = self.return_latch.add();
            BorrowedLoan::new(self.service, unused_loan)
                .release_deferred(WorkPriority::Foreground, latch_guard);
        }
        self.await_returns();
    }

    /// Waits until lenders have their memory back. Returns to unreachable lenders, and those queued behind them,
    /// continue in the background.
    fn await_returns(&self) {
        let cluster = &self.service.cluster;
        self.return_latch
            .wait_while(|| !cluster.has_unreachable_member());
    }

    /// Returns chunks that do not belong to the region any longer, if other chunks of their loan still do.
    /// Loans without any chunk in use are returned as a whole.
    fn return_chunks(&self, sources: impl Iterator<Item = ChunkSource> + Clone) {
        let region = self.region;
        let loans = region.with_placement(|placement| placement.loans().len());
        for loan in 0..loans as u16 {
            let Some(key) = region.with_placement(|placement| placement.loan_in_use(loan)) else {
                continue;
            };
            let chunks = retry_alloc(|| {
                let mut chunks = KVVec::new();
                for source in sources.clone().filter(|source| source.loan_index == loan) {
                    chunks.push(source.chunk, GFP_KERNEL)?;
                }
                Ok(chunks)
            });
            if !chunks.is_empty() {
                BorrowedLoan::new(self.service, key)
                    .shrink_deferred(chunks, self.return_latch.add());
            }
        }
    }
}
