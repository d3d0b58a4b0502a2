// SPDX-License-Identifier: GPL-2.0

//! The queue pairs of a session: requests without system calls.
//!
//! The process adds submissions to one queue and takes completions from another, both in memory that it
//! shares with the kernel; `kite_core::queue` counts. The poller thread of the RNIC takes submissions, and
//! so does who waits for completions, one at a time ([`Queue::try_drive`]). Short reads and writes, and calls,
//! are posted and looked after there ([`task`]); what may have to wait is done by a few workers.
//!
//! Whatever the process writes to that memory harms itself at most: a submission is copied before it is
//! checked, the kernel counts its ends itself, and requests use memory that is pinned for them.

mod call;
mod run;
mod short;
mod task;

use super::{
    abi,
    caller::{self, Arena, Caller},
    Session,
};
use crate::{
    bindings, errno,
    fabric::poller::{Driven, Rest},
    rnic::Rnic,
    sys::{
        deadline::Deadline,
        payer::Payer,
        pin::{Hold, Pinned},
        shared::Shared,
        thread::spin,
    },
};
use core::mem::offset_of;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    mm::virt::VmaNew,
    new_condvar, new_mutex, new_spinlock,
    page::PAGE_SHIFT,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        Arc, CondVar, CondVarTimeoutResult, Mutex, SpinLock,
    },
    time::msecs_to_jiffies,
};
use kite_core::queue::{self, Consumer, Producer};
use task::{Progress, Task};

/// Submissions taken at a time, so that other queues, and messages, have their turns.
const TAKE_MAX: u32 = 64;

/// Tasks that could not be begun before the others are left for later.
const TRIES_MAX: u32 = 16;

/// Requests of one queue that workers do at a time.
const SLOW_MAX: u32 = 8;

/// Queue pairs are mapped at multiples of so many bytes of the session, in powers of two.
const OFFSET_SHIFT: u32 = 20;
const _: () = assert!(size(bindings::KITE_QUEUE_ENTRIES_MAX) <= 1 << OFFSET_SHIFT);

/// How long who waits for completions trusts others to drive the queue.
const NAP_MS: u32 = 50;

const SQ_HEAD: usize = offset_of!(bindings::kite_queue_words, sq_head);
const SQ_TAIL: usize = offset_of!(bindings::kite_queue_words, sq_tail);
const CQ_HEAD: usize = offset_of!(bindings::kite_queue_words, cq_head);
const CQ_TAIL: usize = offset_of!(bindings::kite_queue_words, cq_tail);
const FLAGS: usize = offset_of!(bindings::kite_queue_words, flags);

const SUBMISSIONS: usize = bindings::KITE_QUEUE_SUBMISSIONS as usize;

/// What was taken and is to be completed.
struct Work {
    taken: Consumer,
    tasks: KVec<Task>,
    /// The task to look at next.
    next: usize,
    /// The process was told that nobody looks.
    asleep: bool,
    /// Nothing is taken any more.
    over: bool,
}

/// A queue pair.
#[pin_data]
struct Queue {
    session: Arc<Session>,
    rnic: Arc<Rnic>,
    uid: u32,
    arena: Arena,
    payer: Payer,
    entries: u32,
    shared: Shared,
    /// Held by who drives the queue.
    #[pin]
    work: Mutex<Work>,
    #[pin]
    completed: SpinLock<Producer>,
    /// Signalled when there are more completions.
    #[pin]
    more: CondVar,
    /// Requests that workers have.
    slow: Atomic<u32>,
}

/// A queue pair that the poller drives.
pub(super) struct Entered {
    number: u64,
    queue: Arc<Queue>,
    /// By which the poller knows it.
    driven: u64,
}

/// Bytes of the memory of a queue pair of so many entries.
const fn size(entries: u32) -> usize {
    completions(entries) + entries as usize * size_of::<bindings::kite_completion>()
}

/// Where the completions begin.
const fn completions(entries: u32) -> usize {
    SUBMISSIONS + entries as usize * size_of::<bindings::kite_submission>()
}

/// Pins the memory that requests by a queue use.
fn pin(addr: u64, len: u64) -> Result<Arena> {
    if len == 0 || len > bindings::KITE_QUEUE_MEMORY_MAX.into() {
        return Err(EINVAL);
    }
    let base = usize::try_from(addr).map_err(|_| EFAULT)?;
    let pinned = Pinned::user(base, len as usize, true, Hold::Long)?;
    Ok(Arena {
        base,
        pinned: Arc::new(pinned, GFP_KERNEL_ACCOUNT)?,
    })
}

