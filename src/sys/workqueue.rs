// SPDX-License-Identifier: GPL-2.0

//! Workqueue owned by kite, so that unloading the module can wait for all queued items.
//!
//! `kernel::workqueue` can neither create, flush nor destroy a workqueue. With an owned queue type this file
//! can be reduced to [`ClosureWork`].

use core::{convert::Infallible, mem::MaybeUninit};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    bindings, impl_has_work, new_work,
    prelude::*,
    time::{delay::fsleep, Delta},
    workqueue::{Queue, Work, WorkItem},
};

/// Delay between two attempts to allocate an item, in milliseconds.
const ALLOC_RETRY_MS: i64 = 10;

/// Work item that runs a closure once.
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
    /// Creates an item that runs `f`. Sleeps and retries until memory is available, for work that must not
    /// fail.
    pub(crate) fn new(f: F) -> Pin<KBox<Self>> {
        let item = pin_init!(Self {
            work <- new_work!("kite"),
            f: Some(f),
        });
        let Ok(item) = alloc_box_nofail().write_pin_init::<Infallible>(item);
        item
    }
}

/// Allocates an item, charged to the caller if the cgroup has room. Sleeps and retries until memory is
/// available.
///
/// The kernel denies an allocation of this size to almost no task but a victim of the OOM killer.
fn alloc_box_nofail<T>() -> KBox<MaybeUninit<T>> {
    loop {
        let charged = KBox::new_uninit(GFP_KERNEL_ACCOUNT);
        match charged.or_else(|_| KBox::new_uninit(GFP_KERNEL)) {
            Ok(uninit) => return uninit,
            Err(_) => fsleep(Delta::from_millis(ALLOC_RETRY_MS)),
        }
    }
}

/// Unbound workqueue, drained and destroyed on drop.
///
/// # Invariants
///
/// The pointer is a live workqueue that this value owns.
pub(crate) struct OwnedQueue(*mut bindings::workqueue_struct);

// SAFETY: Workqueues may be used from any thread.
unsafe impl Send for OwnedQueue {}
// SAFETY: See `Send`.
unsafe impl Sync for OwnedQueue {}

impl OwnedQueue {
    /// Creates a workqueue with the given name that runs up to `max_active` items concurrently.
    ///
    /// An item must not wait for another item of the same queue. With `max_active` waiting items, no other
    /// item would run.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the workqueue could not be allocated.
    pub(crate) fn new(name: &'static CStr, max_active: c_int) -> Result<Self> {
        Self::with_flags(name, bindings::wq_flags_WQ_UNBOUND, max_active)
    }

    /// Creates an ordered workqueue with the given name, which runs one item at a time, in the order of
    /// queuing.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the workqueue could not be allocated.
    pub(crate) fn new_ordered(name: &'static CStr) -> Result<Self> {
        let flags = bindings::wq_flags_WQ_UNBOUND | bindings::wq_flags___WQ_ORDERED;
        Self::with_flags(name, flags, 1)
    }

    fn with_flags(
        name: &'static CStr,
        flags: bindings::wq_flags,
        max_active: c_int,
    ) -> Result<Self> {
        // SAFETY: The format takes one string, which is `name`.
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
        // INVARIANT: The workqueue was just created and has no other owner.
        Ok(Self(ptr))
    }

    /// Queues `f`. Sleeps and retries until memory is available, for work that must not fail.
    pub(crate) fn spawn<F: FnOnce() + Send + 'static>(&self, f: F) {
        self.enqueue(ClosureWork::new(f));
    }

    /// Waits for all items queued so far.
    pub(crate) fn flush(&self) {
        // SAFETY: By the type invariants, the workqueue is live. The caller may sleep.
        unsafe { bindings::__flush_workqueue(self.0) };
    }
}

impl core::ops::Deref for OwnedQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        // SAFETY: By the type invariants, the workqueue is live. The borrow ends before the workqueue is
        // destroyed.
        unsafe { Queue::from_raw(self.0) }
    }
}

impl Drop for OwnedQueue {
    fn drop(&mut self) {
        // SAFETY: By the type invariants, this value owns the workqueue. The call waits for all queued items.
        unsafe { bindings::destroy_workqueue(self.0) };
    }
}
