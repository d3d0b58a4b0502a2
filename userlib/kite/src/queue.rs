// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests that are done while the program goes on, without system calls under steady load.

use std::cell::Cell;
use std::mem::{offset_of, size_of};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{fence, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::patience::Patience;
use crate::region::{in_ms, Region};
use crate::service::{Call, Service};
use crate::shared::{Plain, Shared};
use crate::sys;
use crate::vqp::{Vqp, Work};

const SQ_HEAD: usize = offset_of!(sys::kite_queue_words, sq_head);
const SQ_TAIL: usize = offset_of!(sys::kite_queue_words, sq_tail);
const CQ_HEAD: usize = offset_of!(sys::kite_queue_words, cq_head);
const CQ_TAIL: usize = offset_of!(sys::kite_queue_words, cq_tail);
const FLAGS: usize = offset_of!(sys::kite_queue_words, flags);

const SUBMISSIONS: usize = sys::KITE_QUEUE_SUBMISSIONS as usize;

/// A queue pair: requests are submitted, and complete later, in any order.
///
/// It has memory of its own, which requests read from and write to: [`store`](Self::store) and
/// [`load`](Self::load) copy to and from it. A method that submits is given a tag, which the
/// [`Completion`] has too. The kernel begins with what was submitted at [`submit`](Self::submit),
/// or [`wait`](Self::wait).
///
/// A region may be dropped before its requests are done; they fail then, or not. Each has the deadline
/// of its region. [`Cluster`]'s descriptor is readable while there are completions.
///
/// A child of the process, after `fork`, has not got it: there it may be dropped, but not used.
///
/// ```no_run
/// # fn main() -> kite::Result<()> {
/// # let cluster = kite::Cluster::open()?;
/// # let region = cluster.map("greeting", kite::Rights::READ | kite::Rights::WRITE)?;
/// let mut queue = cluster.queue(64, 4096)?;
/// queue.store(0, b"hello")?;
/// queue.write(1, &region, 0, 0..5)?;
/// queue.read(2, &region, 100, 5..10)?;
/// while queue.unfinished() > 0 {
///     let done = queue.wait()?;
///     println!("{} is done: {:?}", done.tag, done.result);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Queue {
    // Unmapped, and ended in the kernel, before the memory goes that the kernel has pinned.
    shared: Shared,
    ended: Arc<Ended>,
    memory: Shared,
    entries: u32,
    /// Submissions that were added, and those of them that the kernel was told of.
    added: u32,
    told: u32,
    /// Completions that were taken.
    taken: u32,
    patience: Patience,
    system_calls: Cell<u64>,
}

/// Ends the queue pair in the kernel when it is dropped.
#[derive(Debug)]
struct Ended {
    cluster: Cluster,
    number: u64,
}

/// A handle by which one thread waits for completions of a [`Queue`] that another one uses.
///
/// It takes no completion: after [`wait`](Self::wait) the owner of the queue calls
/// [`Queue::try_next`]. The queue ends in the kernel when it and all its waiters are dropped.
#[derive(Clone, Debug)]
pub struct Waiter(Arc<Ended>);

impl Waiter {
    /// Waits until the queue has a completion that was not taken, for at most `timeout`, or without
    /// limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Interrupted`] if a signal handler ran, [`Error::NoRnic`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let ended = self.0.enter(1, left.unwrap_or(Duration::MAX));
            // Another thread may have taken the completion.
            if ended != Err(Error::TimedOut) || left.is_some_and(|left| left.is_zero()) {
                return ended;
            }
        }
    }
}

/// What came of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As given when it was submitted.
    pub tag: u64,
    /// For an atomic operation what the number was, for a call the bytes of the reply, else 0.
    pub result: Result<u64>,
}

impl Completion {
    pub(crate) fn from_raw(raw: &sys::kite_completion) -> Self {
        let result = match raw.error {
            0 => Ok(raw.value),
            errno => Err(Error::from_errno(errno as i32)),
        };
        let tag = raw.tag;
        Self { tag, result }
    }
}

