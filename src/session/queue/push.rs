// SPDX-License-Identifier: GPL-2.0

//! Requests of virtual queue pairs by a queue.
//!
//! They stand in line, and those to one virtual queue pair leave it in their order, as many at a time as stand together.
//! Each is checked by itself. Who has to wait, for room or for what a worker waits for, holds up those that are to the
//! same one, and nobody else. What became of them the virtual queue pair tells
//! ([`super::completions`]).

use super::{task::IoTask, IoQueue, IoQueueState, MAX_OFFLOADED, MAX_SQES_PER_ROUND};
use crate::{
    bindings,
    fabric::{
        qos::tenant::{AdmissionTicket, Tenant},
        recv::poller::PollHint,
        Fabric,
    },
    session::args,
    sys::deadline::Deadline,
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

/// Requests that are added at a time, and virtual queue pairs of a session.
const MAX_RUN_LEN: usize = bindings::KITE_PUSH_MAX as usize;
const MAX_VQPS: usize = bindings::KITE_VQPS_MAX as usize;

/// Virtual queue pairs that keep others waiting, of which a few may be gone by now that workers ask for.
const MAX_SKIPPED_VQPS: usize = MAX_VQPS + MAX_OFFLOADED as usize;

/// How far a request is.
enum PushJobState {
    /// It stands in line.
    Queued,
    /// So it does, and a worker waits for what it lacks, of all that are asked the one of this number.
    AwaitingWorker(u64),
    /// Its virtual queue pair has it, or it was refused.
    Done(Result),
}

/// A request of a virtual queue pair.
pub(super) struct VqpPushJob {
    vqp_id: u64,
    wr: bindings::kite_send_wr,
    state: PushJobState,
    /// Until when it may be held back by the priority and limits of the session, once it is.
    deadline: Option<Deadline>,
}

impl VqpPushJob {
    /// What a submission of that tag asks for.
    pub(super) fn new(tag: u64, wr: bindings::kite_send_wr) -> Self {
        Self {
            vqp_id: wr.tag,
            wr: bindings::kite_send_wr { tag, ..wr },
            state: PushJobState::Queued,
            deadline: None,
        }
    }

    /// Whether it is its turn, by the priority and limits of the session.
    fn check_admission(
        &mut self,
        tenant: &Tenant,
        ticket: &mut AdmissionTicket,
    ) -> Result<(), PushError> {
        let deadline = self.deadline.unwrap_or_else(|| args::deadline(0));
        let len = u64::from(self.wr.len);
        if tenant.try_admit(ticket, len, deadline)? {
            tenant.charge_unmeasured(len);
            return Ok(());
        }
        if deadline.has_expired() {
            return Err(PushError::Refused(ETIMEDOUT));
        }
        self.deadline = Some(deadline);
        Err(PushError::Busy)
    }

    fn is_queued(&self) -> bool {
        matches!(self.state, PushJobState::Queued)
    }
}

/// The requests of a queue that stand in line, and what it has under way.
pub(super) struct VqpPushQueue {
    queued: KVec<KBox<IoTask>>,
    /// Virtual queue pairs to which nothing more can be added in this round.
    skipped_vqps: KVec<u64>,
    /// Those that have some under way.
    active_vqps: KVec<Arc<Vqp>>,
    /// There is more to add, which would take too long now, or somebody was in the way, who will not be for long.
    retry_soon: bool,
    /// Workers that were asked so far.
    last_wait_id: u64,
}

impl VqpPushQueue {
    /// None, with room for as many as a queue has entries.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(entries: usize) -> Result<Self> {
        Ok(Self {
            queued: KVec::with_capacity(entries, GFP_KERNEL_ACCOUNT)?,
            skipped_vqps: KVec::with_capacity(MAX_SKIPPED_VQPS, GFP_KERNEL_ACCOUNT)?,
            active_vqps: KVec::with_capacity(MAX_VQPS, GFP_KERNEL_ACCOUNT)?,
            retry_soon: false,
            last_wait_id: 0,
        })
    }

    /// How many stand in line.
    pub(super) fn len(&self) -> u32 {
        self.queued.len() as u32
    }

    /// Adds one at the end of the line.
    pub(super) fn push_back(&mut self, task: KBox<IoTask>) {
        // There is room: no more are taken than there are entries.
        let _ = self.queued.push_within_capacity(task);
    }

    /// Takes one out of the line, if it is there.
    pub(super) fn remove(&mut self, tag: u64) -> Option<KBox<IoTask>> {
        let index = self.queued.iter().position(|task| task.tag == tag)?;
        self.queued.remove(index).ok()
    }

    /// Takes all out. What is under way is its virtual queue pairs' affair.
    pub(super) fn drain(&mut self) -> KVec<KBox<IoTask>> {
        self.active_vqps.clear();
        core::mem::replace(&mut self.queued, KVec::new())
    }

    /// Looks after what is under way, for who waits for it. Returns how much has come of that.
    pub(super) fn make_progress(&self, fabric: &Fabric) -> usize {
        self.active_vqps
            .iter()
            .map(|vqp| vqp.try_make_progress(fabric))
            .sum()
    }

    /// Whether there is anything to look after.
    pub(super) fn is_busy(&self) -> bool {
        !self.queued.is_empty() || !self.active_vqps.is_empty()
    }

    /// What the poller has to do for them.
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

    /// To which virtual queue pair that one is, and where those end that stand with it.
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

    /// This one has some under way.
    fn add_active_vqp(&mut self, vqp: Arc<Vqp>) {
        if self
            .active_vqps
            .iter()
            .any(|other| Arc::ptr_eq(other, &vqp))
        {
            return;
        }
        self.active_vqps.retain(|vqp| vqp.has_pending());
        // If it is not kept the poller looks after it all the same.
        let _ = self.active_vqps.push_within_capacity(vqp);
    }

    /// To this one nothing more is added in this round. Returns whether that is remembered.
    fn skip_vqp(&mut self, vqp_id: u64) -> bool {
        self.skipped_vqps.push_within_capacity(vqp_id).is_ok()
    }
}

