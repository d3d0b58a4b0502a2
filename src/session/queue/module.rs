// SPDX-License-Identifier: GPL-2.0

//! I/O queues of other kernel modules: asynchronous requests by the functions of `include/kite.h`.
//!
//! # Operation
//!
//! The SQ has the same layout as the SQ of a process, but its memory is not shared. [`ModuleIoQueue::submit`]
//! writes SQEs, and does not sleep. A completion calls the module's function instead of writing a CQE.
//!
//! # Locking
//!
//! `sq` (spinlock) protects [`ModuleSq`] and the tail of the SQ. `sq` nests inside `IoQueue::state`:
//! completions run with `state` locked, and their callback may submit.

use super::{
    completions::{CompletionRing, ModuleCallback},
    IoQueue, IoQueueOwner, FLAGS_OFFSET, SQES_OFFSET, SQ_HEAD_OFFSET, SQ_TAIL_OFFSET,
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

/// Submissions of a module.
struct ModuleSq {
    /// Number of submissions so far, modulo 2³².
    tail: u32,
    /// `true` once the queue is being closed: further submissions fail.
    closed: bool,
}

/// I/O queue of a module, `struct kite_queue`.
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
            sq <- new_spinlock!(sq, "ModuleIoQueue::sq"),
        });
        KBox::pin_init(init, GFP_KERNEL_ACCOUNT).inspect_err(|_| {
            // Nothing was submitted yet. Fails if closing the session has already destroyed the queue.
            let _ = session.destroy_queue(queue_id);
        })
    }

    fn submit(&self, sqe: &bindings::kite_sqe) -> Result {
        let completion_ring = &self.queue.completion_ring;
        // The guard delays RNIC removal, which completes all submissions in the SQ.
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
        // Pairs with the barrier in `IoQueuePollClient::poll_hint`, between the store of the flag and the
        // test of the tail.
        crate::sys::compat::smp_mb();
        if completion_ring.shared.load_acquire::<FLAGS_OFFSET>() & bindings::KITE_QUEUE_NEED_WAKEUP
            != 0
        {
            completion_ring.poller.event.complete();
        }
        drop(rpc);
        // Unlock last: after the completion the module may close the queue, and `close` waits for `sq` before
        // the queue is freed.
        drop(sq);
        Ok(())
    }

    fn close(&self) {
        // Stop submissions first: a completion callback may submit another request.
        self.sq.lock().closed = true;
        // Fails if closing the session has already destroyed the queue.
        let _ = self.session.destroy_queue(self.queue_id);
        self.queue.wait_workers_done();
    }
}

/// # Safety
///
/// `queue` must be open.
unsafe fn borrow_queue<'a>(queue: *mut bindings::kite_queue) -> &'a ModuleIoQueue {
    // SAFETY: By the safety requirements the queue is open. `kite_queue_open` made the pointer from a
    // `KBox<ModuleIoQueue>`.
    unsafe { &*queue.cast::<ModuleIoQueue>() }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `session` must be open. Any thread may call `done` with `context` until the queue is closed.
#[no_mangle]
unsafe extern "C" fn kite_queue_open(
    session: *mut bindings::kite_session,
    entries: u32,
    done: bindings::kite_done_t,
    context: *mut c_void,
) -> *mut bindings::kite_queue {
    let open = || {
        let function = done.ok_or(EINVAL)?;
        // SAFETY: By the safety requirements the session is open. `kite_open` made the pointer from an
        // `Arc<Session>`.
        let session = unsafe { ArcBorrow::from_raw(session.cast::<Session>()) };
        ModuleIoQueue::open(
            session.into(),
            entries,
            ModuleCallback { function, context },
        )
    };
    match open() {
        // SAFETY: The queue stays pinned: the module does not move the queue, and passes the pointer back
        // unchanged.
        Ok(pair) => KBox::into_raw(unsafe { Pin::into_inner_unchecked(pair) }).cast(),
        Err(error) => error.to_ptr(),
    }
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `queue` must be open, and `submission` readable. The memory that the submission points to must stay valid
/// until the submission completes.
#[no_mangle]
unsafe extern "C" fn kite_submit(
    queue: *mut bindings::kite_queue,
    submission: *const bindings::kite_sqe,
) -> c_int {
    // SAFETY: By the safety requirements the queue is open, and `submission` is readable.
    let (io_queue, submission) = unsafe { (borrow_queue(queue), &*submission) };
    from_result(|| io_queue.submit(submission).map(|()| 0))
}

/// See `include/kite.h`.
///
/// # Safety
///
/// `queue` must be open.
#[no_mangle]
unsafe extern "C" fn kite_cancel(queue: *mut bindings::kite_queue, tag: u64) -> c_int {
    // SAFETY: By the safety requirements the queue is open.
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
/// `queue` must be open, and must not be used after this call.
#[no_mangle]
unsafe extern "C" fn kite_queue_close(queue: *mut bindings::kite_queue) {
    // SAFETY: By the safety requirements the queue is open, and this call is its last use. The pointer comes
    // from `KBox::into_raw` in `kite_queue_open`, and the queue was not moved since.
    let io_queue = unsafe { Pin::new_unchecked(KBox::from_raw(queue.cast::<ModuleIoQueue>())) };
    io_queue.close();
}
