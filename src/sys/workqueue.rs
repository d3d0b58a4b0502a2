// SPDX-License-Identifier: GPL-2.0

//! A workqueue of our own, so that unloading can wait for all that was queued.

use core::{convert::Infallible, mem::MaybeUninit};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    bindings, impl_has_work, new_work,
    prelude::*,
    time::{delay::fsleep, Delta},
    workqueue::{Queue, Work, WorkItem},
};

/// Time between attempts to get memory for an item.
const ALLOC_RETRY_MS: i64 = 10;

/// An item of a queue: a closure to run once.
#[pin_data]
pub(crate) struct ClosureWork<F> {
    #[pin]
    work: Work<ClosureWork<F>>,
    f: Option<F>,
}

impl_has_work! {
    impl{F} HasWork<Self> for ClosureWork<F> { self.work }
}

impl<F: FnOnce()> WorkItem for ClosureWork<F> {
    type Pointer = Pin<KBox<Self>>;

    fn run(mut item: Pin<KBox<Self>>) {
        if let Some(f) = item.as_mut().project().f.take() {
            f();
        }
    }
}

impl<F: FnOnce()> ClosureWork<F> {
    /// Makes an item of `f`. For what must not fail: it waits for memory.
    pub(crate) fn new(f: F) -> Pin<KBox<Self>> {
        let item = pin_init!(Self {
            work <- new_work!("kite"),
            f: Some(f),
        });
        let Ok(item) = alloc_box_nofail().write_pin_init::<Infallible>(item);
        item
    }
}

/// Waits until there is memory for an item, charged to the caller if its cgroup has room. The kernel
/// refuses so little to hardly anybody but a task that it kills for memory.
fn alloc_box_nofail<T>() -> KBox<MaybeUninit<T>> {
    loop {
        let charged = KBox::new_uninit(GFP_KERNEL_ACCOUNT);
        match charged.or_else(|_| KBox::new_uninit(GFP_KERNEL)) {
            Ok(uninit) => return uninit,
            Err(_) => fsleep(Delta::from_millis(ALLOC_RETRY_MS)),
        }
    }
}

/// An unbound workqueue, drained and destroyed on drop.
///
/// # Invariants
///
/// The pointer is a live workqueue that we own.
pub(crate) struct OwnedQueue(*mut bindings::workqueue_struct);

// SAFETY: Workqueues may be used from any thread.
unsafe impl Send for OwnedQueue {}
// SAFETY: As above.
unsafe impl Sync for OwnedQueue {}

impl OwnedQueue {
    /// Makes a queue with the given name that runs up to `width` items at a time. An item must not wait
    /// for another of the same queue: with enough of them, none would run any more.
    pub(crate) fn new(name: &'static CStr, max_active: c_int) -> Result<Self> {
        Self::with_flags(name, bindings::wq_flags_WQ_UNBOUND, max_active)
    }

    /// Makes a queue with the given name that runs its items one after another, in order.
    pub(crate) fn new_ordered(name: &'static CStr) -> Result<Self> {
        let flags = bindings::wq_flags_WQ_UNBOUND | bindings::wq_flags___WQ_ORDERED;
        Self::with_flags(name, flags, 1)
    }

    fn with_flags(
        name: &'static CStr,
        flags: bindings::wq_flags,
        max_active: c_int,
    ) -> Result<Self> {
        // SAFETY: The format takes one string.
        let ptr = unsafe {
            bindings::alloc_workqueue_noprof(
                c"%s".as_char_ptr(),
                flags,
                max_active,
                name.as_char_ptr(),
            )
        };
        if ptr.is_null() {
            return Err(ENOMEM);
        }
        // INVARIANT: We just made it.
        Ok(Self(ptr))
    }

    /// Runs `f` on the queue. For what must not fail: it waits for memory.
    pub(crate) fn spawn<F: FnOnce() + Send + 'static>(&self, f: F) {
        self.enqueue(ClosureWork::new(f));
    }

    /// Waits for everything queued so far.
    pub(crate) fn flush(&self) {
        // SAFETY: By the type invariants; the caller may sleep.
        unsafe { bindings::__flush_workqueue(self.0) };
    }
}

impl core::ops::Deref for OwnedQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        // SAFETY: By the type invariants; the borrow ends before the queue does.
        unsafe { Queue::from_raw(self.0) }
    }
}

impl Drop for OwnedQueue {
    fn drop(&mut self) {
        // SAFETY: By the type invariants. Waits for the queued work.
        unsafe { bindings::destroy_workqueue(self.0) };
    }
}
