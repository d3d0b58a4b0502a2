// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs (VQPs): verbs to one node over queue pairs that all programs share.

mod info;
mod listener;
mod mr;
mod wr;

use std::os::fd::AsFd;
use std::time::Duration;

use crate::cluster::Cluster;
use crate::completion::Completion;
use crate::error::Result;
use crate::sys;
use crate::timeout::wait_to_raw;

pub use info::VqpInfo;
pub use listener::{Listener, PeerCred};
pub use mr::{Mr, RemoteMemory};
pub use wr::{SendWr, WrOp};

/// Virtual queue pair: a send queue and a receive queue to one node.
///
/// Creating one needs a table lookup, or one RDMA READ for the first VQP to a node. No message is sent to the node.
/// Work requests execute in order. A failed work request affects this VQP only. While there are completions or
/// messages, the descriptor of the [`Cluster`] is readable. [`IoQueue::push`](crate::IoQueue::push) submits work
/// requests without a system call for each.
///
/// A VQP to a port has another end there as soon as a listener accepts it. Both ends can then send messages.
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// # let memory = cluster.reg_mr(kite::Buffer::new(4096)?, kite::Rights::empty())?;
/// # let remote = memory.remote_memory();
/// use kite::{Buffer, Rights, SendWr, WrOp};
///
/// let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
/// let vqp = cluster.connect(2)?;
/// let read = SendWr {
///     tag: 1,
///     op: WrOp::Read,
///     local: &local,
///     local_offset: 0,
///     len: 64,
///     remote,
///     remote_offset: 0,
///     immediate: None,
///     signaled: true,
///     fence: false,
/// };
/// vqp.push(&[read])?;
/// let completions = vqp.pop(1, Some(std::time::Duration::from_secs(10)))?;
/// completions[0].result?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct Vqp {
    cluster: Cluster,
    id: u64,
}

/// A received message.
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// # let local = cluster.reg_mr(kite::Buffer::new(4096)?, kite::Rights::empty())?;
/// # let (vqp, _) = cluster.listen(7)?.accept(Some(std::time::Duration::from_secs(60)))?;
/// let message = vqp.receive(&local, 0, 4096, Some(std::time::Duration::from_secs(10)))?;
/// let mut bytes = vec![0; message.len];
/// local.buffer().load(0, &mut bytes)?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VqpMessage {
    /// Bytes.
    pub len: usize,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// `true` if a write with immediate data placed the bytes in memory that the sender selected.
    pub is_placed: bool,
}

impl Cluster {
    /// Creates a VQP to a node. No message is sent to the node.
    ///
    /// # Errors
    /// - [`Error::Busy`](crate::Error::Busy): the session has [`VQPS_MAX`](crate::VQPS_MAX) VQPs and listeners.
    /// - [`Error::HostDown`](crate::Error::HostDown): the node is not in the view.
    /// - [`Error::Interrupted`](crate::Error::Interrupted): a signal handler ran.
    /// - [`Error::Invalid`](crate::Error::Invalid): this node, on an RNIC without DC.
    /// - [`Error::NotJoined`](crate::Error::NotJoined): this node is in no cluster.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): the directory of DC targets could not be read in time.
    pub fn connect(&self, node: u32) -> Result<Vqp> {
        self.connect_to(node, 0)
    }

    /// Creates a VQP to the listener of a port of a node. If the port has no listener, the first message fails.
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    pub fn connect_to(&self, node: u32, port: u32) -> Result<Vqp> {
        self.connect_raw(sys::kite_connect {
            node,
            port,
            ..Default::default()
        })
    }

    /// Creates a VQP to the listener of a port of a node, which must belong to the user `owner`. If the listener belongs
    /// to another user, no process receives a message, and the first message fails with
    /// [`Error::Denied`](crate::Error::Denied).
    ///
    /// # Examples
    /// ```no_run
    /// # let cluster = kite::Cluster::open()?;
    /// // Any user can listen at port 7. Only a listener of root receives the messages.
    /// let vqp = cluster.connect_to_owner(2, 7, 0)?;
    /// # drop(vqp);
    /// # Ok::<(), kite::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`connect`](Self::connect).
    /// - [`Error::Invalid`](crate::Error::Invalid): also if `port` is 0, or the user namespace has no user `owner`.
    pub fn connect_to_owner(&self, node: u32, port: u32, owner: u32) -> Result<Vqp> {
        self.connect_raw(sys::kite_connect {
            node,
            port,
            flags: sys::KITE_CONNECT_OWNER,
            owner,
            ..Default::default()
        })
    }

    fn connect_raw(&self, mut raw: sys::kite_connect) -> Result<Vqp> {
        sys::connect(self.as_fd(), &mut raw)?;
        Ok(Vqp::from_id(self, raw.vqp))
    }
}

