// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs (KRCORE, section 4): verbs to one node each, over initiators of DC that all share.
//!
//! Nothing is connected for them: who knows by which target the node is reached can post at once ([`crate::cluster`]).
//! What is pushed is checked whole before anything is posted ([`check`]), so nobody breaks what others use. A push
//! is posted as a [`batch`], with one doorbell; batches go by one initiator, in their order, and are looked after by
//! the poller or by who pops. If the initiator fails by another's request, what was not done of them goes again.
//!
//! One that was made to a port, or for who listens there, is an end of two, and takes messages ([`exchange`],
//! [`inbox`]).

pub(crate) mod batch;
pub(crate) mod check;
pub(crate) mod exchange;
pub(crate) mod inbox;
mod remote;

use crate::{
    cluster::Cluster,
    errno,
    fabric::{
        dynamic::Dynamic,
        peer::Reach,
        poller::{Driven, Rest},
        sender::Class,
        Fabric,
    },
    rpc::Rpc,
    sys::{
        deadline::{now, Deadline},
        patience::Patience,
        payer::Payer,
        watch::Watch,
    },
};
use batch::{Batch, Doubt, End, Request, Stage, Use};
use inbox::Inbox;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_condvar, new_mutex,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, CondVar, CondVarTimeoutResult, Mutex,
    },
    time::{delay::fsleep, msecs_to_jiffies, Delta},
};
use kite_core::{
    view::Life,
    window::Outgoing,
    wire::packet::{Body, Packet, Phase},
};
use remote::Remotes;

/// Requests of a queue pair that were not popped.
pub(crate) const DEPTH: usize = crate::bindings::KITE_VQP_DEPTH as usize;

/// How long it may take to find out by what name a node is reached, in a view in which it has another.
const DOUBT_MS: u32 = 10_000;

/// How much later than the node such a view may come to us, and how often we look.
const LATE_MS: u32 = 1500;
const LOOK_MS: i64 = 20;

/// How long somebody sleeps who waits, should nobody wake him.
const NAP_MS: u32 = 50;

/// How long a process may look itself, and how long the poller waits for it to look again.
const LOOK_NS: u64 = 10_000_000;
const BACK_NS: u64 = 100_000;

/// What somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    Completion,
    Message,
}

/// What became of a request.
pub(crate) type Completion = (u64, Result);

/// By what the two ends know each other.
pub(super) struct Ids {
    me: Life,
    /// Of this end, or 0 if it takes no messages.
    number: u64,
    /// Of the other end, or 0 if it has not told it yet.
    other: u64,
    port: u32,
    /// Whose this end is.
    uid: u32,
}

impl Ids {
    fn packet(&self, body: Body) -> Packet {
        Packet {
            from: self.me,
            source: self.number,
            destination: self.other,
            body,
        }
    }
}

/// What is pushed, and what came of it.
struct State {
    peer: Life,
    batches: KVec<Batch>,
    /// Number of the next.
    next: u64,
    /// The initiator by which they go.
    line: Option<usize>,
    /// By what the node is reached, once a process has asked.
    reach: Option<Arc<Reach>>,
    completions: KVec<Completion>,
    /// Requests of all batches of which nobody knows yet what became of them.
    pending: usize,
    ids: Ids,
    out: Outgoing,
    inbox: Inbox,
    /// A process has this end.
    accepted: bool,
    /// The other end was heard to be over.
    left: bool,
    /// Somebody tells the other end how this one is.
    telling: bool,
    /// Somebody finds out about a doubt.
    asking: bool,
    /// Nothing is posted any more, for this reason.
    over: Option<Error>,
}

/// A virtual queue pair.
#[pin_data]
pub(crate) struct Vqp {
    pub(crate) life: Life,
    #[pin]
    state: Mutex<State>,
    #[pin]
    remotes: Mutex<Remotes>,
    /// There are completions or messages, or it is over.
    #[pin]
    changed: CondVar,
    patience: Patience,
    /// Until then a process looks itself, or is about to.
    looked_after: Atomic<u64>,
    watch: Arc<Watch>,
    /// Pays for messages that are kept.
    payer: Arc<Payer>,
}

