// SPDX-License-Identifier: GPL-2.0

//! A submission under way.
//!
//! A short read or write is posted at once, or as soon as there is room for it, and whoever drives the queue
//! looks for its end. All else is left to a worker, who does it as the system call would: what is long, in
//! several pieces, of another kind, or has to be done again because its queue pair failed.

use super::{run, Queue, SLOW_MAX};
use crate::{
    bindings,
    fabric::flight::{deliver, Failed, Flight},
    lmr::{
        io::{Access, Begun},
        mapping::{KeptPass, Mapping},
    },
    sys::memory::Memory,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
    time::{Instant, Monotonic},
};

/// Time after which a worker waits for what was posted, and makes its queue pair fail in the end.
const PATIENCE_MS: i64 = 1000;

/// A read or write.
pub(super) struct Short {
    pub(super) handle: u64,
    pub(super) access: Access,
    pub(super) memory: Memory,
}

/// A read or write that was posted.
struct Flying {
    flight: Flight<KeptPass>,
    mapping: Arc<Mapping>,
    since: Instant<Monotonic>,
}

/// What is to be done.
enum Job {
    Short(Short),
    Other(bindings::kite_submission),
    /// It cannot be.
    Wrong(Error),
}

/// How far it is.
enum State {
    New,
    Flying(Flying),
    /// Its queue pair failed.
    Failed(Failed),
}

/// What came of a look at a task.
pub(super) enum Progress {
    Done(Result<u64>),
    /// A worker has it.
    Left,
    /// It is to be looked at again.
    Stays,
}

/// A submission.
pub(super) struct Task {
    pub(super) tag: u64,
    /// Nothing once a worker has it.
    job: Option<Job>,
    state: State,
}

impl Task {
    /// Takes a submission on.
    pub(super) fn new(queue: &Queue, submission: &bindings::kite_submission) -> Self {
        let job = match run::short(queue.caller(), submission) {
            Ok(Some(short)) => Job::Short(short),
            Ok(None) => Job::Other(*submission),
            Err(error) => Job::Wrong(error),
        };
        Self {
            tag: submission.tag,
            job: Some(job),
            state: State::New,
        }
    }

    /// Whether nothing is to be done before the RNIC says that it was posted.
    pub(super) fn is_flying(&self) -> bool {
        matches!(self.state, State::Flying(_))
    }

    /// Looks for completions of everybody, if this waits for one.
    pub(super) fn look(&self) -> bool {
        if let State::Flying(flying) = &self.state {
            flying.flight.look();
        }
        self.is_flying()
    }

    /// Goes on, if that is possible without waiting.
    pub(super) fn advance(&mut self, queue: &Arc<Queue>) -> Progress {
        match core::mem::replace(&mut self.state, State::New) {
            State::New => self.begin(queue),
            State::Flying(flying) if flying.flight.is_done() => self.land(queue, flying),
            State::Flying(flying) => self.wait_for(queue, flying),
            State::Failed(failed) => self.redo(queue, failed),
        }
    }

    fn begin(&mut self, queue: &Arc<Queue>) -> Progress {
        let short = match &self.job {
            Some(Job::Short(short)) => short,
            Some(Job::Wrong(error)) => return Progress::Done(Err(*error)),
            _ => return self.leave(queue),
        };
        let session = &queue.session;
        match session.begin(short.handle, &short.access, &short.memory) {
            Ok((_, Begun::Done)) => Progress::Done(Ok(0)),
            Ok((_, Begun::Long)) => self.leave(queue),
            Ok((mapping, Begun::Flying(flight))) => {
                self.state = State::Flying(Flying {
                    flight,
                    mapping,
                    since: Instant::now(),
                });
                Progress::Stays
            }
            Err(error) if error == EAGAIN => Progress::Stays,
            Err(error) => Progress::Done(Err(error)),
        }
    }

    fn land(&mut self, queue: &Arc<Queue>, flying: Flying) -> Progress {
        let Some(Job::Short(short)) = &self.job else {
            return Progress::Done(Err(EIO));
        };
        match flying.land(queue, short) {
            Ok(None) => Progress::Done(Ok(0)),
            Ok(Some(failed)) => self.redo(queue, failed),
            Err(error) => Progress::Done(Err(error)),
        }
    }

