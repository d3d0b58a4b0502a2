// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions.
//!
//! Who waits drives the queue itself for a while, and then sleeps while the poller thread does. It leaves no
//! work behind of which that does not know.

use super::{Queue, CQ_HEAD};
use crate::sys::{deadline::Deadline, thread::spin};
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
        if want > self.entries {
            return Err(EINVAL);
        }
        self.look()?;
        // It is not to find out late that there is something for it.
        self.poller.event.signal();
        if want != 0 && !spin(|| self.look().is_err() || self.ready() >= want) {
            self.poller.event.signal();
            self.sleep(want, deadline)?;
        }
        self.leave_to_poller();
        Ok(self.ready())
    }

    /// Takes what has come, and goes on with what was submitted.
    ///
    /// # Errors
    ///
    /// `ENODEV`.
    fn look(self: &Arc<Self>) -> Result {
        let rpc = self.rnic.enter()?;
        let fabric = &rpc.lmr.cluster.fabric;
        fabric.look();
        self.try_drive(fabric);
        Ok(())
    }

    /// What was posted is looked after by the poller from now on, which may sleep.
    fn leave_to_poller(&self) {
        let left = self
            .work
            .try_lock()
            .is_none_or(|work| !work.tasks.is_empty());
        if left {
            self.poller.event.signal();
        }
    }

    fn sleep(&self, want: u32, deadline: Deadline) -> Result {
        let mut completed = self.completed.lock();
        while completed.waiting(self.shared.load::<CQ_HEAD>()) < want {
            let nap = msecs_to_jiffies(deadline.left_ms().min(NAP_MS));
            let woken = self.more.wait_interruptible_timeout(&mut completed, nap);
            drop(completed);
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                deadline.on_signal()?;
            }
            if self.ready() < want {
                self.goes_on(deadline)?;
            }
            completed = self.completed.lock();
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