/// What came by [`Queue::receive`].
#[derive(Debug)]
pub struct Received {
    /// The part of the queue pair's memory that has its data.
    pub data: Range<usize>,
    /// For which function it is, as the caller said.
    pub function: u32,
    /// The node of the caller.
    pub node: u32,
    /// The effective user of the caller.
    pub uid: u32,
    /// What to answer; `None` for a message.
    pub call: Option<Call>,
}

impl Cluster {
    /// Makes a queue pair of `entries` requests at a time, a power of two up to 1024, with `memory`
    /// bytes for them, at least 1, at most 1 GiB. The memory is pinned, and counts against the limit of
    /// locked memory. A session has at most [`QUEUES_MAX`](crate::QUEUES_MAX).
    ///
    /// # Errors
    /// [`Error::Busy`] (the session has as many as may be), [`Error::Invalid`], [`Error::NoRnic`],
    /// [`Error::OutOfMemory`] (limit of locked memory).
    pub fn queue(&self, entries: u32, memory: usize) -> Result<Queue> {
        if memory == 0 {
            return Err(Error::Invalid);
        }
        let memory = Shared::anonymous(memory)?;
        let mut raw = sys::kite_queue {
            entries,
            ..Default::default()
        };
        sys::queue(self.as_fd(), &memory, &mut raw)?;
        let ended = Arc::new(Ended {
            cluster: self.clone(),
            number: raw.queue,
        });
        let shared = Shared::of_device(self.device(), raw.offset, raw.size as usize)?;
        Ok(Queue {
            shared,
            ended,
            memory,
            entries,
            added: 0,
            told: 0,
            taken: 0,
            patience: Patience::new(),
            system_calls: Cell::new(0),
        })
    }
}

impl Ended {
    /// Has the kernel look at the queue, and waits for `want` completions.
    fn enter(&self, want: u32, timeout: Duration) -> Result<()> {
        let mut raw = sys::kite_enter {
            queue: self.number,
            want,
            timeout_ms: in_ms(timeout),
            ..Default::default()
        };
        sys::enter(self.cluster.as_fd(), &mut raw)
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if !self.cluster.is_own() {
            return;
        }
        let mut raw = sys::kite_unqueue { queue: self.number };
        // It fails only for one that is gone, and then nothing is left to do.
        let _ = sys::unqueue(self.cluster.as_fd(), &mut raw);
    }
}

impl Queue {
    /// Bytes of its memory, before the data, that tell of what was received.
    pub const HEAD: usize = size_of::<sys::kite_incoming>();

    /// Requests at a time.
    pub fn entries(&self) -> usize {
        self.entries as usize
    }

    /// Bytes of its memory.
    pub fn memory(&self) -> usize {
        self.memory.len()
    }

    /// Its memory, for who accesses it directly. What requests read and write that are under way may
    /// change at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Requests that were submitted and whose completions were not taken.
    pub fn unfinished(&self) -> usize {
        self.added.wrapping_sub(self.taken) as usize
    }

    /// Whether a completion has to be taken before anything can be submitted.
    pub fn is_full(&self) -> bool {
        self.unfinished() >= self.entries()
    }

    /// System calls that it has made so far, to see how many it saves.
    pub fn system_calls(&self) -> u64 {
        self.system_calls.get()
    }

