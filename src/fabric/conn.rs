// SPDX-License-Identifier: GPL-2.0

//! One connection to a peer, shared by all who talk to it.
//!
//! `kite_core::conn` decides; here are the queue pair and those who use it. The connector thread alone
//! makes, connects and drops queue pairs ([`Conn::step`]). Users [`Conn::begin`] when there is a ready
//! one with room, and report its failure with [`Conn::failed`]; the failed one gets no new users, is
//! dropped when the last has left, and then a new one is made. A request that failed with its queue
//! pair may therefore be replayed as soon as `begin` succeeds again.
//!
//! Lock: `inner`, a spin lock, held for a few instructions only.

mod steps;

pub(crate) use steps::Workshop;

use super::{
    channel::{Channel, Place, CALLS, SEND_DEPTH},
    parting::has_room,
    suspicion::Suspicion,
    usage::Use,
    wake::Wake,
    Fabric,
};
use crate::{errno, stats::Stats, sys::deadline::Deadline, trace};
use kernel::{
    new_condvar, new_spinlock,
    prelude::*,
    sync::{Arc, CondVar, CondVarTimeoutResult, SpinLock},
    time::{delay::fsleep, msecs_to_jiffies, Delta, Instant, Monotonic},
};
use kite_core::{
    conn::{Conn as Logic, Phase, Role},
    turns::Turns,
    wire::setup::Setup,
};

/// How long a user sleeps before it looks again, in case a wake-up went elsewhere.
const NAP_MS: u32 = 50;

/// Bytes of virtual queue pairs that may be under way, besides a single batch: others wait behind them.
const BYTES: u64 = 16 << 20;

/// How long nobody has used a connection that may be given up.
const IDLE_MS: i64 = 1000;

/// How long it is not tried again to give up one that the peer uses.
const TRY_MS: i64 = 5000;

/// Bytes that a packet can have on any path.
const SMALLEST_PACKET: u32 = 256;

struct Inner {
    logic: Logic,
    channel: Option<Arc<Channel>>,
    /// Whether the channel's queue pair is connected and has not failed.
    connected: bool,
    /// Generation of the queue pair that was connected last; 0 before the first, and when nothing of it can come late.
    newest: u32,
    /// Key to the peer's memory, valid while the connection is ready.
    remote_key: u32,
    /// Bytes of the largest packet, once it was connected.
    packet: u32,
    /// The first sequence number that we send.
    psn: u32,
    /// Send requests that users have announced.
    inflight: u32,
    /// Control requests that wait for a reply.
    calls: u32,
    /// Parts of reads and writes under way, each of which has a slot of the RNIC or waits for one.
    parts: u32,
    /// Bytes of virtual queue pairs under way.
    bytes: u64,
    /// When somebody's requests ended last.
    progress: Instant<Monotonic>,
    /// Datagrams repeated since the connection was last ready.
    unanswered: u32,
    /// Threads that wait for a queue pair or for room.
    waiters: u32,
    /// Of those that wait for room, and who only looks for it, whose turn it is.
    turns: Turns,
    /// Taken for the first channel, and kept for its successors.
    place: Option<Place>,
    /// Why nobody may use the connection any more.
    closed: Option<Error>,
    // For the connector thread:
    wanted: bool,
    /// It is one too many.
    spare: bool,
    /// When it was that last.
    tried: Option<Instant<Monotonic>>,
    failed: Option<u32>,
    inbox: Option<Setup>,
}

impl<'a> Wish<'a> {
    /// For requests of a virtual queue pair, of so many bytes.
    fn bytes(count: u32, bytes: u64, fabric: &'a Fabric) -> Self {
        Self {
            requests: count,
            most: count,
            calls: 0,
            bytes,
            slots: Some(fabric),
            by: None,
        }
    }
}

impl Inner {
    fn is_ready(&self) -> bool {
        self.is_whole() && self.logic.phase() != Phase::Parting
    }

    fn is_whole(&self) -> bool {
        self.connected && self.has_not_failed()
    }

    /// For how many milliseconds nobody has used it, if long enough to give it up.
    fn idle_ms(&self) -> Option<i64> {
        let idle = self.progress.elapsed().as_millis();
        let used = self.inflight != 0 || self.calls != 0 || idle < IDLE_MS;
        (self.is_ready() && !used).then_some(idle)
    }

    fn has_not_failed(&self) -> bool {
        self.failed != Some(self.logic.generation()) && self.logic.phase() != Phase::Draining
    }

