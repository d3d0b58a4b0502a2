// SPDX-License-Identifier: GPL-2.0

//! Batches: short reads and writes of an I/O queue that are posted together.
//!
//! # Operation
//!
//! Within one round, accesses through the same handle in the same direction join an open batch as long as
//! they fit. A batch is posted when it is full, before an access that does not fit, and at the end of the
//! round. The next rounds poll for completions and reap batches ([`super::reap`]).
//!
//! # Recovery
//!
//! If no task list or WR chain is free, an access is tried again in a later round, until its deadline.
//!
//! # Locking
//!
//! `IoQueue::state` protects [`Batches`].

use crate::{
    errno::{TryError, TryResult},
    fabric::{
        qos::tenant::AdmissionTicket,
        send::{
            batch::{BatchedSegment, WrChain, MAX_BATCH_WRS},
            inflight::PolledOp,
        },
        Fabric,
    },
    region::map::{
        access::{AccessRequest, SubmitContext},
        batch::AccessBatch,
        remote::OwnedRemoteAccess,
        submit::SubmitResult,
        Mapping,
    },
    session::Session,
    sys::buffer::Buffer,
    verbs::dma::LongTermDmaMap,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};

/// Maximum number of open and posted batches of a queue.
const MAX_BATCHES: usize = 64;

/// Maximum number of open batches: one per handle and direction.
const MAX_OPEN_BATCHES: usize = 4;

/// Batch that accesses can join.
struct OpenBatch<T> {
    handle_id: u64,
    batch: AccessBatch,
    wr_chain: WrChain,
    tasks: KVec<T>,
}

/// Batch in flight.
pub(super) struct PostedBatch<T> {
    pub(super) op: PolledOp<OwnedRemoteAccess>,
    pub(super) mapping: Arc<Mapping>,
    pub(super) tasks: KVec<T>,
}

/// Batches of a queue. `T` is the task of an access.
pub(super) struct Batches<T> {
    open: KVec<OpenBatch<T>>,
    pub(super) posted: KVec<PostedBatch<T>>,
    /// DMA mapping of the queue's memory, if mapped. Dropped with the batches, before the RNIC is removed.
    pub(super) dma_map: Option<Arc<LongTermDmaMap>>,
    /// Number of tasks in all batches.
    task_count: u32,
    /// WR chains for batches to open.
    free_wr_chains: KVec<WrChain>,
    /// Empty task lists for batches to open.
    free_task_lists: KVec<KVec<T>>,
}

/// Result of starting an access.
pub(super) enum BatchJoinResult {
    Done,
    /// The access joined a batch. The caller must add its task with [`PollRound::add_task`].
    Joined(BatchedSegment),
    NeedsWorker,
}

impl<T> Default for Batches<T> {
    fn default() -> Self {
        Self {
            open: KVec::new(),
            posted: KVec::new(),
            dma_map: None,
            task_count: 0,
            free_wr_chains: KVec::new(),
            free_task_lists: KVec::new(),
        }
    }
}

