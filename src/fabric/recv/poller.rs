// SPDX-License-Identifier: GPL-2.0

//! Poller thread: processes the messages that peers send (LITE, section 5.1: one poller on one receive
//! queue).
//!
//! # Operation
//!
//! 1. The thread polls the receive CQ and, with DC, the packet CQ ([`super::engine`]). If waiters have polled in
//!    its place for 1 ms, the thread waits for the present one, which inherits the priority of the wait.
//! 2. The thread polls the send CQ if a sender sleeps.
//! 3. The thread polls the clients ([`super::poll_client`]), which are I/O queues and VQPs.
//! 4. Under traffic the thread polls without pause, except while waiters busy-poll ([`super::busy_poll`]).
//! 5. After an adaptive spin without a message the thread arms the CQs and sleeps until an interrupt.
//!    An idle node therefore uses no processor time.
//!
//! # Locking
//!
//! Order: `PollClients::list`, then the locks of a client, then the locks of the send engine.

use super::{
    busy_poll::AdaptiveInterval,
    poll_client::{PollHint, POSTED_SLEEP_MS, SOON_SLEEP_US, WAITING_SLEEP_MS},
};
use crate::{
    fabric::Fabric,
    sys::{
        adaptive_spin::AdaptiveSpin,
        thread::{cond_resched, ThreadBody},
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
    time::{Instant, Monotonic},
};

/// Time for which the thread keeps polling after a client made progress, in ns. A process that uses its
/// queues steadily then needs no system call to wake the thread.
const CLIENT_SPIN_NS: i64 = 1_000_000;

/// Time for which waiters may poll in place of the thread until the thread waits for them, in ns. A waiter
/// that was preempted while it polled would otherwise keep the node from receiving.
const MAX_RECV_STALL_NS: i64 = 1_000_000;

/// The poller thread of one RNIC.
pub(crate) struct Poller {
    fabric: Arc<Fabric>,
    /// Time for which the thread polls without a message before it sleeps.
    adaptive_spin: AdaptiveSpin,
    /// 1 once the thread must end. Stored with `Release`, loaded with `Acquire`.
    stopping: Atomic<u32>,
}

impl Poller {
    /// Creates the body of the thread.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    pub(crate) fn new(fabric: Arc<Fabric>) -> Result<Arc<Self>> {
        let poller = Self {
            fabric,
            adaptive_spin: AdaptiveSpin::new(),
            stopping: Atomic::new(0u32),
        };
        Ok(Arc::new(poller, GFP_KERNEL)?)
    }

    /// Polls once. `last_recv_poll` is the time of the last poll of the receive queues. Returns the number of
    /// completions and messages, and the number of steps done for clients.
    fn poll(&self, last_recv_poll: &mut Instant<Monotonic>) -> (usize, usize) {
        let mut done = self.poll_recv(last_recv_poll);
        if self.fabric.send_engine().has_sleepers() {
            done += self.fabric.send_engine().poll();
        }
        (done, self.fabric.poll_clients.poll_all(&self.fabric))
    }

    /// Processes received messages. Waits for the thread that does so instead, if the thread has not done so
    /// itself for [`MAX_RECV_STALL_NS`]. Returns the number of messages.
    fn poll_recv(&self, last_poll: &mut Instant<Monotonic>) -> usize {
        let engine = &self.fabric.recv_engine;
        let messages = match engine.try_poll(&self.fabric) {
            None if last_poll.elapsed().as_nanos() < MAX_RECV_STALL_NS => return 0,
            None => engine.wait_and_poll(&self.fabric),
            Some(messages) => messages,
        };
        *last_poll = Instant::now();
        messages
    }

    /// Sleeps for at most about `us` microseconds, or until woken.
    fn sleep_us(&self, us: u32) {
        self.fabric.poller_waker.event.wait_timeout_us(us);
        self.fabric.poller_waker.event.reinit();
    }

    /// Returns how long the thread may sleep, in µs, because waiters busy-poll; `None` if none does.
    fn covered_by_busy_pollers(
        &self,
        interval: &mut AdaptiveInterval,
        now: Instant<Monotonic>,
    ) -> Option<u32> {
        let fabric = &self.fabric;
        let has_other_work = fabric.send_engine().has_sleepers() || !fabric.poll_clients.is_empty();
        interval.next_interval_us(fabric.recv_engine.busy_pollers(), now, has_other_work)
    }

    /// Arms the CQs and sleeps, unless a completion arrived meanwhile.
    ///
    /// A sender that goes to sleep arms the send CQ itself. An armed CQ raises only one notification, so the
    /// thread arms the CQ again for senders that still sleep.
    ///
    /// Returns `false` after the short sleep for [`PollHint::Soon`], which must not restart the spin.
    fn arm_and_sleep(&self) -> bool {
        let mut missed = self.fabric.recv_engine.arm(&self.fabric);
        let has_clients = !self.fabric.poll_clients.is_empty();
        let old_hint = self.fabric.poll_clients.max_hint();
        // A client that is polled again soon needs no interrupt.
        if self.fabric.send_engine().has_sleepers() || has_clients && old_hint != PollHint::Soon {
            missed |= self.fabric.send_engine().arm();
        }
        // Read the hints again: only completions after the CQ was armed wake the thread.
        let hint = self.fabric.poll_clients.max_hint();
        missed |= hint != old_hint;
        if missed || hint == PollHint::Busy || self.stopping.load(Acquire) != 0 {
            return true;
        }
        match hint {
            PollHint::Soon => {
                self.sleep_us(SOON_SLEEP_US);
                return false;
            }
            PollHint::Idle => self.fabric.poller_waker.event.wait_idle(),
            PollHint::Posted => drop(
                self.fabric
                    .poller_waker
                    .event
                    .wait_timeout_ms(POSTED_SLEEP_MS),
            ),
            _ => drop(
                self.fabric
                    .poller_waker
                    .event
                    .wait_timeout_ms(WAITING_SLEEP_MS),
            ),
        }
        // Discard all pending wake-ups: the next round handles all of their causes.
        self.fabric.poller_waker.event.reinit();
        self.fabric.stats.wakeups.add(1);
        true
    }
}

impl ThreadBody for Poller {
    fn run(&self) {
        let mut last_work = Instant::<Monotonic>::now();
        let mut last_recv_poll = last_work;
        let mut interval = AdaptiveInterval::new();
        let mut last_client_work: Option<Instant<Monotonic>> = None;
        while self.stopping.load(Acquire) == 0 {
            let (done, client_work) = self.poll(&mut last_recv_poll);
            let now = Instant::now();
            if client_work != 0 {
                last_client_work = Some(now);
            }
            let clients_active =
                last_client_work.is_some_and(|last| (now - last).as_nanos() < CLIENT_SPIN_NS);
            if done != 0 {
                last_work = now;
            } else if clients_active {
                core::hint::spin_loop();
            } else if let Some(us) = self.covered_by_busy_pollers(&mut interval, now) {
                self.sleep_us(us);
                last_work = Instant::now();
            } else if self.adaptive_spin.should_spin(last_work, now) {
                core::hint::spin_loop();
            } else if self.arm_and_sleep() {
                self.adaptive_spin.record_wait(last_work);
                last_work = Instant::now();
            }
            cond_resched();
        }
        self.fabric.poll_clients.stop();
    }

    fn request_stop(&self) {
        self.stopping.store(1, Release);
        self.fabric.poller_waker.event.complete_all();
    }
}
