// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs (KRCORE, section 4): verbs to one node each, over initiators of DC, or connections, that all share.
//!
//! Nothing is connected for them: who knows by which target the node is reached can post at once ([`crate::cluster`]).
//! What is pushed is checked whole before anything is posted ([`check`]), so nobody breaks what others use. A push
//! is posted as a [`batch`], with one doorbell; batches go by one initiator, in their order, and are looked after by
//! the poller or by who pops ([`state`]). If the initiator fails by another's request, what was not done of them goes
//! again.
//!
//! One that was made to a port, or for who listens there, is an end of two, and takes messages ([`exchange`],
//! [`deliver`], [`inbox`], [`tell`]). What is pushed may also come by a queue that a process shares with the kernel
//! ([`addition`], [`outlet`]).

mod accounts;
pub(crate) mod addition;
mod apart;
pub(crate) mod batch;
pub(crate) mod check;
mod deliver;
mod ending;
pub(crate) mod exchange;
pub(crate) mod inbox;
pub(crate) mod outlet;
mod remote;
mod state;
mod tell;

pub(crate) use state::{Awaited, Completion};

use crate::{
    cluster::Cluster,
    errno,
    fabric::{
        peer::Reach,
        poller::{Driven, Rest},
        qos::tenant::{Load, Tenant},
        Fabric,
    },
    sys::{
        deadline::{now, Deadline},
        patience::Patience,
        payer::Payer,
        watch::Watch,
    },
};
use batch::{Batch, Doubt, Request, Stage, Use};
use core::ops::Deref;
use exchange::Exchange;
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    new_condvar, new_mutex,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Relaxed, Release},
        Arc, CondVar, CondVarTimeoutResult, Mutex,
    },
    time::{delay::fsleep, msecs_to_jiffies, Delta},
};
use kite_core::view::Life;
use remote::Remotes;
use state::{Ids, State};

/// How long it may take to find out by what name a node is reached, in a view in which it has another.
const DOUBT_MS: u32 = 10_000;

/// How often we look.
const LOOK_MS: i64 = 20;

/// How long somebody sleeps who waits, should nobody wake him.
const NAP_MS: u32 = 50;

/// How long a process may look itself, and how long the poller waits for it to look again.
const LOOK_NS: u64 = 10_000_000;
const BACK_NS: u64 = 100_000;

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
    /// Something is to be found out, or asked for, which the poller sees to in any case.
    doubted: AtomicFlag,
    watch: Arc<Watch>,
    /// Pays for messages that are kept.
    payer: Arc<Payer>,
}

impl Vqp {
    /// One to a node in this life. `open` says whether the other end has made it, which a process has. `memory` says how
    /// memory is asked for.
    fn new(
        life: Life,
        ids: Ids,
        open: bool,
        watch: Arc<Watch>,
        (payer, memory): (Arc<Payer>, Flags),
    ) -> Result<Arc<Self>> {
        let state = State::new(life, ids, open, memory)?;
        Arc::pin_init(
            pin_init!(Self {
                life,
                state <- new_mutex!(state),
                remotes <- new_mutex!(Remotes::new()),
                changed <- new_condvar!(),
                patience: Patience::new(),
                looked_after: Atomic::new(0u64),
                doubted: AtomicFlag::new(false),
                watch,
                payer,
            }),
            memory,
        )
    }

