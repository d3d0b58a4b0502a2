// SPDX-License-Identifier: GPL-2.0

//! Requests of virtual queue pairs by a queue.
//!
//! They stand in line, and those to one virtual queue pair leave it in their order, as many at a time as stand together.
//! Each is checked by itself. Who has to wait, for room or for what a worker waits for, holds up those that are to the
//! same one, and nobody else. What became of them the virtual queue pair tells
//! ([`super::completions`]).

use super::{task::Task, Queue, Work, SLOW_MAX, TAKE_MAX};
use crate::{
    bindings,
    fabric::{
        poller::Rest,
        qos::tenant::{Tenant, Turn},
        Fabric,
    },
    session::request,
    sys::deadline::Deadline,
    vqp::{
        addition::{Addition, Lack, Unready},
        exchange::Exchange,
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
const RUN_MAX: usize = bindings::KITE_PUSH_MAX as usize;
const PAIRS_MAX: usize = bindings::KITE_VQPS_MAX as usize;

/// Virtual queue pairs that keep others waiting, of which a few may be gone by now that workers ask for.
const HELD_MAX: usize = PAIRS_MAX + SLOW_MAX as usize;

/// How far a request is.
enum Stage {
    /// It stands in line.
    Waits,
    /// So it does, and a worker waits for what it lacks, of all that are asked the one of this number.
    Asks(u64),
    /// Its virtual queue pair has it, or it was refused.
    Over(Result),
}

/// A request of a virtual queue pair.
pub(super) struct Push {
    vqp: u64,
    work: bindings::kite_work,
    stage: Stage,
    /// Until when it may be held back by the priority and limits of the session, once it is.
    deadline: Option<Deadline>,
}

impl Push {
    /// What a submission of that tag asks for.
    pub(super) fn new(tag: u64, work: bindings::kite_work) -> Self {
        Self {
            vqp: work.tag,
            work: bindings::kite_work { tag, ..work },
            stage: Stage::Waits,
            deadline: None,
        }
    }

    /// Whether it is its turn, by the priority and limits of the session.
    fn check_turn(&mut self, tenant: &Tenant, turn: &mut Turn) -> Result<(), Unready> {
        let deadline = self.deadline.unwrap_or_else(|| request::deadline(0));
        let len = u64::from(self.work.len);
        if tenant.may_go(turn, len, deadline)? {
            tenant.passes(len);
            return Ok(());
        }
        if deadline.passed() {
            return Err(Unready::Refused(ETIMEDOUT));
        }
        self.deadline = Some(deadline);
        Err(Unready::Busy)
    }

    fn waits(&self) -> bool {
        matches!(self.stage, Stage::Waits)
    }
}

/// The requests of a queue that stand in line, and what it has under way.
pub(super) struct Pushes {
    waiting: KVec<KBox<Task>>,
    /// Virtual queue pairs to which nothing more can be added in this round.
    held: KVec<u64>,
    /// Those that have some under way.
    pairs: KVec<Arc<Vqp>>,
    /// There is more to add, which would take too long now, or somebody was in the way, who will not be for long.
    contended: bool,
    /// Workers that were asked so far.
    asked: u64,
}

impl Pushes {
    /// None, with room for as many as a queue has entries.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(entries: usize) -> Result<Self> {
        Ok(Self {
            waiting: KVec::with_capacity(entries, GFP_KERNEL_ACCOUNT)?,
            held: KVec::with_capacity(HELD_MAX, GFP_KERNEL_ACCOUNT)?,
            pairs: KVec::with_capacity(PAIRS_MAX, GFP_KERNEL_ACCOUNT)?,
            contended: false,
            asked: 0,
        })
    }

    /// How many stand in line.
    pub(super) fn len(&self) -> u32 {
        self.waiting.len() as u32
    }

    /// Adds one at the end of the line.
    pub(super) fn add(&mut self, task: KBox<Task>) {
        // There is room: no more are taken than there are entries.
        let _ = self.waiting.push_within_capacity(task);
    }

    /// Takes one out of the line, if it is there.
    pub(super) fn take(&mut self, tag: u64) -> Option<KBox<Task>> {
        let at = self.waiting.iter().position(|task| task.tag == tag)?;
        self.waiting.remove(at).ok()
    }

    /// Takes all out. What is under way is its virtual queue pairs' affair.
    pub(super) fn take_all(&mut self) -> KVec<KBox<Task>> {
        self.pairs.clear();
        core::mem::replace(&mut self.waiting, KVec::new())
    }

    /// Looks after what is under way, for who waits for it. Returns how much has come of that.
    pub(super) fn look(&self, fabric: &Fabric) -> usize {
        self.pairs.iter().map(|vqp| vqp.try_proceed(fabric)).sum()
    }

    /// Whether there is anything to look after.
    pub(super) fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || !self.pairs.is_empty()
    }

    /// What the poller has to do for them.
    pub(super) fn rest(&mut self) -> Rest {
        self.pairs.retain(|vqp| vqp.has_pending());
        let rest = match (self.is_busy(), self.contended && !self.waiting.is_empty()) {
            (_, true) => Rest::Soon,
            (true, false) => Rest::Waiting,
            (false, false) => Rest::Idle,
        };
        self.pairs
            .iter()
            .map(|vqp| vqp.rest())
            .fold(rest, Rest::max)
    }

    /// To which virtual queue pair that one is, and where those end that stand with it.
    fn run(&self, at: usize) -> Option<(u64, Range<usize>)> {
        let to = |task: &KBox<Task>| task.push().map(|push| push.vqp);
        let rest = self.waiting.get(at..)?;
        let vqp = to(rest.first()?)?;
        let alike = rest.iter().take(RUN_MAX);
        let count = alike.take_while(|task| to(task) == Some(vqp)).count();
        Some((vqp, at..at + count))
    }

    /// This one has some under way.
    fn keep(&mut self, vqp: Arc<Vqp>) {
        if self.pairs.iter().any(|other| Arc::ptr_eq(other, &vqp)) {
            return;
        }
        self.pairs.retain(|vqp| vqp.has_pending());
        // If it is not kept the poller looks after it all the same.
        let _ = self.pairs.push_within_capacity(vqp);
    }

    /// To this one nothing more is added in this round. Returns whether that is remembered.
    fn hold(&mut self, vqp: u64) -> bool {
        self.held.push_within_capacity(vqp).is_ok()
    }
}

