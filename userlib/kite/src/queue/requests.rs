// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests of I/O queues.
//!
//! Each method writes an SQE with the structure of the system call of the same name. The data are ranges of the buffer
//! of the queue.

use std::mem::size_of;
use std::ops::Range;

use super::IoQueue;
use crate::error::{Error, Result};
use crate::region::Region;
use crate::rpc::{PendingCall, Service};
use crate::sys;
use crate::vqp::{SendWr, Vqp};

/// A call or message received by [`IoQueue::receive`].
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// # let region = cluster.alloc(&kite::AllocOptions::new(1).name("service"))?;
/// # let service = region.serve(&kite::ServeOptions::new())?;
/// # let mut queue = cluster.create_queue(64, 8192)?;
/// queue.receive(1, &service, 0..4096)?;
/// queue.wait()?.result?;
/// let rpc = queue.parse_received(&service, 0)?;
/// if let Some(call) = rpc.call {
///     queue.reply(2, call, rpc.data)?;
///     queue.wait()?.result?;
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct ReceivedRpc {
    /// Range of the buffer that has the data.
    pub data: Range<usize>,
    /// Function number, chosen by the caller.
    pub function: u32,
    /// Node of the caller.
    pub node: u32,
    /// Effective user of the caller.
    pub uid: u32,
    /// The call to reply to, or `None` for a message.
    pub call: Option<PendingCall>,
}

impl IoQueue {
    /// Bytes of the buffer that precede the data of a received call or message.
    pub const RECV_HEADER_BYTES: usize = size_of::<sys::kite_recv_header>();

