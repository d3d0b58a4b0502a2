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
use crate::patience::AdaptiveSpin;
use crate::region::{timeout_to_ms, Region};
use crate::service::{PendingCall, Service};
use crate::shared::{Mapping, Pod};
use crate::sys;
use crate::vqp::{SendWr, Vqp};

const SQ_HEAD_OFFSET: usize = offset_of!(sys::kite_ring_header, sq_head);
const SQ_TAIL_OFFSET: usize = offset_of!(sys::kite_ring_header, sq_tail);
const CQ_HEAD_OFFSET: usize = offset_of!(sys::kite_ring_header, cq_head);
const CQ_TAIL_OFFSET: usize = offset_of!(sys::kite_ring_header, cq_tail);
const FLAGS_OFFSET: usize = offset_of!(sys::kite_ring_header, flags);
const VERSION_OFFSET: usize = offset_of!(sys::kite_ring_header, version);

const SQES_OFFSET: usize = sys::KITE_QUEUE_SQ_OFFSET as usize;

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
/// let mut queue = cluster.create_queue(64, 4096)?;
/// queue.store(0, b"hello")?;
/// queue.write(1, &region, 0, 0..5)?;
/// queue.read(2, &region, 100, 5..10)?;
/// while queue.in_flight() > 0 {
///     let done = queue.wait()?;
///     println!("{} is done: {:?}", done.tag, done.result);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct IoQueue {
    // Unmapped, and ended in the kernel, before the memory goes that the kernel has pinned.
    rings: Mapping,
    handle: Arc<QueueHandle>,
    buffer: Mapping,
    entries: u32,
    /// Submissions that were added, and those of them that the kernel was told of.
    sq_tail: u32,
    published_sq_tail: u32,
    /// Completions that were taken.
    cq_head: u32,
    spin: AdaptiveSpin,
    system_calls: Cell<u64>,
}

/// Ends the queue pair in the kernel when it is dropped.
#[derive(Debug)]
struct QueueHandle {
    cluster: Cluster,
    id: u64,
}

/// A handle by which one thread waits for completions of a [`IoQueue`] that another one uses.
///
/// It takes no completion: after [`wait`](Self::wait) the owner of the queue calls
/// [`IoQueue::try_next`]. The queue ends in the kernel when it and all its waiters are dropped.
#[derive(Clone, Debug)]
pub struct QueueWaiter(Arc<QueueHandle>);

impl QueueWaiter {
    /// Waits until the queue has a completion that was not taken, for at most `timeout`, or without
    /// limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Interrupted`] if a signal handler ran, [`Error::NoRnic`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let remaining =
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let result = self.0.enter(1, remaining.unwrap_or(Duration::MAX));
            // Another thread may have taken the completion.
            if result != Err(Error::TimedOut)
                || remaining.is_some_and(|remaining| remaining.is_zero())
            {
                return result;
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
    pub(crate) fn from_raw(raw: &sys::kite_cqe) -> Self {
        let result = match raw.error {
            0 => Ok(raw.value),
            errno => Err(Error::from_errno(errno as i32)),
        };
        let tag = raw.tag;
        Self { tag, result }
    }
}

/// What came by [`IoQueue::receive`].
#[derive(Debug)]
pub struct ReceivedRpc {
    /// The part of the queue pair's memory that has its data.
    pub data: Range<usize>,
    /// For which function it is, as the caller said.
    pub function: u32,
    /// The node of the caller.
    pub node: u32,
    /// The effective user of the caller.
    pub uid: u32,
    /// What to answer; `None` for a message.
    pub call: Option<PendingCall>,
}

impl Cluster {
    /// Makes a queue pair of `entries` requests at a time, a power of two up to 1024, with `memory`
    /// bytes for them, at least 1, at most 1 GiB. The memory is pinned, and counts against the limit of
    /// locked memory. A session has at most [`IO_QUEUES_MAX`](crate::IO_QUEUES_MAX).
    ///
    /// # Errors
    /// [`Error::Busy`] (the session has as many as may be), [`Error::Invalid`], [`Error::NoRnic`],
    /// [`Error::OutOfMemory`] (limit of locked memory), [`Error::WrongVersion`] (of the rings).
    pub fn create_queue(&self, entries: u32, buffer_len: usize) -> Result<IoQueue> {
        if buffer_len == 0 {
            return Err(Error::Invalid);
        }
        let buffer = Mapping::anonymous(buffer_len)?;
        let mut raw = sys::kite_create_queue {
            entries,
            ..Default::default()
        };
        sys::create_queue(self.as_fd(), &buffer, &mut raw)?;
        let handle = Arc::new(QueueHandle {
            cluster: self.clone(),
            id: raw.queue,
        });
        let rings = Mapping::from_device(self.device(), raw.offset, raw.size as usize)?;
        // The kernel wrote the version before this process mapped the rings.
        if rings.atomic_u32(VERSION_OFFSET)?.load(Ordering::Relaxed) != sys::KITE_QUEUE_VERSION {
            return Err(Error::WrongVersion);
        }
        Ok(IoQueue {
            rings,
            handle,
            buffer,
            entries,
            sq_tail: 0,
            published_sq_tail: 0,
            cq_head: 0,
            spin: AdaptiveSpin::new(),
            system_calls: Cell::new(0),
        })
    }
}

impl QueueHandle {
    /// Has the kernel look at the queue, and waits for `want` completions.
    fn enter(&self, min_complete: u32, timeout: Duration) -> Result<()> {
        let mut raw = sys::kite_enter {
            queue: self.id,
            want: min_complete,
            timeout_ms: timeout_to_ms(timeout),
            ..Default::default()
        };
        sys::enter(self.cluster.as_fd(), &mut raw)
    }
}

impl Drop for QueueHandle {
    fn drop(&mut self) {
        if !self.cluster.is_owner_process() {
            return;
        }
        let mut raw = sys::kite_destroy_queue { queue: self.id };
        // It fails only for one that is gone, and then nothing is left to do.
        let _ = sys::destroy_queue(self.cluster.as_fd(), &mut raw);
    }
}

impl IoQueue {
    /// Bytes of its memory, before the data, that tell of what was received.
    pub const RECV_HEADER_BYTES: usize = size_of::<sys::kite_recv_header>();

