// SPDX-License-Identifier: GPL-2.0

//! FIFO of the requests of virtual queue pairs (VQPs) that were submitted through an I/O queue.
//!
//! # Operation
//!
//! Requests form one FIFO. Consecutive requests to the same VQP form a run, and a run is submitted together,
//! in order. Each request is checked separately: a rejected request does not affect the others. A request
//! that waits for credits, or for a prerequisite that a worker obtains, delays only later requests to the
//! same VQP. The VQP completes the requests through its
//! [`CompletionSink`](crate::vqp::sink::CompletionSink), here [`super::completions`].
//!
//! # Locking
//!
//! `IoQueue::state` protects [`VqpPushQueue`]. With `state` locked, a round only tries to lock
//! `Session::vqps` and the VQPs. A worker locks `state` only after the wait for its prerequisite.

use super::{
    job::push::{PushJobState, VqpPushJob},
    task::IoTask,
    worker::MAX_OFFLOADED,
    IoQueue, IoQueueState, MAX_SQES_PER_ROUND,
};
use crate::{
    bindings,
    fabric::{qos::tenant::AdmissionTicket, recv::poll_client::PollHint, Fabric},
    session::args,
    vqp::{
        send::push_builder::{PushBuilder, PushError, PushPrerequisite},
        table::VqpTable,
        Vqp,
    },
};
use core::ops::Range;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::{atomic::Full, Arc},
};

/// Maximum requests submitted together, and maximum VQPs of a session.
const MAX_RUN_LEN: usize = bindings::KITE_PUSH_MAX as usize;
const MAX_VQPS: usize = bindings::KITE_VQPS_MAX as usize;

/// Capacity for VQPs to skip: those of the session, and closed VQPs that workers still wait for.
const MAX_SKIPPED_VQPS: usize = MAX_VQPS + MAX_OFFLOADED as usize;

/// Queued requests, and the VQPs with requests in flight.
pub(super) struct VqpPushQueue {
    queued: KVec<KBox<IoTask>>,
    /// VQPs that accept no further requests in this round.
    skipped_vqps: KVec<u64>,
    /// VQPs with requests in flight.
    active_vqps: KVec<Arc<Vqp>>,
    /// `true` if the round stopped at its limit, or if another thread briefly held a lock.
    retry_soon: bool,
    /// Number of the last wait given to a worker.
    last_wait_id: u64,
}

impl VqpPushQueue {
    /// Returns an empty FIFO with capacity for `entries` requests.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new(entries: usize) -> Result<Self> {
        Ok(Self {
            queued: KVec::with_capacity(entries, GFP_KERNEL_ACCOUNT)?,
            skipped_vqps: KVec::with_capacity(MAX_SKIPPED_VQPS, GFP_KERNEL_ACCOUNT)?,
            active_vqps: KVec::with_capacity(MAX_VQPS, GFP_KERNEL_ACCOUNT)?,
            retry_soon: false,
            last_wait_id: 0,
        })
    }

    /// Returns the number of queued requests.
    pub(super) fn len(&self) -> u32 {
        self.queued.len() as u32
    }

    /// Appends a request.
    pub(super) fn push_back(&mut self, task: KBox<IoTask>) {
        // Capacity suffices: the number of tasks never exceeds the number of entries.
        let _ = self.queued.push_within_capacity(task);
    }

    /// Removes the queued request with this tag, if any.
    pub(super) fn remove(&mut self, tag: u64) -> Option<KBox<IoTask>> {
        let index = self.queued.iter().position(|task| task.tag == tag)?;
        self.queued.remove(index).ok()
    }

    /// Removes all queued requests. The VQPs complete requests in flight.
    pub(super) fn drain(&mut self) -> KVec<KBox<IoTask>> {
        self.active_vqps.clear();
        core::mem::replace(&mut self.queued, KVec::new())
    }

    /// Makes progress on VQPs with requests in flight, for a thread that waits. Returns the amount of
    /// progress.
    pub(super) fn make_progress(&self, fabric: &Fabric) -> usize {
        self.active_vqps
            .iter()
            .map(|vqp| vqp.try_make_progress(fabric))
            .sum()
    }

    /// Returns `true` if requests are queued or in flight.
    pub(super) fn is_busy(&self) -> bool {
        !self.queued.is_empty() || !self.active_vqps.is_empty()
    }

    /// Returns how the poller thread must continue.
    pub(super) fn poll_hint(&mut self) -> PollHint {
        self.active_vqps.retain(|vqp| vqp.has_pending());
        let rest = match (self.is_busy(), self.retry_soon && !self.queued.is_empty()) {
            (_, true) => PollHint::Soon,
            (true, false) => PollHint::Waiting,
            (false, false) => PollHint::Idle,
        };
        self.active_vqps
            .iter()
            .map(|vqp| vqp.poll_hint())
            .fold(rest, PollHint::max)
    }

    /// Returns the VQP of the request at `start`, and the range of the run that begins there.
    fn run_at(&self, start: usize) -> Option<(u64, Range<usize>)> {
        let vqp_of = |task: &KBox<IoTask>| task.push_job().map(|push| push.vqp_id);
        let remaining = self.queued.get(start..)?;
        let vqp = vqp_of(remaining.first()?)?;
        let candidates = remaining.iter().take(MAX_RUN_LEN);
        let count = candidates
            .take_while(|task| vqp_of(task) == Some(vqp))
            .count();
        Some((vqp, start..start + count))
    }

    /// Records that a VQP has requests in flight.
    fn add_active_vqp(&mut self, vqp: Arc<Vqp>) {
        if self
            .active_vqps
            .iter()
            .any(|other| Arc::ptr_eq(other, &vqp))
        {
            return;
        }
        self.active_vqps.retain(|vqp| vqp.has_pending());
        // Without an entry the poller thread still drives the VQP.
        let _ = self.active_vqps.push_within_capacity(vqp);
    }

    /// Skips a VQP for the rest of the round. Returns `false` if the list is full.
    fn skip_vqp(&mut self, vqp_id: u64) -> bool {
        self.skipped_vqps.push_within_capacity(vqp_id).is_ok()
    }
}