    fn wait_for(&mut self, queue: &Arc<Queue>, flying: Flying) -> Progress {
        let stuck = flying.since.elapsed().as_millis() > PATIENCE_MS;
        if !stuck || !queue.has_worker() {
            self.state = State::Flying(flying);
            return Progress::Stays;
        }
        self.leave_with(queue, move |queue, short| {
            match flying.land(queue, short)? {
                None => Ok(0),
                Some(failed) => again(queue, short, &failed),
            }
        })
    }

    fn redo(&mut self, queue: &Arc<Queue>, failed: Failed) -> Progress {
        if !queue.has_worker() {
            self.state = State::Failed(failed);
            return Progress::Stays;
        }
        self.leave_with(queue, move |queue, short| again(queue, short, &failed))
    }

    /// Leaves what was not begun to a worker, if there is one.
    fn leave(&mut self, queue: &Arc<Queue>) -> Progress {
        if !queue.has_worker() {
            return Progress::Stays;
        }
        match self.job.take() {
            Some(Job::Other(submission)) => {
                queue.spawn(self.tag, move |queue| run::run(queue, &submission))
            }
            job => {
                self.job = job;
                self.leave_with(queue, |queue, short| do_short(queue, short))
            }
        }
    }

    fn leave_with(
        &mut self,
        queue: &Arc<Queue>,
        f: impl FnOnce(&Arc<Queue>, &Short) -> Result<u64> + Send + 'static,
    ) -> Progress {
        match self.job.take() {
            Some(Job::Short(short)) => queue.spawn(self.tag, move |queue| f(queue, &short)),
            _ => Progress::Done(Err(EIO)),
        }
    }

    /// Waits for what was posted.
    pub(super) fn end(self, queue: &Queue) {
        if let (State::Flying(flying), Some(Job::Short(short))) = (self.state, &self.job) {
            drop(flying.land(queue, short));
        }
    }
}

impl Flying {
    /// Waits for the end, which takes as long as the RNIC. Returns the part if its queue pair failed.
    fn land(self, queue: &Queue, short: &Short) -> Result<Option<Failed>> {
        let (access, stats) = (&short.access, &queue.rnic.stats);
        let landed = self.flight.settle(stats, |claim, part| {
            deliver(access.direction, &short.memory, claim, part)
        });
        if !matches!(landed, Ok(Some(_))) {
            access.ended(&self.mapping, stats, landed.as_ref().err().copied());
        }
        landed
    }
}

/// Does it as the system call would.
fn do_short(queue: &Queue, short: &Short) -> Result<u64> {
    let session = &queue.session;
    let done = session.access(short.handle, &short.access, &short.memory);
    done.map(|()| 0)
}

/// Does it again, once nothing of the first attempt can come late.
fn again(queue: &Queue, short: &Short, failed: &Failed) -> Result<u64> {
    let session = &queue.session;
    let rpc = session.rpc()?;
    let outlived = failed.outlive(short.access.deadline);
    outlived.inspect_err(|_| rpc.lmr.stats.errors.add(1))?;
    drop(rpc);
    do_short(queue, short)
}

impl Queue {
    /// Whether a worker would take one more request.
    fn has_worker(&self) -> bool {
        self.slow.load(Acquire) < SLOW_MAX
    }

    /// Has a worker do `f` for a submission.
    fn spawn(
        self: &Arc<Self>,
        tag: u64,
        f: impl FnOnce(&Arc<Self>) -> Result<u64> + Send + 'static,
    ) -> Progress {
        self.slow.fetch_add(1u32, Full);
        let queue = self.clone();
        let spawned = self.rnic.spawn(move || {
            let result = queue.payer.pays(|| f(&queue));
            queue.worker_done(tag, result);
        });
        match spawned {
            Ok(()) => Progress::Left,
            Err(error) => {
                self.slow.fetch_sub(1u32, Full);
                Progress::Done(Err(error))
            }
        }
    }
}
