// SPDX-License-Identifier: GPL-2.0

//! Short reads and writes of a queue that are posted together.
//!
//! In one round of who drives the queue, accesses by one handle that go one way join a batch for as long as they
//! fit. It is posted when one comes that does not, or at the end of the round. What a failed queue pair took with it, and
//! what takes longer than any RNIC should, is left to workers.

use super::{small::AccessJob, task::IoTask, IoQueue, IoQueueOwner, IoQueueState, MAX_OFFLOADED};
use crate::{
    fabric::{
        qos::tenant::AdmissionTicket,
        send::{
            batch::{BatchedSegment, WrChain, MAX_BATCH_WRS},
            inflight::PolledOp,
        },
        Fabric,
    },
    region::map::{
        batch::AccessBatch,
        io::{AccessRequest, SubmitContext, SubmitResult},
        Mapping, OwnedRemoteAccess,
    },
    session::Session,
    sys::buffer::Buffer,
    verbs::{device::IbDevice, dma::LongTermDmaMap},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    sync::{atomic::Full, Arc, SpinLock},
    time::{Instant, Monotonic},
};

/// Batches of a queue that may be under way, or opened.
const MAX_BATCHES: usize = 64;

/// Batches that may be open: for several handles, or both ways.
const MAX_OPEN_BATCHES: usize = 4;

/// What others may join.
struct OpenBatch {
    handle_id: u64,
    batch: AccessBatch,
    wr_chain: WrChain,
    tasks: BatchTasks,
}

/// What was posted.
struct PostedBatch {
    op: PolledOp<OwnedRemoteAccess>,
    mapping: Arc<Mapping>,
    tasks: BatchTasks,
}

/// The tasks of a batch.
type BatchTasks = KVec<KBox<IoTask>>;

/// The batches of a queue.
#[derive(Default)]
pub(super) struct IoQueueBatches {
    open: KVec<OpenBatch>,
    posted: KVec<PostedBatch>,
    /// The memory of the queue, if it is mapped for the RNIC. That ends with the batches, before the RNIC goes.
    dma_map: Option<Arc<LongTermDmaMap>>,
    /// Tasks in all of them.
    task_count: u32,
    /// Room for the requests of those that may be opened.
    free_wr_chains: KVec<WrChain>,
    /// Room for the tasks of those that may be opened.
    free_task_lists: KVec<BatchTasks>,
}

/// What became of an access that was begun.
pub(super) enum BatchJoinResult {
    Done,
    /// It is in the batch in which its task is to be put.
    Joined(BatchedSegment),
    NeedsWorker,
}

impl IoQueueBatches {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
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

    /// Tasks in all of them.
    pub(super) fn len(&self) -> u32 {
        self.task_count
    }

    /// Whether one has completed.
    pub(super) fn has_completed(&self) -> bool {
        self.posted.iter().any(|posted| posted.op.is_done())
    }

    /// Takes one out that was posted.
    fn remove_posted(&mut self, index: usize) -> Option<PostedBatch> {
        let posted = self.posted.remove(index).ok()?;
        self.task_count -= posted.tasks.len() as u32;
        Some(posted)
    }

    /// Puts one back.
    fn reinsert_posted(&mut self, posted: PostedBatch) {
        self.task_count += posted.tasks.len() as u32;
        // There is room, here and below: for as many as there are lists, and for all of these.
        let _ = self.posted.push(posted, GFP_ATOMIC);
    }

    /// Keeps a list of tasks, of which there are none any more, for another batch.
    fn recycle_task_list(&mut self, list: BatchTasks) {
        if self.free_task_lists.len() < self.free_task_lists.capacity() {
            let _ = self.free_task_lists.push(list, GFP_ATOMIC);
        }
    }
}

/// An access of a session, by a handle.
pub(super) struct BatchCandidate<'a> {
    pub(super) session: &'a Session,
    pub(super) handle_id: u64,
    pub(super) access: &'a AccessRequest,
    pub(super) memory: &'a Buffer,
}

/// One round of who drives a queue.
pub(super) struct PollRound<'a> {
    fabric: &'a Fabric,
    /// When it began: that is slow to find out.
    pub(super) now: Instant<Monotonic>,
    batches: IoQueueBatches,
    /// The batch that was joined last.
    last_joined: usize,
}

impl<'a> PollRound<'a> {
    /// Begins one.
    pub(super) fn new(fabric: &'a Fabric, batches: IoQueueBatches) -> Self {
        Self {
            fabric,
            now: Instant::now(),
            batches,
            last_joined: 0,
        }
    }

