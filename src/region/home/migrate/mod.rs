// SPDX-License-Identifier: GPL-2.0

//! Moves of a region to other nodes while the region is used (LITE, section 4: a master may move it).
//!
//! # Operation
//!
//! The home borrows the destination memory of all chunks and then moves the region window by window
//! ([`window`]). Afterwards it returns the memory that the region does not use any longer.
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
    reclaim::Teardown,
    Region,
};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        retry::{retry_alloc, CONTROL_TIMEOUT_MS},
    },
    errno,
    region::{map::Mapping, MemoryService},
    sys::deadline::Deadline,
    trace,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    layout::{stripe_index, StripeShare},
    wire::{ChunkLocation, ControlRequest, U32List, WireList, MAX_CONTROL_BYTES},
};

/// Destination of a chunk.
#[derive(Clone, Copy)]
struct MoveTarget {
    chunk: u32,
    location: ChunkLocation,
    source: ChunkSource,
}

/// Background operations of a move.
struct MoveLatches {
    /// Pushes with unknown outcome.
    push_latch: Latch,
    /// Operations that must complete before the next step.
    step_latch: Latch,
}

/// Requests of a node that maps the region.
impl MemoryService {
    /// Moves a mapped region to `nodes`, round robin; 0 is this node.
    ///
    /// # Errors
    ///
    /// See `struct kite_migrate` in `include/uapi/kite.h`.
    pub(crate) fn move_region(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        nodes: &[u32],
        deadline: Deadline,
    ) -> Result {
        let (local_node, home) = (
            self.cluster.local_node()?,
            self.cluster.instance_of(mapping.home)?,
        );
        drop(mapping.access()?);
        let (region, token) = (mapping.region, self.new_id());
        // The home ends the move at `deadline`. Allow extra time to receive the result.
        let reply_deadline =
            Deadline::after_ms(deadline.remaining_ms().saturating_add(CONTROL_TIMEOUT_MS));
        let nodes = nodes
            .iter()
            .map(|&node| if node == 0 { local_node } else { node });
        let started = if home.node == local_node {
            self.start_move((local_node, mapping.id), region, token, nodes, deadline)
        } else {
            let mut list_buffer = [0; MAX_CONTROL_BYTES / 2];
            let nodes: U32List<'_> = WireList::from_items(nodes, &mut list_buffer);
            let request = |sequence| ControlRequest::MigrateRegion {
                sequence,
                region,
                mapping: mapping.id,
                token,
                timeout_ms: deadline.remaining_ms(),
                nodes,
            };
            let answer = self.request_exactly_once((), (home, 0), reply_deadline, request);
            answer.and_then(|answer| answer.expect_done())
        };
        let result = started.and_then(|()| {
            let request = ControlRequest::MigrationStatus { region, token };
            self.request_with_retry(home.node, &request, reply_deadline)?
                .expect_done()
        });
        result.map_err(|error| {
            if error == ENOENT {
                // If the handle was closed meanwhile, report that cause.
                mapping.access().err().unwrap_or_else(errno::stale)
            } else {
                error
            }
        })
    }
}

/// Requests served by the home.
impl MemoryService {
    /// Starts a move of a region of this node on behalf of a mapper, which chose `token`.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: one of the nodes is not in the view.
    /// - `ENOMEM`: out of memory.
    /// - Other errors: see [`Region::start_move`].
    pub(in crate::region) fn start_move(
        self: &Arc<Self>,
        (node, mapping): (u32, u64),
        region: u64,
        token: u64,
        nodes: impl Iterator<Item = u32>,
        deadline: Deadline,
    ) -> Result {
        let region = self.region(region)?;
        let mut target_nodes = KVec::new();
        for target_node in nodes {
            self.cluster.instance_of(target_node)?;
            target_nodes.push(target_node, GFP_KERNEL)?;
        }
        region.start_move(node, mapping, token)?;
        let memory_service = self.clone();
        self.move_queue().spawn(move || {
            let result = memory_service.migrate(&region, &target_nodes, deadline);
            if region.finish_move(result) {
                Teardown::start_deferred(&memory_service, &region, WorkPriority::Foreground);
            }
        });
        Ok(())
    }

