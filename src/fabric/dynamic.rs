// SPDX-License-Identifier: GPL-2.0

//! Requests to peers to which nothing is connected (KRCORE, sections 3 and 4).
//!
//! A few initiators of DC on each processor are shared by all, and reach the target of any node, which serves all
//! of its peers: so what a node keeps for this does not depend on how many there are, and nobody waits for a
//! connection. The target is another whenever somebody leaves the view, who may live on and know the former one.
//!
//! An initiator that failed gets no new users; when the last has left, the connector starts it anew ([`Dynamic::mend`]).

use super::{
    sender::{Claim, Rescue},
    wake::Wake,
};
use crate::{
    dc::{
        cq::Cq,
        pool::Pool,
        qp::Qp,
        target::{Name, Target},
        work::Work,
        Hca, Source,
    },
    stats::Stats,
    verbs::cq::Status,
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex, SpinLock,
    },
    time::{Instant, Monotonic},
};
use kite_core::view::Life;

/// Initiators of each processor: while one waits for a target that does not answer, there is another.
const INITIATORS: usize = 2;

/// Most of a node.
const MOST: usize = 64;

/// Requests that may be under way by one of them.
const DEPTH: u32 = 128;

/// Bytes that may be under way by one of them, besides a single request: what comes late must not come much later.
pub(crate) const BYTES: u64 = 256 << 20;

/// An initiator by which nothing ended for so long, in ms, may wait for a target that does not answer.
const STUCK_MS: i64 = 5;

/// Buffers for packets that nobody has looked at yet.
const PACKETS: u32 = 256;

/// What becomes of an initiator.
struct State {
    /// Requests that users have announced, and their bytes.
    inflight: u32,
    bytes: u64,
    /// When somebody's requests ended last.
    progress: Instant<Monotonic>,
    /// It is to be started, anew or for the first time, before anybody uses it.
    failed: bool,
    /// The peer whose request made it fail, and how, if that is known.
    culprit: Option<(Life, Status)>,
}

impl State {
    /// Nobody uses it.
    fn new(failed: bool) -> Self {
        Self {
            inflight: 0,
            bytes: 0,
            progress: Instant::now(),
            failed,
            culprit: None,
        }
    }

    /// Nobody waits for anything of it.
    fn is_idle(&self) -> bool {
        self.inflight == 0
    }

    /// It is idle, or something ended by it not long ago.
    fn is_lively(&self) -> bool {
        self.is_idle() || self.progress.elapsed().as_millis() < STUCK_MS
    }

    /// It gets no new users. Returns whether it was in order.
    fn fail(&mut self) -> bool {
        !core::mem::replace(&mut self.failed, true)
    }
}

/// An initiator, and who uses it.
#[pin_data]
struct Line {
    qp: Qp<Wake>,
    #[pin]
    state: SpinLock<State>,
}

impl Line {
    fn new(hca: &Arc<Hca>, cq: &Arc<Cq<Wake>>) -> Result<Arc<Self>> {
        let qp = Qp::new_initiator(hca.clone(), cq.clone(), DEPTH)?;
        Arc::pin_init(
            pin_init!(Self { qp, state <- new_spinlock!(State::new(true)) }),
            GFP_KERNEL,
        )
    }

    /// Announces so many requests and bytes, if it is in order, there is room, and it `suits`.
    fn begin(&self, (count, bytes): (u32, u64), suits: fn(&State) -> bool) -> bool {
        let mut state = self.state.lock();
        let fits = state.is_idle() || state.bytes + bytes <= BYTES;
        let room = state.inflight + count <= DEPTH && fits;
        let free = !state.failed && room && suits(&state);
        if free {
            if state.is_idle() {
                state.progress = Instant::now();
            }
            state.inflight += count;
            state.bytes += bytes;
        }
        free
    }
}

/// Where we are.
#[derive(Clone, Copy)]
struct Place {
    /// Nothing without a view.
    source: Option<Source>,
    /// How often there was none before.
    opened: u32,
}

/// What an RNIC has of DC.
#[pin_data]
pub(crate) struct Dynamic {
    lines: KVec<Arc<Line>>,
    /// Whose turn it is, of the initiators of a processor.
    turn: Atomic<u32>,
    #[pin]
    place: SpinLock<Place>,
    /// What peers reach us by. Nothing without a view, or if it could not be made yet.
    #[pin]
    target: Mutex<Option<Target<Wake>>>,
    /// Where packets come to, whatever the target.
    pool: Arc<Pool<Wake>>,
    /// Wakes the connector.
    connector: Arc<Wake>,
    stats: Arc<Stats>,
    cq: Arc<Cq<Wake>>,
    hca: Arc<Hca>,
}