/// Returns the requests of tasks.
fn push_jobs(tasks: &mut [KBox<IoTask>]) -> impl Iterator<Item = &mut VqpPushJob> {
    push_jobs_with_tickets(tasks).map(|(push, _)| push)
}

/// Like [`push_jobs`], with their admission tickets.
fn push_jobs_with_tickets(
    tasks: &mut [KBox<IoTask>],
) -> impl Iterator<Item = (&mut VqpPushJob, &mut AdmissionTicket)> {
    tasks.iter_mut().filter_map(|task| task.push_job_mut())
}

impl IoQueue {
    /// Submits queued requests to VQPs. Returns the number of requests removed from the FIFO.
    pub(super) fn submit_pushes(self: &Arc<Self>, state: &mut IoQueueState) -> usize {
        if state.pushes.len() == 0 {
            return 0;
        }
        // RNIC removal completes the requests.
        let Ok(vqp_table) = self.session.enter_vqp_table() else {
            return 0;
        };
        state.pushes.skipped_vqps.clear();
        state.pushes.retry_soon = false;
        let (mut index, mut removed) = (0, 0);
        while let Some((vqp_id, run)) = state.pushes.run_at(index) {
            if removed >= MAX_SQES_PER_ROUND as usize {
                state.pushes.retry_soon = true;
                break;
            }
            if state.pushes.skipped_vqps.contains(&vqp_id) {
                index = run.end;
                continue;
            }
            self.submit_run(&vqp_table, &mut state.pushes, vqp_id, run.clone());
            let left_queue = self.remove_done_pushes(state, run.clone());
            removed += left_queue;
            index += run.len() - left_queue;
            // Capacity suffices for all VQPs of the session. While `vqps` is locked, requests to VQPs that do
            // not exist can fill the list.
            if left_queue < run.len() && !state.pushes.skip_vqp(vqp_id) {
                break;
            }
        }
        removed
    }

    /// Submits as many requests of a run as possible.
    fn submit_run(
        self: &Arc<Self>,
        vqp_table: &VqpTable,
        pushes: &mut VqpPushQueue,
        vqp_id: u64,
        run: Range<usize>,
    ) {
        let first = pushes.queued[run.start].push_job();
        if first.is_some_and(|push| matches!(push.state, PushJobState::AwaitingWorker(_))) {
            return;
        }
        let found = self.session.try_vqp(vqp_id).map_err(PushError::from);
        let added = found.and_then(|vqp| {
            pushes.add_active_vqp(vqp.clone());
            let tasks = &mut pushes.queued[run.clone()];
            self.memcg
                .with_active(|| self.push_run_to_vqp(vqp_table, &vqp, tasks))
        });
        let tasks = &mut pushes.queued[run];
        let mut queued = push_jobs(tasks).filter(|push| push.is_queued());
        match added {
            Ok(()) | Err(PushError::Full) => {}
            Err(PushError::Busy) => pushes.retry_soon = true,
            Err(PushError::Missing(prerequisite)) => {
                if let Some(push) = queued.next() {
                    pushes.last_wait_id += 1;
                    self.offload_wait(push, pushes.last_wait_id, prerequisite);
                }
            }
            Err(PushError::Refused(error)) => {
                queued.for_each(|push| push.state = PushJobState::Done(Err(error)));
            }
        }
    }

