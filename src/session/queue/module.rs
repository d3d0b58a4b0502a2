// SPDX-License-Identifier: GPL-2.0

//! Queue pairs of other kernel modules: the functions of `include/kite.h` for requests that are done while their
//! module goes on.
//!
//! Submissions are where those of a process would be, but nobody shares that memory, and who completes one
//! calls the module instead of telling it there.

use super::{
    CompletionRing, IoQueue, IoQueueOwner, FLAGS_OFFSET, SQES_OFFSET, SQ_HEAD_OFFSET,
    SQ_TAIL_OFFSET,
};
use crate::{
    bindings, errno,
    session::{export::check, uapi, Session},
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
type CompletionFn = unsafe extern "C" fn(*mut c_void, u64, c_int, u64);

/// Whom to tell of completions.
pub(super) struct ModuleCallback {
    function: CompletionFn,
    context: *mut c_void,
}

// SAFETY: The module lets any thread call its function with that.
unsafe impl Send for ModuleCallback {}
// SAFETY: As above, several at once.
unsafe impl Sync for ModuleCallback {}

impl ModuleCallback {
    /// Tells the module what came of a submission.
    pub(super) fn invoke(&self, tag: u64, result: Result<u64>) {
        let (error, value) = match result {
            Ok(value) => (0, value),
            Err(error) => (error.to_errno(), 0),
        };
        // SAFETY: The module keeps both until the queue pair is closed, and that waits for all completions.
        unsafe { (self.function)(self.context, tag, error, value) };
    }
}

/// What a module has submitted.
struct ModuleSq {
    /// Submissions, ever.
    tail: u32,
    /// There will be no more.
    closed: bool,
}

/// A queue pair of a module, `struct kite_queue`.
#[pin_data]
struct ModuleIoQueue {
    session: Arc<Session>,
    queue: Arc<IoQueue>,
    queue_id: u64,
    #[pin]
    sq: SpinLock<ModuleSq>,
}

impl ModuleIoQueue {
    fn open(session: Arc<Session>, entries: u32, done: ModuleCallback) -> Result<Pin<KBox<Self>>> {
        let completion_ring = CompletionRing::new(&session, entries, Some(done))?;
        let queue = IoQueue::new(session.clone(), completion_ring, || {
            Ok(IoQueueOwner::Module)
        })?;
        let queue_id = session.add_queue(queue.clone())?.id;
        let sq = ModuleSq {
            tail: 0,
            closed: false,
        };
        let owner = session.clone();
        let init = try_pin_init!(Self {
            session: owner,
            queue,
            queue_id,
            sq <- new_spinlock!(sq),
        });
        KBox::pin_init(init, GFP_KERNEL_ACCOUNT).inspect_err(|_| {
            // Nothing was submitted yet.
            let _ = session.destroy_queue(queue_id);
        })
    }

    fn submit(&self, sqe: &bindings::kite_sqe) -> Result {
        let completion_ring = &self.queue.completion_ring;
        // The RNIC does not go meanwhile; then all that is there completes.
        let rpc = self.queue.rnic.enter_rpc()?;
        let mut sq = self.sq.lock();
        if sq.closed {
            return Err(errno::canceled());
        }
        if sq
            .tail
            .wrapping_sub(completion_ring.shared.load_acquire::<SQ_HEAD_OFFSET>())
            >= completion_ring.entries
        {
            return Err(EAGAIN);
        }
        let index = (sq.tail & (completion_ring.entries - 1)) as usize;
        let offset = SQES_OFFSET + index * size_of::<bindings::kite_sqe>();
        completion_ring.shared.write(offset, uapi::as_bytes(sqe))?;
        sq.tail = sq.tail.wrapping_add(1);
        completion_ring
            .shared
            .store_release::<SQ_TAIL_OFFSET>(sq.tail);
        // The poller says that it sleeps, and then looks at what was added.
        crate::sys::compat::smp_mb();
        if completion_ring.shared.load_acquire::<FLAGS_OFFSET>() & bindings::KITE_QUEUE_NEED_WAKEUP
            != 0
        {
            completion_ring.poller.event.complete();
        }
        drop(rpc);
        // Last: who is told of the completion may close the queue pair.
        drop(sq);
        Ok(())
    }

    fn close(&self) {
        // Who completes a request may submit another.
        self.sq.lock().closed = true;
        // It is gone if the session was closed.
        let _ = self.session.destroy_queue(self.queue_id);
        self.queue.wait_workers_done();
    }
}

/// # Safety
///
/// `pair` must be open.
unsafe fn borrow_queue<'a>(queue: *mut bindings::kite_queue) -> &'a ModuleIoQueue {
    // SAFETY: By the safety requirements; `kite_queue_open` made the pointer from a box.
    unsafe { &*queue.cast::<ModuleIoQueue>() }
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
) -> *mut bindings::kite_queue {
    let open = || {
        let function = done.ok_or(EINVAL)?;
        // SAFETY: By the safety requirements; `kite_open` made the pointer from an `Arc<Session>`.
        let session = unsafe { ArcBorrow::from_raw(session.cast::<Session>()) };
        ModuleIoQueue::open(
            session.into(),
            entries,
            ModuleCallback { function, context },
        )
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
    queue: *mut bindings::kite_queue,
    submission: *const bindings::kite_sqe,
) -> c_int {
    // SAFETY: By the safety requirements.
    let (io_queue, submission) = unsafe { (borrow_queue(queue), &*submission) };
    from_result(|| io_queue.submit(submission).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `pair` must be open.
#[no_mangle]
unsafe extern "C" fn kite_cancel(queue: *mut bindings::kite_queue, tag: u64) -> c_int {
    // SAFETY: By the safety requirements.
    let io_queue = unsafe { borrow_queue(queue) };
    from_result(|| {
        io_queue
            .session
            .cancel_submission(io_queue.queue_id, tag)
            .map(|()| 0)
    })
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `pair` must be open, and is not any more.
#[no_mangle]
unsafe extern "C" fn kite_queue_close(queue: *mut bindings::kite_queue) {
    // SAFETY: By the safety requirements; this takes back what `kite_queue_open` gave, which did not move.
    let io_queue = unsafe { Pin::new_unchecked(KBox::from_raw(queue.cast::<ModuleIoQueue>())) };
    io_queue.close();
}