impl Queue {
    /// A queue pair of a session, for the current process.
    ///
    /// # Errors
    ///
    /// As `struct kite_queue` in `include/uapi/kite.h` says.
    fn new(session: Arc<Session>, addr: u64, len: u64, entries: u32) -> Result<Arc<Self>> {
        if !queue::is_valid(entries, bindings::KITE_QUEUE_ENTRIES_MAX) {
            return Err(EINVAL);
        }
        let work = Work {
            taken: Consumer::new(entries),
            tasks: KVec::with_capacity(entries as usize, GFP_KERNEL_ACCOUNT)?,
            next: 0,
            asleep: false,
            over: false,
        };
        let (arena, shared) = (pin(addr, len)?, Shared::new(size(entries))?);
        let completed = Producer::new(entries);
        Arc::pin_init(
            try_pin_init!(Self {
                rnic: session.rnic()?.clone(),
                session,
                uid: caller::uid(),
                arena,
                payer: Payer::current(),
                entries,
                shared,
                work <- new_mutex!(work),
                completed <- new_spinlock!(completed),
                more <- new_condvar!(),
                slow: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    fn caller(&self) -> Caller<'_> {
        Caller::Queue {
            uid: self.uid,
            arena: &self.arena,
        }
    }

    /// Completions that the process has not taken.
    fn ready(&self) -> u32 {
        self.completed.lock().waiting(self.shared.load::<CQ_HEAD>())
    }

    /// Tells the process what came of a submission.
    fn complete(&self, tag: u64, result: Result<u64>) {
        let completion = bindings::kite_completion {
            tag,
            value: *result.as_ref().unwrap_or(&0),
            error: result.map_or_else(|error| error.to_errno().unsigned_abs(), |_| 0),
            reserved: 0,
        };
        let mut completed = self.completed.lock();
        let at = completions(self.entries)
            + completed.index() as usize * size_of::<bindings::kite_completion>();
        // It is there: the memory has as many entries as are counted.
        let _ = self.shared.write(at, abi::bytes(&completion));
        self.shared.store::<CQ_TAIL>(completed.advance());
    }

    /// Wakes who waits for completions.
    fn announce(&self) {
        self.more.notify_all();
        self.session.watch.wait.notify_all();
    }

    /// The next submission, if there is one and room for its completion.
    fn take(&self, work: &mut Work) -> Option<bindings::kite_submission> {
        // In this order, as workers complete what they have before they have it no more.
        let slow = self.slow.load(Acquire);
        let pending = work.tasks.len() as u32 + slow;
        let added = work.taken.available(self.shared.load::<SQ_TAIL>());
        if work.over || added == 0 || pending + self.ready() >= self.entries {
            return None;
        }
        let size = size_of::<bindings::kite_submission>();
        let mut bytes = [0; size_of::<bindings::kite_submission>()];
        let at = SUBMISSIONS + work.taken.index() as usize * size;
        // It is there, as above.
        let _ = self.shared.read(at, &mut bytes);
        self.shared.store::<SQ_HEAD>(work.taken.advance());
        self.rnic.stats.submissions.add(1);
        abi::parse(&bytes)
    }

    /// Takes what was submitted, and begins it.
    fn begin_more(self: &Arc<Self>, work: &mut Work) -> usize {
        let mut progress = 0;
        while progress < TAKE_MAX as usize {
            let Some(submission) = self.take(work) else {
                break;
            };
            progress += 1;
            let (tag, mut task) = (submission.tag, Task::new(self, &submission));
            match task.advance(self) {
                Progress::Done(result) => self.complete(tag, result),
                // There is room: no more are taken than there are entries.
                Progress::Stays => drop(work.tasks.push(task, GFP_ATOMIC)),
                Progress::Left => {}
            }
        }
        progress
    }

    /// Goes on with what was begun.
    fn go_on(self: &Arc<Self>, work: &mut Work) -> usize {
        let _ = work.tasks.iter().any(Task::look);
        let (mut progress, mut tries) = (0, 0);
        for _ in 0..work.tasks.len() {
            let at = work.next % work.tasks.len().max(1);
            let Some(task) = work.tasks.get_mut(at) else {
                break;
            };
            match task.advance(self) {
                Progress::Stays => {
                    tries += u32::from(!task.is_waiting());
                    work.next = at + 1;
                    if tries == TRIES_MAX {
                        break;
                    }
                    continue;
                }
                Progress::Done(result) => self.complete(task.tag, result),
                Progress::Left => {}
            }
            progress += 1;
            work.remove(at);
        }
        progress
    }

    fn try_drive(self: &Arc<Self>) -> Option<usize> {
        let mut work = self.work.try_lock()?;
        let work = &mut *work;
        if core::mem::take(&mut work.asleep) {
            self.shared.store::<FLAGS>(0);
        }
        let progress = self.go_on(work) + self.begin_more(work);
        if progress != 0 {
            self.announce();
        }
        Some(progress)
    }

    /// Waits until there are `want` completions. Returns how many there are.
    ///
    /// # Errors
    ///
    /// As `struct kite_enter` in `include/uapi/kite.h` says.
    fn enter(self: &Arc<Self>, want: u32, deadline: Deadline) -> Result<u32> {
        if want > self.entries {
            return Err(EINVAL);
        }
        self.try_drive();
        self.session.rpc()?.lmr.cluster.fabric.poller.event.signal();
        if want != 0 {
            let done = || {
                if let Ok(rpc) = self.session.rpc() {
                    rpc.lmr.cluster.fabric.look();
                }
                self.try_drive();
                self.ready() >= want
            };
            if !spin(done) {
                self.sleep(want, deadline)?;
            }
        }
        Ok(self.ready())
    }

    fn sleep(&self, want: u32, deadline: Deadline) -> Result {
        let mut completed = self.completed.lock();
        while completed.waiting(self.shared.load::<CQ_HEAD>()) < want {
            let nap = msecs_to_jiffies(deadline.left_ms().min(NAP_MS));
            let woken = self.more.wait_interruptible_timeout(&mut completed, nap);
            drop(completed);
            drop(self.session.rpc()?);
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                deadline.on_signal()?;
            }
            if self.ready() < want {
                deadline.check()?;
            }
            completed = self.completed.lock();
        }
        Ok(())
    }

    /// Gives up a submission of that tag that was taken, but waits to be begun or for a reply.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is none.
    fn cancel(&self, tag: u64) -> Result {
        let mut work = self.work.lock();
        let wanted = |task: &Task| task.tag == tag && task.can_cancel();
        let at = work.tasks.iter().position(wanted).ok_or(ENOENT)?;
        work.remove(at);
        drop(work);
        self.rnic.stats.errors.add(1);
        self.complete(tag, Err(errno::canceled()));
        self.announce();
        Ok(())
    }

    /// Ends what is under way, and takes nothing any more. Waits for the RNIC alone.
    fn end(self: &Arc<Self>) {
        let mut work = self.work.lock();
        work.over = true;
        let tasks = core::mem::replace(&mut work.tasks, KVec::new());
        drop(work);
        for task in tasks {
            let tag = task.tag;
            drop(task);
            self.complete(tag, Err(ENODEV));
        }
        self.announce();
    }

    /// A worker has no more to do for a submission.
    fn worker_done(&self, tag: u64, result: Result<u64>) {
        self.complete(tag, result);
        self.slow.fetch_sub(1u32, Full);
        self.announce();
    }
}

/// What the poller thread does for a queue.
struct Driver(Arc<Queue>);

impl Driven for Driver {
    fn drive(&self) -> usize {
        self.0.try_drive().unwrap_or(0)
    }

    fn rest(&self) -> Rest {
        let Some(mut work) = self.0.work.try_lock() else {
            return Rest::Busy;
        };
        work.asleep = true;
        self.0.shared.store::<FLAGS>(bindings::KITE_QUEUE_ASLEEP);
        // The process adds a submission and then looks at the flag.
        kernel::sync::barrier::smp_mb();
        let added = work.taken.available(self.0.shared.load::<SQ_TAIL>());
        work.rest(added)
    }

    fn end(&self) {
        self.0.end();
    }
}

impl Work {
    fn remove(&mut self, at: usize) {
        let last = self.tasks.len() - 1;
        self.tasks.swap(at, last);
        drop(self.tasks.pop());
    }

    /// What the poller has to do if that many submissions wait.
    fn rest(&self, added: u32) -> Rest {
        if added != 0 {
            Rest::Busy
        } else if self.tasks.iter().any(|task| !task.is_waiting()) {
            Rest::Soon
        } else if !self.tasks.is_empty() {
            Rest::Flying
        } else {
            Rest::Idle
        }
    }
}

/// A queue pair that was made.
pub(super) struct Made {
    pub(super) number: u64,
    /// Bytes of its memory.
    pub(super) size: u64,
}

impl Made {
    /// Where it is mapped.
    pub(super) fn offset(&self) -> u64 {
        self.number << OFFSET_SHIFT
    }
}

impl Session {
    /// Makes a queue pair.
    ///
    /// # Errors
    ///
    /// As `struct kite_queue` in `include/uapi/kite.h` says.
    pub(super) fn make_queue(self: &Arc<Self>, addr: u64, len: u64, entries: u32) -> Result<Made> {
        self.rnic()?;
        // Nobody waits for the process's memory: not the RNIC, nor who maps a queue pair.
        let queue = Queue::new(self.clone(), addr, len, entries)?;
        let driver = Arc::new(Driver(queue.clone()), GFP_KERNEL_ACCOUNT)?;
        let rpc = self.rpc()?;
        let mut queues = self.queues.lock();
        if queues.len() == bindings::KITE_QUEUES_MAX as usize {
            return Err(EBUSY);
        }
        queues.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let driven = rpc.lmr.cluster.fabric.drive(driver)?;
        rpc.lmr.stats.queues.add(1);
        let made = Made {
            number: self.next_number(),
            size: queue.shared.len() as u64,
        };
        let entered = Entered {
            number: made.number,
            queue,
            driven,
        };
        queues.push(entered, GFP_KERNEL_ACCOUNT)?;
        Ok(made)
    }

    fn queue(&self, number: u64) -> Result<Arc<Queue>> {
        self.rnic()?;
        let queues = self.queues.lock();
        let found = queues.iter().find(|entered| entered.number == number);
        found.map(|entered| entered.queue.clone()).ok_or(EBADF)
    }

    /// Has the kernel look at a queue pair, and waits for completions. Returns how many there are.
    ///
    /// # Errors
    ///
    /// As `struct kite_enter` in `include/uapi/kite.h` says.
    pub(super) fn enter_queue(&self, number: u64, want: u32, deadline: Deadline) -> Result<u32> {
        self.queue(number)?.enter(want, deadline)
    }

    /// Gives up a submission.
    ///
    /// # Errors
    ///
    /// As `struct kite_cancel` in `include/uapi/kite.h` says.
    pub(super) fn cancel(&self, number: u64, tag: u64) -> Result {
        let queue = self.queue(number)?;
        let _rpc = self.rpc()?;
        queue.cancel(tag)
    }

    /// Whether there is a completion to take.
    pub(super) fn has_completions(&self) -> bool {
        let queues = self.queues.lock();
        queues.iter().any(|entered| entered.queue.ready() != 0)
    }

    /// Maps a queue pair into the process.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none; `EINVAL` unless all of it is mapped, and shared.
    pub(super) fn map_queue(&self, vma: &VmaNew) -> Result {
        // SAFETY: The mapping is being made, by this thread.
        let page = unsafe { (*vma.as_ptr()).vm_pgoff } as u64;
        let shift = OFFSET_SHIFT - PAGE_SHIFT as u32;
        if page.trailing_zeros() < shift {
            return Err(EINVAL);
        }
        self.queue(page >> shift)?.shared.map(vma)
    }

    /// Ends a queue pair.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is no such.
    pub(super) fn end_queue(&self, number: u64) -> Result {
        self.rnic()?;
        let mut queues = self.queues.lock();
        let at = queues.iter().position(|entered| entered.number == number);
        let removed = queues.remove(at.ok_or(EBADF)?).map_err(|_| EBADF)?;
        drop(queues);
        removed.end();
        Ok(())
    }

    /// Ends all queue pairs.
    pub(super) fn end_queues(&self) {
        let queues = core::mem::replace(&mut *self.queues.lock(), KVec::new());
        for entered in queues {
            entered.end();
        }
    }
}

impl Entered {
    fn end(self) {
        let queue = self.queue;
        queue.rnic.stats.queues.sub(1);
        // If the RNIC goes, the poller does that, too.
        if let Ok(rpc) = queue.rnic.enter() {
            rpc.lmr.cluster.fabric.drive_no_more(self.driven);
        }
        queue.end();
    }
}