impl Dynamic {
    /// What is needed for DC, if the RNIC has it.
    pub(super) fn of(
        hca: &Arc<Hca>,
        [poller, connector]: [&Arc<Wake>; 2],
        stats: &Arc<Stats>,
    ) -> Option<Arc<Self>> {
        if !hca.has_dc() {
            return None;
        }
        let (poller, connector) = (poller.clone(), connector.clone());
        Self::new(hca.clone(), poller, connector, stats.clone())
            .inspect_err(|error| pr_warn!("DC cannot be used: {error:?}\n"))
            .ok()
    }

    /// Makes the initiators; they are started by and by.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the hardware has no room for them; `EIO`, `ENOMEM`.
    fn new(
        hca: Arc<Hca>,
        poller: Arc<Wake>,
        connector: Arc<Wake>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let count = (kernel::cpu::nr_cpu_ids() as usize * INITIATORS).min(MOST);
        let cq = Cq::new(hca.clone(), count as u32 * DEPTH, 0, poller.clone())?;
        let pool = Pool::new(hca.clone(), PACKETS, poller)?;
        let mut lines = KVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            lines.push(Line::new(&hca, &cq)?, GFP_KERNEL)?;
        }
        Arc::pin_init(
            pin_init!(Self {
                lines,
                turn: Atomic::new(0u32),
                place <- new_spinlock!(Place { source: None, opened: 0 }),
                target <- new_mutex!(None),
                pool,
                connector,
                stats,
                cq,
                hca,
            }),
            GFP_KERNEL,
        )
    }

    /// The hardware.
    pub(crate) fn hca(&self) -> &Arc<Hca> {
        &self.hca
    }

    /// The completion queue of all initiators.
    pub(crate) fn cq(&self) -> &Arc<Cq<Wake>> {
        &self.cq
    }

    /// Is to be reached at a port from now on, if it is not yet.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
    pub(crate) fn open(&self, source: Source) -> Result {
        let mut target = self.target.lock();
        if self.source().is_none() {
            *target = Some(self.make(source)?);
            let mut place = self.place.lock();
            place.source = Some(source);
            place.opened += 1;
            drop(place);
            drop(target);
            // They may have been started somewhere else.
            self.lines.iter().for_each(|line| self.give_up(line));
            self.connector.event.signal();
        }
        Ok(())
    }

    fn source(&self) -> Option<Source> {
        self.place.lock().source
    }

    fn make(&self, source: Source) -> Result<Target<Wake>> {
        Target::new(self.hca.clone(), source, self.pool.clone())
    }

    /// Is to be reached by another name from now on. When this returns nobody reaches our memory by the former.
    /// `take` takes what has come.
    pub(crate) fn renew(&self, take: impl Fn()) {
        let mut target = self.target.lock();
        if let Some(before) = target.take() {
            end(before, take);
        }
        if self.lacks(&mut target) {
            pr_warn!("peers do not reach this node by DC yet\n");
            self.connector.event.signal();
        }
    }

    /// Makes a target if there should be one. Returns whether there still is none.
    fn lacks(&self, target: &mut Option<Target<Wake>>) -> bool {
        // Looked at under the lock of the target, which who closes takes after that.
        let Some(source) = self.source().filter(|_| target.is_none()) else {
            return false;
        };
        *target = self.make(source).ok();
        target.is_none()
    }

    /// Is not to be reached any more, when this returns. `take` takes what has come.
    pub(crate) fn close(&self, take: impl Fn()) {
        self.place.lock().source = None;
        let before = self.target.lock().take();
        if let Some(target) = before {
            end(target, take);
        }
    }

    /// Takes packets that have come. Returns how many there were.
    pub(super) fn poll_packets(&self, mut f: impl FnMut(KVec<u8>)) -> usize {
        self.pool.cq().poll(|completion| {
            let bytes = self.pool.take(&completion);
            if completion.status == Status::Success {
                f(bytes);
            }
        })
    }

    /// Asks for an interrupt when a packet comes, after whoever looks once more and finds none.
    pub(super) fn arm_packets(&self) {
        self.pool.cq().arm();
    }

    /// What peers reach us by, if they do.
    pub(crate) fn name(&self) -> Option<Name> {
        self.target.lock().as_ref().map(Target::name)
    }

    /// Starts initiators anew that failed and that nobody uses any more, and makes a target if there is none. Returns
    /// whether to come again soon.
    pub(super) fn mend(&self) -> bool {
        let Place { source, opened } = *self.place.lock();
        let Some(source) = source else {
            return false;
        };
        // Who has the lock may be long about it.
        let mut again = match self.target.try_lock() {
            Some(mut target) => self.lacks(&mut target),
            None => true,
        };
        for line in &self.lines {
            let drained = {
                let state = line.state.lock();
                again |= state.failed && !state.is_idle();
                state.failed && state.is_idle()
            };
            // Nobody else starts what failed; it is to be started once more if the source has changed.
            if drained {
                let started = line.qp.reset().and_then(|()| line.qp.start(source));
                let mut state = line.state.lock();
                let failed = started.is_err() || self.place.lock().opened != opened;
                self.stats.initiators.add((!failed).into());
                *state = State::new(failed);
                again |= failed;
            }
        }
        again
    }

    /// An initiator failed, by no peer's fault.
    fn give_up(&self, line: &Line) {
        let mut state = line.state.lock();
        state
            .culprit
            .get_or_insert((Life::default(), Status::Flushed));
        let first = state.fail();
        drop(state);
        self.stats.initiators.sub(first.into());
    }

    /// Announces so many requests and bytes by the initiator of number `on`, or by one of those of this processor if
    /// possible. One that may be stuck, for a node that died, is the last choice.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is no room.
    pub(crate) fn begin(self: &Arc<Self>, size: (u32, u64), on: Option<usize>) -> Result<Pass> {
        let home = kernel::cpu::CpuId::current().as_u32() as usize * INITIATORS;
        let turn = home + self.turn.fetch_add(1u32, Relaxed) as usize % INITIATORS;
        let any = |_: &State| true;
        let pass = match on {
            Some(on) => self.pass((on, 1), size, any),
            None => self
                .pass((home, INITIATORS), size, State::is_idle)
                .or_else(|| self.pass((turn, self.lines.len()), size, State::is_lively))
                .or_else(|| self.pass((turn, self.lines.len()), size, any)),
        };
        pass.ok_or(EAGAIN)
    }

    /// Announces that by one of so many initiators from `first` on, if one suits.
    fn pass(
        self: &Arc<Self>,
        (first, most): (usize, usize),
        (count, bytes): (u32, u64),
        suits: fn(&State) -> bool,
    ) -> Option<Pass> {
        let all = self.lines.iter().enumerate().cycle();
        let mut lines = all.skip(first % self.lines.len()).take(most);
        let (number, line) = lines.find(|(_, line)| line.begin((count, bytes), suits))?;
        Some(Pass {
            dynamic: self.clone(),
            line: line.clone(),
            number,
            count,
            bytes,
        })
    }
}

