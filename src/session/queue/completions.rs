// SPDX-License-Identifier: GPL-2.0

//! Where the owner of a queue pair hears what became of its submissions.
//!
//! Requests of virtual queue pairs may outlive the queue by which they came, and have this alone of it: who drops the
//! last of them need not give back the process's memory.

use super::{module::Done, CQ_HEAD, CQ_TAIL, FLAGS, SUBMISSIONS};
use crate::{
    bindings,
    fabric::wake::Wake,
    rnic::Rnic,
    session::{abi, Session},
    sys::{shared::Shared, watch::Watch},
    vqp::outlet::Outlet,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_condvar, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        Arc, CondVar, SpinLock,
    },
};
use kite_core::queue::{self, Producer};

/// Bytes of the memory of a queue pair of so many entries.
pub(super) const fn size(entries: u32) -> usize {
    completions(entries) + entries as usize * size_of::<bindings::kite_completion>()
}

/// Where in it the completions begin.
const fn completions(entries: u32) -> usize {
    SUBMISSIONS + entries as usize * size_of::<bindings::kite_submission>()
}

/// The completions of a queue pair.
#[pin_data]
pub(super) struct Completions {
    rnic: Arc<Rnic>,
    /// Wakes the poller thread.
    pub(super) poller: Arc<Wake>,
    watch: Arc<Watch>,
    /// The module whose queue pair it is, if that is none of a process.
    module: Option<Done>,
    pub(super) entries: u32,
    /// The memory of the queue pair.
    pub(super) shared: Shared,
    #[pin]
    pub(super) completed: SpinLock<Producer>,
    /// Signalled when there are more.
    #[pin]
    pub(super) more: CondVar,
    /// Requests that virtual queue pairs have.
    pushed: Atomic<u32>,
}

impl Completions {
    /// Those of a session's queue pair of so many entries: none yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there can be no queue of so many; `ENODEV`, `ENOMEM`.
    pub(super) fn new(session: &Session, entries: u32, module: Option<Done>) -> Result<Arc<Self>> {
        if !queue::is_valid(entries, bindings::KITE_QUEUE_ENTRIES_MAX) {
            return Err(EINVAL);
        }
        let shared = Shared::new(size(entries))?;
        let completed = Producer::new(entries);
        Arc::pin_init(
            try_pin_init!(Self {
                rnic: session.rnic()?.clone(),
                poller: session.rpc()?.lmr.cluster.fabric.poller.clone(),
                watch: session.watch.clone(),
                module,
                entries,
                shared,
                completed <- new_spinlock!(completed),
                more <- new_condvar!(),
                pushed: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Those that the process has not taken.
    pub(super) fn ready(&self) -> u32 {
        self.completed.lock().waiting(self.shared.load::<CQ_HEAD>())
    }

    /// Requests that virtual queue pairs have.
    pub(super) fn pushed(&self) -> u32 {
        self.pushed.load(Acquire)
    }

    /// Virtual queue pairs are about to have so many more.
    pub(super) fn begin(&self, count: u32) {
        self.pushed.fetch_add(count, Full);
    }

    /// Virtual queue pairs have so many no more.
    pub(super) fn end(&self, count: u32) {
        self.pushed.fetch_sub(count, Full);
    }

    /// Tells the owner what came of a submission.
    pub(super) fn complete(&self, tag: u64, result: Result<u64>) {
        self.complete_all(core::iter::once((tag, result)));
    }

    /// Tells the owner what came of several, each with its tag.
    pub(super) fn complete_all(&self, all: impl Iterator<Item = (u64, Result<u64>)>) {
        if let Some(done) = &self.module {
            return all.for_each(|(tag, result)| done.tell(tag, result));
        }
        let mut completed = self.completed.lock();
        for (tag, result) in all {
            self.write(&mut completed, tag, result);
        }
    }

    /// Writes a completion for the process.
    fn write(&self, completed: &mut Producer, tag: u64, result: Result<u64>) {
        let completion = bindings::kite_completion {
            tag,
            value: *result.as_ref().unwrap_or(&0),
            error: result.map_or_else(|error| error.to_errno().unsigned_abs(), |_| 0),
            reserved: 0,
        };
        let at = completions(self.entries)
            + completed.index() as usize * size_of::<bindings::kite_completion>();
        // It is there: the memory has as many entries as are counted.
        let _ = self.shared.write(at, abi::bytes(&completion));
        self.shared.store::<CQ_TAIL>(completed.advance());
    }

    /// Wakes who waits for completions.
    pub(super) fn announce(&self) {
        self.more.notify_all();
        self.watch.wait.notify_all();
    }
}

impl Outlet for Completions {
    fn tell(&self, tag: u64, result: Result) {
        let blame = |error| self.rnic.services().err().unwrap_or(error);
        self.complete(tag, result.map(|()| 0).map_err(blame));
        // In this order, as of workers.
        self.end(1);
    }

    fn announce(&self) {
        self.announce();
        // There is room for more, which the poller may just have looked for in vain.
        if self.shared.load::<FLAGS>() & bindings::KITE_QUEUE_ASLEEP != 0 {
            self.poller.event.signal();
        }
    }
}
