// SPDX-License-Identifier: GPL-2.0

//! I/O queues of a session: creation, lookup, mapping, and destruction.
//!
//! # Operation
//!
//! A program maps the rings of a queue, and the mapping keeps the session open. The poller thread drives the
//! queue as a poll client until the queue is destroyed.
//!
//! # Locking
//!
//! `Session::io_queues` (mutex) protects the table. The holder may sleep in an allocation. `io_queues` nests
//! outside the poll client table of the fabric, and outside `CompletionRing::producer`. Queues are shut down
//! after removal from the table, with `io_queues` unlocked.

use super::{
    completions::{ring_bytes, CompletionRing},
    poll_client::IoQueuePollClient,
    IoQueue, IoQueueOwner,
};
use crate::{
    bindings, errno,
    rpc::Rpc,
    session::{
        source::{QueueMemory, QueueProcess},
        Session,
    },
    sys::{deadline::Deadline, ring_memory},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT, mm::virt::VmaNew, page::PAGE_SHIFT, prelude::*, sync::Arc,
};

/// Binary logarithm of the distance between the mmap offsets of consecutive queue numbers.
const MMAP_OFFSET_SHIFT: u32 = 20;
const _: () = assert!(ring_bytes(bindings::KITE_QUEUE_ENTRIES_MAX) <= 1 << MMAP_OFFSET_SHIFT);

/// I/O queue driven by the poller thread.
pub(in crate::session) struct RegisteredQueue {
    id: u64,
    queue: Arc<IoQueue>,
    /// Number of the queue's poll client.
    poll_client_id: u64,
}

/// Number and size of a new I/O queue.
pub(in crate::session) struct CreatedQueue {
    pub(in crate::session) id: u64,
    /// Size of the shared memory in bytes.
    pub(in crate::session) bytes: u64,
}

impl CreatedQueue {
    /// Returns the mmap offset of the queue.
    pub(in crate::session) fn mmap_offset(&self) -> u64 {
        self.id << MMAP_OFFSET_SHIFT
    }
}

/// Pins the memory that requests of a queue use.
fn pin_queue_memory(session: &Session, addr: u64, len: u64) -> Result<QueueMemory> {
    if len == 0 || len > bindings::KITE_QUEUE_MEMORY_MAX.into() {
        return Err(EINVAL);
    }
    let user_addr = usize::try_from(addr).map_err(|_| EFAULT)?;
    let pinned = session.pin_long_term(user_addr, len as usize)?;
    Ok(QueueMemory {
        user_addr,
        pinned: Arc::new(pinned, GFP_KERNEL_ACCOUNT)?,
    })
}

impl Session {
    /// Creates an I/O queue for the current process.
    ///
    /// # Errors
    ///
    /// See `struct kite_create_queue` in `include/uapi/kite.h`.
    pub(in crate::session) fn create_queue(
        self: &Arc<Self>,
        addr: u64,
        len: u64,
        entries: u32,
    ) -> Result<CreatedQueue> {
        self.rnic()?;
        let owner = || {
            let memory = pin_queue_memory(self, addr, len)?;
            Ok(IoQueueOwner::Process(QueueProcess::current(memory)))
        };
        // Pin user memory with neither a service guard nor `io_queues` held. A page fault must delay neither
        // RNIC removal nor the mapping of a queue.
        let completion_ring = CompletionRing::new(self, entries, None)?;
        self.add_queue(IoQueue::new(self.clone(), completion_ring, owner)?)
    }

    /// Adds an I/O queue to the session, and lets the poller thread drive the queue.
    ///
    /// # Errors
    ///
    /// - `EBUSY`: the session has `KITE_QUEUES_MAX` queues.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
    pub(super) fn add_queue(&self, queue: Arc<IoQueue>) -> Result<CreatedQueue> {
        let rpc = self.enter_rpc()?;
        queue.map_memory(rpc.fabric().device());
        // The DMA mapping must not outlive the RNIC.
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
        let poll_client_id = rpc.fabric().poll_clients.register(poll_client)?;
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

    /// Drives an I/O queue, and waits for `min_complete` completions. Returns the number of completions in
    /// the CQ.
    ///
    /// # Errors
    ///
    /// See `struct kite_enter` in `include/uapi/kite.h`.
    pub(in crate::session) fn enter_queue(
        &self,
        queue_id: u64,
        min_complete: u32,
        deadline: Deadline,
    ) -> Result<u32> {
        self.find_queue(queue_id)?
            .wait_completions(min_complete, deadline)
    }

    /// Cancels a submission.
    ///
    /// # Errors
    ///
    /// See `struct kite_cancel` in `include/uapi/kite.h`.
    pub(in crate::session) fn cancel_submission(&self, queue_id: u64, tag: u64) -> Result {
        let queue = self.find_queue(queue_id)?;
        let _rpc = self.enter_rpc()?;
        queue.cancel(tag)
    }

    /// Returns `true` if a queue has a completion to take.
    pub(in crate::session) fn has_completions(&self) -> bool {
        let queues = self.io_queues.lock();
        queues
            .iter()
            .any(|entry| entry.queue.completion_ring.unconsumed() != 0)
    }

    /// Maps the shared memory of an I/O queue into the process.
    ///
    /// # Errors
    ///
    /// - `EBADF`: no queue has this offset.
    /// - `EINVAL`: the offset is misaligned, or the mapping is private or has another length than the memory.
    /// - `ENOTCONN`: the session is not bound.
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

    /// Destroys an I/O queue.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the session has no queue of this number.
    /// - `ENOTCONN`: the session is not bound.
    pub(in crate::session) fn destroy_queue(&self, queue_id: u64) -> Result {
        self.rnic()?;
        let mut queues = self.io_queues.lock();
        let index = queues.iter().position(|entry| entry.id == queue_id);
        let removed = queues.remove(index.ok_or(EBADF)?).map_err(|_| EBADF)?;
        drop(queues);
        removed.close();
        Ok(())
    }

    /// Destroys all I/O queues.
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
        // The guard delays RNIC removal until the shutdown below is done. If the RNIC was already removed,
        // the poller thread also runs the shutdown, and the call below waits for the lock.
        let rpc_guard = queue.rnic.enter_rpc();
        if let Ok(rpc) = &rpc_guard {
            rpc.fabric().poll_clients.unregister(self.poll_client_id);
        }
        queue.shutdown(errno::canceled());
    }
}