    /// Ends it, and gives the batches back.
    pub(super) fn finish(mut self) -> IoQueueBatches {
        self.post_all();
        self.batches
    }

    /// Tasks in batches.
    pub(super) fn batched_tasks(&self) -> u32 {
        self.batches.task_count
    }

    /// Looks for completions of everybody, if a batch waits for some. Returns whether one does.
    pub(super) fn poll_cq(&self) -> bool {
        let first = self.batches.posted.first();
        first.map(|posted| posted.op.poll_cq()).is_some()
    }

    /// Begins an access. Waits for nothing.
    ///
    /// # Errors
    ///
    /// As for [`Access::begin`].
    pub(super) fn submit(
        &mut self,
        candidate: &BatchCandidate<'_>,
        ticket: &mut AdmissionTicket,
    ) -> Result<BatchJoinResult> {
        let direction = candidate.access.direction;
        let has_same_target = |open: &OpenBatch| {
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

    /// Has an access join an open batch, if it can.
    fn try_join(
        &mut self,
        index: usize,
        candidate: &BatchCandidate<'_>,
        ticket: &mut AdmissionTicket,
    ) -> Result<Option<BatchedSegment>> {
        let IoQueueBatches { open, dma_map, .. } = &mut self.batches;
        let Some(OpenBatch {
            batch,
            wr_chain: works,
            ..
        }) = open.get_mut(index)
        else {
            return Ok(None);
        };
        let mut context = SubmitContext {
            tenant: candidate.session.tenant()?,
            admission: ticket,
            wr_chain: works,
            arena: dma_map.as_ref(),
            now: self.now,
        };
        candidate
            .access
            .try_join(self.fabric, batch, candidate.memory, &mut context)
    }

    /// Begins an access by which a batch is opened, unless it needs none.
    fn open_batch(
        &mut self,
        candidate: &BatchCandidate<'_>,
        ticket: &mut AdmissionTicket,
    ) -> Result<BatchJoinResult> {
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
            // There is room: one was posted if there was none.
            let _ = batches.open.push(opened, GFP_ATOMIC);
            return Ok(BatchJoinResult::Joined(placed));
        }
        let _ = batches.free_wr_chains.push(wr_chain, GFP_ATOMIC);
        batches.recycle_task_list(tasks);
        result.map(|result| match result {
            SubmitResult::Done => BatchJoinResult::Done,
            _ => BatchJoinResult::NeedsWorker,
        })
    }

    /// Puts a task where its access is: in the batch that was joined last.
    pub(super) fn add_task(&mut self, task: KBox<IoTask>) {
        let Some(open) = self.batches.open.get_mut(self.last_joined) else {
            return;
        };
        // There is room: a batch has no more accesses than requests.
        let _ = open.tasks.push(task, GFP_ATOMIC);
        self.batches.task_count += 1;
        if open.batch.is_full() {
            self.post_batch(self.last_joined);
        }
    }

    /// Posts all open batches. To be called before anything that may take its time.
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
        // There is room: it was opened with a list and with this, which others may have now.
        let _ = batches.posted.push(posted, GFP_ATOMIC);
        let _ = batches.free_wr_chains.push(open.wr_chain, GFP_ATOMIC);
    }
}

impl BatchCandidate<'_> {
    fn submit(&self, context: &mut SubmitContext<'_>) -> Result<SubmitResult> {
        let Self {
            session,
            handle_id,
            access,
            memory,
        } = self;
        session.submit_access(*handle_id, access, memory, context)
    }

    /// It is to be tried again, unless that is too late.
    fn retry_or_time_out(&self, now: Instant<Monotonic>) -> Result<BatchJoinResult> {
        if !self.access.deadline.has_expired_at(now) {
            return Err(EAGAIN);
        }
        self.session.rnic()?.stats.errors.add(1);
        Err(ETIMEDOUT)
    }
}

/// The accesses of a batch.
fn access_jobs(tasks: &mut [KBox<IoTask>]) -> impl Iterator<Item = &mut AccessJob> {
    tasks.iter_mut().filter_map(|task| task.access_job())
}

/// Batches that workers wait for, or are about to.
pub(super) fn new_timed_out() -> Result<impl PinInit<SpinLock<TimedOutBatches>>> {
    let batches = KVec::with_capacity(MAX_OFFLOADED as usize, GFP_KERNEL_ACCOUNT)?;
    Ok(new_spinlock!(TimedOutBatches(batches)))
}

/// Batches that take too long.
pub(super) struct TimedOutBatches(KVec<PostedBatch>);