/// The requests of tasks in line.
fn pushes(tasks: &mut [KBox<Task>]) -> impl Iterator<Item = &mut Push> {
    turns(tasks).map(|(push, _)| push)
}

/// As [`pushes`], with their turns.
fn turns(tasks: &mut [KBox<Task>]) -> impl Iterator<Item = (&mut Push, &mut Turn)> {
    tasks.iter_mut().filter_map(|task| task.push_mut())
}

impl Queue {
    /// Adds what can be added to virtual queue pairs. Returns how many have left the line.
    pub(super) fn push_all(self: &Arc<Self>, work: &mut Work) -> usize {
        if work.pushes.len() == 0 {
            return 0;
        }
        // They end with the RNIC.
        let Ok(exchange) = self.session.exchange() else {
            return 0;
        };
        work.pushes.held.clear();
        work.pushes.contended = false;
        let (mut at, mut done) = (0, 0);
        while let Some((vqp, run)) = work.pushes.run(at) {
            if done >= TAKE_MAX as usize {
                work.pushes.contended = true;
                break;
            }
            if work.pushes.held.contains(&vqp) {
                at = run.end;
                continue;
            }
            self.push_run(&exchange, &mut work.pushes, vqp, run.clone());
            let left = self.clear_run(work, run.clone());
            done += left;
            at += run.len() - left;
            // There is room for all that the session has, but whose they are may not be known for now.
            if left < run.len() && !work.pushes.hold(vqp) {
                break;
            }
        }
        done
    }

    /// Adds those that stand together, as far as that can be.
    fn push_run(
        self: &Arc<Self>,
        exchange: &Exchange,
        all: &mut Pushes,
        number: u64,
        run: Range<usize>,
    ) {
        let first = all.waiting[run.start].push();
        if first.is_some_and(|push| matches!(push.stage, Stage::Asks(_))) {
            return;
        }
        let found = self.session.try_vqp(number).map_err(Unready::from);
        let added = found.and_then(|vqp| {
            all.keep(vqp.clone());
            let tasks = &mut all.waiting[run.clone()];
            self.payer.pays(|| self.add_run(exchange, &vqp, tasks))
        });
        let tasks = &mut all.waiting[run];
        let mut left = pushes(tasks).filter(|push| push.waits());
        match added {
            Ok(()) | Err(Unready::Full) => {}
            Err(Unready::Busy) => all.contended = true,
            Err(Unready::Lacks(lack)) => {
                if let Some(push) = left.next() {
                    all.asked += 1;
                    self.ask(push, all.asked, lack);
                }
            }
            Err(Unready::Refused(error)) => {
                left.for_each(|push| push.stage = Stage::Over(Err(error)));
            }
        }
    }