/// The requests of tasks in line.
fn push_jobs(tasks: &mut [KBox<IoTask>]) -> impl Iterator<Item = &mut VqpPushJob> {
    push_jobs_with_tickets(tasks).map(|(push, _)| push)
}

/// As [`pushes`], with their turns.
fn push_jobs_with_tickets(
    tasks: &mut [KBox<IoTask>],
) -> impl Iterator<Item = (&mut VqpPushJob, &mut AdmissionTicket)> {
    tasks.iter_mut().filter_map(|task| task.push_job_mut())
}

impl IoQueue {
    /// Adds what can be added to virtual queue pairs. Returns how many have left the line.
    pub(super) fn submit_pushes(self: &Arc<Self>, state: &mut IoQueueState) -> usize {
        if state.pushes.len() == 0 {
            return 0;
        }
        // They end with the RNIC.
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
            // There is room for all that the session has, but whose they are may not be known for now.
            if left_queue < run.len() && !state.pushes.skip_vqp(vqp_id) {
                break;
            }
        }
        removed
    }

    /// Adds those that stand together, as far as that can be.
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

    /// Adds them to their virtual queue pair, or as many as it takes.
    fn push_run_to_vqp(
        self: &Arc<Self>,
        vqp_table: &VqpTable,
        vqp: &Vqp,
        tasks: &mut [KBox<IoTask>],
    ) -> Result<(), PushError> {
        let cluster = &vqp_table.lmr.cluster;
        let mut builder = vqp.try_start_push(cluster, tasks.len())?;
        let stop_reason = self.fill_builder(vqp_table, &mut builder, tasks);
        let count = builder.len() as u32;
        // Before they can be done.
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

    /// Adds requests, until one has to wait.
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

    /// Takes those of a run out of the line that are over: the first ones. Returns how many.
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

    /// Has a worker wait for what a request lacks, if there is one.
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
        vqp.wait_for_prerequisite(&vqp_table.lmr.cluster, prerequisite, args::deadline(0))
    }

    /// Who asked goes on, or is refused, unless it was given up.
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
