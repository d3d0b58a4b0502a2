// SPDX-License-Identifier: GPL-2.0

//! Kernel thread that is joined when its owner is dropped, scheduling helpers for polling loops and for steps
//! without preemption, and the rank of the current CPU.
//!
//! The `kernel` crate wraps neither `kthread_create_on_node`, `kthread_stop`, `cond_resched`,
//! `preempt_disable` nor `cpu_online_mask`. With these abstractions this file can be removed.

pub(crate) mod pi_mutex;

use crate::bindings::{self, inline};
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Yields the processor if the scheduler requests a reschedule, lazy requests included. Returns `true` if it
/// did.
///
/// Polling loops must call this function. With lazy preemption nothing else interrupts such a loop before the
/// next tick.
pub(crate) fn cond_resched() -> bool {
    // SAFETY: The function has no preconditions.
    let need_resched = unsafe { inline::kite_should_yield() };
    if need_resched {
        // SAFETY: The caller may sleep and is in state `TASK_RUNNING`.
        unsafe { bindings::schedule() };
    }
    need_resched
}

/// Calls `f` with preemption disabled, so no other task delays its steps. `f` must not sleep.
pub(crate) fn without_preemption<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: The function has no preconditions. Preemption is enabled again below.
    unsafe { inline::kite_preempt_disable() };
    let result = f();
    // SAFETY: Preemption was disabled above.
    unsafe { inline::kite_preempt_enable() };
    result
}

/// Returns the number of online CPUs with lower IDs than the current CPU. Only a hint: the thread may move to
/// another CPU at any time.
///
/// CPU IDs can be sparse, for example if every second hardware thread is offline. Ranks are dense, so they
/// spread the CPUs evenly over objects selected by rank modulo count.
pub(crate) fn current_cpu_rank() -> u32 {
    // SAFETY: The function has no preconditions.
    unsafe { inline::kite_cpu_rank() }
}

/// Returns `true` if the current thread is a workqueue worker. Other items share its queue.
pub(crate) fn is_wq_worker() -> bool {
    // SAFETY: The function has no preconditions.
    unsafe { inline::kite_is_wq_worker() }
}

/// Body of a [`Thread`].
pub(crate) trait ThreadBody: Send + Sync + 'static {
    /// Runs until a stop is requested.
    fn run(&self);

    /// Requests that `run` return soon. Called from another thread.
    fn request_stop(&self);
}

/// Running kernel thread, stopped and joined on drop.
///
/// # Invariants
///
/// `task` runs `T::run` on `body`, or has returned from `run` and waits to be joined.
pub(crate) struct Thread<T: ThreadBody> {
    task: *mut bindings::task_struct,
    body: Arc<T>,
}

// SAFETY: The task may be stopped from any thread.
unsafe impl<T: ThreadBody> Send for Thread<T> {}
// SAFETY: A shared reference gives no access to the task.
unsafe impl<T: ThreadBody> Sync for Thread<T> {}

impl<T: ThreadBody> Thread<T> {
    /// Starts a thread with the given name that runs `body`.
    pub(crate) fn spawn(name: &CStr, body: Arc<T>) -> Result<Self> {
        // SAFETY:
        // - The format takes one string, which the call copies.
        // - `body` outlives the thread, since `drop` joins the thread before `body` is released.
        let task = from_err_ptr(unsafe {
            bindings::kthread_create_on_node(
                Some(Self::main),
                Arc::as_ptr(&body).cast_mut().cast(),
                bindings::NUMA_NO_NODE,
                c"%s".as_char_ptr(),
                name.as_char_ptr(),
            )
        })?;
        // SAFETY: The task was just created, and only this value can stop it.
        unsafe { bindings::wake_up_process(task) };
        // INVARIANT: The task was just woken and runs `T::run` on `body`.
        Ok(Self { task, body })
    }

    /// Entry point of the kernel thread.
    ///
    /// # Safety
    ///
    /// `data` must be the `T` of a [`Thread`] that is not dropped before this function returns.
    unsafe extern "C" fn main(data: *mut c_void) -> c_int {
        // SAFETY: By the safety requirements, `data` is a `T` that lives until this function returns.
        unsafe { &*data.cast::<T>() }.run();
        // A kernel thread that returns early may be freed before `kthread_stop` joins the thread.
        // SAFETY: The current task is a kernel thread.
        while !unsafe { bindings::kthread_should_stop() } {
            kernel::time::delay::fsleep(kernel::time::Delta::from_millis(1));
        }
        0
    }
}

impl<T: ThreadBody> Drop for Thread<T> {
    fn drop(&mut self) {
        self.body.request_stop();
        // SAFETY: By the type invariants, `task` is a kernel thread that was not joined. `drop` joins the
        // task once.
        unsafe { bindings::kthread_stop(self.task) };
    }
}