/// Ends a target. Who sent something to it was told that it has come, so it is taken before.
fn end(mut target: Target<Wake>, take: impl Fn()) {
    // If it does not end, dropping it says so.
    let _ = target.drain();
    take();
    drop(target);
}

/// The right to post a number of requests by an initiator.
pub(crate) struct Pass {
    dynamic: Arc<Dynamic>,
    line: Arc<Line>,
    /// The number of the initiator.
    pub(crate) number: usize,
    count: u32,
    bytes: u64,
}

impl Pass {
    /// Posts requests that were announced, with one doorbell. Those that are refused make the claim fail.
    ///
    /// # Safety
    ///
    /// The local memory that they name must be mapped for as long as `claim` has requests under way.
    pub(crate) unsafe fn post(&self, claim: &Claim, works: &[Work<'_>]) {
        claim.before_post(works.len() as u32);
        // SAFETY: By the safety requirements.
        let posted = unsafe { self.line.qp.post(works) };
        if posted == works.len() {
            return;
        }
        // The hardware has failed: there is room, and what is posted is well formed.
        self.dynamic.give_up(&self.line);
        (posted..works.len()).for_each(|_| claim.refused());
    }

    /// Reports how a request to `peer` failed, and with it the initiator.
    pub(crate) fn failed(&self, status: Status, peer: Life) {
        let mut state = self.line.state.lock();
        let first = state.fail();
        if status != Status::Flushed {
            state.culprit = Some((peer, status));
        }
        drop(state);
        self.dynamic.stats.dynamic_failures.add(first.into());
        self.dynamic.stats.initiators.sub(first.into());
    }

    /// The peer whose request made the initiator fail, and how, once that is known.
    pub(crate) fn culprit(&self) -> Option<(Life, Status)> {
        self.line.state.lock().culprit
    }

    /// Since when nobody's requests have ended, and how many bytes are under way.
    pub(super) fn progress(&self) -> (Instant<Monotonic>, u64) {
        let state = self.line.state.lock();
        (state.progress, state.bytes)
    }

    /// Gives the initiator up, for want of completions.
    pub(crate) fn rescue(&self, how: Rescue) -> Result {
        self.dynamic.give_up(&self.line);
        match how {
            Rescue::Fail => self.line.qp.fail(),
            Rescue::Reset => self.line.qp.reset(),
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.line.state.lock();
        state.inflight -= self.count;
        state.bytes -= self.bytes;
        state.progress = Instant::now();
        let drained = state.failed && state.is_idle();
        drop(state);
        if drained {
            self.dynamic.connector.event.signal();
        }
    }
}
