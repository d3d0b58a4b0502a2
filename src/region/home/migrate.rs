// SPDX-License-Identifier: GPL-2.0

//! Moves of a region to other nodes while the region is used (LITE, section 4: a master may move it).
//!
//! # Operation
//!
//! The home borrows the destination memory of all chunks and then moves the region window by window. For each
//! window, every node that maps the region is quiesced ([`super::quiesce`]). The lenders push the chunks to
//! the destination ([`crate::region::lend::push`]), and the mapping nodes resume with the new locations.
//!
//! # Recovery
//!
//! No written byte is lost. Accesses are blocked while one window moves. If a node does not reply, they are
//! blocked for about [`QUIESCE_TIMEOUT_MS`] plus [`COPY_TIMEOUT_MS`] per attempt. If a move fails or its
//! deadline expires, windows that have moved stay moved, and the remaining chunks stay at the old location.

use super::{
    placement::{ChunkSource, Placement},
    quiesce::{Latch, LatchGuard, QUIESCE_TIMEOUT_MS},
    Region,
};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        retry::{retry_alloc, CONTROL_TIMEOUT_MS},
    },
    errno,
    region::{lend::loan::LentChunk, map::Mapping, MemoryService},
    sys::deadline::{retry_until, Deadline},
    trace,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    layout::{stripe_index, StripeShare},
    wire::{
        ChunkLocation, ControlRequest, LentChunkAddr, U32List, WireList, MAX_CONTROL_BYTES,
        MAX_MOVED_CHUNKS, PUSH_SEQUENCE_FLAG,
    },
};

/// Bytes that move while accesses to the region are blocked.
const MOVE_WINDOW_BYTES: usize = 4 << 20;

/// Maximum time in ms to copy one window, during which accesses are blocked.
const COPY_TIMEOUT_MS: u32 = 5_000;

