// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions of an I/O queue.
//!
//! # Operation
//!
//! A waiter first drives the queue itself, for an adaptive spin time. Then the waiter sleeps on `ready_cv`,
//! while the poller thread drives the queue. Before a waiter returns, it wakes the poller thread if work is
//! left.
//!
//! # Locking
//!
//! A waiter only tries to lock `IoQueue::state`: the holder already drives the queue. The sleep on `ready_cv`
//! releases `CompletionRing::producer` (spin lock). No lock is held while the deadline and the RNIC are
//! checked.

use super::{IoQueue, IoQueueState, CQ_HEAD_OFFSET};
use crate::sys::{adaptive_spin::SpinSample, deadline::Deadline};
use kernel::{
    prelude::*,
    sync::{Arc, CondVarTimeoutResult},
    time::msecs_to_jiffies,
};

impl IoQueue {
    /// Waits until the CQ has `min_complete` completions. Returns the number of completions in the CQ.
    ///
    /// # Errors
    ///
    /// See `struct kite_enter` in `include/uapi/kite.h`.
    pub(super) fn wait_completions(
        self: &Arc<Self>,
        min_complete: u32,
        deadline: Deadline,
    ) -> Result<u32> {
        if min_complete > self.completion_ring.entries {
            return Err(EINVAL);
        }
        if let Some(_spin_sample) = self.spin_until_ready(min_complete)? {
            self.sleep_until_ready(min_complete, deadline)?;
        }
        self.wake_poller_if_needed();
        Ok(self.completion_ring.unconsumed())
    }

    /// Receives messages and runs rounds of the queue, until the CQ has `min_complete` completions or the
    /// spin time is over. Returns the spin sample if the time is over.
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the RNIC was removed.
    fn spin_until_ready(self: &Arc<Self>, min_complete: u32) -> Result<Option<SpinSample<'_>>> {
        let rpc = self.rnic.enter_rpc()?;
        let fabric = rpc.fabric();
        Ok(fabric.busy_poll(&self.completion_spin, || {
            self.try_run_round(fabric);
            self.completion_ring.unconsumed() >= min_complete
        }))
    }

    /// Passes the queue to the poller thread. Wakes the poller thread if work is left. A sleeping poller
    /// thread is woken even without work: a process with steady use of the queue then need not enter
    /// the kernel each time.
    fn wake_poller_if_needed(&self) {
        let has_work = |state: &IoQueueState| {
            let batched = state.batches.len();
            !state.tasks.is_empty()
                || state.pushes.is_busy()
                || batched != 0
                || self.ready_sqes(state, batched) != 0
        };
        let state = self.state.try_lock();
        if state.is_none_or(|state| state.needs_wakeup || has_work(&state)) {
            self.completion_ring.poller.event.complete();
        }
    }

    fn sleep_until_ready(&self, min_complete: u32, deadline: Deadline) -> Result {
        let mut producer = self.completion_ring.producer.lock();
        while producer.unconsumed(self.completion_ring.shared.load_acquire::<CQ_HEAD_OFFSET>())
            < min_complete
        {
            let slice = msecs_to_jiffies(deadline.slice_ms());
            let woken = self
                .completion_ring
                .ready_cv
                .wait_interruptible_timeout(&mut producer, slice);
            drop(producer);
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                deadline.handle_signal()?;
            }
            if self.completion_ring.unconsumed() < min_complete {
                self.check_can_wait(deadline)?;
            }
            producer = self.completion_ring.producer.lock();
        }
        Ok(())
    }

    /// Checks that the wait may continue.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the queue is closed.
    /// - `ENODEV`: the RNIC was removed.
    /// - Otherwise see [`Deadline::check`].
    fn check_can_wait(&self, deadline: Deadline) -> Result {
        drop(self.rnic.enter_rpc()?);
        if self.is_closed() {
            return Err(EBADF);
        }
        deadline.check()
    }
}
