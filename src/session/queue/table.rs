// SPDX-License-Identifier: GPL-2.0

//! The queue pairs of a session.

use super::{
    pin_queue_memory, ring_bytes, CompletionRing, IoQueue, IoQueueOwner, IoQueuePollClient,
};
use crate::{
    bindings, errno,
    rpc::Rpc,
    session::{source, Session},
    sys::{deadline::Deadline, ring_memory},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT, mm::virt::VmaNew, page::PAGE_SHIFT, prelude::*, sync::Arc,
};

/// They are mapped at multiples of so many bytes of the session, in powers of two.
const MMAP_OFFSET_SHIFT: u32 = 20;
const _: () = assert!(ring_bytes(bindings::KITE_QUEUE_ENTRIES_MAX) <= 1 << MMAP_OFFSET_SHIFT);

/// A queue pair that the poller drives.
pub(in crate::session) struct RegisteredQueue {
    id: u64,
    queue: Arc<IoQueue>,
    /// By which the poller knows it.
    poll_client_id: u64,
}

/// A queue pair that was made.
pub(in crate::session) struct CreatedQueue {
    pub(in crate::session) id: u64,
    /// Bytes of its memory.
    pub(in crate::session) bytes: u64,
}

impl CreatedQueue {
    /// Where it is mapped.
    pub(in crate::session) fn mmap_offset(&self) -> u64 {
        self.id << MMAP_OFFSET_SHIFT
    }
}

impl Session {
    /// Makes a queue pair.
    ///
    /// # Errors
    ///
    /// As `struct kite_create_queue` in `include/uapi/kite.h` says.
    pub(in crate::session) fn create_queue(
        self: &Arc<Self>,
        addr: u64,
        len: u64,
        entries: u32,
    ) -> Result<CreatedQueue> {
        self.rnic()?;
        let owner = || {
            let uid = source::current_euid();
            pin_queue_memory(self, addr, len).map(|memory| IoQueueOwner::Process { uid, memory })
        };
        // Nobody waits for the process's memory: not the RNIC, nor who maps a queue pair.
        let completion_ring = CompletionRing::new(self, entries, None)?;
        self.add_queue(IoQueue::new(self.clone(), completion_ring, owner)?)
    }

    /// Enters a queue pair, which the poller drives from now on.
    ///
    /// # Errors
    ///
    /// `EBUSY` if there are as many as there may be, `ENODEV`, `ENOMEM`.
    pub(super) fn add_queue(&self, queue: Arc<IoQueue>) -> Result<CreatedQueue> {
        let rpc = self.enter_rpc()?;
        queue.map_memory(rpc.memory_service.cluster.fabric.device());
        // What is mapped is not to outlive the RNIC.
        let unmap = |_: &Error| queue.shutdown(ENODEV);
        self.register_queue(&rpc, queue.clone()).inspect_err(unmap)
    }

    fn register_queue(&self, rpc: &Rpc, queue: Arc<IoQueue>) -> Result<CreatedQueue> {
        let poll_client = Arc::new(IoQueuePollClient(queue.clone()), GFP_KERNEL_ACCOUNT)?;
        let mut queues = self.io_queues.lock();
        if queues.len() == bindings::KITE_QUEUES_MAX as usize {
            return Err(EBUSY);
        }
        queues.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let poll_client_id = rpc
            .memory_service
            .cluster
            .fabric
            .register_poll_client(poll_client)?;
        rpc.memory_service.stats.io_queues.add(1);
        let created = CreatedQueue {
            id: self.alloc_id(),
            bytes: queue.completion_ring.shared.len() as u64,
        };
        let entry = RegisteredQueue {
            id: created.id,
            queue,
            poll_client_id,
        };
        queues.push(entry, GFP_KERNEL_ACCOUNT)?;
        Ok(created)
    }

    fn find_queue(&self, queue_id: u64) -> Result<Arc<IoQueue>> {
        self.rnic()?;
        let queues = self.io_queues.lock();
        let found = queues.iter().find(|entry| entry.id == queue_id);
        found.map(|entered| entered.queue.clone()).ok_or(EBADF)
    }

    /// Has the kernel look at a queue pair, and waits for completions. Returns how many there are.
    ///
    /// # Errors
    ///
    /// As `struct kite_enter` in `include/uapi/kite.h` says.
    pub(in crate::session) fn enter_queue(
        &self,
        queue_id: u64,
        min_complete: u32,
        deadline: Deadline,
    ) -> Result<u32> {
        self.find_queue(queue_id)?
            .wait_completions(min_complete, deadline)
    }

    /// Gives up a submission.
    ///
    /// # Errors
    ///
    /// As `struct kite_cancel` in `include/uapi/kite.h` says.
    pub(in crate::session) fn cancel_submission(&self, queue_id: u64, tag: u64) -> Result {
        let queue = self.find_queue(queue_id)?;
        let _rpc = self.enter_rpc()?;
        queue.cancel(tag)
    }

    /// Whether there is a completion to take.
    pub(in crate::session) fn has_completions(&self) -> bool {
        let queues = self.io_queues.lock();
        queues
            .iter()
            .any(|entry| entry.queue.completion_ring.unconsumed() != 0)
    }

    /// Maps a queue pair into the process.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none; `EINVAL` unless all of it is mapped, and shared.
    pub(in crate::session) fn mmap_queue(&self, vma: &VmaNew) -> Result {
        let pgoff = ring_memory::vma_pgoff(vma);
        let shift = MMAP_OFFSET_SHIFT - PAGE_SHIFT as u32;
        if pgoff.trailing_zeros() < shift {
            return Err(EINVAL);
        }
        self.find_queue(pgoff >> shift)?
            .completion_ring
            .shared
            .mmap(vma)
    }

    /// Ends a queue pair.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is no such.
    pub(in crate::session) fn destroy_queue(&self, queue_id: u64) -> Result {
        self.rnic()?;
        let mut queues = self.io_queues.lock();
        let index = queues.iter().position(|entry| entry.id == queue_id);
        let removed = queues.remove(index.ok_or(EBADF)?).map_err(|_| EBADF)?;
        drop(queues);
        removed.close();
        Ok(())
    }

    /// Ends all queue pairs.
    pub(in crate::session) fn destroy_queues(&self) {
        let queues = core::mem::replace(&mut *self.io_queues.lock(), KVec::new());
        for entry in queues {
            entry.close();
        }
    }
}

impl RegisteredQueue {
    fn close(self) {
        let queue = self.queue;
        queue.rnic.stats.io_queues.sub(1);
        // If the RNIC goes, it waits for this, or the poller winds up, for which we wait.
        let rpc_guard = queue.rnic.enter_rpc();
        if let Ok(rpc) = &rpc_guard {
            rpc.memory_service
                .cluster
                .fabric
                .unregister_poll_client(self.poll_client_id);
        }
        queue.shutdown(errno::canceled());
    }
}