    /// Requests at a time.
    pub fn entries(&self) -> usize {
        self.entries as usize
    }

    /// Bytes of its memory.
    pub fn buffer_len(&self) -> usize {
        self.buffer.len()
    }

    /// Its memory, for who accesses it directly. What requests read and write that are under way may
    /// change at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    /// Requests that were submitted and whose completions were not taken.
    pub fn in_flight(&self) -> usize {
        self.sq_tail.wrapping_sub(self.cq_head) as usize
    }

    /// Whether a completion has to be taken before anything can be submitted.
    pub fn is_full(&self) -> bool {
        self.in_flight() >= self.entries()
    }

    /// System calls that it has made so far, to see how many it saves.
    pub fn system_calls(&self) -> u64 {
        self.system_calls.get()
    }

    /// Copies `bytes` to its memory, from `at` on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn store(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.buffer.store(offset, bytes)
    }

    /// Copies from its memory, from `at` on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.buffer.load(offset, bytes)
    }

    /// Submits a read of as many bytes as `to` has, from `offset` of the region on, to that part of
    /// the memory. See [`Region::read_at`].
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::OutOfRange`] (`to`); [`Error::Invalid`] if the region is open in
    /// another session.
    pub fn read(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        range: Range<usize>,
    ) -> Result<()> {
        let body = self.rw_args(region, offset, range)?;
        self.enqueue(region, tag, sys::KITE_IOC_READ_NR, body)
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
        range: Range<usize>,
    ) -> Result<()> {
        let body = self.rw_args(region, offset, range)?;
        self.enqueue(region, tag, sys::KITE_IOC_WRITE_NR, body)
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
        let body = region.fill_args(byte, offset, len)?;
        self.enqueue(region, tag, sys::KITE_IOC_FILL_NR, body)
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
        let body = from.copy_args(from_offset, to, to_offset, len)?;
        self.enqueue(from, tag, sys::KITE_IOC_COPY_NR, body)
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
        let body = region.atomic_args(offset, sys::KITE_ATOMIC_FETCH_ADD, operand, 0)?;
        self.enqueue(region, tag, sys::KITE_IOC_ATOMIC_NR, body)
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
        let body = region.atomic_args(offset, sys::KITE_ATOMIC_COMPARE_SWAP, new, expected)?;
        self.enqueue(region, tag, sys::KITE_IOC_ATOMIC_NR, body)
    }

    /// Submits [`Region::swap`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn swap(&mut self, tag: u64, region: &Region, offset: u64, new: u64) -> Result<()> {
        let body = region.atomic_args(offset, sys::KITE_ATOMIC_SWAP, new, 0)?;
        self.enqueue(region, tag, sys::KITE_IOC_ATOMIC_NR, body)
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
        let mut body = region.call_args(function, 0)?;
        (body.addr, body.len) = self.buffer_range(data)?;
        (body.reply, body.reply_len) = self.buffer_range(reply)?;
        self.enqueue(region, tag, sys::KITE_IOC_CALL_NR, body)
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
        let mut body = region.call_args(function, sys::KITE_CALL_ONEWAY)?;
        (body.addr, body.len) = self.buffer_range(data)?;
        self.enqueue(region, tag, sys::KITE_IOC_CALL_NR, body)
    }

    /// Submits [`Service::receive`]. What has come is in that part of the memory when it has completed,
    /// for [`parse_received`](Self::parse_received), and its value is the bytes of data; these come behind the first
    /// [`RECV_HEADER_BYTES`](Self::RECV_HEADER_BYTES) bytes.
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn receive(&mut self, tag: u64, service: &Service, range: Range<usize>) -> Result<()> {
        let (addr, len) = self.buffer_range(range)?;
        let data_len = len.checked_sub(Self::RECV_HEADER_BYTES as u64);
        let body = sys::kite_receive {
            addr,
            len: data_len.ok_or(Error::OutOfRange)?,
            ..service.receive_args()
        };
        self.enqueue(service.region(), tag, sys::KITE_IOC_RECEIVE_NR, body)
    }

    /// Takes what came by [`receive`](Self::receive) to the part of the memory that begins at `at`. It is to be
    /// taken once; a call that nobody takes is answered when the region is closed, and then with
    /// [`Error::ConnectionReset`].
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if it was taken, or nothing came there; [`Error::OutOfRange`]; [`Error::Invalid`] if the
    /// service is of another session.
    pub fn parse_received(&mut self, service: &Service, offset: usize) -> Result<ReceivedRpc> {
        if !service
            .region()
            .cluster()
            .is_same_session(&self.handle.cluster)
        {
            return Err(Error::Invalid);
        }
        let raw: sys::kite_recv_header = self.buffer.load_pod(offset)?;
        // No node has this number.
        if raw.node == 0 {
            return Err(Error::WouldBlock);
        }
        let start = offset + Self::RECV_HEADER_BYTES;
        let len = usize::try_from(raw.len).unwrap_or(usize::MAX);
        let data = start..start.saturating_add(len);
        self.buffer_range(data.clone())?;
        self.buffer
            .store_pod(offset, sys::kite_recv_header::default())?;
        Ok(ReceivedRpc {
            data,
            function: raw.function,
            node: raw.node,
            uid: raw.uid,
            call: service.call_from_id(raw.call),
        })
    }

    /// Submits [`PendingCall::reply`], with that part of the memory as data. If that fails, as it does when the queue
    /// pair [is full](Self::is_full), the caller gets [`Error::ConnectionReset`].
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn reply(&mut self, tag: u64, call: PendingCall, range: Range<usize>) -> Result<()> {
        let mut body = call.reply_args(0);
        (body.addr, body.len) = self.buffer_range(range)?;
        self.enqueue(call.region(), tag, sys::KITE_IOC_REPLY_NR, body)?;
        call.mark_replied();
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
    pub fn push(&mut self, vqp: &Vqp, work: &SendWr<'_>) -> Result<()> {
        let body = sys::kite_send_wr {
            tag: vqp.id(),
            ..work.as_raw()
        };
        self.enqueue_for(vqp.cluster(), work.tag, sys::KITE_IOC_PUSH_NR, body)
    }

    /// Has the kernel begin with what was submitted. That is a system call only if it does not look,
    /// since nothing has come for a while.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
    pub fn submit(&mut self) -> Result<()> {
        if self.published_sq_tail == self.sq_tail {
            return Ok(());
        }
        self.published_sq_tail = self.sq_tail;
        self.rings
            .atomic_u32(SQ_TAIL_OFFSET)?
            .store(self.published_sq_tail, Ordering::Release);
        // The kernel says that it sleeps and then looks at the tail.
        fence(Ordering::SeqCst);
        match self.rings.atomic_u32(FLAGS_OFFSET)?.load(Ordering::Relaxed)
            & sys::KITE_QUEUE_NEED_WAKEUP
        {
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
        while self
            .rings
            .atomic_u32(SQ_HEAD_OFFSET)?
            .load(Ordering::Acquire)
            != self.published_sq_tail
        {
            self.enter()?;
        }
        let QueueHandle {
            cluster,
            id: number,
        } = &*self.handle;
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
        if !self.has_completion()? {
            return Ok(None);
        }
        let index = (self.cq_head & (self.entries - 1)) as usize;
        let cqe_offset = SQES_OFFSET
            + self.entries() * size_of::<sys::kite_sqe>()
            + index * size_of::<sys::kite_cqe>();
        let raw: sys::kite_cqe = self.rings.load_pod(cqe_offset)?;
        self.cq_head = self.cq_head.wrapping_add(1);
        self.rings
            .atomic_u32(CQ_HEAD_OFFSET)?
            .store(self.cq_head, Ordering::Release);
        Ok(Some(Completion::from_raw(&raw)))
    }

    /// Submits what was added, and waits for a completion: polls first, then sleeps.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if nothing is unfinished, [`Error::Interrupted`] if a signal handler ran,
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
    pub fn waiter(&self) -> QueueWaiter {
        QueueWaiter(self.handle.clone())
    }

    /// Submits what was added, and polls for a completion for as long as polling is cheaper than
    /// sleeping. Returns `None` if there is none by then.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if nothing is unfinished, [`Error::NoRnic`].
    pub fn poll(&mut self) -> Result<Option<Completion>> {
        self.submit()?;
        if self.in_flight() == 0 {
            return Err(Error::WouldBlock);
        }
        if !self.has_completion()? && !self.spin_for_completion()? {
            return Ok(None);
        }
        self.try_next()
    }

    fn wait_until(&mut self, deadline: Option<Instant>) -> Result<Completion> {
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            self.system_calls.set(self.system_calls.get() + 1);
            let remaining =
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            self.waiter().wait(remaining)?;
        }
    }

    fn spin_for_completion(&mut self) -> Result<bool> {
        let tail = self.rings.atomic_u32(CQ_TAIL_OFFSET)?;
        let cq_head = self.cq_head;
        let is_ready = || tail.load(Ordering::Relaxed) != cq_head;
        Ok(self.spin.spin_until(is_ready))
    }

    fn has_completion(&self) -> Result<bool> {
        let tail = self
            .rings
            .atomic_u32(CQ_TAIL_OFFSET)?
            .load(Ordering::Acquire);
        Ok(tail != self.cq_head)
    }

    fn enter(&self) -> Result<()> {
        self.system_calls.set(self.system_calls.get() + 1);
        self.handle.enter(0, Duration::MAX)
    }

    /// Address and length of a part of the memory.
    fn buffer_range(&self, range: Range<usize>) -> Result<(u64, u64)> {
        if range.start > range.end || range.end > self.buffer.len() {
            return Err(Error::OutOfRange);
        }
        Ok((self.buffer.addr() + range.start as u64, range.len() as u64))
    }

    fn rw_args(&self, region: &Region, offset: u64, range: Range<usize>) -> Result<sys::kite_rw> {
        let (addr, len) = self.buffer_range(range)?;
        region.rw_args(offset, addr, len)
    }

    /// Adds a submission about a region.
    fn enqueue<T: Pod>(&mut self, region: &Region, tag: u64, request: u32, body: T) -> Result<()> {
        self.enqueue_for(region.cluster(), tag, request, body)
    }

    /// Adds a submission with the structure of its request, about something of a session.
    fn enqueue_for<T: Pod>(
        &mut self,
        cluster: &Cluster,
        tag: u64,
        request: u32,
        body: T,
    ) -> Result<()> {
        const { assert!(size_of::<T>() <= size_of::<[u64; 7]>()) };
        if !cluster.is_same_session(&self.handle.cluster) {
            return Err(Error::Invalid);
        }
        if self.is_full() {
            return Err(Error::QueueFull);
        }
        let index = (self.sq_tail & (self.entries - 1)) as usize;
        let sqe_offset = SQES_OFFSET + index * size_of::<sys::kite_sqe>();
        let submission = sys::kite_sqe {
            tag,
            request,
            ..Default::default()
        };
        self.rings.store_pod(sqe_offset, submission)?;
        let body_offset = sqe_offset + offset_of!(sys::kite_sqe, body);
        self.rings.store_pod(body_offset, body)?;
        self.sq_tail = self.sq_tail.wrapping_add(1);
        Ok(())
    }
}
