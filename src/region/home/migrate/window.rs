// SPDX-License-Identifier: GPL-2.0

//! Move of the chunks of a region, window by window.
//!
//! # Operation
//!
//! For each window, all nodes that map the region are quiesced ([`crate::region::home::quiesce`]). The
//! lenders push the chunks to the destination ([`crate::region::lend::push`]), and the nodes resume with the
//! new locations. Accesses are blocked while one window moves.
//!
//! # Recovery
//!
//! A window moves as a whole or not at all. If a node does not quiesce in time, or the copy times out, the
//! nodes resume with the old locations. The window is then tried again, at most [`MAX_MOVE_RETRIES`] times.
//! No attempt starts before all pushes of the previous one have ended.
//!
//! # Locking
//!
//! No lock is held while a request is sent. The region is marked as frozen instead, which blocks new mappers.

use super::{MoveLatches, MoveTarget};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::retry_alloc},
    errno::{self, TryError, TryResult},
    region::{
        home::{
            latch::{Latch, LatchGuard},
            quiesce::QUIESCE_TIMEOUT_MS,
            Region,
        },
        lend::loan::LentChunk,
        MemoryService,
    },
    sys::deadline::{retry_until, Deadline},
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::wire::{
    ChunkLocation, ControlRequest, LentChunkAddr, MAX_MOVED_CHUNKS, PUSH_SEQUENCE_FLAG,
};

/// Bytes that move while accesses to the region are blocked.
const MOVE_WINDOW_BYTES: usize = 4 << 20;

/// Maximum time in ms to copy one window, during which accesses are blocked.
const COPY_TIMEOUT_MS: u32 = 5_000;

/// Maximum number of successive retries of one window, after which the move fails with `ETIMEDOUT`.
const MAX_MOVE_RETRIES: u32 = 5;

impl MemoryService {
    /// Moves the remaining chunks window by window, until an error.
    pub(super) fn move_chunks(
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
                Err(TryError::WouldBlock) if retries < MAX_MOVE_RETRIES => {
                    retries += 1;
                    // Users have waited for the quiesce timeout. Let them run for as long before the next
                    // attempt.
                    let backoff_ms = QUIESCE_TIMEOUT_MS.min(deadline.remaining_ms());
                    fsleep(Delta::from_millis(backoff_ms.into()));
                }
                Err(TryError::WouldBlock) => return Err(ETIMEDOUT),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Moves all chunks of one window, or none.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: not all nodes quiesced in time, or the copy timed out.
    /// - Other errors: the move cannot continue.
    fn move_window(
        self: &Arc<Self>,
        region: &Arc<Region>,
        targets: &[MoveTarget],
        background: &MoveLatches,
        deadline: Deadline,
    ) -> TryResult {
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
    ) -> TryResult {
        let layout = region.spec.layout;
        let copy_deadline = Deadline::after_ms(COPY_TIMEOUT_MS.min(deadline.remaining_ms()));
        for target in targets {
            let len = layout.chunk_len(target.chunk);
            let from =
                region.with_placement(|placement| placement.locations()[target.chunk as usize]);
            let copied = self.copy_chunk(region, from, target.location, len, pushes, copy_deadline);
            copied.map_err(|error| match error {
                error if error == ETIMEDOUT => TryError::WouldBlock,
                error => error.into(),
            })?;
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
            let chunk = self.find_lent_chunk((local_node, region.id), source.addr)?;
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
            RUNNING if self.cluster.is_member(destination.instance) => Err(TryError::WouldBlock),
            RUNNING => Err(errno::hostdown().into()),
            errno => Err(Error::from_errno(-(errno as c_int)).into()),
        })
    }
}
