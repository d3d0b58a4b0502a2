// SPDX-License-Identifier: GPL-2.0

//! A kernel thread that is joined when its owner goes, and how threads make way.

use crate::bindings::{self, inline};
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Lets somebody else run if the scheduler wants that. To be called in loops that poll, since nothing
/// else makes them stop before the next tick. Returns whether it did.
pub(crate) fn cond_resched() -> bool {
    // SAFETY: The function has no preconditions.
    let need_resched = unsafe { inline::kite_should_yield() };
    if need_resched {
        // SAFETY: The caller may sleep, and is in the running state.
        unsafe { bindings::schedule() };
    }
    need_resched
}

/// Whether this is a thread of a workqueue, which others wait for.
pub(crate) fn is_wq_worker() -> bool {
    // SAFETY: The function has no preconditions.
    unsafe { inline::kite_is_wq_worker() }
}

/// What a [`Thread`] runs.
pub(crate) trait ThreadBody: Send + Sync + 'static {
    /// Runs until asked to stop.
    fn run(&self);

    /// Asks `run` to return soon. Called from another thread.
    fn request_stop(&self);
}

/// A running thread, stopped and joined on drop.
///
/// # Invariants
///
/// `task` runs `T::run` on `body`, or has returned from it and waits to be joined.
pub(crate) struct Thread<T: ThreadBody> {
    task: *mut bindings::task_struct,
    body: Arc<T>,
}

// SAFETY: The task may be stopped from any thread.
unsafe impl<T: ThreadBody> Send for Thread<T> {}
// SAFETY: Nothing of the task is reachable through a shared reference.
unsafe impl<T: ThreadBody> Sync for Thread<T> {}

impl<T: ThreadBody> Thread<T> {
    /// Starts a thread that runs `body`.
    pub(crate) fn spawn(name: &CStr, body: Arc<T>) -> Result<Self> {
        // SAFETY: The format takes one string, which is copied. `body` outlives the thread, since
        // `drop` joins it first.
        let task = from_err_ptr(unsafe {
            bindings::kthread_create_on_node(
                Some(Self::main),
                Arc::as_ptr(&body).cast_mut().cast(),
                bindings::NUMA_NO_NODE,
                c"%s".as_char_ptr(),
                name.as_char_ptr(),
            )
        })?;
        // SAFETY: We just made the task, and nobody else can end it.
        unsafe { bindings::wake_up_process(task) };
        // INVARIANT: It runs now.
        Ok(Self { task, body })
    }

    /// # Safety
    ///
    /// `data` must be the `T` of a [`Thread`] that is not dropped before this returns.
    unsafe extern "C" fn main(data: *mut c_void) -> c_int {
        // SAFETY: By the safety requirements.
        unsafe { &*data.cast::<T>() }.run();
        // A kernel thread that returns early may be freed before it is joined.
        // SAFETY: We are a kernel thread.
        while !unsafe { bindings::kthread_should_stop() } {
            kernel::time::delay::fsleep(kernel::time::Delta::from_millis(1));
        }
        0
    }
}

impl<T: ThreadBody> Drop for Thread<T> {
    fn drop(&mut self) {
        self.body.request_stop();
        // SAFETY: By the type invariants; joined once.
        unsafe { bindings::kthread_stop(self.task) };
    }
}
