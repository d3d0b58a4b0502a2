// SPDX-License-Identifier: GPL-2.0

//! Queue pairs of other kernel modules: the functions of `include/kite.h` for requests that are done while their
//! module goes on.
//!
//! Submissions are where those of a process would be, but nobody shares that memory, and who completes one
//! calls the module instead of telling it there.

use super::{Completions, Owner, Queue, FLAGS, SQ_HEAD, SQ_TAIL, SUBMISSIONS};
use crate::{
    bindings, errno,
    session::{abi, export::check, Session},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    error::from_result,
    new_spinlock,
    prelude::*,
    sync::{Arc, ArcBorrow, SpinLock},
};

check! { kite_queue_open kite_submit kite_cancel kite_queue_close }

/// What a module is called with when a request has completed.
type Function = unsafe extern "C" fn(*mut c_void, u64, c_int, u64);

/// Whom to tell of completions.
pub(super) struct Done {
    function: Function,
    context: *mut c_void,
}

// SAFETY: The module lets any thread call its function with that.
unsafe impl Send for Done {}
// SAFETY: As above, several at once.
unsafe impl Sync for Done {}

impl Done {
    /// Tells the module what came of a submission.
    pub(super) fn tell(&self, tag: u64, result: Result<u64>) {
        let (error, value) = match result {
            Ok(value) => (0, value),
            Err(error) => (error.to_errno(), 0),
        };
        // SAFETY: The module keeps both until the queue pair is closed, and that waits for all completions.
        unsafe { (self.function)(self.context, tag, error, value) };
    }
}

/// What a module has submitted.
struct Added {
    /// Submissions, ever.
    count: u32,
    /// There will be no more.
    closed: bool,
}

/// A queue pair of a module, `struct kite_queue_pair`.
#[pin_data]
struct QueuePair {
    session: Arc<Session>,
    queue: Arc<Queue>,
    number: u64,
    #[pin]
    added: SpinLock<Added>,
}

impl QueuePair {
    fn open(session: Arc<Session>, entries: u32, done: Done) -> Result<Pin<KBox<Self>>> {
        let completions = Completions::new(&session, entries, Some(done))?;
        let queue = Queue::new(session.clone(), completions, || Ok(Owner::Module))?;
        let number = session.enter(queue.clone())?.number;
        let added = Added {
            count: 0,
            closed: false,
        };
        let its = session.clone();
        let pair = try_pin_init!(Self {
            session: its,
            queue,
            number,
            added <- new_spinlock!(added),
        });
        KBox::pin_init(pair, GFP_KERNEL_ACCOUNT).inspect_err(|_| {
            // Nothing was submitted yet.
            let _ = session.end_queue(number);
        })
    }

    fn submit(&self, submission: &bindings::kite_submission) -> Result {
        let completions = &self.queue.completions;
        // The RNIC does not go meanwhile; then all that is there completes.
        let rpc = self.queue.rnic.enter()?;
        let mut added = self.added.lock();
        if added.closed {
            return Err(errno::canceled());
        }
        if added
            .count
            .wrapping_sub(completions.shared.load::<SQ_HEAD>())
            >= completions.entries
        {
            return Err(EAGAIN);
        }
        let index = (added.count & (completions.entries - 1)) as usize;
        let at = SUBMISSIONS + index * size_of::<bindings::kite_submission>();
        completions.shared.write(at, abi::bytes(submission))?;
        added.count = added.count.wrapping_add(1);
        completions.shared.store::<SQ_TAIL>(added.count);
        // The poller says that it sleeps, and then looks at what was added.
        crate::sys::compat::smp_mb();
        if completions.shared.load::<FLAGS>() & bindings::KITE_QUEUE_ASLEEP != 0 {
            completions.poller.event.signal();
        }
        drop(rpc);
        // Last: who is told of the completion may close the queue pair.
        drop(added);
        Ok(())
    }

    fn close(&self) {
        // Who completes a request may submit another.
        self.added.lock().closed = true;
        // It is gone if the session was closed.
        let _ = self.session.end_queue(self.number);
        self.queue.await_workers();
    }
}

/// # Safety
///
/// `pair` must be open.
unsafe fn borrow<'a>(pair: *mut bindings::kite_queue_pair) -> &'a QueuePair {
    // SAFETY: By the safety requirements; `kite_queue_open` made the pointer from a box.
    unsafe { &*pair.cast::<QueuePair>() }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open, and `done` callable with `context` by any thread until the queue pair is closed.
#[no_mangle]
unsafe extern "C" fn kite_queue_open(
    session: *mut bindings::kite_session,
    entries: u32,
    done: bindings::kite_done_t,
    context: *mut c_void,
) -> *mut bindings::kite_queue_pair {
    let open = || {
        let function = done.ok_or(EINVAL)?;
        // SAFETY: By the safety requirements; `kite_open` made the pointer from an `Arc<Session>`.
        let session = unsafe { ArcBorrow::from_raw(session.cast::<Session>()) };
        QueuePair::open(session.into(), entries, Done { function, context })
    };
    match open() {
        // SAFETY: It is pinned in the module's hands, too, which gives it back as it is.
        Ok(pair) => KBox::into_raw(unsafe { Pin::into_inner_unchecked(pair) }).cast(),
        Err(error) => error.to_ptr(),
    }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `pair` must be open, and `submission` readable; what that points to must stay until it completes.
#[no_mangle]
unsafe extern "C" fn kite_submit(
    pair: *mut bindings::kite_queue_pair,
    submission: *const bindings::kite_submission,
) -> c_int {
    // SAFETY: By the safety requirements.
    let (pair, submission) = unsafe { (borrow(pair), &*submission) };
    from_result(|| pair.submit(submission).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `pair` must be open.
#[no_mangle]
unsafe extern "C" fn kite_cancel(pair: *mut bindings::kite_queue_pair, tag: u64) -> c_int {
    // SAFETY: By the safety requirements.
    let pair = unsafe { borrow(pair) };
    from_result(|| pair.session.cancel(pair.number, tag).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `pair` must be open, and is not any more.
#[no_mangle]
unsafe extern "C" fn kite_queue_close(pair: *mut bindings::kite_queue_pair) {
    // SAFETY: By the safety requirements; this takes back what `kite_queue_open` gave, which did not move.
    let pair = unsafe { Pin::new_unchecked(KBox::from_raw(pair.cast::<QueuePair>())) };
    pair.close();
}
