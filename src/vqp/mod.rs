// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs (KRCORE, section 4): verbs to one node each, over initiators of DC that all share.
//!
//! Nothing is connected for them: who knows by which target the node is reached can post at once ([`crate::cluster`]).
//! What is pushed is checked whole before anything is posted ([`check`]), so nobody breaks what others use. A push
//! is posted as a batch, with one doorbell; batches go by one initiator, in their order, and are looked after by
//! the poller or by who pops. If the initiator fails by another's request, what was not done of them goes again.

pub(crate) mod check;
mod remote;

use crate::{
    cluster::Cluster,
    dc::work::Work,
    errno,
    fabric::{
        dynamic::{Dynamic, Pass},
        memory::Memory,
        peer::Reach,
        poller::{Driven, Rest},
        sender::{Claim, Class},
        Fabric,
    },
    sys::{deadline::Deadline, patience::Patience, watch::Watch},
    verbs::{
        cq::Status,
        work::{Remote, Sge},
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::view::Life;
use remote::Remotes;

/// Requests of a queue pair that were not popped.
pub(crate) const DEPTH: usize = crate::bindings::KITE_VQP_DEPTH as usize;

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Read,
    Write,
    CompareSwap { expected: u64, new: u64 },
    FetchAdd { operand: u64 },
}

/// A request that was checked.
pub(crate) struct Request {
    pub(crate) tag: u64,
    pub(crate) signalled: bool,
    fenced: bool,
    verb: Verb,
    /// Its local memory, and where in that.
    memory: Arc<Memory>,
    addr: u64,
    len: u32,
    remote: Remote,
}

/// What became of a request.
pub(crate) type Completion = (u64, Result);

/// Requests that were pushed together.
struct Batch {
    requests: KVec<Request>,
    /// So many of them are done.
    done: usize,
    reach: Arc<Reach>,
    /// The rest, unless they are to be posted.
    flight: Option<(Claim, Pass)>,
}

/// What is pushed, and what came of it.
struct State {
    batches: KVec<Batch>,
    /// The initiator by which they go.
    line: Option<usize>,
    completions: KVec<Completion>,
    /// Requests of all batches.
    pending: usize,
    /// Nothing is posted any more, for this reason.
    over: Option<Error>,
}

/// A virtual queue pair.
#[pin_data]
pub(crate) struct Vqp {
    life: Life,
    #[pin]
    state: Mutex<State>,
    #[pin]
    remotes: Mutex<Remotes>,
    patience: Patience,
    watch: Arc<Watch>,
}

impl Vqp {
    /// Makes one to a node, which hears nothing of it.
    ///
    /// # Errors
    ///
    /// As for [`Cluster::reach`].
    pub(crate) fn connect(
        cluster: &Cluster,
        node: u32,
        watch: Arc<Watch>,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        if node == cluster.node()? {
            return Err(EINVAL);
        }
        let life = cluster.life_of(node)?;
        drop(cluster.reach(life, deadline)?);
        let state = State {
            batches: KVec::new(),
            line: None,
            completions: KVec::with_capacity(DEPTH, GFP_KERNEL_ACCOUNT)?,
            pending: 0,
            over: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                life,
                state <- new_mutex!(state),
                remotes <- new_mutex!(Remotes::new()),
                patience: Patience::new(),
                watch,
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Adds requests, which are posted by and by, in this order. None of them is if one is refused.
    ///
    /// # Errors
    ///
    /// As `struct kite_push` in `include/uapi/kite.h` says.
    pub(crate) fn push(
        &self,
        cluster: &Cluster,
        asked: &[check::Asked],
        uid: u32,
        deadline: Deadline,
    ) -> Result {
        let reach = cluster.reach(self.life, deadline)?;
        let mut requests = KVec::with_capacity(asked.len(), GFP_KERNEL_ACCOUNT)?;
        for one in asked {
            let remotes = &self.remotes;
            let record = |key| remote::record(remotes, cluster, (self.life, &reach), key, deadline);
            let request = one.check(uid, record)?;
            requests.push(request, GFP_KERNEL_ACCOUNT)?;
        }
        let mut state = self.state.lock();
        if let Some(error) = state.over {
            return Err(error);
        }
        if state.pending + state.completions.len() + requests.len() > DEPTH {
            return Err(errno::nobufs());
        }
        state.pending += requests.len();
        let batch = Batch {
            requests,
            done: 0,
            reach,
            flight: None,
        };
        state.batches.push(batch, GFP_KERNEL_ACCOUNT)?;
        self.proceed(&cluster.fabric, &mut state);
        Ok(())
    }

    /// Takes completions, at most so many.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is none; why the queue pair is over; `ENOMEM`.
    pub(crate) fn pop(&self, fabric: &Fabric, most: usize) -> Result<KVec<Completion>> {
        let mut state = self.state.lock();
        self.proceed(fabric, &mut state);
        let taken = state.take(most)?;
        match state.over {
            Some(error) if taken.is_empty() => Err(error),
            None if taken.is_empty() => Err(EAGAIN),
            _ => Ok(taken),
        }
    }

    /// How long who waits for completions should poll.
    pub(crate) fn patience(&self) -> &Patience {
        &self.patience
    }

    /// Whether there is something to pop.
    pub(crate) fn has_completions(&self) -> bool {
        !self.state.lock().completions.is_empty()
    }

    /// Lets what is under way end, and nothing new begin.
    pub(crate) fn close(&self, error: Error) {
        let mut state = self.state.lock();
        state.over = Some(error);
        while let Some(batch) = state.batches.pop() {
            if let Some((claim, pass)) = &batch.flight {
                let status = claim.wait(|how| pass.rescue(how));
                if status != Status::Success {
                    pass.failed(status, self.life);
                }
            }
        }
        state.pending = 0;
    }

    /// Takes what has completed, and posts what can be. Returns how much that was.
    fn proceed(&self, fabric: &Fabric, state: &mut State) -> usize {
        let (before, mut posted) = (state.completions.len(), 0);
        if let Some((claim, _)) = state.batches.iter().find_map(|batch| batch.flight.as_ref()) {
            claim.look();
        }
        while let Some(batch) = state.batches.first_mut() {
            let Some(end) = batch.end(self.life) else {
                break;
            };
            state.settle(end);
        }
        for i in 0..state.batches.len() {
            if state.batches[i].flight.is_some() {
                continue;
            }
            if state.launch(fabric, i).is_err() {
                break;
            }
            posted += 1;
        }
        let done = state.completions.len() - before;
        if done != 0 {
            self.watch.wait.notify_all();
        }
        done + posted
    }
}

/// How the posted requests of a batch ended.
enum End {
    /// All are done.
    Done,
    /// One failed, after so many that were done.
    Failed { done: usize, error: Error },
    /// Somebody else's failed: what was not done goes again.
    Again { done: usize },
}

impl Batch {
    /// How it ended, if it did.
    fn end(&mut self, peer: Life) -> Option<End> {
        let (claim, pass) = self.flight.as_ref()?;
        if !claim.is_done() {
            return None;
        }
        let left = self.requests.len() - self.done;
        let done = left - (claim.failed() as usize).min(left);
        let flushed = claim.failure() == Status::Flushed;
        if flushed {
            pass.failed(Status::Flushed, peer);
            // Whose it was is known when they have heard of it.
            let culprit = pass.culprit()?;
            if culprit != peer {
                let _ = claim.wait(|how| pass.rescue(how));
                return Some(End::Again { done });
            }
        }
        let status = claim.wait(|how| pass.rescue(how));
        if status == Status::Success {
            return Some(End::Done);
        }
        pass.failed(status, peer);
        let error = match status {
            Status::NoAnswer => ETIMEDOUT,
            Status::Flushed => errno::canceled(),
            _ => EIO,
        };
        Some(End::Failed { done, error })
    }

    /// Posts what is not done. The claim holds what that names, as long as the batch lives.
    fn post(&self, claim: &Claim, pass: &Pass) -> Result {
        let left = &self.requests[self.done..];
        let mut sges = KVec::with_capacity(left.len(), GFP_KERNEL)?;
        for request in left {
            let sge = Sge::new(request.addr, request.len, request.memory.record.rkey);
            sges.push(sge, GFP_KERNEL)?;
        }
        let mut works = KVec::with_capacity(left.len(), GFP_KERNEL)?;
        for (request, sge) in left.iter().zip(sges.chunks(1)) {
            works.push(request.work(claim.wr_id(), sge, &self.reach), GFP_KERNEL)?;
        }
        // SAFETY: The memory is registered for as long as the batch has it, which waits for its end.
        unsafe { pass.post(claim, &works) };
        Ok(())
    }
}

impl Request {
    fn work<'a>(&self, wr_id: u64, sges: &'a [Sge], reach: &'a Reach) -> Work<'a> {
        let (way, remote) = (&reach.way, self.remote);
        let work = match self.verb {
            Verb::Read => Work::read(wr_id, sges, way, remote),
            Verb::Write => Work::write(wr_id, sges, way, remote),
            Verb::CompareSwap { expected, new } => {
                Work::compare_swap(wr_id, sges, way, remote, (expected, new))
            }
            Verb::FetchAdd { operand } => Work::fetch_add(wr_id, sges, way, remote, operand),
        };
        if self.fenced {
            work.fenced()
        } else {
            work
        }
    }
}

impl State {
    /// Posts the `i`th batch, by the initiator of those before it.
    fn launch(&mut self, fabric: &Fabric, i: usize) -> Result {
        let batch = &mut self.batches[i];
        let left = batch.requests.len() - batch.done;
        let dynamic: &Arc<Dynamic> = fabric.dynamic()?;
        let pass = dynamic.begin(left as u32, self.line.filter(|_| i != 0))?;
        let claim = fabric.claim(Class::Data)?;
        batch.post(&claim, &pass)?;
        self.line = Some(pass.number);
        batch.flight = Some((claim, pass));
        Ok(())
    }

    /// Takes note of the end of the first batch.
    fn settle(&mut self, end: End) {
        if matches!(end, End::Again { .. }) {
            self.recall();
        }
        let (done, error) = match end {
            End::Done => (usize::MAX, None),
            End::Failed { done, error } => (done, Some(error)),
            End::Again { done } => (done, None),
        };
        let Some(batch) = self.batches.first_mut() else {
            return;
        };
        batch.flight = None;
        let upto = batch.requests.len().min(batch.done.saturating_add(done));
        for request in &batch.requests[batch.done..upto] {
            if request.signalled {
                let _ = self.completions.push((request.tag, Ok(())), GFP_ATOMIC);
            }
        }
        self.pending -= upto - batch.done;
        batch.done = upto;
        let mut error = match error {
            Some(error) => error,
            None if upto == batch.requests.len() => return drop(self.batches.remove(0)),
            None => return,
        };
        for request in &batch.requests[upto..] {
            let _ = self.completions.push((request.tag, Err(error)), GFP_ATOMIC);
            error = errno::canceled();
        }
        self.pending -= batch.requests.len() - upto;
        drop(self.batches.remove(0));
    }

    /// Has all batches but the first go again, after it: their initiator failed, and none of their requests was
    /// done.
    fn recall(&mut self) {
        for batch in self.batches.iter_mut().skip(1) {
            if let Some((claim, pass)) = batch.flight.take() {
                let _ = claim.wait(|how| pass.rescue(how));
            }
        }
    }

    /// Takes the first completions.
    fn take(&mut self, most: usize) -> Result<KVec<Completion>> {
        let count = most.min(self.completions.len());
        let mut taken = KVec::new();
        let (first, rest) = self.completions.split_at(count);
        taken.extend_from_slice(first, GFP_KERNEL)?;
        let left = rest.len();
        self.completions.as_mut_slice().copy_within(count.., 0);
        self.completions.truncate(left);
        Ok(taken)
    }
}

/// Has the poller look after a queue pair.
pub(crate) struct Driver(pub(crate) Arc<Vqp>);

impl Driven for Driver {
    fn drive(&self, fabric: &Fabric) -> usize {
        let Some(mut state) = self.0.state.try_lock() else {
            return 0;
        };
        self.0.proceed(fabric, &mut state)
    }

    fn rest(&self) -> Rest {
        let state = self.0.state.try_lock();
        match state.is_none_or(|state| !state.batches.is_empty()) {
            true => Rest::Posted,
            false => Rest::Idle,
        }
    }

    fn end(&self) {
        self.0.close(ENODEV);
    }
}