impl<T> Batches<T> {
    /// Returns an empty set of batches.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new() -> Result<Self> {
        let mut this = Self {
            open: KVec::with_capacity(MAX_OPEN_BATCHES, GFP_KERNEL_ACCOUNT)?,
            posted: KVec::with_capacity(MAX_BATCHES, GFP_KERNEL_ACCOUNT)?,
            dma_map: None,
            task_count: 0,
            free_wr_chains: KVec::with_capacity(MAX_OPEN_BATCHES, GFP_KERNEL_ACCOUNT)?,
            free_task_lists: KVec::with_capacity(MAX_BATCHES, GFP_KERNEL_ACCOUNT)?,
        };
        for _ in 0..MAX_OPEN_BATCHES {
            this.free_wr_chains
                .push(WrChain::new()?, GFP_KERNEL_ACCOUNT)?;
        }
        for _ in 0..MAX_BATCHES {
            let list = KVec::with_capacity(MAX_BATCH_WRS, GFP_KERNEL_ACCOUNT)?;
            this.free_task_lists.push(list, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(this)
    }

    /// Returns the number of tasks in all batches.
    pub(super) fn len(&self) -> u32 {
        self.task_count
    }

    /// Returns `true` if a batch has completed.
    pub(super) fn has_completed(&self) -> bool {
        self.posted.iter().any(|posted| posted.op.is_done())
    }

    /// Removes a posted batch.
    pub(super) fn remove_posted(&mut self, index: usize) -> Option<PostedBatch<T>> {
        let posted = self.posted.remove(index).ok()?;
        self.task_count -= posted.tasks.len() as u32;
        Some(posted)
    }

    /// Reinserts a posted batch.
    pub(super) fn reinsert_posted(&mut self, posted: PostedBatch<T>) {
        self.task_count += posted.tasks.len() as u32;
        // Capacity suffices here and below: each batch owns one of the `MAX_BATCHES` task lists.
        let _ = self.posted.push(posted, GFP_ATOMIC);
    }

    /// Keeps an empty task list for another batch.
    pub(super) fn recycle_task_list(&mut self, list: KVec<T>) {
        if self.free_task_lists.len() < self.free_task_lists.capacity() {
            // Capacity suffices, by the test above.
            let _ = self.free_task_lists.push(list, GFP_ATOMIC);
        }
    }
}

/// Access of a session through a handle.
pub(super) struct BatchCandidate<'a> {
    pub(super) session: &'a Session,
    pub(super) handle_id: u64,
    pub(super) access: &'a AccessRequest,
    pub(super) memory: &'a Buffer,
}

/// One round of driving a queue.
pub(super) struct PollRound<'a, T> {
    fabric: &'a Fabric,
    /// Start of the round. Cached, because reading the clock is slow.
    pub(super) now: Instant<Monotonic>,
    pub(super) batches: Batches<T>,
    /// Index of the open batch that was joined last.
    last_joined: usize,
}

impl<'a, T> PollRound<'a, T> {
    /// Starts a round.
    pub(super) fn new(fabric: &'a Fabric, batches: Batches<T>) -> Self {
        Self {
            fabric,
            now: Instant::now(),
            batches,
            last_joined: 0,
        }
    }

    /// Posts the open batches, ends the round, and returns the batches.
    pub(super) fn finish(mut self) -> Batches<T> {
        self.post_all();
        self.batches
    }

    /// Returns the number of tasks in batches.
    pub(super) fn batched_tasks(&self) -> u32 {
        self.batches.task_count
    }

    /// Polls the CQ of the RNIC, for all waiters, if a batch is in flight. Returns `true` if one is.
    pub(super) fn poll_cq(&self) -> bool {
        let first = self.batches.posted.first();
        first.map(|posted| posted.op.poll_cq()).is_some()
    }

    /// Starts an access without blocking.
    ///
    /// # Errors
    ///
    /// See [`AccessRequest::submit`].
    pub(super) fn submit(
        &mut self,
        candidate: &BatchCandidate<'_>,
        ticket: &mut AdmissionTicket,
    ) -> TryResult<BatchJoinResult> {
        let direction = candidate.access.direction;
        let has_same_target = |open: &OpenBatch<T>| {
            open.handle_id == candidate.handle_id && open.batch.direction() == direction
        };
        if let Some(index) = self.batches.open.iter().position(has_same_target) {
            if let Some(placed) = self.try_join(index, candidate, ticket)? {
                self.last_joined = index;
                return Ok(BatchJoinResult::Joined(placed));
            }
            self.post_batch(index);
        }
        self.open_batch(candidate, ticket)
    }

    /// Adds an access to an open batch. Returns `None` if the access does not fit.
    fn try_join(
        &mut self,
        index: usize,
        candidate: &BatchCandidate<'_>,
        ticket: &mut AdmissionTicket,
    ) -> TryResult<Option<BatchedSegment>> {
        let Batches { open, dma_map, .. } = &mut self.batches;
        let Some(OpenBatch {
            batch, wr_chain, ..
        }) = open.get_mut(index)
        else {
            return Ok(None);
        };
        let mut context = SubmitContext {
            tenant: candidate.session.tenant()?,
            admission: ticket,
            wr_chain,
            arena: dma_map.as_ref(),
            now: self.now,
        };
        candidate
            .access
            .try_join(self.fabric, batch, candidate.memory, &mut context)
    }