    /// Makes one to a node, which hears nothing of it, and to a port there unless that is 0.
    ///
    /// # Errors
    ///
    /// As for [`Cluster::reach`].
    pub(crate) fn connect(
        exchange: &Exchange,
        (node, port): (u32, u32),
        uid: u32,
        watch: Arc<Watch>,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        let cluster = &exchange.lmr.cluster;
        let me = cluster.life_of(cluster.node()?)?;
        // Nothing is connected to itself.
        if node == me.node && cluster.fabric.dynamic().is_none() {
            return Err(EINVAL);
        }
        let life = cluster.life_of(node)?;
        let reach = cluster.reach(life, deadline)?;
        let number = match port {
            0 => 0,
            _ => exchange.number(),
        };
        let ids = Ids {
            me,
            number,
            other: 0,
            port,
            uid,
        };
        let payer = Arc::new(Payer::current(), GFP_KERNEL_ACCOUNT)?;
        let vqp = Self::new(life, ids, false, watch, (payer, GFP_KERNEL_ACCOUNT))?;
        vqp.state.lock().reach = Some(reach);
        if port != 0 {
            exchange.enter(number, vqp.clone())?;
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
        tenant: &Tenant,
        deadline: Deadline,
    ) -> Result {
        for request in &mut requests {
            if let Some(of) = request.of {
                let known = remote::record(&self.remotes, cluster, self.life, of.key, deadline)?;
                request.trust(of, known)?;
            }
        }
        let reach = cluster.reach(self.life, deadline)?;
        self.state.lock().check_all(&requests)?;
        let (count, stats) = (requests.len(), &cluster.fabric.stats);
        let load = Load {
            requests: count as u64,
            bytes: requests.iter().map(Request::bytes).sum(),
        };
        let turn = tenant.wait(load, deadline);
        turn.inspect_err(|_| stats.errors.add(1))?;
        tenant.passes(load);
        let mut fresh = Batch::cut(requests, &reach, GFP_KERNEL_ACCOUNT)?;
        loop {
            let mut state = self.state.lock();
            state.learn(&reach);
            let admitted = state.admit(&mut fresh, None);
            if admitted != Err(ENOMEM) {
                admitted?;
                stats.vqp_requests.add(count as u64);
                self.proceed_or_leave(&cluster.fabric, &mut state);
                return Ok(());
            }
            drop(state);
            deadline.check()?;
            Self::make_room()?;
        }
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
        Self::let_in(fabric, &mut state);
        match state.over {
            // Who is told so may use his memory for something else.
            Some(error) if taken.is_empty() && state.pending == 0 => Err(error),
            _ if taken.is_empty() => Err(EAGAIN),
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

    /// Does what says `EAGAIN` while there is nothing of that kind, now.
    ///
    /// # Errors
    ///
    /// Those of `f`.
    pub(crate) fn look<T>(
        &self,
        exchange: impl Deref<Target = Arc<Exchange>>,
        what: Awaited,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        match f() {
            Err(error) if error == EAGAIN && self.hears(what) => {
                // Who looks all the time need not wait until the poller was woken.
                exchange.lmr.cluster.fabric.poll_received();
                f()
            }
            done => done,
        }
    }

    /// Whether that may depend on what the other end says: a message is done when that one has it.
    fn hears(&self, what: Awaited) -> bool {
        what == Awaited::Message || self.numbers().0 != 0
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
        // Without a port there are no messages.
        let message = state.ids.number != 0 && state.has(Awaited::Message);
        state.has(Awaited::Completion) || message
    }

    /// Nothing new begins, for this reason. What is under way ends.
    pub(crate) fn shut(&self, error: Error) {
        let mut state = self.state.lock();
        state.over = state.over.or(Some(error));
        // Who looks for messages alone would not find out what is not done.
        state.hand_out();
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
            batch.abandon();
        }
        tells
    }

    /// As [`Self::proceed`], and has the poller do what is left to do.
    fn proceed_or_leave(&self, fabric: &Fabric, state: &mut State) -> usize {
        let done = self.proceed(fabric, state);
        if state.has_more() {
            self.doubted.store(state.has_doubt(), Release);
            fabric.wake_poller();
        }
        done
    }

    /// As [`Self::proceed_or_leave`], unless somebody else does. Returns how much that was.
    pub(crate) fn try_proceed(&self, fabric: &Fabric) -> usize {
        let state = self.state.try_lock();
        state.map_or(0, |mut state| self.proceed_or_leave(fabric, &mut state))
    }

    /// Takes what has completed, and posts what can be. Returns how much that was.
    fn proceed(&self, fabric: &Fabric, state: &mut State) -> usize {
        let before = state.pending;
        if let Some(Stage::Posted(claim, ..)) = state.first_posted() {
            claim.look();
        }
        let again = state.look();
        state.outlive(fabric);
        fabric.stats.dynamic_repeats.add(again as u64);
        state.hand_out();
        let posted = state.launch_all(fabric);
        let done = before - state.pending;
        if done != 0 {
            self.notify();
            Self::let_in(fabric, state);
        }
        done + posted
    }

    /// Finds out what keeps a batch from being posted: whether the node, which did not answer, is reached by another
    /// name, or whether remote memory is still there. Or asks for what is not posted.
    fn resolve(&self, exchange: &Exchange) {
        let (deadline, cluster) = (Deadline::after_ms(DOUBT_MS), &exchange.lmr.cluster);
        let (mut asked, mut words) = (u64::MAX, (KVec::new(), Ok(())));
        let found = match self.doubt() {
            Some((number, Doubt::Reach(before, ms))) => {
                (number, self.finds_other(cluster, (&before, ms), deadline))
            }
            Some((number, Doubt::Words(changes))) => {
                let goes_on = || self.state.lock().over.is_none();
                let ask = |(word, atomic)| exchange.lmr.change(self.life, word, atomic, deadline);
                (asked, words) = (number, apart::ask(&changes, goes_on, ask));
                (u64::MAX, Ok(false))
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
        state.take_words(asked, words);
        self.proceed_or_leave(&cluster.fabric, &mut state);
        drop(state);
        self.notify();
    }

    /// Whether the node is reached by another name than before, perhaps in a view that is yet to come.
    fn finds_other(
        &self,
        cluster: &Cluster,
        (before, ms): (&Arc<Reach>, u32),
        deadline: Deadline,
    ) -> Result<bool> {
        let late = Deadline::after_ms(ms);
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

    /// What the poller has to do for it.
    pub(crate) fn rest(&self) -> Rest {
        // The RNIC need not interrupt who looks, nor us on his behalf.
        if self.is_looked_after() {
            return Rest::Soon;
        }
        let Some(state) = self.state.try_lock() else {
            return Rest::Posted;
        };
        let waits = |batch: &Batch| batch.is_posted() || batch.is_broken();
        match state.has_more() || state.batches.iter().any(waits) {
            true => Rest::Posted,
            false => Rest::Idle,
        }
    }

    /// Whether what became of some requests is not known yet.
    pub(crate) fn has_pending(&self) -> bool {
        let state = self.state.try_lock();
        state.is_none_or(|state| state.pending != 0)
    }

    /// The first batch that is in doubt.
    fn doubt(&self) -> Option<(u64, Doubt)> {
        let state = self.state.lock();
        let mut all = state.batches.iter();
        all.find_map(|batch| Some((batch.number, batch.doubt()?)))
    }
}

/// Has the poller look after a queue pair.
pub(crate) struct Driver {
    pub(crate) vqp: Arc<Vqp>,
    pub(crate) exchange: Arc<Exchange>,
}

impl Driven for Driver {
    fn drive(&self, fabric: &Fabric) -> usize {
        let leaves = self.vqp.is_looked_after();
        if leaves && !self.vqp.doubted.load(Acquire) {
            return 0;
        }
        let Some(mut state) = self.vqp.state.try_lock() else {
            return 0;
        };
        let done = match leaves {
            true => 0,
            false => self.vqp.proceed(fabric, &mut state),
        };
        self.vqp.doubted.store(false, Release);
        if state.has_doubt() {
            let (vqp, exchange) = (self.vqp.clone(), self.exchange.clone());
            let resolve = move || vqp.resolve(&exchange);
            let asked = match state.is_apart() {
                true => self.exchange.ask_later(resolve),
                false => self.exchange.later(resolve),
            };
            state.asking = asked.is_ok();
        }
        done
    }

    fn rest(&self) -> Rest {
        self.vqp.rest()
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