    /// Whether its channel is that of number `number`, which has been or is being connected.
    fn has_channel(&self, number: u32) -> bool {
        let same = self.channel.as_ref().map(|channel| channel.number()) == Some(number);
        same && self.has_not_failed()
    }
}

/// What a user announces.
struct Wish<'a> {
    /// Send requests.
    requests: u32,
    /// So many are welcome, if there is room.
    most: u32,
    /// Control requests.
    calls: u32,
    /// Bytes of a virtual queue pair.
    bytes: u64,
    /// Where it takes a slot, if it is for a part of a read or write.
    slots: Option<&'a Fabric>,
    /// The number of the one channel that will do, if not any does.
    by: Option<u32>,
}

impl Wish<'_> {
    /// Requests that may be announced when this one is. Parts leave room for control requests, which take no
    /// turns.
    fn depth(&self) -> u32 {
        match self.slots {
            Some(_) => SEND_DEPTH - CALLS,
            None => SEND_DEPTH,
        }
    }
}

/// A connection.
#[pin_data]
pub(crate) struct Conn {
    node: u32,
    index: u8,
    #[pin]
    inner: SpinLock<Inner>,
    /// Signalled when `inner` changes in a way that somebody may wait for.
    #[pin]
    changed: CondVar,
    connector: Arc<Wake>,
    suspicion: Arc<Suspicion>,
    stats: Arc<Stats>,
}

impl Conn {
    /// An idle connection: the `index`th to `node`, of which we have `role`'s side.
    pub(crate) fn new(
        node: u32,
        index: u8,
        role: Role,
        connector: Arc<Wake>,
        suspicion: Arc<Suspicion>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let inner = Inner {
            logic: Logic::new(role),
            channel: None,
            connected: false,
            newest: 0,
            remote_key: 0,
            packet: SMALLEST_PACKET,
            psn: 0,
            inflight: 0,
            calls: 0,
            parts: 0,
            bytes: 0,
            progress: Instant::now(),
            unanswered: 0,
            waiters: 0,
            turns: Turns::new(),
            place: None,
            closed: None,
            wanted: false,
            spare: false,
            tried: None,
            failed: None,
            inbox: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                node,
                index,
                inner <- new_spinlock!(inner),
                changed <- new_condvar!(),
                connector,
                suspicion,
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Whether a user would not have to wait for a queue pair.
    pub(crate) fn is_ready(&self) -> bool {
        let inner = self.inner.lock();
        inner.closed.is_none() && inner.is_ready()
    }

    /// Whether another queue pair took the place of that of `generation`, for which the peer gave up its half.
    pub(super) fn was_replaced(&self, generation: u32) -> bool {
        self.inner.lock().newest != generation
    }

    /// The generation of the last queue pair, if it failed.
    pub(super) fn failure(&self) -> Option<u32> {
        let inner = self.inner.lock();
        (inner.newest != 0 && !inner.is_whole()).then_some(inner.newest)
    }

    /// Whether it is being given up, and counts no more.
    pub(super) fn is_parting(&self) -> bool {
        self.inner.lock().logic.phase() == Phase::Parting
    }

    /// For how many milliseconds nobody has used it, if it may be given up, and nobody tried that of late: the peer
    /// may have used it.
    pub(super) fn idle_ms(&self) -> Option<i64> {
        let inner = self.inner.lock();
        let of_late = |tried: Instant<_>| tried.elapsed().as_millis() < TRY_MS;
        let tried = inner.tried.is_some_and(of_late);
        inner.idle_ms().filter(|_| inner.closed.is_none() && !tried)
    }

    /// It is one too many: is given up, unless somebody uses it after all.
    pub(super) fn spare(&self) {
        let mut inner = self.inner.lock();
        inner.spare = true;
        inner.tried = Some(Instant::now());
    }

    /// Whether its channel is that of number `number`, and has not failed.
    pub(super) fn has_channel(&self, number: u32) -> bool {
        self.inner.lock().has_channel(number)
    }

    /// As [`Self::need`], if there is room for one more connection.
    pub(crate) fn want(&self) {
        if has_room(&self.stats) {
            self.need();
        }
    }

    /// Has a queue pair made if there is none, and nobody who asked for one.
    pub(super) fn need(&self) {
        let mut inner = self.inner.lock();
        let idle = inner.logic.phase() == Phase::Idle && !inner.logic.is_unsettled();
        if idle && inner.closed.is_none() {
            self.ask(&mut inner);
        }
    }

    fn ask(&self, inner: &mut Inner) {
        if !core::mem::replace(&mut inner.wanted, true) {
            self.connector.event.signal();
        }
    }

    /// Bytes of the largest packet.
    pub(crate) fn packet(&self) -> usize {
        self.inner.lock().packet.max(SMALLEST_PACKET) as usize
    }

    /// Announces `count` send requests and `calls` control requests; waits until there is a queue pair
    /// with room for them.
    ///
    /// # Errors
    ///
    /// - What [`Self::shut`] was given, if it was shut.
    /// - `EAGAIN` if it would have to wait, and there is no deadline.
    /// - `ETIMEDOUT`, `EINTR`.
    pub(crate) fn begin(
        self: &Arc<Self>,
        count: u32,
        calls: u32,
        deadline: Option<Deadline>,
    ) -> Result<Use> {
        let wish = Wish {
            requests: count,
            most: count,
            calls,
            bytes: 0,
            slots: None,
            by: None,
        };
        self.enter(&wish, deadline)
    }

    /// Announces `count` send requests for a part of a read or write, which is to have a slot of `fabric`:
    /// see [`Fabric::share`].
    ///
    /// # Errors
    ///
    /// As for [`Self::begin`].
    pub(crate) fn begin_part(
        self: &Arc<Self>,
        count: u32,
        fabric: &Fabric,
        deadline: Option<Deadline>,
    ) -> Result<Use> {
        let wish = Wish {
            requests: count,
            most: count,
            calls: 0,
            bytes: 0,
            slots: Some(fabric),
            by: None,
        };
        self.enter(&wish, deadline)
    }

    /// As [`Self::begin_part`], for so many bytes of a virtual queue pair. Waits for nothing.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn begin_bytes(
        self: &Arc<Self>,
        count: u32,
        bytes: u64,
        fabric: &Fabric,
    ) -> Result<Use> {
        self.enter(&Wish::bytes(count, bytes, fabric), None)
    }

    /// Whether [`Self::begin_bytes`] would find room, which is not taken.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn fits(&self, count: u32, bytes: u64, fabric: &Fabric) -> Result<bool> {
        self.has_room(&mut self.inner.lock(), &Wish::bytes(count, bytes, fabric))
    }

