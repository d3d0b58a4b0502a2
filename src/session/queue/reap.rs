// SPDX-License-Identifier: GPL-2.0

//! Reaping the batches of an I/O queue: completes the accesses of batches whose operation is done.
//!
//! # Operation
//!
//! The round of a queue polls its posted batches in order. The accesses of a completed part of a batch
//! complete at once; the rest stays.
//!
//! # Recovery
//!
//! If the QP of a batch fails, the incomplete accesses become tasks again, and workers retry them. A worker
//! waits for a batch whose operation is stuck (`PolledOp::is_stuck`).
//!
//! # Locking
//!
//! `IoQueue::timed_out`, a spinlock, protects [`TimedOutBatches`] and nests inside `IoQueue::state`.

use super::{
    batch::PostedBatch,
    job::access::AccessJob,
    task::{IoTask, TaskBatches, TaskRound},
    worker::MAX_OFFLOADED,
    IoQueue, IoQueueOwner, IoQueueState,
};
use crate::{
    session::source::QueueProcess,
    verbs::{device::IbDevice, dma::LongTermDmaMap},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    sync::{atomic::Full, Arc, SpinLock},
};

/// Batches that exceeded their time limit, until a worker takes them.
pub(super) struct TimedOutBatches(KVec<PostedBatch<KBox<IoTask>>>);

/// Returns an empty list of batches for workers.
pub(super) fn new_timed_out() -> Result<impl PinInit<SpinLock<TimedOutBatches>>> {
    let batches = KVec::with_capacity(MAX_OFFLOADED as usize, GFP_KERNEL_ACCOUNT)?;
    Ok(new_spinlock!(
        TimedOutBatches(batches),
        "IoQueue::timed_out"
    ))
}

/// Returns the accesses of a batch.
fn access_jobs(tasks: &mut [KBox<IoTask>]) -> impl Iterator<Item = &mut AccessJob> {
    tasks.iter_mut().filter_map(|task| task.access_job())
}

impl IoQueue {
    /// Maps the memory of the queue for DMA. The caller prevents RNIC removal. On failure short accesses use
    /// bounce buffers.
    pub(super) fn map_memory(&self, device: IbDevice) {
        let IoQueueOwner::Process(QueueProcess { memory, .. }) = &self.owner else {
            return;
        };
        let dma_map = LongTermDmaMap::new(device, memory.pinned.clone()).ok();
        let mut state = self.state.lock();
        if state.close_error.is_none() {
            state.batches.dma_map = dma_map;
        }
    }

    /// Reaps the completed batches. Returns the number of their tasks.
    pub(super) fn reap_batches(
        self: &Arc<Self>,
        state: &mut IoQueueState,
        round: &mut TaskRound<'_>,
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

    /// Reaps a batch, and blocks until its operation completes. Completes its tasks, except those that failed
    /// with the QP. Returns all tasks.
    fn reap_batch(&self, posted: PostedBatch<KBox<IoTask>>) -> KVec<KBox<IoTask>> {
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

    /// Lets a worker wait for a batch. Returns a batch if no worker could be started.
    fn offload_timed_out(
        self: &Arc<Self>,
        posted: PostedBatch<KBox<IoTask>>,
    ) -> Option<PostedBatch<KBox<IoTask>>> {
        let count = posted.tasks.len() as u32;
        // Capacity suffices: each batch has a worker, or is about to get one.
        let _ = self.timed_out.lock().0.push(posted, GFP_ATOMIC);
        self.offloaded.fetch_add(count, Full);
        let queue = self.clone();
        if self.rnic.spawn(move || queue.reap_timed_out()).is_ok() {
            return None;
        }
        // This may be a different batch, if other batches wait for workers that have not started.
        let returned = self.timed_out.lock().0.remove(0).ok();
        let count = returned.as_ref().map_or(0, |posted| posted.tasks.len());
        self.offloaded.fetch_sub(count as u32, Full);
        returned
    }

    fn reap_timed_out(&self) {
        // The oldest batch first: none waits longer than the workers need.
        let Ok(posted) = self.timed_out.lock().0.remove(0) else {
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

    /// Completes all tasks of posted batches with `error`, after the RNIC has released the batches.
    pub(super) fn fail_batches(&self, batches: TaskBatches, error: Error) {
        for posted in batches.posted {
            drop(posted.op);
            self.completion_ring
                .complete_all(posted.tasks.iter().map(|task| (task.tag, Err(error))));
        }
    }
}

impl IoQueueState {
    /// Returns failed tasks of a batch to the queue, and frees the slots of the others.
    fn requeue_failed(&mut self, tasks: &mut KVec<KBox<IoTask>>) {
        for task in tasks.drain_all() {
            match task.result() {
                Some(_) => self.recycle_task(task),
                None => self.push_task(task),
            }
        }
    }
}
