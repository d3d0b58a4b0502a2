// SPDX-License-Identifier: GPL-2.0

//! Where the owner of a queue pair hears what became of its submissions.
//!
//! Requests of virtual queue pairs may outlive the queue by which they came, and have this alone of it: who drops the
//! last of them need not give back the process's memory.

use super::{module::ModuleCallback, CQ_HEAD_OFFSET, CQ_TAIL_OFFSET, FLAGS_OFFSET, SQES_OFFSET};
use crate::{
    bindings,
    fabric::recv::wake::ThreadWaker,
    rnic::Rnic,
    session::{uapi, Session},
    sys::{event_counter::EventCounter, ring_memory::SharedPages},
    vqp::send::deliver::CompletionSink,
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

/// Bytes of the memory of a queue pair of so many entries.
pub(super) const fn ring_bytes(entries: u32) -> usize {
    cqes_offset(entries) + entries as usize * size_of::<bindings::kite_cqe>()
}

/// Where in it the completions begin.
const fn cqes_offset(entries: u32) -> usize {
    SQES_OFFSET + entries as usize * size_of::<bindings::kite_sqe>()
}

/// The completions of a queue pair.
#[pin_data]
pub(super) struct CompletionRing {
    rnic: Arc<Rnic>,
    /// Wakes the poller thread.
    pub(super) poller: Arc<ThreadWaker>,
    events: Arc<EventCounter>,
    /// The module whose queue pair it is, if that is none of a process.
    module_callback: Option<ModuleCallback>,
    pub(super) entries: u32,
    /// The memory of the queue pair.
    pub(super) shared: SharedPages,
    #[pin]
    pub(super) producer: SpinLock<IoQueueProducer>,
    /// Signalled when there are more.
    #[pin]
    pub(super) ready_cv: CondVar,
    /// Requests that virtual queue pairs have.
    vqp_requests: Atomic<u32>,
}

impl CompletionRing {
    /// Those of a session's queue pair of so many entries: none yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there can be no queue of so many; `ENODEV`, `ENOMEM`.
    pub(super) fn new(
        session: &Session,
        entries: u32,
        module_callback: Option<ModuleCallback>,
    ) -> Result<Arc<Self>> {
        if !queue::is_valid_size(entries, bindings::KITE_QUEUE_ENTRIES_MAX) {
            return Err(EINVAL);
        }
        let shared = SharedPages::new(ring_bytes(entries))?;
        let producer = IoQueueProducer::new(entries);
        Arc::pin_init(
            try_pin_init!(Self {
                rnic: session.rnic()?.clone(),
                poller: session.enter_rpc()?.memory_service.cluster.fabric.poller_waker.clone(),
                events: session.events.clone(),
                module_callback,
                entries,
                shared,
                producer <- new_spinlock!(producer),
                ready_cv <- new_condvar!(),
                vqp_requests: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Those that the process has not taken.
    pub(super) fn unconsumed(&self) -> u32 {
        self.producer
            .lock()
            .unconsumed(self.shared.load_acquire::<CQ_HEAD_OFFSET>())
    }

    /// Requests that virtual queue pairs have.
    pub(super) fn vqp_requests(&self) -> u32 {
        self.vqp_requests.load(Acquire)
    }

    /// Virtual queue pairs are about to have so many more.
    pub(super) fn add_vqp_requests(&self, count: u32) {
        self.vqp_requests.fetch_add(count, Full);
    }

    /// Virtual queue pairs have so many no more.
    pub(super) fn sub_vqp_requests(&self, count: u32) {
        self.vqp_requests.fetch_sub(count, Full);
    }

    /// Tells the owner what came of a submission.
    pub(super) fn complete(&self, tag: u64, result: Result<u64>) {
        self.complete_all(core::iter::once((tag, result)));
    }

    /// Tells the owner what came of several, each with its tag.
    pub(super) fn complete_all(&self, all: impl Iterator<Item = (u64, Result<u64>)>) {
        if let Some(callback) = &self.module_callback {
            return all.for_each(|(tag, result)| callback.invoke(tag, result));
        }
        let mut producer = self.producer.lock();
        for (tag, result) in all {
            self.write_cqe(&mut producer, tag, result);
        }
    }

    /// Writes a completion for the process.
    fn write_cqe(&self, producer: &mut IoQueueProducer, tag: u64, result: Result<u64>) {
        let cqe = bindings::kite_cqe {
            tag,
            value: *result.as_ref().unwrap_or(&0),
            error: result.map_or_else(|error| error.to_errno().unsigned_abs(), |_| 0),
            reserved: 0,
        };
        let offset = cqes_offset(self.entries)
            + producer.next_index() as usize * size_of::<bindings::kite_cqe>();
        // It is there: the memory has as many entries as are counted.
        let _ = self.shared.write(offset, uapi::as_bytes(&cqe));
        self.shared
            .store_release::<CQ_TAIL_OFFSET>(producer.advance());
    }

    /// Wakes who waits for completions.
    pub(super) fn wake_waiters(&self) {
        self.ready_cv.notify_all();
        self.events.poll_condvar.notify_all();
    }
}

impl CompletionSink for CompletionRing {
    fn push_completion(&self, tag: u64, result: Result) {
        let or_device_gone = |error| self.rnic.enter_services().err().unwrap_or(error);
        self.complete(tag, result.map(|()| 0).map_err(or_device_gone));
        // In this order, as of workers.
        self.sub_vqp_requests(1);
    }

    fn wake_consumer(&self) {
        self.wake_waiters();
        // There is room for more, which the poller may just have looked for in vain.
        if self.shared.load_acquire::<FLAGS_OFFSET>() & bindings::KITE_QUEUE_NEED_WAKEUP != 0 {
            self.poller.event.complete();
        }
    }
}