    /// Copies `bytes` to its memory, from `at` on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn store(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        self.memory.store(at, bytes)
    }

    /// Copies from its memory, from `at` on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn load(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        self.memory.load(at, bytes)
    }

    /// Submits a read of as many bytes as `to` has, from `offset` of the region on, to that part of
    /// the memory. See [`Region::read_at`].
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::OutOfRange`] (`to`); [`Error::Invalid`] if the region is open in
    /// another session.
    pub fn read(&mut self, tag: u64, region: &Region, offset: u64, to: Range<usize>) -> Result<()> {
        let body = self.what_to_move(region, offset, to)?;
        self.add(region, tag, sys::KITE_IOC_READ_NR, body)
    }

    /// Submits a write of that part of the memory to `offset` of the region. See [`Region::write_at`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn write(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        from: Range<usize>,
    ) -> Result<()> {
        let body = self.what_to_move(region, offset, from)?;
        self.add(region, tag, sys::KITE_IOC_WRITE_NR, body)
    }

    /// Submits [`Region::fill`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn fill(
        &mut self,
        tag: u64,
        region: &Region,
        byte: u8,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let body = region.what_to_fill(byte, offset, len)?;
        self.add(region, tag, sys::KITE_IOC_SET_NR, body)
    }

    /// Submits [`Region::copy_to`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn copy(
        &mut self,
        tag: u64,
        (from, from_offset): (&Region, u64),
        (to, to_offset): (&Region, u64),
        len: u64,
    ) -> Result<()> {
        let body = from.what_to_copy(from_offset, to, to_offset, len)?;
        self.add(from, tag, sys::KITE_IOC_COPY_NR, body)
    }

    /// Submits [`Region::fetch_add`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn fetch_add(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        operand: u64,
    ) -> Result<()> {
        let body = region.what_to_change(offset, sys::KITE_ATOMIC_FETCH_ADD, operand, 0)?;
        self.add(region, tag, sys::KITE_IOC_ATOMIC_NR, body)
    }

    /// Submits [`Region::compare_swap`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn compare_swap(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<()> {
        let body = region.what_to_change(offset, sys::KITE_ATOMIC_COMPARE_SWAP, new, expected)?;
        self.add(region, tag, sys::KITE_IOC_ATOMIC_NR, body)
    }

    /// Submits [`Region::swap`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn swap(&mut self, tag: u64, region: &Region, offset: u64, new: u64) -> Result<()> {
        let body = region.what_to_change(offset, sys::KITE_ATOMIC_SWAP, new, 0)?;
        self.add(region, tag, sys::KITE_IOC_ATOMIC_NR, body)
    }

    /// Submits [`Region::call`], with that part of the memory as data, and room for the reply in
    /// another.
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn call(
        &mut self,
        tag: u64,
        region: &Region,
        function: u32,
        data: Range<usize>,
        reply: Range<usize>,
    ) -> Result<()> {
        let mut body = region.what_to_call(function, 0)?;
        (body.addr, body.len) = self.part(data)?;
        (body.reply, body.reply_len) = self.part(reply)?;
        self.add(region, tag, sys::KITE_IOC_CALL_NR, body)
    }

    /// Submits [`Region::send`], with that part of the memory as data.
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn send(
        &mut self,
        tag: u64,
        region: &Region,
        function: u32,
        data: Range<usize>,
    ) -> Result<()> {
        let mut body = region.what_to_call(function, sys::KITE_CALL_SEND)?;
        (body.addr, body.len) = self.part(data)?;
        self.add(region, tag, sys::KITE_IOC_CALL_NR, body)
    }

    /// Submits [`Service::receive`]. What has come is in that part of the memory when it has completed,
    /// for [`received`](Self::received), and its value is the bytes of data; these come behind the first
    /// [`HEAD`](Self::HEAD) bytes.
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn receive(&mut self, tag: u64, service: &Service, to: Range<usize>) -> Result<()> {
        let (addr, len) = self.part(to)?;
        let room = len.checked_sub(Self::HEAD as u64);
        let body = sys::kite_receive {
            addr,
            len: room.ok_or(Error::OutOfRange)?,
            ..service.what()
        };
        self.add(service.region(), tag, sys::KITE_IOC_RECEIVE_NR, body)
    }

    /// Takes what came by [`receive`](Self::receive) to the part of the memory that begins at `at`. It is to be
    /// taken once; a call that nobody takes is answered when the region is closed, and then with
    /// [`Error::ServerEnded`].
    ///
    /// # Errors
    /// [`Error::Nothing`] if it was taken, or nothing came there; [`Error::OutOfRange`]; [`Error::Invalid`] if the
    /// service is of another session.
    pub fn received(&mut self, service: &Service, at: usize) -> Result<Received> {
        if !service.region().cluster().is(&self.ended.cluster) {
            return Err(Error::Invalid);
        }
        let raw: sys::kite_incoming = self.memory.load_plain(at)?;
        // No node has this number.
        if raw.node == 0 {
            return Err(Error::Nothing);
        }
        let start = at + Self::HEAD;
        let len = usize::try_from(raw.len).unwrap_or(usize::MAX);
        let data = start..start.saturating_add(len);
        self.part(data.clone())?;
        self.memory.store_plain(at, sys::kite_incoming::default())?;
        Ok(Received {
            data,
            function: raw.function,
            node: raw.node,
            uid: raw.uid,
            call: service.call(raw.call),
        })
    }

    /// Submits [`Call::reply`], with that part of the memory as data. If that fails, as it does when the queue
    /// pair [is full](Self::is_full), the caller gets [`Error::ServerEnded`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn reply(&mut self, tag: u64, call: Call, from: Range<usize>) -> Result<()> {
        let mut body = call.what(0);
        (body.addr, body.len) = self.part(from)?;
        self.add(call.region(), tag, sys::KITE_IOC_REPLY_NR, body)?;
        call.answered();
        Ok(())
    }

    /// Submits a request of a virtual queue pair, as [`Vqp::push`] adds several at once; its tag is that of the work. Its
    /// memory is what the work names, and none of the queue pair's.
    ///
    /// Those to one virtual queue pair are done in the order in which they were submitted, and each has its completion
    /// here, signalled or not; one that is refused stops none of the others. It waits while
    /// [`VQP_DEPTH`](crate::VQP_DEPTH) are under way there. Messages are received by [`Vqp::receive`].
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Invalid`] if the virtual queue pair is of another session.
    pub fn push(&mut self, vqp: &Vqp, work: &Work<'_>) -> Result<()> {
        let body = sys::kite_work {
            tag: vqp.number(),
            ..work.raw()
        };
        self.add_of(vqp.cluster(), work.tag, sys::KITE_IOC_PUSH_NR, body)
    }

    /// Has the kernel begin with what was submitted. That is a system call only if it does not look,
    /// since nothing has come for a while.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
    pub fn submit(&mut self) -> Result<()> {
        if self.told == self.added {
            return Ok(());
        }
        self.told = self.added;
        self.shared
            .word(SQ_TAIL)?
            .store(self.told, Ordering::Release);
        // The kernel says that it sleeps and then looks at the tail.
        fence(Ordering::SeqCst);
        match self.shared.word(FLAGS)?.load(Ordering::Relaxed) & sys::KITE_QUEUE_ASLEEP {
            0 => Ok(()),
            _ => self.enter(),
        }
    }

    /// Gives up a request of that tag that was not begun, or that waits for a reply: it completes with
    /// [`Error::Canceled`]. A call may have been made, or may yet be. Returns whether there was one.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
    pub fn cancel(&mut self, tag: u64) -> Result<bool> {
        self.submit()?;
        // There is room for all completions, so the kernel takes all that was submitted.
        while self.shared.word(SQ_HEAD)?.load(Ordering::Acquire) != self.told {
            self.enter()?;
        }
        let Ended { cluster, number } = &*self.ended;
        let mut raw = sys::kite_cancel {
            queue: *number,
            tag,
        };
        match sys::cancel(cluster.as_fd(), &mut raw) {
            Ok(()) => Ok(true),
            Err(Error::NotFound) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes a completion, if there is one now.
    ///
    /// # Errors
    /// [`Error::Io`] if the kernel's memory is not as it should be.
    pub fn try_next(&mut self) -> Result<Option<Completion>> {
        if !self.is_ready()? {
            return Ok(None);
        }
        let index = (self.taken & (self.entries - 1)) as usize;
        let at = SUBMISSIONS
            + self.entries() * size_of::<sys::kite_submission>()
            + index * size_of::<sys::kite_completion>();
        let raw: sys::kite_completion = self.shared.load_plain(at)?;
        self.taken = self.taken.wrapping_add(1);
        self.shared
            .word(CQ_HEAD)?
            .store(self.taken, Ordering::Release);
        Ok(Some(Completion::from_raw(&raw)))
    }

    /// Submits what was added, and waits for a completion: polls first, then sleeps.
    ///
    /// # Errors
    /// [`Error::Nothing`] if nothing is unfinished, [`Error::Interrupted`] if a signal handler ran,
    /// [`Error::NoRnic`].
    pub fn wait(&mut self) -> Result<Completion> {
        self.wait_until(None)
    }

    /// Like [`wait`](Self::wait), for at most `timeout`.
    ///
    /// # Errors
    /// As of [`wait`](Self::wait), and [`Error::TimedOut`].
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<Completion> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// A handle to wait by while another thread uses the queue.
    pub fn waiter(&self) -> Waiter {
        Waiter(self.ended.clone())
    }

    /// Submits what was added, and polls for a completion for as long as polling is cheaper than
    /// sleeping. Returns `None` if there is none by then.
    ///
    /// # Errors
    /// [`Error::Nothing`] if nothing is unfinished, [`Error::NoRnic`].
    pub fn poll(&mut self) -> Result<Option<Completion>> {
        self.submit()?;
        if self.unfinished() == 0 {
            return Err(Error::Nothing);
        }
        if !self.is_ready()? && !self.look()? {
            return Ok(None);
        }
        self.try_next()
    }

    fn wait_until(&mut self, end: Option<Instant>) -> Result<Completion> {
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            self.system_calls.set(self.system_calls.get() + 1);
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            self.waiter().wait(left)?;
        }
    }

    fn look(&mut self) -> Result<bool> {
        let tail = self.shared.word(CQ_TAIL)?;
        let taken = self.taken;
        let is_there = || tail.load(Ordering::Relaxed) != taken;
        Ok(self.patience.look(is_there))
    }

    fn is_ready(&self) -> Result<bool> {
        let tail = self.shared.word(CQ_TAIL)?.load(Ordering::Acquire);
        Ok(tail != self.taken)
    }

    fn enter(&self) -> Result<()> {
        self.system_calls.set(self.system_calls.get() + 1);
        self.ended.enter(0, Duration::MAX)
    }

    /// Address and length of a part of the memory.
    fn part(&self, part: Range<usize>) -> Result<(u64, u64)> {
        if part.start > part.end || part.end > self.memory.len() {
            return Err(Error::OutOfRange);
        }
        Ok((self.memory.addr() + part.start as u64, part.len() as u64))
    }

    fn what_to_move(
        &self,
        region: &Region,
        offset: u64,
        part: Range<usize>,
    ) -> Result<sys::kite_rw> {
        let (addr, len) = self.part(part)?;
        region.what_to_move(offset, addr, len)
    }

    /// Adds a submission about a region.
    fn add<T: Plain>(&mut self, region: &Region, tag: u64, request: u32, body: T) -> Result<()> {
        self.add_of(region.cluster(), tag, request, body)
    }

    /// Adds a submission with the structure of its request, about something of a session.
    fn add_of<T: Plain>(&mut self, of: &Cluster, tag: u64, request: u32, body: T) -> Result<()> {
        const { assert!(size_of::<T>() <= size_of::<[u64; 7]>()) };
        if !of.is(&self.ended.cluster) {
            return Err(Error::Invalid);
        }
        if self.is_full() {
            return Err(Error::QueueFull);
        }
        let index = (self.added & (self.entries - 1)) as usize;
        let at = SUBMISSIONS + index * size_of::<sys::kite_submission>();
        let submission = sys::kite_submission {
            tag,
            request,
            ..Default::default()
        };
        self.shared.store_plain(at, submission)?;
        let body_at = at + offset_of!(sys::kite_submission, body);
        self.shared.store_plain(body_at, body)?;
        self.added = self.added.wrapping_add(1);
        Ok(())
    }
}