    fn migrate(
        self: &Arc<Self>,
        region: &Arc<Region>,
        nodes: &[u32],
        deadline: Deadline,
    ) -> Result {
        let mut targets = KVVec::new();
        let background = MoveLatches {
            push_latch: Latch::new()?,
            step_latch: Latch::new()?,
        };
        let reserved = region
            .with_owner_memcg(|| self.reserve_destination(region, nodes, deadline, &mut targets));
        let mut remaining = &targets[..];
        let result =
            reserved.and_then(|()| self.move_chunks(region, &mut remaining, &background, deadline));
        // Wait for pushes with unknown outcome before returning their destination memory.
        background.push_latch.wait();
        let step_latch = &background.step_latch;
        self.return_chunks(
            region,
            remaining.iter().map(|target| target.source),
            step_latch,
        );
        while let Some(unused_loan) = region.with_placement(Placement::remove_unused_loan) {
            let latch_guard = step_latch.add();
            BorrowedLoan::new(self, unused_loan)
                .release_deferred(WorkPriority::Foreground, latch_guard);
        }
        step_latch.wait();
        if result.is_ok() {
            self.stats.migrations.add(1);
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
        trace::migrate(region.id, targets.len() as u32, errno);
        result
    }

    /// Borrows memory for all chunks that are not on their destination node.
    fn reserve_destination(
        self: &Arc<Self>,
        region: &Region,
        nodes: &[u32],
        deadline: Deadline,
        targets: &mut KVVec<MoveTarget>,
    ) -> Result {
        let layout = region.spec.layout;
        for (position, &node) in nodes.iter().enumerate() {
            Self::check_move_live(region, deadline)?;
            let chunks = Self::misplaced_chunks(
                region,
                |chunk| stripe_index(chunk, nodes.len()) == position,
                node,
            )?;
            let Some(&last) = chunks.last() else {
                continue;
            };
            let key = (node, self.new_id());
            let loan = region.with_placement(|placement| placement.add_loan(key))?;
            let stripe = StripeShare {
                chunk_count: chunks.len() as u32,
                last_chunk_len: layout.chunk_len(last),
            };
            let shape = (layout.shift(), stripe);
            let borrowed =
                BorrowedLoan::new(self, key).borrow(shape, region.id, deadline, |i, location| {
                    let chunk = *chunks.get(i as usize).ok_or(EIO)?;
                    let source = ChunkSource {
                        loan_index: loan,
                        chunk: i,
                    };
                    let target = MoveTarget {
                        chunk,
                        location,
                        source,
                    };
                    Ok(targets.push(target, GFP_KERNEL)?)
                });
            // The chunk size of the region is fixed, so smaller chunks do not help.
            borrowed.map_err(|error| if error == ENOSPC { ENOMEM } else { error })?;
        }
        Ok(())
    }

    /// Checks that the deadline has not expired and that the region is not being freed.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`, `EINTR`: see [`Deadline::check`].
    /// - `ESTALE`: the region is being freed.
    fn check_move_live(region: &Region, deadline: Deadline) -> Result {
        deadline.check()?;
        let freeing = region.is_freeing();
        (!freeing).then_some(()).ok_or_else(errno::stale)
    }

    /// Returns the chunks that belong on `node` and are not there.
    fn misplaced_chunks(
        region: &Region,
        belongs_to_node: impl Fn(u32) -> bool,
        node: u32,
    ) -> Result<KVVec<u32>> {
        let mut chunks = KVVec::new();
        region.with_placement(|placement| {
            for (chunk, location) in (0..).zip(placement.locations()) {
                if belongs_to_node(chunk) && location.instance.node != node {
                    chunks.push(chunk, GFP_KERNEL)?;
                }
            }
            Ok(chunks)
        })
    }

    /// Returns chunks that do not belong to the region any longer, if other chunks of their loan still do.
    /// Loans without any chunk in use are returned as a whole.
    fn return_chunks(
        self: &Arc<Self>,
        region: &Region,
        sources: impl Iterator<Item = ChunkSource> + Clone,
        latch: &Latch,
    ) {
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
                BorrowedLoan::new(self, key).shrink_deferred(chunks, latch.add());
            }
        }
    }
}