    /// Adds them to their virtual queue pair, or as many as it takes.
    fn add_run(
        self: &Arc<Self>,
        exchange: &Exchange,
        vqp: &Vqp,
        tasks: &mut [KBox<Task>],
    ) -> Result<(), Unready> {
        let cluster = &exchange.lmr.cluster;
        let mut addition = vqp.try_begin(cluster, tasks.len())?;
        let stopped = self.fill(exchange, &mut addition, tasks);
        let count = addition.len() as u32;
        // Before they can be done.
        self.completions.begin(count);
        if let Err(error) = addition.end(cluster, self.completions.clone()) {
            self.completions.end(count);
            let added = pushes(tasks).filter(|push| matches!(push.stage, Stage::Over(Ok(()))));
            added.for_each(|push| push.stage = Stage::Waits);
            return Err(error);
        }
        stopped
    }

    /// Adds requests, until one has to wait.
    fn fill(
        &self,
        exchange: &Exchange,
        addition: &mut Addition<'_>,
        tasks: &mut [KBox<Task>],
    ) -> Result<(), Unready> {
        let (uid, tenant) = (self.caller().uid(), self.session.tenant()?);
        for (push, turn) in turns(tasks).filter(|(push, _)| push.waits()) {
            let request = self.session.try_request(exchange, &push.work, uid);
            let mut add = |request| addition.add(request, || push.check_turn(tenant, turn));
            push.stage = match request.map_err(Unready::from).and_then(&mut add) {
                Ok(()) => Stage::Over(Ok(())),
                Err(Unready::Refused(error)) => Stage::Over(Err(error)),
                Err(other) => return Err(other),
            };
        }
        Ok(())
    }

    /// Takes those of a run out of the line that are over: the first ones. Returns how many.
    fn clear_run(&self, work: &mut Work, run: Range<usize>) -> usize {
        let mut count = 0;
        for _ in run.clone() {
            let first = work.pushes.waiting.get_mut(run.start);
            let push = first.and_then(|task| task.push());
            let Some(Stage::Over(result)) = push.map(|push| &push.stage) else {
                break;
            };
            let refused = result.err();
            if let Ok(mut task) = work.pushes.waiting.remove(run.start) {
                if refused.is_some() {
                    task.give_up(self);
                }
                let refused = refused.map(|error| (task.tag, Err(self.session.blame(error))));
                work.clear(task);
                self.completions.complete_all(refused.into_iter());
            }
            count += 1;
        }
        count
    }

    /// Has a worker wait for what a request lacks, if there is one.
    fn ask(self: &Arc<Self>, push: &mut Push, asked: u64, lack: Lack) {
        if !self.has_worker() {
            return;
        }
        self.slow.fetch_add(1u32, Full);
        let (queue, number) = (self.clone(), push.vqp);
        let spawned = self.rnic.spawn(move || {
            let found = queue.payer.pays(|| queue.provide(number, lack));
            queue.answer(asked, found);
            queue.workers_have_less(1);
        });
        match spawned {
            Ok(()) => push.stage = Stage::Asks(asked),
            Err(_) => drop(self.slow.fetch_sub(1u32, Full)),
        }
    }

    fn provide(&self, number: u64, lack: Lack) -> Result {
        let exchange = self.session.exchange()?;
        let vqp = self.session.vqp(number)?;
        vqp.provide(&exchange.lmr.cluster, lack, request::deadline(0))
    }

    /// Who asked goes on, or is refused, unless it was given up.
    fn answer(&self, asked: u64, found: Result) {
        let mut work = self.work.lock();
        let mut all = pushes(&mut work.pushes.waiting);
        if let Some(push) = all.find(|push| matches!(push.stage, Stage::Asks(by) if by == asked)) {
            push.stage = found.map_or_else(|error| Stage::Over(Err(error)), |()| Stage::Waits);
        }
    }
}
