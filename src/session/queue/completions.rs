// SPDX-License-Identifier: GPL-2.0

//! Completion ring of an I/O queue: delivers results to the owner of the queue.
//!
//! # Operation
//!
//! A completion is written to the CQ, and wakes the threads that wait for it. A queue of a module calls the
//! module instead. Requests of virtual queue pairs (VQPs) may outlive their I/O queue. Such requests refer only to the
//! [`CompletionRing`], so the drop of the last reference need not unpin the memory of the process.
//!
//! # Locking
//!
//! `producer` (spinlock) protects the tail of the CQ. `producer` nests inside `IoQueue::state` and inside the
//! lock of a VQP. Waiters sleep on `ready_cv` with `producer`. The completion of a module's request runs the
//! module's callback without `producer`.
//!
//! A request completes before the decrement of `vqp_requests` (full barrier).
//! [`IoQueue::ready_sqes`](super::IoQueue::ready_sqes) loads the counter (acquire) before the CQ.

use super::{CQ_HEAD_OFFSET, CQ_TAIL_OFFSET, FLAGS_OFFSET, SQES_OFFSET, VERSION_OFFSET};
use crate::{
    bindings,
    fabric::recv::wake::ThreadWaker,
    rnic::Rnic,
    session::{uapi, Session},
    sys::{event_counter::EventCounter, ring_memory::SharedPages},
    vqp::sink::CompletionSink,
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
use kite_core::queue::{self, IoQueueProducer};

/// Returns the size in bytes of the shared memory of a queue with `entries` entries.
pub(super) const fn ring_bytes(entries: u32) -> usize {
    cqes_offset(entries) + entries as usize * size_of::<bindings::kite_cqe>()
}

/// Returns the offset of the first completion in the shared memory.
const fn cqes_offset(entries: u32) -> usize {
    SQES_OFFSET + entries as usize * size_of::<bindings::kite_sqe>()
}

/// Function of the module, called once per completion.
type CompletionFn = unsafe extern "C" fn(*mut c_void, u64, c_int, u64);

/// Completion callback of a module.
pub(super) struct ModuleCallback {
    pub(super) function: CompletionFn,
    pub(super) context: *mut c_void,
}

// SAFETY: By the contract of `kite_queue_open()`, any thread may call `function` with `context`.
unsafe impl Send for ModuleCallback {}
// SAFETY: By the same contract, several threads may call `function` with `context` concurrently.
unsafe impl Sync for ModuleCallback {}

impl ModuleCallback {
    /// Calls the module with the result of a submission.
    fn invoke(&self, tag: u64, result: Result<u64>) {
        let (error, value) = match result {
            Ok(value) => (0, value),
            Err(error) => (error.to_errno(), 0),
        };
        // SAFETY: The module keeps `function` and `context` valid until the queue is closed, and closing
        // waits for all completions.
        unsafe { (self.function)(self.context, tag, error, value) };
    }
}

/// Completion ring of an I/O queue.
#[pin_data]
pub(super) struct CompletionRing {
    rnic: Arc<Rnic>,
    /// Waker of the poller thread.
    pub(super) poller: Arc<ThreadWaker>,
    events: Arc<EventCounter>,
    /// Callback of the module that owns the queue. `None` if a process owns the queue.
    module_callback: Option<ModuleCallback>,
    pub(super) entries: u32,
    /// Memory of the queue, shared with the process.
    pub(super) shared: SharedPages,
    #[pin]
    pub(super) producer: SpinLock<IoQueueProducer>,
    /// Notified when completions arrive, and when workers finish.
    #[pin]
    pub(super) ready_cv: CondVar,
    /// Number of requests submitted to VQPs and not completed.
    vqp_requests: Atomic<u32>,
}

impl CompletionRing {
    /// Returns an empty completion ring for a queue of a session with `entries` entries.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: invalid number of entries.
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
    /// - `ENOTCONN`: the session is not bound.
    pub(super) fn new(
        session: &Session,
        entries: u32,
        module_callback: Option<ModuleCallback>,
    ) -> Result<Arc<Self>> {
        if !queue::is_valid_size(entries, bindings::KITE_QUEUE_ENTRIES_MAX) {
            return Err(EINVAL);
        }
        let shared = SharedPages::new(ring_bytes(entries))?;
        shared.store_release::<VERSION_OFFSET>(bindings::KITE_QUEUE_VERSION);
        let producer = IoQueueProducer::new(entries);
        Arc::pin_init(
            try_pin_init!(Self {
                rnic: session.rnic()?.clone(),
                poller: session.enter_rpc()?.fabric().poller_waker.clone(),
                events: session.events.clone(),
                module_callback,
                entries,
                shared,
                producer <- new_spinlock!(producer, "CompletionRing::producer"),
                ready_cv <- new_condvar!("CompletionRing::ready_cv"),
                vqp_requests: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Returns the number of completions that the process has not consumed.
    pub(super) fn unconsumed(&self) -> u32 {
        self.producer
            .lock()
            .unconsumed(self.shared.load_acquire::<CQ_HEAD_OFFSET>())
    }

    /// Returns the number of requests submitted to VQPs and not completed.
    pub(super) fn vqp_requests(&self) -> u32 {
        self.vqp_requests.load(Acquire)
    }

    /// Adds `count` requests. The caller submits the requests to a VQP afterwards.
    pub(super) fn add_vqp_requests(&self, count: u32) {
        self.vqp_requests.fetch_add(count, Full);
    }

    /// Subtracts `count` requests, which are completed or were not submitted.
    pub(super) fn sub_vqp_requests(&self, count: u32) {
        self.vqp_requests.fetch_sub(count, Full);
    }

    /// Delivers the result of a submission.
    pub(super) fn complete(&self, tag: u64, result: Result<u64>) {
        self.complete_all(core::iter::once((tag, result)));
    }

    /// Delivers the results of several submissions, each with its tag.
    pub(super) fn complete_all(&self, all: impl Iterator<Item = (u64, Result<u64>)>) {
        let refine = |error| self.rnic.refine_unreachable(error);
        let all = all.map(|(tag, result)| (tag, result.map_err(refine)));
        if let Some(callback) = &self.module_callback {
            return all.for_each(|(tag, result)| callback.invoke(tag, result));
        }
        let mut producer = self.producer.lock();
        for (tag, result) in all {
            self.write_cqe(&mut producer, tag, result);
        }
    }

    /// Writes a CQE for the process.
    fn write_cqe(&self, producer: &mut IoQueueProducer, tag: u64, result: Result<u64>) {
        let cqe = uapi::cqe(tag, result);
        let offset = cqes_offset(self.entries)
            + producer.next_index() as usize * size_of::<bindings::kite_cqe>();
        // The write cannot fail: the offset is within the CQ.
        let _ = self.shared.write(offset, uapi::as_bytes(&cqe));
        self.shared
            .store_release::<CQ_TAIL_OFFSET>(producer.advance());
    }

    /// Wakes all waiters for completions.
    pub(super) fn wake_waiters(&self) {
        self.ready_cv.notify_all();
        self.events.poll_condvar.notify_all();
    }
}

impl CompletionSink for CompletionRing {
    fn push_completion(&self, tag: u64, result: Result) {
        let result = result.map_err(|error| self.rnic.or_device_gone(error));
        self.complete(tag, result.map(|()| 0));
        // Complete before the decrement, as workers do: [`super::IoQueue::ready_sqes`] must count each
        // request at least once.
        self.sub_vqp_requests(1);
    }

    fn wake_consumer(&self) {
        self.wake_waiters();
        // Entries of the CQ may be free for submissions that the poller thread could not take before its
        // sleep.
        if self.shared.load_acquire::<FLAGS_OFFSET>() & bindings::KITE_QUEUE_NEED_WAKEUP != 0 {
            self.poller.event.complete();
        }
    }
}