    /// Submits a read of `range.len()` bytes at `offset` of the region to `range` of the buffer. See
    /// [`Region::read_at`].
    ///
    /// # Errors
    /// - [`Error::BadHandle`]: the region was freed through a clone.
    /// - [`Error::Invalid`]: the region is open in another session.
    /// - [`Error::OutOfRange`]: the range is outside the buffer.
    /// - [`Error::QueueFull`]: the queue [is full](Self::is_full).
    pub fn read(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        range: Range<usize>,
    ) -> Result<()> {
        let body = self.rw_args(region, offset, range)?;
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_READ_NR, body)
    }

    /// Submits a write of `range` of the buffer to `offset` of the region. See [`Region::write_at`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn write(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        range: Range<usize>,
    ) -> Result<()> {
        let body = self.rw_args(region, offset, range)?;
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_WRITE_NR, body)
    }

    /// Submits a fill. See [`Region::fill`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn fill(
        &mut self,
        tag: u64,
        region: &Region,
        byte: u8,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let body = region.fill_args(byte, offset, len)?;
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_FILL_NR, body)
    }

    /// Submits a copy. See [`Region::copy_to`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn copy(
        &mut self,
        tag: u64,
        (from, from_offset): (&Region, u64),
        (to, to_offset): (&Region, u64),
        len: u64,
    ) -> Result<()> {
        let body = from.copy_args(from_offset, to, to_offset, len)?;
        self.enqueue(from.cluster(), tag, sys::KITE_IOC_COPY_NR, body)
    }

    /// Submits a fetch-and-add. See [`Region::fetch_add`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn fetch_add(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        operand: u64,
    ) -> Result<()> {
        let body = region.atomic_args(offset, sys::KITE_ATOMIC_FETCH_ADD, operand, 0)?;
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_ATOMIC_NR, body)
    }

    /// Submits a compare-and-swap. See [`Region::compare_swap`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn compare_swap(
        &mut self,
        tag: u64,
        region: &Region,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<()> {
        let body = region.atomic_args(offset, sys::KITE_ATOMIC_COMPARE_SWAP, new, expected)?;
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_ATOMIC_NR, body)
    }

    /// Submits a swap. See [`Region::swap`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn swap(&mut self, tag: u64, region: &Region, offset: u64, new: u64) -> Result<()> {
        let body = region.atomic_args(offset, sys::KITE_ATOMIC_SWAP, new, 0)?;
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_ATOMIC_NR, body)
    }

    /// Submits a call with `data` of the buffer. The range `reply` of the buffer receives the reply. See
    /// [`Region::call`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
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
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_CALL_NR, body)
    }

    /// Submits a message with `data` of the buffer. See [`Region::send`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn send(
        &mut self,
        tag: u64,
        region: &Region,
        function: u32,
        data: Range<usize>,
    ) -> Result<()> {
        let mut body = region.call_args(function, sys::KITE_CALL_ONEWAY)?;
        (body.addr, body.len) = self.buffer_range(data)?;
        self.enqueue(region.cluster(), tag, sys::KITE_IOC_CALL_NR, body)
    }

    /// Submits a receive of a call or message to `range` of the buffer. After its completion, whose value is the bytes
    /// of data, [`parse_received`](Self::parse_received) returns the call. The data follow the first
    /// [`RECV_HEADER_BYTES`](Self::RECV_HEADER_BYTES) bytes of the range. See [`Service::receive`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn receive(&mut self, tag: u64, service: &Service, range: Range<usize>) -> Result<()> {
        let (addr, len) = self.buffer_range(range)?;
        let data_len = len.checked_sub(Self::RECV_HEADER_BYTES as u64);
        let body = sys::kite_receive {
            addr,
            len: data_len.ok_or(Error::OutOfRange)?,
            ..service.receive_args()
        };
        let cluster = service.region().cluster();
        self.enqueue(cluster, tag, sys::KITE_IOC_RECEIVE_NR, body)
    }

    /// Returns the call or message that a completed [`receive`](Self::receive) has stored at `offset` of the buffer.
    /// Returns each of them once. A call that is never returned ends with the region: the caller then receives
    /// [`Error::ConnectionReset`].
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the service is of another session.
    /// - [`Error::OutOfRange`]: the range is outside the buffer.
    /// - [`Error::WouldBlock`]: there is no call at `offset`, or it was returned already.
    pub fn parse_received(&mut self, service: &Service, offset: usize) -> Result<ReceivedRpc> {
        let cluster = service.region().cluster();
        if !cluster.is_same_session(&self.handle.cluster) {
            return Err(Error::Invalid);
        }
        let raw: sys::kite_recv_header = self.buffer.load_pod(offset)?;
        // Node numbers begin with 1.
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

    /// Submits a reply with `range` of the buffer. After an error, as for a [full](Self::is_full) queue, the caller
    /// receives [`Error::ConnectionReset`]. See [`PendingCall::reply`].
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn reply(&mut self, tag: u64, call: PendingCall, range: Range<usize>) -> Result<()> {
        let mut body = call.reply_args(0);
        (body.addr, body.len) = self.buffer_range(range)?;
        let cluster = call.region().cluster();
        self.enqueue(cluster, tag, sys::KITE_IOC_REPLY_NR, body)?;
        call.mark_replied();
        Ok(())
    }

    /// Submits a work request of a VQP. Its tag is [`SendWr::tag`], and its local memory is an MR, not the buffer.
    ///
    /// Work requests to one VQP execute in the order of submission. Each completes in this queue, signaled or not. A
    /// rejected work request does not affect others. While [`VQP_DEPTH`](crate::VQP_DEPTH) work requests of the VQP are
    /// pending, further ones wait. [`Vqp::receive`] receives messages.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the VQP is of another session.
    /// - [`Error::QueueFull`]: the queue [is full](Self::is_full).
    pub fn push(&mut self, vqp: &Vqp, work: &SendWr<'_>) -> Result<()> {
        let body = sys::kite_send_wr {
            tag: vqp.id(),
            ..work.as_raw()
        };
        self.enqueue(vqp.cluster(), work.tag, sys::KITE_IOC_PUSH_NR, body)
    }

    fn rw_args(&self, region: &Region, offset: u64, range: Range<usize>) -> Result<sys::kite_rw> {
        let (addr, len) = self.buffer_range(range)?;
        region.rw_args(offset, addr, len)
    }
}