    /// As [`Self::begin_part`], for parts that are to be posted together and share a slot: the result says for
    /// how many requests there is room, and [`Use::keep`] is to be told how many there are. Waits for nothing.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn begin_batch(
        self: &Arc<Self>,
        count: u32,
        most: u32,
        fabric: &Fabric,
    ) -> Result<Use> {
        let wish = Wish {
            requests: count,
            most,
            calls: 0,
            bytes: 0,
            slots: Some(fabric),
            by: None,
        };
        self.enter(&wish, None)
    }

    /// Announces one send request for the channel of number `by`.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` if the channel is not in use any more, and as for [`Self::begin`].
    pub(crate) fn begin_by(self: &Arc<Self>, by: u32, deadline: Deadline) -> Result<Use> {
        let wish = Wish {
            requests: 1,
            most: 1,
            calls: 0,
            bytes: 0,
            slots: None,
            by: Some(by),
        };
        self.enter(&wish, Some(deadline))
    }

    fn enter(self: &Arc<Self>, wish: &Wish<'_>, deadline: Option<Deadline>) -> Result<Use> {
        let mut inner = self.inner.lock();
        while !self.has_room(&mut inner, wish)? || (deadline.is_none() && !inner.turns.may_look()) {
            let deadline = deadline.ok_or(EAGAIN)?;
            deadline.check()?;
            // Who waits for an answer to a control request waits for no room of theirs.
            let for_room = wish.calls == 0;
            if for_room {
                inner.turns.sleep();
            }
            inner.waiters += 1;
            let nap = msecs_to_jiffies(deadline.left_ms().min(NAP_MS));
            let woken = self.changed.wait_interruptible_timeout(&mut inner, nap);
            inner.waiters -= 1;
            if for_room {
                inner.turns.wake();
            }
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                // A signal that does not end the wait must not make it spin either.
                drop(inner);
                deadline.on_signal()?;
                inner = self.inner.lock();
            }
        }
        let channel = inner.channel.clone().ok_or(EIO)?;
        inner.turns.admit(deadline.is_none());
        let count = wish.most.min(wish.depth() - inner.inflight);
        inner.inflight += count;
        inner.calls += wish.calls;
        let parts = u32::from(wish.slots.is_some());
        inner.parts += parts;
        inner.bytes += wish.bytes;
        if inner.inflight == count {
            inner.progress = Instant::now();
        }
        if wish.most == wish.requests {
            trace::post(self.node, self.index.into(), count, inner.inflight);
        }
        let (generation, key) = (inner.logic.generation(), inner.remote_key);
        Ok(Use {
            conn: self.clone(),
            channel,
            generation,
            key,
            count,
            calls: wish.calls,
            parts,
            bytes: wish.bytes,
        })
    }

    /// Whether the requests can be posted now; if there is no queue pair, one is asked for.
    fn has_room(&self, inner: &mut Inner, wish: &Wish<'_>) -> Result<bool> {
        if let Some(error) = inner.closed {
            return Err(error);
        }
        if wish.by.is_some_and(|by| !inner.has_channel(by)) {
            return Err(errno::notconn());
        }
        if !inner.is_ready() {
            self.ask(inner);
            return Ok(false);
        }
        let room = inner.inflight + wish.requests <= wish.depth()
            && inner.calls + wish.calls <= CALLS
            && (wish.bytes == 0 || inner.bytes == 0 || inner.bytes + wish.bytes <= BYTES)
            && wish.slots.is_none_or(|fabric| inner.parts < fabric.share());
        if !room {
            self.stats.credit_waits.add(1);
        }
        Ok(room)
    }

    /// Reports that the queue pair of `generation` failed.
    pub(super) fn failed(&self, generation: u32) {
        let mut inner = self.inner.lock();
        if inner.logic.generation() == generation {
            inner.failed = Some(generation);
            self.connector.event.signal();
        }
    }

    /// Reports that the peer did not answer, on the queue pair of `generation`.
    pub(super) fn unanswered(&self, generation: u32) {
        self.suspicion.raise();
        self.failed(generation);
    }

    /// Takes a datagram from the peer, for [`Self::step`]. A newer one replaces one not yet seen: the
    /// sender repeats what matters.
    pub(crate) fn deliver(&self, setup: Setup) {
        self.inner.lock().inbox = Some(setup);
        self.connector.event.signal();
    }

    /// Ends the connection for good: users get `error`. When this returns the peer cannot reach our
    /// memory through it; [`Self::leave`] waits for the users.
    pub(crate) fn shut(&self, error: Error) {
        let mut inner = self.inner.lock();
        inner.closed = Some(error);
        let channel = inner.channel.clone();
        drop(inner);
        self.changed.notify_all();
        if let Some(Err(error)) = channel.map(|channel| channel.qp().fail()) {
            pr_err!("a queue pair does not stop: {error:?}\n");
        }
    }

    /// Waits until nobody uses the connection, which must be shut, and returns its last channel and place.
    pub(crate) fn leave(&self) -> (Option<Arc<Channel>>, Option<Place>) {
        let mut inner = self.inner.lock();
        while inner.inflight != 0 || inner.calls != 0 {
            drop(inner);
            fsleep(Delta::from_millis(1));
            inner = self.inner.lock();
        }
        if core::mem::take(&mut inner.connected) {
            self.stats.connections.sub(1);
        }
        (inner.channel.take(), inner.place.take())
    }

    /// So many requests are posted, and so many that were announced are not.
    pub(super) fn keep(&self, count: u32, spare: u32) {
        let mut inner = self.inner.lock();
        inner.inflight -= spare;
        trace::post(self.node, self.index.into(), count, inner.inflight);
        let waiters = inner.waiters;
        drop(inner);
        if spare != 0 && waiters != 0 {
            self.changed.notify_all();
        }
    }

    pub(super) fn give_back(&self, count: u32, calls: u32, (parts, bytes): (u32, u64)) {
        let mut inner = self.inner.lock();
        inner.inflight -= count;
        inner.calls -= calls;
        inner.parts -= parts;
        inner.bytes -= bytes;
        inner.progress = Instant::now();
        let drained = inner.logic.phase() == Phase::Draining && inner.inflight == 0;
        let waiters = inner.waiters;
        drop(inner);
        if drained {
            self.connector.event.signal();
        }
        if waiters != 0 {
            self.changed.notify_all();
        }
    }

    /// Since when nobody's requests have ended, and how many bytes of virtual queue pairs are under way.
    pub(super) fn progress(&self) -> (Instant<Monotonic>, u64) {
        let inner = self.inner.lock();
        (inner.progress, inner.bytes)
    }

    /// Whether the queue pair of `generation` may still bring an answer.
    pub(super) fn is_current(&self, generation: u32) -> bool {
        let inner = self.inner.lock();
        inner.closed.is_none() && inner.is_ready() && inner.logic.generation() == generation
    }
}