impl IoQueue {
    /// Maps the memory of the queue for an RNIC that does not go meanwhile. If that cannot be, what short
    /// accesses move is copied.
    pub(super) fn map_memory(&self, device: IbDevice) {
        let IoQueueOwner::Process { memory, .. } = &self.owner else {
            return;
        };
        let dma_map = LongTermDmaMap::new(device, memory.pinned.clone()).ok();
        let mut state = self.state.lock();
        if state.close_error.is_none() {
            state.batches.dma_map = dma_map;
        }
    }

    /// Ends the batches that have completed. Returns how many tasks were in them.
    pub(super) fn reap_batches(
        self: &Arc<Self>,
        state: &mut IoQueueState,
        round: &mut PollRound<'_>,
    ) -> usize {
        let (mut reaped, mut index) = (0, 0);
        while let Some(PostedBatch { op, .. }) = round.batches.posted.get(index) {
            let is_done = op.is_done();
            let has_timed_out = !is_done && op.is_stuck(round.now) && self.has_free_worker();
            if !is_done && !has_timed_out {
                index += 1;
                continue;
            }
            let Some(posted) = round.batches.remove_posted(index) else {
                break;
            };
            if !is_done {
                if let Some(posted) = self.offload_timed_out(posted) {
                    round.batches.reinsert_posted(posted);
                    break;
                }
                continue;
            }
            let mut tasks = self.reap_batch(posted);
            reaped += tasks.len();
            state.requeue_failed(&mut tasks);
            round.batches.recycle_task_list(tasks);
        }
        reaped
    }

    /// Ends a batch, and waits for that if need be. Returns its tasks, of which those are completed that did
    /// not fail with their queue pair.
    fn reap_batch(&self, posted: PostedBatch) -> BatchTasks {
        let PostedBatch {
            op,
            mapping,
            mut tasks,
        } = posted;
        let stats = &self.rnic.stats;
        let outcome = op.complete_batch(stats, |slot, done| {
            access_jobs(&mut tasks).for_each(|job| job.on_wrs_done(slot, done));
        });
        match outcome {
            Ok(None) => {}
            Ok(Some(failed)) => access_jobs(&mut tasks).for_each(|job| job.fail(&failed)),
            Err(error) => access_jobs(&mut tasks).for_each(|job| job.complete(Err(error))),
        }
        access_jobs(&mut tasks).for_each(|job| job.account(&mapping, stats));
        self.completion_ring
            .complete_all(tasks.iter().filter_map(|task| task.result()));
        tasks
    }

    /// Has a worker wait for a batch. Returns it if none can.
    fn offload_timed_out(self: &Arc<Self>, posted: PostedBatch) -> Option<PostedBatch> {
        let count = posted.tasks.len() as u32;
        // There is room: each has a worker, or is about to.
        let _ = self.timed_out.lock().0.push(posted, GFP_ATOMIC);
        self.offloaded.fetch_add(count, Full);
        let queue = self.clone();
        if self.rnic.spawn(move || queue.reap_timed_out()).is_ok() {
            return None;
        }
        // It need not be the same, if others are left to workers that are yet to begin.
        let returned = self.timed_out.lock().0.pop();
        let count = returned.as_ref().map_or(0, |posted| posted.tasks.len());
        self.offloaded.fetch_sub(count as u32, Full);
        returned
    }

    fn reap_timed_out(&self) {
        let Some(posted) = self.timed_out.lock().0.pop() else {
            return;
        };
        let mut tasks = self.reap_batch(posted);
        let count = tasks.len() as u32;
        let mut state = self.state.lock();
        match state.close_error {
            None => {
                state.requeue_failed(&mut tasks);
                state.batches.recycle_task_list(tasks);
            }
            Some(error) => {
                let failed = tasks.iter().filter(|task| task.result().is_none());
                self.completion_ring
                    .complete_all(failed.map(|task| (task.tag, Err(error))));
            }
        }
        drop(state);
        self.release_workers(count);
    }

    /// Ends all batches, which were given up for some reason, when the RNIC has let go of them.
    pub(super) fn abandon_batches(&self, batches: IoQueueBatches, error: Error) {
        for posted in batches.posted {
            drop(posted.op);
            self.completion_ring
                .complete_all(posted.tasks.iter().map(|task| (task.tag, Err(error))));
        }
    }
}

impl IoQueueState {
    /// Of tasks that were in a batch, those go on that failed; of others the room is free again.
    fn requeue_failed(&mut self, tasks: &mut BatchTasks) {
        for task in tasks.drain_all() {
            match task.result() {
                Some(_) => self.recycle_task(task),
                None => self.push_task(task),
            }
        }
    }
}