impl Vqp {
    /// One to a node in this life. `open` says whether the other end has made it, which a process has.
    fn new(
        life: Life,
        ids: Ids,
        open: bool,
        watch: Arc<Watch>,
        payer: Arc<Payer>,
    ) -> Result<Arc<Self>> {
        let state = State {
            peer: life,
            batches: KVec::new(),
            next: 0,
            line: None,
            reach: None,
            completions: KVec::with_capacity(DEPTH, GFP_KERNEL_ACCOUNT)?,
            pending: 0,
            ids,
            out: Outgoing::new(open),
            inbox: Inbox::new()?,
            accepted: !open,
            left: false,
            telling: false,
            asking: false,
            over: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                life,
                state <- new_mutex!(state),
                remotes <- new_mutex!(Remotes::new()),
                changed <- new_condvar!(),
                patience: Patience::new(),
                looked_after: Atomic::new(0u64),
                watch,
                payer,
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Makes one to a node, which hears nothing of it, and to a port there unless that is 0.
    ///
    /// # Errors
    ///
    /// As for [`Cluster::reach`].
    pub(crate) fn connect(
        rpc: &Rpc,
        (node, port): (u32, u32),
        uid: u32,
        watch: Arc<Watch>,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        let cluster = &rpc.lmr.cluster;
        let me = cluster.life_of(cluster.node()?)?;
        if node == me.node {
            return Err(EINVAL);
        }
        let life = cluster.life_of(node)?;
        let reach = cluster.reach(life, deadline)?;
        let number = match port {
            0 => 0,
            _ => rpc.exchange.number(),
        };
        let ids = Ids {
            me,
            number,
            other: 0,
            port,
            uid,
        };
        let payer = Arc::new(Payer::current(), GFP_KERNEL_ACCOUNT)?;
        let vqp = Self::new(life, ids, false, watch, payer)?;
        vqp.state.lock().reach = Some(reach);
        if port != 0 {
            rpc.exchange.enter(cluster, number, vqp.clone())?;
        }
        Ok(vqp)
    }

    /// Adds requests, which are posted by and by, in this order. None of them is if one is refused.
    ///
    /// # Errors
    ///
    /// As `struct kite_push` in `include/uapi/kite.h` says.
    pub(crate) fn push(
        &self,
        cluster: &Cluster,
        mut requests: KVec<Request>,
        deadline: Deadline,
    ) -> Result {
        for request in &mut requests {
            if let Some(of) = request.of {
                let known = remote::record(&self.remotes, cluster, self.life, of.key, deadline)?;
                request.trust(of, known)?;
            }
        }
        let reach = cluster.reach(self.life, deadline)?;
        let mut state = self.state.lock();
        let count = requests.len();
        state.admit(requests)?;
        cluster.fabric.stats.vqp_requests.add(count as u64);
        state.reach = Some(reach);
        self.proceed_or_leave(&cluster.fabric, &mut state);
        Ok(())
    }

    /// Takes completions, at most so many.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is none; why the queue pair is over; `ENOMEM`.
    pub(crate) fn pop(&self, fabric: &Fabric, most: usize) -> Result<KVec<Completion>> {
        let mut state = self.state.lock();
        self.proceed_or_leave(fabric, &mut state);
        let taken = state.take(most)?;
        match state.over {
            Some(error) if taken.is_empty() => Err(error),
            None if taken.is_empty() => Err(EAGAIN),
            _ => Ok(taken),
        }
    }

    /// Does what says `EAGAIN` while there is nothing of that kind: without a pause for a while, then whenever
    /// something has come.
    ///
    /// # Errors
    ///
    /// Those of `f`; `ETIMEDOUT`, `EINTR`.
    pub(crate) fn wait<T>(
        &self,
        what: Awaited,
        deadline: Deadline,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut done = Err(EAGAIN);
        let mut has_come = || {
            done = f();
            !matches!(&done, Err(error) if *error == EAGAIN)
        };
        self.look_after(LOOK_NS);
        let impatient = self.patience.poll(&mut has_come);
        // Who uses it steadily is back in a moment.
        self.look_after(if impatient.is_none() { BACK_NS } else { 0 });
        if impatient.is_some() {
            while !has_come() {
                deadline.check()?;
                self.nap(what, deadline)?;
            }
        }
        done
    }

    /// A process looks itself for so many nanoseconds.
    fn look_after(&self, ns: u64) {
        self.looked_after.store(now() + ns, Relaxed);
    }

    fn is_looked_after(&self) -> bool {
        now() < self.looked_after.load(Relaxed)
    }

    /// Sleeps until something has come, but not for long.
    fn nap(&self, what: Awaited, deadline: Deadline) -> Result {
        let mut state = self.state.lock();
        if state.has(what) {
            return Ok(());
        }
        let nap = msecs_to_jiffies(deadline.left_ms().min(NAP_MS));
        let woken = self.changed.wait_interruptible_timeout(&mut state, nap);
        drop(state);
        match woken {
            CondVarTimeoutResult::Signal { .. } => deadline.on_signal(),
            _ => Ok(()),
        }
    }

    fn notify(&self) {
        self.changed.notify_all();
        self.watch.wait.notify_all();
    }

    /// Whether there is something to pop or to receive.
    pub(crate) fn is_ready(&self) -> bool {
        let state = self.state.lock();
        state.has(Awaited::Completion) || state.has(Awaited::Message)
    }

    /// Nothing new begins, for this reason. What is under way ends.
    pub(crate) fn shut(&self, error: Error) {
        let mut state = self.state.lock();
        state.over = state.over.or(Some(error));
        drop(state);
        self.notify();
    }

    /// Lets what is under way end, and nothing new begin. Returns whether to tell the other end.
    pub(crate) fn close(&self) -> bool {
        let mut state = self.state.lock();
        state.over = Some(errno::canceled());
        state.pending = 0;
        let batches = core::mem::replace(&mut state.batches, KVec::new());
        state.inbox.clear();
        // Who has heard nothing of it need not hear that it is over.
        let tells = (state.ids.other != 0 || state.out.has_sent()) && !state.left;
        drop(state);
        // The poller must not wait for it meanwhile.
        for mut batch in batches {
            batch.recall(self.life);
        }
        tells
    }

    /// As [`Self::proceed`], and has the poller do what is left to do.
    fn proceed_or_leave(&self, fabric: &Fabric, state: &mut State) {
        self.proceed(fabric, state);
        if state.has_more() {
            fabric.wake_poller();
        }
    }

    /// Takes what has completed, and posts what can be. Returns how much that was.
    fn proceed(&self, fabric: &Fabric, state: &mut State) -> usize {
        let before = state.completions.len();
        if let Some(Stage::Posted(claim, ..)) = state.first_posted() {
            claim.look();
        }
        let again = state.look();
        fabric.stats.dynamic_repeats.add(again as u64);
        state.hand_out();
        let posted = state.launch_all(fabric);
        let done = state.completions.len() - before;
        if done != 0 {
            self.notify();
        }
        done + posted
    }

    /// Finds out what keeps a batch from being posted: whether the node, which did not answer, is reached by another
    /// name, or whether remote memory is still there.
    fn resolve(&self, rpc: &Rpc) {
        let (deadline, cluster) = (Deadline::after_ms(DOUBT_MS), &rpc.lmr.cluster);
        let found = match self.doubt() {
            Some((number, Doubt::Reach(before))) => {
                (number, self.finds_other(cluster, &before, deadline))
            }
            Some((number, Doubt::Memory(uses))) => {
                let read =
                    |of: &Use| remote::record(&self.remotes, cluster, self.life, of.key, deadline);
                // What was read is remembered for a while.
                (
                    number,
                    uses.iter()
                        .try_for_each(|of| read(of).map(drop))
                        .map(|()| true),
                )
            }
            None => (u64::MAX, Ok(false)),
        };
        let reach = cluster.reach(self.life, deadline).ok();
        let mut state = self.state.lock();
        state.asking = false;
        state.reach = reach.or(state.reach.take());
        state.decide(found, &self.remotes);
        self.proceed_or_leave(&cluster.fabric, &mut state);
        drop(state);
        self.notify();
    }

    /// Whether the node is reached by another name than before, perhaps in a view that is yet to come.
    fn finds_other(
        &self,
        cluster: &Cluster,
        before: &Arc<Reach>,
        deadline: Deadline,
    ) -> Result<bool> {
        let late = Deadline::after_ms(LATE_MS);
        loop {
            if !Arc::ptr_eq(before, &cluster.reach(self.life, deadline)?) {
                return Ok(true);
            }
            if late.passed() {
                return Ok(false);
            }
            fsleep(Delta::from_millis(LOOK_MS));
        }
    }

    /// The first batch that is in doubt.
    fn doubt(&self) -> Option<(u64, Doubt)> {
        let state = self.state.lock();
        let mut all = state.batches.iter();
        all.find_map(|batch| Some((batch.number, batch.doubt()?)))
    }
}

impl State {
    /// Whether there is something of that kind, or nothing more will come.
    fn has(&self, what: Awaited) -> bool {
        let empty = match what {
            Awaited::Completion => self.completions.is_empty(),
            Awaited::Message => self.inbox.is_empty(),
        };
        let taking = what == Awaited::Message && self.inbox.is_taking();
        !empty || self.over.is_some() && !taking
    }

    /// The other end is over.
    fn end(&mut self, error: Error) {
        self.left = true;
        self.over = self.over.or(Some(error));
        if !self.accepted {
            self.inbox.clear();
        }
    }

    fn first_posted(&self) -> Option<&Stage> {
        let posted = self.batches.iter().find(|batch| batch.is_posted());
        posted.map(|batch| &batch.stage)
    }

    /// What tells the other end how this one is.
    fn packet(&self, phase: Phase) -> Packet {
        self.ids
            .packet(Body::State(self.inbox.incoming.state(phase)))
    }

    /// Takes requests to be posted, and numbers their messages.
    fn admit(&mut self, requests: KVec<Request>) -> Result {
        if let Some(error) = self.over {
            return Err(error);
        }
        let (count, first) = (requests.len(), self.batches.len());
        if self.pending + self.completions.len() + count > DEPTH {
            return Err(errno::nobufs());
        }
        if self.ids.number == 0 && requests.iter().any(Request::has_message) {
            return Err(EINVAL);
        }
        Batch::cut(requests, &mut self.batches)?;
        for batch in &mut self.batches[first..] {
            for request in batch.requests.iter_mut().filter(|one| one.has_message()) {
                request.number = Some(self.out.number());
            }
            batch.number = self.next;
            self.next += 1;
        }
        self.pending += count;
        Ok(())
    }

    /// Takes note of posted batches that have ended. Returns how many requests of them go again.
    fn look(&mut self) -> usize {
        let mut again = 0;
        for i in 0..self.batches.len() {
            if let Some(end) = self.batches[i].end(self.peer) {
                self.settle(i, end);
                if !matches!(self.batches[i].stage, Stage::Ended) {
                    again += self.batches[i].left().len();
                }
            }
        }
        again
    }

    /// Takes note of how the `i`th batch ended.
    fn settle(&mut self, i: usize, end: End) {
        let batch = &mut self.batches[i];
        match end {
            End::Done => {
                batch.done = batch.requests.len();
                batch.stage = Stage::Ended;
            }
            End::Failed { done, error } => {
                batch.done += done;
                self.fail(i, error);
            }
            End::Again { done } => {
                batch.done += done;
                self.go_again(i, Stage::Ready);
            }
            End::Unanswered { done, at } => {
                batch.done += done;
                match self.batches[i..].iter().all(Batch::is_repeatable) {
                    true => self.go_again(i, Stage::Doubted(at)),
                    false => self.fail(i, ETIMEDOUT),
                }
            }
        }
    }

    /// Has the `i`th batch go again, from that stage on, and all others after it: what carried them failed, and
    /// none of their requests was done.
    fn go_again(&mut self, i: usize, stage: Stage) {
        for batch in &mut self.batches[i + 1..] {
            batch.recall(self.peer);
        }
        self.batches[i].stage = stage;
    }

    /// The first request of the `i`th batch that is not done has failed. Those after it are not done.
    fn fail(&mut self, i: usize, error: Error) {
        let mut why = error;
        for batch in &mut self.batches[i..] {
            if batch.has_message() && self.over.is_none() {
                // Its number is missing at the other end, to which nothing can be said any more.
                self.over = Some(errno::connreset());
            }
            batch.give_up(why, self.peer);
            why = errno::canceled();
        }
    }

    /// What was in doubt goes again if that was settled to the good, or else has failed.
    fn decide(&mut self, (number, found): (u64, Result<bool>), remotes: &Mutex<Remotes>) {
        let Some(i) = self.batches.iter().position(|batch| batch.number == number) else {
            return;
        };
        let batch = &mut self.batches[i];
        let decided = match (&batch.stage, found) {
            (Stage::Doubted(_), Ok(false)) => Err(ETIMEDOUT),
            (Stage::Stale, Ok(_)) => batch.renew(&remotes.lock()),
            (Stage::Doubted(_) | Stage::Stale, found) => found.map(drop),
            _ => return,
        };
        match decided {
            Ok(()) => batch.stage = Stage::Ready,
            Err(error) => self.fail(i, error),
        }
    }

    /// Says what became of requests, in their order, as far as that is known.
    fn hand_out(&mut self) {
        while let Some(batch) = self.batches.first_mut() {
            while let Some(request) = batch.requests[batch.told..batch.done].first() {
                let result = match (request.is_settled(&self.out), self.over) {
                    (true, _) => Ok(()),
                    (false, Some(error)) => Err(error),
                    (false, None) => return,
                };
                if request.signalled || result.is_err() {
                    let _ = self.completions.push((request.tag, result), GFP_ATOMIC);
                }
                batch.told += 1;
                self.pending -= 1;
            }
            match (&batch.stage, self.over) {
                (Stage::Ended, _) => self.remove_first(),
                (Stage::Posted(..), _) | (_, None) => return,
                (_, Some(error)) => self.fail(0, error),
            }
        }
    }

    /// The first batch has ended. What is not done of it never will be.
    fn remove_first(&mut self) {
        let Ok(batch) = self.batches.remove(0) else {
            return;
        };
        let mut error = batch.error.unwrap_or(errno::canceled());
        for request in batch.left() {
            let _ = self.completions.push((request.tag, Err(error)), GFP_ATOMIC);
            error = errno::canceled();
        }
        self.pending -= batch.left().len();
    }

    /// Posts batches as far as possible, in their order. Returns how many.
    fn launch_all(&mut self, fabric: &Fabric) -> usize {
        let mut posted = 0;
        for i in 0..self.batches.len() {
            match self.batches[i].stage {
                Stage::Posted(..) | Stage::Ended => continue,
                Stage::Doubted(_) | Stage::Stale => break,
                Stage::Ready => {}
            }
            let may_go = self.over.is_none() && self.batches[i].may_go(&self.out);
            if !may_go || self.launch(fabric, i).is_err() {
                break;
            }
            posted += 1;
        }
        posted
    }

    /// Posts the `i`th batch, by the initiator of those before it that are posted.
    fn launch(&mut self, fabric: &Fabric, i: usize) -> Result {
        let dynamic: &Arc<Dynamic> = fabric.dynamic()?;
        let reach = self.reach.clone().ok_or(EAGAIN)?;
        let follows = self.batches[..i].iter().any(Batch::is_posted);
        let batch = &self.batches[i];
        let size = (batch.works() as u32, batch.bytes());
        let pass = dynamic.begin(size, self.line.filter(|_| follows))?;
        let claim = fabric.claim(Class::Data)?;
        // The last look before the RNIC has it.
        if !self.batches[i].is_fresh() {
            self.batches[i].stage = Stage::Stale;
            return Err(EAGAIN);
        }
        self.line = Some(pass.number);
        self.batches[i].post(fabric, &self.ids, (claim, pass), reach)
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

    /// Whether something is left to do that no completion will remind anybody of.
    fn has_more(&self) -> bool {
        let goes = |batch: &Batch| self.over.is_none() && batch.may_go(&self.out);
        self.has_doubt() || self.batches.iter().any(goes)
    }

    /// Whether a batch is in doubt, and nobody finds out yet.
    fn has_doubt(&self) -> bool {
        let doubted = |batch: &Batch| matches!(batch.stage, Stage::Doubted(_) | Stage::Stale);
        !self.asking && self.batches.iter().any(doubted)
    }
}

/// Has the poller look after a queue pair.
pub(crate) struct Driver {
    pub(crate) vqp: Arc<Vqp>,
    pub(crate) rpc: Arc<Rpc>,
}

impl Driven for Driver {
    fn drive(&self, fabric: &Fabric) -> usize {
        if self.vqp.is_looked_after() {
            return 0;
        }
        let Some(mut state) = self.vqp.state.try_lock() else {
            return 0;
        };
        let done = self.vqp.proceed(fabric, &mut state);
        if state.has_doubt() {
            let (vqp, rpc) = (self.vqp.clone(), self.rpc.clone());
            let asked = self.rpc.exchange.later(move || vqp.resolve(&rpc));
            state.asking = asked.is_ok();
        }
        done
    }

    fn rest(&self) -> Rest {
        // The RNIC need not interrupt who looks, nor us on his behalf.
        if self.vqp.is_looked_after() {
            return Rest::Soon;
        }
        let Some(state) = self.vqp.state.try_lock() else {
            return Rest::Posted;
        };
        match state.has_more() || state.batches.iter().any(Batch::is_posted) {
            true => Rest::Posted,
            false => Rest::Idle,
        }
    }

    fn end(&self) {
        let mut state = self.vqp.state.lock();
        state.over = state.over.or(Some(ENODEV));
        state.fail(0, ENODEV);
        state.hand_out();
        drop(state);
        self.vqp.notify();
    }
}