impl Vqp {
    fn from_id(cluster: &Cluster, id: u64) -> Self {
        let cluster = cluster.clone();
        Self { cluster, id }
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Pushes 1 … [`PUSH_BATCH_MAX`](crate::PUSH_BATCH_MAX) work requests: all of them, or none. They execute in order,
    /// but a write may overtake earlier reads and atomics unless it has a [`fence`](SendWr::fence).
    ///
    /// If a shared QP fails, reads and writes whose outcome is unknown are executed again: a write may overwrite a
    /// later write of another process.
    ///
    /// # Errors
    /// - [`Error::BadHandle`](crate::Error::BadHandle): the local memory is an [`Mr`] of another session.
    /// - [`Error::ConnectionRefused`](crate::Error::ConnectionRefused): the port has no listener.
    /// - [`Error::ConnectionReset`](crate::Error::ConnectionReset): the other end is closed, or a message failed.
    /// - [`Error::Denied`](crate::Error::Denied): the key does not allow the access.
    /// - [`Error::HostDown`](crate::Error::HostDown): the node is not in the view.
    /// - [`Error::Interrupted`](crate::Error::Interrupted): a signal handler ran.
    /// - [`Error::Invalid`](crate::Error::Invalid): an invalid work request, none or too many of them, or a message by
    ///   a VQP without a port.
    /// - [`Error::NotJoined`](crate::Error::NotJoined): this node is in no cluster.
    /// - [`Error::NotFound`](crate::Error::NotFound): the remote key does not exist.
    /// - [`Error::OutOfRange`](crate::Error::OutOfRange): an access outside its MR.
    /// - [`Error::QueueFull`](crate::Error::QueueFull): more than [`VQP_DEPTH`](crate::VQP_DEPTH) work requests would
    ///   be pending or not popped.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): a priority or limit delays the work requests for too long, or
    ///   the attributes of a remote key could not be read in time.
    pub fn push(&self, wrs: &[SendWr<'_>]) -> Result<()> {
        let wrs: Vec<_> = wrs.iter().map(SendWr::as_raw).collect();
        let mut raw = sys::kite_push {
            vqp: self.id,
            ..Default::default()
        };
        sys::push(self.cluster.as_fd(), &wrs, &mut raw)
    }

    /// Pops up to `max` completions in the order of their work requests. Waits for the first for at most `timeout`,
    /// or not at all without one.
    ///
    /// # Errors
    /// - [`Error::ConnectionRefused`](crate::Error::ConnectionRefused),
    ///   [`Error::ConnectionReset`](crate::Error::ConnectionReset), [`Error::HostDown`](crate::Error::HostDown),
    ///   [`Error::NotJoined`](crate::Error::NotJoined): the VQP is closed, and all its completions were popped.
    /// - [`Error::Interrupted`](crate::Error::Interrupted): a signal handler ran.
    /// - [`Error::Invalid`](crate::Error::Invalid): `max` is 0.
    /// - [`Error::NoRnic`](crate::Error::NoRnic): the RNIC was removed.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): there was none in time.
    /// - [`Error::WouldBlock`](crate::Error::WouldBlock): without a timeout, there is none.
    pub fn pop(&self, max: usize, timeout: Option<Duration>) -> Result<Vec<Completion>> {
        let mut completions = vec![sys::kite_cqe::default(); max];
        let (flags, timeout_ms) = wait_to_raw(timeout);
        let mut raw = sys::kite_pop {
            vqp: self.id,
            flags,
            timeout_ms,
            ..Default::default()
        };
        let popped = sys::pop(self.cluster.as_fd(), &mut completions, &mut raw)?;
        Ok(popped.iter().map(Completion::from_raw).collect())
    }

    /// Receives the first message to `len` bytes at `offset` of `local`. Waits for at most `timeout`, or not at all
    /// without one.
    ///
    /// # Errors
    /// - [`Error::ConnectionRefused`](crate::Error::ConnectionRefused): the port has no listener.
    /// - [`Error::ConnectionReset`](crate::Error::ConnectionReset): the other end is closed, and all its messages
    ///   were received.
    /// - [`Error::HostDown`](crate::Error::HostDown): the node is not in the view.
    /// - [`Error::Interrupted`](crate::Error::Interrupted): a signal handler ran.
    /// - [`Error::Invalid`](crate::Error::Invalid): the VQP has no port.
    /// - [`Error::MessageTooLong`](crate::Error::MessageTooLong): the message is longer than `len`. It stays queued.
    /// - [`Error::NoRnic`](crate::Error::NoRnic): the RNIC was removed.
    /// - [`Error::OutOfRange`](crate::Error::OutOfRange): the range is outside `local`.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): there was none in time.
    /// - [`Error::WouldBlock`](crate::Error::WouldBlock): without a timeout, there is none.
    pub fn receive(
        &self,
        local: &Mr,
        offset: usize,
        len: usize,
        timeout: Option<Duration>,
    ) -> Result<VqpMessage> {
        let (flags, timeout_ms) = wait_to_raw(timeout);
        let (key, addr) = local.key_and_addr(offset);
        let mut raw = sys::kite_pop_message {
            vqp: self.id,
            addr,
            key,
            len: u32::try_from(len).unwrap_or(u32::MAX),
            flags,
            timeout_ms,
            ..Default::default()
        };
        sys::pop_message(self.cluster.as_fd(), &mut raw)?;
        let has = |flag| raw.flags & flag != 0;
        Ok(VqpMessage {
            len: raw.len as usize,
            immediate: has(sys::KITE_RECV_FLAG_WITH_IMM).then_some(raw.immediate),
            is_placed: has(sys::KITE_RECV_FLAG_PLACED),
        })
    }
}

impl Drop for Vqp {
    fn drop(&mut self) {
        if !self.cluster.is_owner_process() {
            return;
        }
        // An error means that the RNIC, and the VQP with it, was removed.
        let _ = sys::close_vqp(
            self.cluster.as_fd(),
            &mut sys::kite_close_vqp { vqp: self.id },
        );
    }
}
