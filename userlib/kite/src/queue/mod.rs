// SPDX-License-Identifier: GPL-2.0 OR MIT
//! I/O queues: asynchronous requests, without system calls under steady load.
//!
//! # Operation
//!
//! The module and the process share two rings (`struct kite_ring_header`): the process produces SQEs and consumes
//! CQEs. `requests` has one method per kind of request, `wait` the methods that wait for completions.

mod adaptive_spin;
mod requests;
mod wait;

use std::cell::Cell;
use std::mem::{offset_of, size_of};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{fence, Ordering};
use std::sync::Arc;
use std::time::Duration;

use adaptive_spin::AdaptiveSpin;

use crate::cluster::Cluster;
use crate::completion::Completion;
use crate::error::{Error, Result};
use crate::memory::{Mapping, Pod};
use crate::sys;
use crate::timeout::timeout_to_ms;

pub use requests::ReceivedRpc;
pub use wait::QueueWaiter;

const SQ_HEAD_OFFSET: usize = offset_of!(sys::kite_ring_header, sq_head);
const SQ_TAIL_OFFSET: usize = offset_of!(sys::kite_ring_header, sq_tail);
const CQ_HEAD_OFFSET: usize = offset_of!(sys::kite_ring_header, cq_head);
const CQ_TAIL_OFFSET: usize = offset_of!(sys::kite_ring_header, cq_tail);
const FLAGS_OFFSET: usize = offset_of!(sys::kite_ring_header, flags);
const VERSION_OFFSET: usize = offset_of!(sys::kite_ring_header, version);

const SQES_OFFSET: usize = sys::KITE_QUEUE_SQ_OFFSET as usize;

/// I/O queue: a submission queue and a completion queue with a buffer for the data of its requests.
///
/// Requests read from and write to the buffer, which [`store`](Self::store) and [`load`](Self::load) access. Each
/// request has a tag, which its [`Completion`] returns. Requests may complete in any order. The kernel starts requests
/// at [`submit`](Self::submit), or at a method that waits. The deadline of a request is that of its region. If the
/// region is dropped first, the request completes with or without an error.
///
/// While there are completions, the descriptor of the [`Cluster`] is readable. A forked child cannot use the queue of
/// its parent, but may drop it.
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// # let region = cluster.map("greeting", kite::Rights::READ | kite::Rights::WRITE)?;
/// let mut queue = cluster.create_queue(64, 4096)?;
/// queue.store(0, b"hello")?;
/// queue.write(1, &region, 0, 0..5)?;
/// queue.read(2, &region, 100, 5..10)?;
/// while queue.in_flight() > 0 {
///     let completion = queue.wait()?;
///     completion.result?;
///     println!("request {} succeeded", completion.tag);
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct IoQueue {
    // Fields drop in this order: the queue is destroyed in the kernel before its buffer is unmapped.
    rings: Mapping,
    handle: Arc<QueueHandle>,
    buffer: Mapping,
    entries: u32,
    /// SQEs written.
    sq_tail: u32,
    /// SQEs published to the kernel.
    published_sq_tail: u32,
    /// CQEs consumed.
    cq_head: u32,
    spin: AdaptiveSpin,
    system_calls: Cell<u64>,
}

/// I/O queue of the kernel. Dropping it destroys the queue.
#[derive(Debug)]
struct QueueHandle {
    cluster: Cluster,
    id: u64,
}