    /// Submits requests to their VQP, as many as the VQP accepts.
    fn push_run_to_vqp(
        self: &Arc<Self>,
        vqp_table: &VqpTable,
        vqp: &Vqp,
        tasks: &mut [KBox<IoTask>],
    ) -> Result<(), PushError> {
        let cluster = &vqp_table.memory_service.cluster;
        let mut builder = PushBuilder::try_start(vqp, cluster, tasks.len())?;
        let stop_reason = self.fill_builder(vqp_table, &mut builder, tasks);
        let count = builder.len() as u32;
        // Count the requests before they can complete.
        self.completion_ring.add_vqp_requests(count);
        if let Err(error) = builder.submit(cluster, self.completion_ring.clone()) {
            self.completion_ring.sub_vqp_requests(count);
            let added =
                push_jobs(tasks).filter(|push| matches!(push.state, PushJobState::Done(Ok(()))));
            added.for_each(|push| push.state = PushJobState::Queued);
            return Err(error);
        }
        stop_reason
    }

    /// Adds requests to `builder`, until a request must wait.
    fn fill_builder(
        &self,
        vqp_table: &VqpTable,
        builder: &mut PushBuilder<'_>,
        tasks: &mut [KBox<IoTask>],
    ) -> Result<(), PushError> {
        let (uid, tenant) = (self.requester().uid(), self.session.tenant()?);
        for (push, ticket) in push_jobs_with_tickets(tasks).filter(|(push, _)| push.is_queued()) {
            let request = self.session.try_build_request(vqp_table, &push.wr, uid);
            let mut try_add =
                |request| builder.add(request, || push.check_admission(tenant, ticket));
            push.state = match request.map_err(PushError::from).and_then(&mut try_add) {
                Ok(()) => PushJobState::Done(Ok(())),
                Err(PushError::Refused(error)) => PushJobState::Done(Err(error)),
                Err(other) => return Err(other),
            };
        }
        Ok(())
    }

    /// Removes the finished requests at the front of a run from the FIFO. Returns their number.
    fn remove_done_pushes(&self, state: &mut IoQueueState, run: Range<usize>) -> usize {
        let mut count = 0;
        for _ in run.clone() {
            let first = state.pushes.queued.get_mut(run.start);
            let push = first.and_then(|task| task.push_job());
            let Some(PushJobState::Done(result)) = push.map(|push| &push.state) else {
                break;
            };
            let refused = result.err();
            if let Ok(mut task) = state.pushes.queued.remove(run.start) {
                if refused.is_some() {
                    task.cancel(self);
                }
                let refused =
                    refused.map(|error| (task.tag, Err(self.session.or_device_gone(error))));
                state.recycle_task(task);
                self.completion_ring.complete_all(refused.into_iter());
            }
            count += 1;
        }
        count
    }

    /// Lets a worker wait for a prerequisite of a request, if a worker is free.
    fn offload_wait(
        self: &Arc<Self>,
        push: &mut VqpPushJob,
        wait_id: u64,
        prerequisite: PushPrerequisite,
    ) {
        if !self.has_free_worker() {
            return;
        }
        self.offloaded.fetch_add(1u32, Full);
        let (queue, vqp_id) = (self.clone(), push.vqp_id);
        let spawned = self.rnic.spawn(move || {
            let result = queue
                .memcg
                .with_active(|| queue.wait_for_prerequisite(vqp_id, prerequisite));
            queue.on_prerequisite(wait_id, result);
            queue.release_workers(1);
        });
        match spawned {
            Ok(()) => push.state = PushJobState::AwaitingWorker(wait_id),
            Err(_) => drop(self.offloaded.fetch_sub(1u32, Full)),
        }
    }

    fn wait_for_prerequisite(&self, vqp_id: u64, prerequisite: PushPrerequisite) -> Result {
        let vqp_table = self.session.enter_vqp_table()?;
        let vqp = self.session.vqp(vqp_id)?;
        prerequisite.wait(&vqp, &vqp_table.memory_service.cluster, args::deadline(0))
    }

    /// Continues or rejects the request that waited, unless the request was canceled.
    fn on_prerequisite(&self, wait_id: u64, result: Result) {
        let mut state = self.state.lock();
        let mut jobs = push_jobs(&mut state.pushes.queued);
        if let Some(push) = jobs
            .find(|push| matches!(push.state, PushJobState::AwaitingWorker(id) if id == wait_id))
        {
            push.state = result.map_or_else(
                |error| PushJobState::Done(Err(error)),
                |()| PushJobState::Queued,
            );
        }
    }
}
