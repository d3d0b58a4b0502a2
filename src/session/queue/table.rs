// SPDX-License-Identifier: GPL-2.0

//! The queue pairs of a session.

use super::{pin, size, Completions, Driver, Owner, Queue};
use crate::{
    bindings, errno,
    rpc::Rpc,
    session::{caller, Session},
    sys::{deadline::Deadline, shared},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT, mm::virt::VmaNew, page::PAGE_SHIFT, prelude::*, sync::Arc,
};

/// They are mapped at multiples of so many bytes of the session, in powers of two.
const OFFSET_SHIFT: u32 = 20;
const _: () = assert!(size(bindings::KITE_QUEUE_ENTRIES_MAX) <= 1 << OFFSET_SHIFT);

/// A queue pair that the poller drives.
pub(in crate::session) struct Entered {
    number: u64,
    queue: Arc<Queue>,
    /// By which the poller knows it.
    driven: u64,
}

/// A queue pair that was made.
pub(in crate::session) struct Made {
    pub(in crate::session) number: u64,
    /// Bytes of its memory.
    pub(in crate::session) size: u64,
}

impl Made {
    /// Where it is mapped.
    pub(in crate::session) fn offset(&self) -> u64 {
        self.number << OFFSET_SHIFT
    }
}

impl Session {
    /// Makes a queue pair.
    ///
    /// # Errors
    ///
    /// As `struct kite_queue` in `include/uapi/kite.h` says.
    pub(in crate::session) fn make_queue(
        self: &Arc<Self>,
        addr: u64,
        len: u64,
        entries: u32,
    ) -> Result<Made> {
        self.rnic()?;
        let owner = || {
            let uid = caller::uid();
            pin(self, addr, len).map(|arena| Owner::Process { uid, arena })
        };
        // Nobody waits for the process's memory: not the RNIC, nor who maps a queue pair.
        let completions = Completions::new(self, entries, None)?;
        self.enter(Queue::new(self.clone(), completions, owner)?)
    }

    /// Enters a queue pair, which the poller drives from now on.
    ///
    /// # Errors
    ///
    /// `EBUSY` if there are as many as there may be, `ENODEV`, `ENOMEM`.
    pub(super) fn enter(&self, queue: Arc<Queue>) -> Result<Made> {
        let rpc = self.rpc()?;
        queue.map(rpc.lmr.cluster.fabric.device());
        // What is mapped is not to outlive the RNIC.
        let unmap = |_: &Error| queue.wind_up(ENODEV);
        self.enter_mapped(&rpc, queue.clone()).inspect_err(unmap)
    }

    fn enter_mapped(&self, rpc: &Rpc, queue: Arc<Queue>) -> Result<Made> {
        let driver = Arc::new(Driver(queue.clone()), GFP_KERNEL_ACCOUNT)?;
        let mut queues = self.queues.lock();
        if queues.len() == bindings::KITE_QUEUES_MAX as usize {
            return Err(EBUSY);
        }
        queues.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let driven = rpc.lmr.cluster.fabric.drive(driver)?;
        rpc.lmr.stats.queues.add(1);
        let made = Made {
            number: self.next_number(),
            size: queue.completions.shared.len() as u64,
        };
        let entered = Entered {
            number: made.number,
            queue,
            driven,
        };
        queues.push(entered, GFP_KERNEL_ACCOUNT)?;
        Ok(made)
    }

    fn queue(&self, number: u64) -> Result<Arc<Queue>> {
        self.rnic()?;
        let queues = self.queues.lock();
        let found = queues.iter().find(|entered| entered.number == number);
        found.map(|entered| entered.queue.clone()).ok_or(EBADF)
    }

    /// Has the kernel look at a queue pair, and waits for completions. Returns how many there are.
    ///
    /// # Errors
    ///
    /// As `struct kite_enter` in `include/uapi/kite.h` says.
    pub(in crate::session) fn enter_queue(
        &self,
        number: u64,
        want: u32,
        deadline: Deadline,
    ) -> Result<u32> {
        self.queue(number)?.enter(want, deadline)
    }

    /// Gives up a submission.
    ///
    /// # Errors
    ///
    /// As `struct kite_cancel` in `include/uapi/kite.h` says.
    pub(in crate::session) fn cancel(&self, number: u64, tag: u64) -> Result {
        let queue = self.queue(number)?;
        let _rpc = self.rpc()?;
        queue.cancel(tag)
    }

    /// Whether there is a completion to take.
    pub(in crate::session) fn has_completions(&self) -> bool {
        let queues = self.queues.lock();
        queues
            .iter()
            .any(|entered| entered.queue.completions.ready() != 0)
    }

    /// Maps a queue pair into the process.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none; `EINVAL` unless all of it is mapped, and shared.
    pub(in crate::session) fn map_queue(&self, vma: &VmaNew) -> Result {
        let page = shared::page_offset(vma);
        let shift = OFFSET_SHIFT - PAGE_SHIFT as u32;
        if page.trailing_zeros() < shift {
            return Err(EINVAL);
        }
        self.queue(page >> shift)?.completions.shared.map(vma)
    }

    /// Ends a queue pair.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is no such.
    pub(in crate::session) fn end_queue(&self, number: u64) -> Result {
        self.rnic()?;
        let mut queues = self.queues.lock();
        let at = queues.iter().position(|entered| entered.number == number);
        let removed = queues.remove(at.ok_or(EBADF)?).map_err(|_| EBADF)?;
        drop(queues);
        removed.end();
        Ok(())
    }

    /// Ends all queue pairs.
    pub(in crate::session) fn end_queues(&self) {
        let queues = core::mem::replace(&mut *self.queues.lock(), KVec::new());
        for entered in queues {
            entered.end();
        }
    }
}

impl Entered {
    fn end(self) {
        let queue = self.queue;
        queue.rnic.stats.queues.sub(1);
        // If the RNIC goes, it waits for this, or the poller winds up, for which we wait.
        let inside = queue.rnic.enter();
        if let Ok(rpc) = &inside {
            rpc.lmr.cluster.fabric.drive_no_more(self.driven);
        }
        queue.wind_up(errno::canceled());
    }
}
