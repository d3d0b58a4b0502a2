// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions.
//!
//! Who waits drives the queue itself for a while, and then sleeps while the poller thread does. It leaves no
//! work behind of which that does not know.

use super::{Queue, Work, CQ_HEAD};
use crate::sys::{deadline::Deadline, patience::Impatient};
use kernel::{
    prelude::*,
    sync::{Arc, CondVarTimeoutResult},
    time::msecs_to_jiffies,
};

/// How long who sleeps trusts that it is woken.
const NAP_MS: u32 = 50;

impl Queue {
    /// Waits until there are `want` completions. Returns how many there are.
    ///
    /// # Errors
    ///
    /// As `struct kite_enter` in `include/uapi/kite.h` says.
    pub(super) fn enter(self: &Arc<Self>, want: u32, deadline: Deadline) -> Result<u32> {
        if want > self.completions.entries {
            return Err(EINVAL);
        }
        if let Some(_impatient) = self.watch(want)? {
            self.sleep(want, deadline)?;
        }
        self.leave_to_poller();
        Ok(self.completions.ready())
    }

    /// Takes what has come, and goes on with what was submitted, for a while or until there are enough
    /// completions.
    ///
    /// # Errors
    ///
    /// `ENODEV`.
    fn watch(self: &Arc<Self>, want: u32) -> Result<Option<Impatient<'_>>> {
        let rpc = self.rnic.enter()?;
        let fabric = &rpc.lmr.cluster.fabric;
        Ok(fabric.watch(&self.patience, || {
            self.try_drive(fabric);
            self.completions.ready() >= want
        }))
    }

    /// What was submitted is looked after by the poller from now on. If that sleeps, it is woken also for what may
    /// come: who uses the queue steadily is not to have to do so each time.
    fn leave_to_poller(&self) {
        let has_some = |work: &Work| {
            let batched = work.batches.len();
            !work.tasks.is_empty()
                || work.pushes.is_busy()
                || batched != 0
                || self.may_take(work, batched) != 0
        };
        let work = self.work.try_lock();
        if work.is_none_or(|work| work.asleep || has_some(&work)) {
            self.completions.poller.event.signal();
        }
    }

    fn sleep(&self, want: u32, deadline: Deadline) -> Result {
        let mut completed = self.completions.completed.lock();
        while completed.waiting(self.completions.shared.load::<CQ_HEAD>()) < want {
            let nap = msecs_to_jiffies(deadline.left_ms().min(NAP_MS));
            let woken = self
                .completions
                .more
                .wait_interruptible_timeout(&mut completed, nap);
            drop(completed);
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                deadline.on_signal()?;
            }
            if self.completions.ready() < want {
                self.goes_on(deadline)?;
            }
            completed = self.completions.completed.lock();
        }
        Ok(())
    }

    /// Whether to wait for more.
    fn goes_on(&self, deadline: Deadline) -> Result {
        drop(self.rnic.enter()?);
        if self.is_over() {
            return Err(EBADF);
        }
        deadline.check()
    }
}