/// Maximum number of successive retries of one window, after which the move fails with `ETIMEDOUT`.
const MAX_MOVE_RETRIES: u32 = 5;

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
        let region = self.regions.get(region)?;
        let mut target_nodes = KVec::new();
        for target_node in nodes {
            self.cluster.instance_of(target_node)?;
            target_nodes.push(target_node, GFP_KERNEL)?;
        }
        region.start_move(node, mapping, token)?;
        let memory_service = self.clone();
        self.move_queue.spawn(move || {
            let result = memory_service.migrate(&region, &target_nodes, deadline);
            if region.finish_move(result) {
                memory_service.reclaim_deferred(&region, WorkPriority::Foreground);
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
            self.return_loan_deferred(unused_loan, WorkPriority::Foreground, move || {
                drop(latch_guard)
            });
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
            let borrowed = self.borrow(shape, key, region.id, deadline, |i, location| {
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
                let latch_guard = latch.add();
                self.shrink_loan_deferred(key, chunks, move || drop(latch_guard));
            }
        }
    }

    /// Moves the remaining chunks window by window, until an error.
    fn move_chunks(
        self: &Arc<Self>,
        region: &Arc<Region>,
        remaining: &mut &[MoveTarget],
        background: &MoveLatches,
        deadline: Deadline,
    ) -> Result {
        let window = (MOVE_WINDOW_BYTES >> region.spec.layout.shift()).clamp(1, MAX_MOVED_CHUNKS);
        let mut retries = 0;
        while !remaining.is_empty() {
            let (batch, tail) = remaining.split_at(window.min(remaining.len()));
            match self.move_window(region, batch, background, deadline) {
                Ok(()) => (*remaining, retries) = (tail, 0),
                Err(error) if error == EAGAIN && retries < MAX_MOVE_RETRIES => {
                    retries += 1;
                    // Users have waited for the quiesce timeout. Let them run for as long before the next
                    // attempt.
                    let backoff_ms = QUIESCE_TIMEOUT_MS.min(deadline.remaining_ms());
                    fsleep(Delta::from_millis(backoff_ms.into()));
                }
                Err(error) if error == EAGAIN => return Err(ETIMEDOUT),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Moves all chunks of one window, or none.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: not all nodes quiesced in time, or the copy timed out.
    /// - Other errors: the move cannot continue.
    fn move_window(
        self: &Arc<Self>,
        region: &Arc<Region>,
        targets: &[MoveTarget],
        background: &MoveLatches,
        deadline: Deadline,
    ) -> Result {
        self.cluster.local_node()?;
        // No push of an earlier attempt may arrive late.
        background.push_latch.wait();
        self.wait_view_synced(deadline)?;
        Self::check_move_live(region, deadline)?;
        let mut moved_chunks = KVec::with_capacity(targets.len(), GFP_KERNEL)?;
        let mut old_sources = KVec::with_capacity(targets.len(), GFP_KERNEL)?;
        let mut quiesced = KVec::new();
        region.set_frozen(true);
        let ready = self.quiesce_all(region, &mut quiesced, deadline);
        let copied = ready
            .and_then(|()| self.copy_chunks(region, targets, &background.push_latch, deadline));
        if copied.is_ok() {
            for &MoveTarget {
                chunk,
                location,
                source,
            } in targets
            {
                let old_source =
                    region.with_placement(|placement| placement.set_chunk(chunk, location, source));
                // Cannot fail: the capacity was reserved.
                let _ = old_sources.push(old_source, GFP_KERNEL);
                let _ = moved_chunks.push((chunk, location), GFP_KERNEL);
            }
        }
        region.set_frozen(false);
        let moved_chunks = retry_alloc(|| {
            let mut copy = KVec::new();
            copy.extend_from_slice(&moved_chunks, GFP_KERNEL)?;
            Ok(Arc::new(copy, GFP_KERNEL)?)
        });
        for node in quiesced {
            self.resume_node(
                region,
                node,
                moved_chunks.clone(),
                background.step_latch.add(),
            );
        }
        background.step_latch.wait();
        self.return_chunks(region, old_sources.iter().copied(), &background.step_latch);
        background.step_latch.wait();
        copied
    }

    /// Lets the lenders push the chunks to their destinations.
    fn copy_chunks(
        self: &Arc<Self>,
        region: &Region,
        targets: &[MoveTarget],
        pushes: &Latch,
        deadline: Deadline,
    ) -> Result {
        let layout = region.spec.layout;
        let copy_deadline = Deadline::after_ms(COPY_TIMEOUT_MS.min(deadline.remaining_ms()));
        for target in targets {
            let len = layout.chunk_len(target.chunk);
            let from =
                region.with_placement(|placement| placement.locations()[target.chunk as usize]);
            let copied = self.copy_chunk(region, from, target.location, len, pushes, copy_deadline);
            copied.map_err(|error| if error == ETIMEDOUT { EAGAIN } else { error })?;
            self.stats.migrated_bytes.add(len.into());
        }
        Ok(())
    }

    fn copy_chunk(
        self: &Arc<Self>,
        region: &Region,
        source: ChunkLocation,
        destination: ChunkLocation,
        len: u32,
        pushes: &Latch,
        deadline: Deadline,
    ) -> Result {
        let (local_node, latch_guard) = (self.cluster.local_node()?, pushes.add());
        if source.instance.node == local_node {
            let chunk = self.find_lent_chunk(local_node, region.id, source.addr)?;
            return self.push_local_chunk(chunk, destination, len, latch_guard, deadline);
        }
        let from_instance = source.instance;
        let source = LentChunkAddr {
            home: local_node,
            region: region.id,
            chunk_addr: source.addr,
            offset: 0,
        };
        let home = self.cluster.instance_of(local_node)?;
        let request = |sequence| ControlRequest::PushCopy {
            sequence,
            source,
            home,
            destination,
            len,
        };
        let answer = self.request_exactly_once(
            latch_guard,
            (from_instance, PUSH_SEQUENCE_FLAG),
            deadline,
            request,
        );
        match answer.and_then(|answer| answer.expect_done()) {
            // The region exists, so a missing chunk means that the lender has restarted.
            Err(error) if error == ENOENT || error == errno::stale() => Err(errno::hostdown()),
            done => done,
        }
    }

    /// Pushes a chunk that this node lends.
    fn push_local_chunk(
        self: &Arc<Self>,
        chunk: Arc<LentChunk>,
        destination: ChunkLocation,
        len: u32,
        latch_guard: LatchGuard,
        deadline: Deadline,
    ) -> Result {
        const RUNNING: u32 = u32::MAX;
        let state = Arc::new(Atomic::new(RUNNING), GFP_KERNEL)?;
        let result = state.clone();
        self.defer(
            destination.instance.node,
            WorkPriority::Foreground,
            move |memory_service, _| {
                let pushed = memory_service.push_chunk(&chunk, 0, destination, len);
                let errno = pushed.err().map_or(0, Error::to_errno).unsigned_abs();
                result.store(errno, Release);
                drop(latch_guard);
            },
        );
        retry_until(deadline, || match state.load(Acquire) {
            0 => Ok(()),
            RUNNING if self.cluster.is_member(destination.instance) => Err(EAGAIN),
            RUNNING => Err(errno::hostdown()),
            errno => Err(Error::from_errno(-(errno as c_int))),
        })
    }
}
