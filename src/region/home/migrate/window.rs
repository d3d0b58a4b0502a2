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

use super::{Migration, MoveTarget};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::retry_alloc},
    errno::{self, TryError, TryResult},
    region::{
        home::{
            latch::LatchGuard,
            placement::{ChunkSource, Placement},
            quiesce::{MovedLocations, Quiesce, QUIESCE_TIMEOUT_MS},
        },
        lend::push::ChunkPush,
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

impl Migration<'_> {
    /// Moves the remaining chunks window by window, until an error.
    pub(super) fn move_chunks(&self, remaining: &mut &[MoveTarget]) -> Result {
        let shift = self.region.spec.layout.shift();
        let window = (MOVE_WINDOW_BYTES >> shift).clamp(1, MAX_MOVED_CHUNKS);
        let mut retries = 0;
        while !remaining.is_empty() {
            let (batch, tail) = remaining.split_at(window.min(remaining.len()));
            match self.move_window(batch) {
                Ok(()) => (*remaining, retries) = (tail, 0),
                Err(TryError::WouldBlock) if retries < MAX_MOVE_RETRIES => {
                    retries += 1;
                    // Users have waited for the quiesce timeout. Let them run for as long before the next
                    // attempt.
                    let backoff_ms = QUIESCE_TIMEOUT_MS.min(self.deadline.remaining_ms());
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
    fn move_window(&self, targets: &[MoveTarget]) -> TryResult {
        self.service.cluster.local_node()?;
        // No push of an earlier attempt may arrive late.
        self.push_latch.wait();
        self.service.cluster.wait_view_synced(self.deadline)?;
        self.check_live()?;
        let mut moved_chunks = KVec::with_capacity(targets.len(), GFP_KERNEL)?;
        let mut old_sources = KVec::with_capacity(targets.len(), GFP_KERNEL)?;
        let mut quiesce = Quiesce::new(self.service, self.region, self.deadline);
        self.region.set_frozen(true);
        let ready = quiesce.quiesce_all();
        let copied = ready.and_then(|()| self.copy_chunks(targets));
        if copied.is_ok() {
            self.record_moved(targets, &mut moved_chunks, &mut old_sources);
        }
        self.region.set_frozen(false);
        quiesce.resume(&share_locations(&moved_chunks), &self.step_latch);
        self.step_latch.wait();
        self.return_chunks(old_sources.iter().copied());
        self.await_returns();
        copied
    }

    /// Records the new locations of `targets`. `moved_chunks` and `old_sources` have capacity for one item
    /// per target.
    fn record_moved(
        &self,
        targets: &[MoveTarget],
        moved_chunks: &mut KVec<(u32, ChunkLocation)>,
        old_sources: &mut KVec<ChunkSource>,
    ) {
        for &MoveTarget {
            chunk,
            location,
            source,
        } in targets
        {
            let set_chunk =
                |placement: &mut Placement| placement.set_chunk(chunk, location, source);
            let old_source = self.region.with_placement(set_chunk);
            // Cannot fail: the capacity was reserved.
            let _ = old_sources.push(old_source, GFP_KERNEL);
            let _ = moved_chunks.push((chunk, location), GFP_KERNEL);
        }
    }

    /// Lets the lenders push the chunks to their destinations.
    fn copy_chunks(&self, targets: &[MoveTarget]) -> TryResult {
        let deadline = Deadline::after_ms(COPY_TIMEOUT_MS.min(self.deadline.remaining_ms()));
        for target in targets {
            let len = self.region.spec.layout.chunk_len(target.chunk);
            let copied = self.copy_chunk(target, len, deadline);
            copied.map_err(|error| match error {
                error if error == ETIMEDOUT => TryError::WouldBlock,
                error => error.into(),
            })?;
            self.service.stats.migrated_bytes.add(len.into());
        }
        Ok(())
    }

    fn copy_chunk(&self, target: &MoveTarget, len: u32, deadline: Deadline) -> Result {
        let index = target.chunk as usize;
        let source = self
            .region
            .with_placement(|placement| placement.locations()[index]);
        let (local_node, destination) = (self.service.cluster.local_node()?, target.location);
        let latch_guard = self.push_latch.add();
        if source.instance.node == local_node {
            let region = (local_node, self.region.id);
            let push = ChunkPush {
                chunk: self.service.find_lent_chunk(region, source.addr)?,
                offset: 0,
                destination,
                len,
            };
            return self.push_local_chunk(push, latch_guard, deadline);
        }
        let home = self.service.cluster.instance_of(local_node)?;
        let request = |sequence| ControlRequest::PushCopy {
            sequence,
            source: LentChunkAddr {
                home: local_node,
                region: self.region.id,
                chunk_addr: source.addr,
                offset: 0,
            },
            home,
            destination,
            len,
        };
        let lender = (source.instance, PUSH_SEQUENCE_FLAG);
        let service = self.service;
        let reply = service.request_once(latch_guard, lender, deadline, request);
        match reply.and_then(|reply| reply.expect_done()) {
            // The region exists, so a missing chunk means that the lender has restarted.
            Err(error) if error == ENOENT || error == errno::stale() => Err(errno::hostdown()),
            done => done,
        }
    }

    /// Pushes a chunk that this node lends.
    fn push_local_chunk(
        &self,
        push: ChunkPush,
        latch_guard: LatchGuard,
        deadline: Deadline,
    ) -> Result {
        const RUNNING: u32 = u32::MAX;
        let state = Arc::new(Atomic::new(RUNNING), GFP_KERNEL)?;
        let (result, instance) = (state.clone(), push.destination.instance);
        let admission = self.service.cluster.admission_of(instance)?;
        let run = move |service: &Arc<MemoryService>, _| {
            let errno = push.run(service).err().map_or(0, Error::to_errno);
            result.store(errno.unsigned_abs(), Release);
            drop(latch_guard);
        };
        self.service
            .defer(instance.node, WorkPriority::Foreground, run);
        let is_connected = || self.service.cluster.is_connected(instance, admission);
        retry_until(deadline, || match state.load(Acquire) {
            0 => Ok(()),
            RUNNING if is_connected() => Err(TryError::WouldBlock),
            RUNNING => Err(errno::hostdown().into()),
            errno => Err(Error::from_errno(-(errno as c_int)).into()),
        })
    }
}

/// Returns a copy of the new locations that several workers can share.
fn share_locations(moved_chunks: &[(u32, ChunkLocation)]) -> MovedLocations {
    retry_alloc(|| {
        let mut copy = KVec::new();
        copy.extend_from_slice(moved_chunks, GFP_KERNEL)?;
        Ok(Arc::new(copy, GFP_KERNEL)?)
    })
}