impl Cluster {
    /// Creates an I/O queue. `entries` is the maximum number of requests in flight: a power of two up to 1024.
    /// `buffer_len` is the size of its buffer in bytes, 1 … 1 GiB. The buffer is pinned, and counts against
    /// `RLIMIT_MEMLOCK`.
    ///
    /// # Errors
    /// - [`Error::Busy`]: the session has [`IO_QUEUES_MAX`](crate::IO_QUEUES_MAX) queues.
    /// - [`Error::Invalid`]: an argument is out of range.
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::OutOfMemory`]: no memory, or the limit of locked memory.
    /// - [`Error::WrongVersion`]: the module has another version of the rings.
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
        // The kernel writes the version before the rings can be mapped.
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
    /// Resumes polling of the queue by the kernel, and waits for `min_complete` completions.
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
        // An error means that the queue is destroyed already.
        let _ = sys::destroy_queue(self.cluster.as_fd(), &mut raw);
    }
}

impl IoQueue {
    /// Returns the maximum number of requests in flight.
    pub fn entries(&self) -> usize {
        self.entries as usize
    }

    /// Returns the bytes of the buffer.
    pub fn buffer_len(&self) -> usize {
        self.buffer.len()
    }

    /// Returns the address of the buffer. Requests in flight may access their ranges at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    /// Returns the number of requests whose completions were not consumed.
    pub fn in_flight(&self) -> usize {
        self.sq_tail.wrapping_sub(self.cq_head) as usize
    }

    /// Returns `true` if a completion must be consumed before the next request.
    pub fn is_full(&self) -> bool {
        self.in_flight() >= self.entries()
    }

    /// Returns the number of system calls of this queue so far.
    pub fn system_calls(&self) -> u64 {
        self.system_calls.get()
    }

    /// Copies `bytes` to the buffer at `offset`.
    ///
    /// # Errors
    /// - [`Error::OutOfRange`]: the range is outside the buffer.
    pub fn store(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.buffer.store(offset, bytes)
    }

    /// Copies from the buffer at `offset` to `bytes`.
    ///
    /// # Errors
    /// - [`Error::OutOfRange`]: the range is outside the buffer.
    pub fn load(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.buffer.load(offset, bytes)
    }

    /// Publishes all new requests to the kernel. Needs a system call only if the kernel has stopped polling the queue.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
    pub fn submit(&mut self) -> Result<()> {
        if self.published_sq_tail == self.sq_tail {
            return Ok(());
        }
        self.published_sq_tail = self.sq_tail;
        self.rings
            .atomic_u32(SQ_TAIL_OFFSET)?
            .store(self.published_sq_tail, Ordering::Release);
        // Pairs with the barrier of the kernel between setting NEED_WAKEUP and reading the tail.
        fence(Ordering::SeqCst);
        match self.rings.atomic_u32(FLAGS_OFFSET)?.load(Ordering::Relaxed)
            & sys::KITE_QUEUE_NEED_WAKEUP
        {
            0 => Ok(()),
            _ => self.enter(),
        }
    }

    /// Cancels a request with this tag that has not started, or that waits for a reply. It completes with
    /// [`Error::Canceled`]. A canceled call may have been executed, or may be executed later. Returns `true` if there
    /// was such a request.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
    pub fn cancel(&mut self, tag: u64) -> Result<bool> {
        self.submit()?;
        // The completion queue has space for all requests, so the kernel consumes all SQEs.
        while self
            .rings
            .atomic_u32(SQ_HEAD_OFFSET)?
            .load(Ordering::Acquire)
            != self.published_sq_tail
        {
            self.enter()?;
        }
        let queue = self.handle.id;
        let mut raw = sys::kite_cancel { queue, tag };
        match sys::cancel(self.handle.cluster.as_fd(), &mut raw) {
            Ok(()) => Ok(true),
            Err(Error::NotFound) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Consumes a completion. Returns `None` if there is none. Does not wait.
    ///
    /// # Errors
    /// - [`Error::OutOfRange`]: the mapping is smaller than its rings.
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

    /// Returns address and length of a range of the buffer.
    fn buffer_range(&self, range: Range<usize>) -> Result<(u64, u64)> {
        if range.start > range.end || range.end > self.buffer.len() {
            return Err(Error::OutOfRange);
        }
        Ok((self.buffer.addr() + range.start as u64, range.len() as u64))
    }

    /// Writes an SQE with the structure of its request, which uses an object of the session `cluster`.
    fn enqueue<T: Pod>(
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
        let sqe = sys::kite_sqe {
            tag,
            request,
            ..Default::default()
        };
        self.rings.store_pod(sqe_offset, sqe)?;
        let body_offset = sqe_offset + offset_of!(sys::kite_sqe, body);
        self.rings.store_pod(body_offset, body)?;
        self.sq_tail = self.sq_tail.wrapping_add(1);
        Ok(())
    }
}
