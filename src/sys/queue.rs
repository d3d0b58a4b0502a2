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
const AGAIN_MS: i64 = 10;

/// An item of a queue: a closure to run once.
#[pin_data]
pub(crate) struct Item<F> {
    #[pin]
    work: Work<Item<F>>,
    f: Option<F>,
}

impl_has_work! {
    impl{F} HasWork<Self> for Item<F> { self.work }
}

impl<F: FnOnce()> WorkItem for Item<F> {
    type Pointer = Pin<KBox<Self>>;

    fn run(mut item: Pin<KBox<Self>>) {
        if let Some(f) = item.as_mut().project().f.take() {
            f();
        }
    }
}

impl<F: FnOnce()> Item<F> {
    /// Makes an item of `f`. For what must not fail: it waits for memory.
    pub(crate) fn new(f: F) -> Pin<KBox<Self>> {
        let item = pin_init!(Self {
            work <- new_work!("kite"),
            f: Some(f),
        });
        let Ok(item) = memory().write_pin_init::<Infallible>(item);
        item
    }
}

/// Waits until there is memory for an item, charged to the caller if its cgroup has room. The kernel
/// refuses so little to hardly anybody but a task that it kills for memory.
fn memory<T>() -> KBox<MaybeUninit<T>> {
    loop {
        let charged = KBox::new_uninit(GFP_KERNEL_ACCOUNT);
        match charged.or_else(|_| KBox::new_uninit(GFP_KERNEL)) {
            Ok(memory) => return memory,
            Err(_) => fsleep(Delta::from_millis(AGAIN_MS)),
        }
    }
}

/// An unbound workqueue, drained and destroyed on drop.
///
/// # Invariants
///
/// The pointer is a live workqueue that we own.
pub(crate) struct OwnQueue(*mut bindings::workqueue_struct);

// SAFETY: Workqueues may be used from any thread.
unsafe impl Send for OwnQueue {}
// SAFETY: As above.
unsafe impl Sync for OwnQueue {}

impl OwnQueue {
    /// Makes a queue with the given name that runs up to `width` items at a time. An item must not wait
    /// for another of the same queue: with enough of them, none would run any more.
    pub(crate) fn new(name: &'static CStr, width: c_int) -> Result<Self> {
        Self::with_flags(name, bindings::wq_flags_WQ_UNBOUND, width)
    }

    /// Makes a queue with the given name that runs its items one after another, in order.
    pub(crate) fn ordered(name: &'static CStr) -> Result<Self> {
        let flags = bindings::wq_flags_WQ_UNBOUND | bindings::wq_flags___WQ_ORDERED;
        Self::with_flags(name, flags, 1)
    }

    fn with_flags(name: &'static CStr, flags: bindings::wq_flags, width: c_int) -> Result<Self> {
        // SAFETY: The format takes one string.
        let ptr = unsafe {
            bindings::alloc_workqueue_noprof(c"%s".as_char_ptr(), flags, width, name.as_char_ptr())
        };
        if ptr.is_null() {
            return Err(ENOMEM);
        }
        // INVARIANT: We just made it.
        Ok(Self(ptr))
    }

    /// Runs `f` on the queue. For what must not fail: it waits for memory.
    pub(crate) fn spawn<F: FnOnce() + Send + 'static>(&self, f: F) {
        self.enqueue(Item::new(f));
    }

    /// Waits for everything queued so far.
    pub(crate) fn flush(&self) {
        // SAFETY: By the type invariants; the caller may sleep.
        unsafe { bindings::__flush_workqueue(self.0) };
    }
}

impl core::ops::Deref for OwnQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        // SAFETY: By the type invariants; the borrow ends before the queue does.
        unsafe { Queue::from_raw(self.0) }
    }
}

impl Drop for OwnQueue {
    fn drop(&mut self) {
        // SAFETY: By the type invariants. Waits for the queued work.
        unsafe { bindings::destroy_workqueue(self.0) };
    }
}