    /// Starts an access that opens a batch, unless the access needs none.
    fn open_batch(
        &mut self,
        candidate: &BatchCandidate<'_>,
        ticket: &mut AdmissionTicket,
    ) -> TryResult<BatchJoinResult> {
        if self.batches.open.len() == MAX_OPEN_BATCHES {
            self.post_batch(0);
        }
        let (tenant, batches) = (candidate.session.tenant()?, &mut self.batches);
        let Some(tasks) = batches.free_task_lists.pop() else {
            return candidate.retry_or_time_out(self.now);
        };
        let Some(mut wr_chain) = batches.free_wr_chains.pop() else {
            batches.recycle_task_list(tasks);
            return candidate.retry_or_time_out(self.now);
        };
        let mut context = SubmitContext {
            tenant,
            admission: ticket,
            wr_chain: &mut wr_chain,
            arena: batches.dma_map.as_ref(),
            now: self.now,
        };
        let result = candidate.submit(&mut context);
        if let Ok(SubmitResult::NewBatch(batch, placed)) = result {
            self.last_joined = batches.open.len();
            let opened = OpenBatch {
                handle_id: candidate.handle_id,
                batch,
                wr_chain,
                tasks,
            };
            // Capacity suffices: a batch was posted above if the maximum number was open.
            let _ = batches.open.push(opened, GFP_ATOMIC);
            return Ok(BatchJoinResult::Joined(placed));
        }
        // Capacity suffices: the chain was popped above.
        let _ = batches.free_wr_chains.push(wr_chain, GFP_ATOMIC);
        batches.recycle_task_list(tasks);
        result.map(|result| match result {
            SubmitResult::Done => BatchJoinResult::Done,
            _ => BatchJoinResult::NeedsWorker,
        })
    }

    /// Adds a task to the batch that its access joined last.
    pub(super) fn add_task(&mut self, task: T) {
        let Some(open) = self.batches.open.get_mut(self.last_joined) else {
            return;
        };
        // Capacity suffices: a batch has at most as many accesses as WRs.
        let _ = open.tasks.push(task, GFP_ATOMIC);
        self.batches.task_count += 1;
        if open.batch.is_full() {
            self.post_batch(self.last_joined);
        }
    }

    /// Posts all open batches. The caller must do so before any slow operation.
    pub(super) fn post_all(&mut self) {
        while !self.batches.open.is_empty() {
            self.post_batch(0);
        }
    }

    /// Posts an open batch.
    fn post_batch(&mut self, index: usize) {
        let batches = &mut self.batches;
        let Ok(mut open) = batches.open.remove(index) else {
            return;
        };
        let posted = PostedBatch {
            mapping: open.batch.mapping().clone(),
            op: open.batch.post(self.fabric, &mut open.wr_chain, self.now),
            tasks: open.tasks,
        };
        // Capacity suffices: the batch was opened with a task list and a WR chain. Another batch may now use
        // the chain.
        let _ = batches.posted.push(posted, GFP_ATOMIC);
        let _ = batches.free_wr_chains.push(open.wr_chain, GFP_ATOMIC);
    }
}

impl BatchCandidate<'_> {
    fn submit(&self, context: &mut SubmitContext<'_>) -> TryResult<SubmitResult> {
        let Self {
            session,
            handle_id,
            access,
            memory,
        } = self;
        session.submit_access(*handle_id, access, memory, context)
    }

    /// Returns [`TryError::WouldBlock`], or `ETIMEDOUT` if the deadline has expired.
    fn retry_or_time_out(&self, now: Instant<Monotonic>) -> TryResult<BatchJoinResult> {
        if !self.access.deadline.has_expired_at(now) {
            return Err(TryError::WouldBlock);
        }
        self.session.rnic()?.stats.errors.add(1);
        Err(ETIMEDOUT.into())
    }
}
