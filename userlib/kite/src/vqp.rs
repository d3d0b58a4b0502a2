// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs: verbs to a node, without a connection to wait for.

use std::os::fd::AsFd;
use std::time::Duration;

use crate::cluster::Cluster;
use crate::error::Result;
use crate::memory::Buffer;
use crate::queue::Completion;
use crate::region::wait_to_raw;
use crate::rights::Rights;
use crate::sys;

/// Memory that requests of virtual queue pairs name, here and on other nodes. It is taken back when this is dropped.
#[derive(Debug)]
pub struct Mr {
    cluster: Cluster,
    buffer: Buffer,
    key: u32,
}

/// Memory of another node, as its owner has told it; the default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of its first byte, at its owner.
    pub addr: u64,
    /// Its key.
    pub rkey: u32,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Copies from the remote memory to the local.
    Read,
    /// Copies from the local memory to the remote.
    Write,
    /// If the remote 8 bytes are `expected`, they become `new`. What they were goes to the local memory.
    CompareSwap {
        /// What to compare with.
        expected: u64,
        /// What to put there.
        new: u64,
    },
    /// Adds to the remote 8 bytes. What they were goes to the local memory.
    FetchAdd {
        /// What to add.
        operand: u64,
    },
    /// Sends the local memory as a message to whoever has the other end. There is no remote memory.
    Send,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Its completion has it.
    pub tag: u64,
    /// What it does.
    pub op: WrOp,
    /// Local memory.
    pub local: &'a Mr,
    /// The first byte there.
    pub local_offset: usize,
    /// Bytes, at least 1; 8 of atomic operations.
    pub len: usize,
    /// Remote memory.
    pub remote: RemoteMemory,
    /// The first byte there.
    pub remote_offset: u64,
    /// Of a message, what is said besides. A write of which something is said is followed by a message without bytes.
    pub immediate: Option<u32>,
    /// Whether it has a completion when it succeeds. When it fails it has one anyway.
    pub signaled: bool,
    /// Whether it begins only when all reads and atomic operations before it have ended, which a write may overtake.
    pub fence: bool,
}

/// A virtual queue pair: a program's own queue to a node, over queue pairs of the RNIC that all programs share.
///
/// To make one costs a look into a table, or the first time one READ, since nothing is connected for it. What is pushed is done in its order, and
/// what goes wrong with it harms nobody else. [`Cluster`]'s descriptor is readable while there is something to pop.
///
/// ```no_run
/// # fn main() -> kite::Result<()> {
/// # let cluster = kite::Cluster::open()?;
/// # let remote = kite::RemoteMemory { addr: 0, rkey: 0 };
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
/// let done = vqp.pop(1, Some(std::time::Duration::from_secs(1)))?;
/// done[0].result?;
/// # Ok(())
/// # }
/// ```
///
/// One that is connected to a port has another end there, when somebody accepts it, and both may send messages.
///
/// [`IoQueue::push`](crate::IoQueue::push) is the way without a system call for each push and pop.
#[derive(Debug)]
pub struct Vqp {
    cluster: Cluster,
    id: u64,
}

/// Listens at a port of this node for virtual queue pairs, until it is dropped.
#[derive(Debug)]
pub struct Listener {
    cluster: Cluster,
    id: u64,
}

/// A virtual queue pair of a process, and what it has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct VqpInfo {
    /// The other node.
    pub node: u32,
    /// The port there that it is to, or here that it came to; 0 for none.
    pub port: u32,
    /// Whose it is.
    pub uid: u32,
    /// The process that made or accepted it.
    pub pid: u32,
    /// Whether its requests go by a connection, and not by DC.
    pub uses_rc: bool,
    /// Whether nothing more can be pushed to it.
    pub closed: bool,
    /// Whether a message is there to be received.
    pub readable: bool,
    /// Requests of which nobody knows yet what became of them.
    pub pending: u32,
    /// Requests that were pushed.
    pub requests: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Messages that were received.
    pub messages: u64,
}

impl From<&sys::kite_vqp_info> for VqpInfo {
    fn from(raw: &sys::kite_vqp_info) -> Self {
        let has = |flag| raw.flags & flag != 0;
        Self {
            node: raw.node,
            port: raw.port,
            uid: raw.uid,
            pid: raw.pid,
            uses_rc: has(sys::KITE_VQP_STATE_RC),
            closed: has(sys::KITE_VQP_STATE_CLOSED),
            readable: has(sys::KITE_VQP_STATE_READABLE),
            pending: raw.pending,
            requests: raw.requests,
            bytes: raw.bytes,
            messages: raw.messages,
        }
    }
}

/// Who connected to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCred {
    /// The node.
    pub node: u32,
    /// The user there.
    pub uid: u32,
}

/// A message that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VqpMessage {
    /// Its bytes.
    pub len: usize,
    /// What was said besides.
    pub immediate: Option<u32>,
    /// The bytes are not where they were wanted: they were written before, to where the sender chose.
    pub is_placed: bool,
}

impl Cluster {
    /// Registers memory of this program for virtual queue pairs; `others` is what users other than this one and root
    /// may do with it who know its key: read it, write it, or both, which allows atomic operations, too.
    ///
    /// The memory is pinned, until some seconds after it was taken back, and counts against what the user may lock.
    ///
    /// # Errors
    /// [`Error::Fault`](crate::Error::Fault), [`Error::Invalid`](crate::Error::Invalid),
    /// [`Error::NotSupportedByRnic`](crate::Error::NotSupportedByRnic) (the RNIC has no keys to so much),
    /// [`Error::NotJoined`](crate::Error::NotJoined), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn reg_mr(&self, memory: Buffer, other_rights: Rights) -> Result<Mr> {
        let mut raw = sys::kite_reg_mr {
            other_rights: other_rights.bits(),
            ..Default::default()
        };
        sys::reg_mr(self.as_fd(), memory.mapping(), &mut raw)?;
        Ok(Mr {
            cluster: self.clone(),
            buffer: memory,
            key: raw.key,
        })
    }

    /// Makes a virtual queue pair to a node, which hears nothing of it.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) (the session has [`VQPS_MAX`](crate::VQPS_MAX)),
    /// [`Error::HostDown`](crate::Error::HostDown), [`Error::Interrupted`](crate::Error::Interrupted),
    /// [`Error::Invalid`](crate::Error::Invalid) (this node, without DC),
    /// [`Error::NotJoined`](crate::Error::NotJoined), [`Error::TimedOut`](crate::Error::TimedOut).
    pub fn connect(&self, node: u32) -> Result<Vqp> {
        self.connect_to(node, 0)
    }

    /// As [`Self::connect`], to whoever listens at a port there. That it is so the first message will find out.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    pub fn connect_to(&self, node: u32, port: u32) -> Result<Vqp> {
        let mut raw = sys::kite_connect {
            node,
            port,
            ..Default::default()
        };
        sys::connect(self.as_fd(), &mut raw)?;
        Ok(self.vqp_from_id(raw.vqp))
    }

    /// The virtual queue pairs of the caller's user on this node, to root those of all.
    ///
    /// # Errors
    /// [`Error::NoRnic`](crate::Error::NoRnic).
    pub fn vqps(&self) -> Result<Vec<VqpInfo>> {
        let mut raw = vec![sys::kite_vqp_info::default(); 16];
        loop {
            let count = sys::list_vqps(self.as_fd(), &mut raw)?;
            if count <= raw.len() {
                return Ok(raw[..count].iter().map(VqpInfo::from).collect());
            }
            raw.resize(count, Default::default());
        }
    }

    /// Listens at a port, which is not 0, for those who connect to it.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) (the session has [`VQPS_MAX`](crate::VQPS_MAX)),
    /// [`Error::Invalid`](crate::Error::Invalid), [`Error::NotJoined`](crate::Error::NotJoined),
    /// [`Error::PortInUse`](crate::Error::PortInUse).
    pub fn listen(&self, port: u32) -> Result<Listener> {
        let mut raw = sys::kite_listen {
            port,
            ..Default::default()
        };
        sys::listen(self.as_fd(), &mut raw)?;
        Ok(Listener {
            cluster: self.clone(),
            id: raw.listener,
        })
    }

    fn vqp_from_id(&self, id: u64) -> Vqp {
        Vqp {
            cluster: self.clone(),
            id,
        }
    }
}

impl Listener {
    /// Takes a queue pair that somebody has connected here and sent a message by; waits for so long if there is none,
    /// or not at all. [`Cluster`]'s descriptor is readable while there is one.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) (the session has [`VQPS_MAX`](crate::VQPS_MAX)),
    /// [`Error::WouldBlock`](crate::Error::WouldBlock), [`Error::TimedOut`](crate::Error::TimedOut),
    /// [`Error::Interrupted`](crate::Error::Interrupted), [`Error::NoRnic`](crate::Error::NoRnic).
    pub fn accept(&self, timeout: Option<Duration>) -> Result<(Vqp, PeerCred)> {
        let (flags, timeout_ms) = wait_to_raw(timeout);
        let mut raw = sys::kite_accept {
            listener: self.id,
            flags,
            timeout_ms,
            ..Default::default()
        };
        sys::accept(self.cluster.as_fd(), &mut raw)?;
        let peer = PeerCred {
            node: raw.node,
            uid: raw.uid,
        };
        Ok((self.cluster.vqp_from_id(raw.vqp), peer))
    }
}

impl Mr {
    /// The memory, to be copied in and out.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// What to tell other nodes of it.
    pub fn remote_memory(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.buffer.as_ptr() as u64,
            rkey: self.key,
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if !self.cluster.is_owner_process() {
            return;
        }
        let mut raw = sys::kite_dereg_mr {
            key: self.key,
            ..Default::default()
        };
        // What the RNIC took along is gone already.
        let _ = sys::dereg_mr(self.cluster.as_fd(), &mut raw);
    }
}

impl SendWr<'_> {
    pub(crate) fn as_raw(&self) -> sys::kite_send_wr {
        let (op, operand, expected) = match self.op {
            WrOp::Read => (sys::KITE_WR_READ, 0, 0),
            WrOp::Write => (sys::KITE_WR_WRITE, 0, 0),
            WrOp::CompareSwap { expected, new } => (sys::KITE_WR_COMPARE_SWAP, new, expected),
            WrOp::FetchAdd { operand } => (sys::KITE_WR_FETCH_ADD, operand, 0),
            WrOp::Send => (sys::KITE_WR_SEND, 0, 0),
        };
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let flags = flag(self.signaled, sys::KITE_WR_SIGNALED)
            | flag(self.fence, sys::KITE_WR_FENCE)
            | flag(self.immediate.is_some(), sys::KITE_WR_WITH_IMM);
        let operand = self.immediate.map_or(operand, u64::from);
        // What does not fit is out of range anyway.
        sys::kite_send_wr {
            tag: self.tag,
            addr: (self.local.buffer.as_ptr() as u64).saturating_add(self.local_offset as u64),
            remote_addr: self.remote.addr.saturating_add(self.remote_offset),
            operand,
            expected,
            len: u32::try_from(self.len).unwrap_or(u32::MAX),
            key: self.local.key,
            remote_key: self.remote.rkey,
            op: op as u16,
            flags: flags as u16,
        }
    }
}

impl Vqp {
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Adds requests, at most [`PUSH_BATCH_MAX`](crate::PUSH_BATCH_MAX), all or none. They are done in their order.
    ///
    /// # Errors
    /// [`Error::Denied`](crate::Error::Denied), [`Error::HostDown`](crate::Error::HostDown),
    /// [`Error::Interrupted`](crate::Error::Interrupted) (none was added),
    /// [`Error::Invalid`](crate::Error::Invalid) (also for a message by one that is to no port),
    /// [`Error::ConnectionRefused`](crate::Error::ConnectionRefused), [`Error::ConnectionReset`](crate::Error::ConnectionReset),
    /// [`Error::NotFound`](crate::Error::NotFound) (no such remote key),
    /// [`Error::OutOfRange`](crate::Error::OutOfRange),
    /// [`Error::QueueFull`](crate::Error::QueueFull) (more than [`VQP_DEPTH`](crate::VQP_DEPTH) would not be popped),
    /// [`Error::TimedOut`](crate::Error::TimedOut).
    pub fn push(&self, wrs: &[SendWr<'_>]) -> Result<()> {
        let wrs: Vec<_> = wrs.iter().map(SendWr::as_raw).collect();
        let mut raw = sys::kite_push {
            vqp: self.id,
            ..Default::default()
        };
        sys::push(self.cluster.as_fd(), &wrs, &mut raw)
    }

    /// Takes completions, at most so many, in the order of their requests; waits for so long if there is none, or
    /// not at all.
    ///
    /// # Errors
    /// [`Error::WouldBlock`](crate::Error::WouldBlock) if there is none, [`Error::TimedOut`](crate::Error::TimedOut),
    /// [`Error::Interrupted`](crate::Error::Interrupted), [`Error::NoRnic`](crate::Error::NoRnic).
    pub fn pop(&self, max: usize, timeout: Option<Duration>) -> Result<Vec<Completion>> {
        let mut completions = vec![sys::kite_cqe::default(); max];
        let (flags, timeout_ms) = wait_to_raw(timeout);
        let mut raw = sys::kite_pop {
            vqp: self.id,
            flags,
            timeout_ms,
            ..Default::default()
        };
        let reaped = sys::pop(self.cluster.as_fd(), &mut completions, &mut raw)?;
        Ok(reaped.iter().map(Completion::from_raw).collect())
    }
}

impl Vqp {
    /// Takes the first message to `len` bytes of memory from `at` on; waits for so long if there is none, or not at
    /// all. [`Cluster`]'s descriptor is readable while there is one.
    ///
    /// # Errors
    /// [`Error::WouldBlock`](crate::Error::WouldBlock), [`Error::TimedOut`](crate::Error::TimedOut),
    /// [`Error::MessageTooLong`](crate::Error::MessageTooLong) (it stays the first), [`Error::OutOfRange`](crate::Error::OutOfRange),
    /// [`Error::ConnectionRefused`](crate::Error::ConnectionRefused), [`Error::ConnectionReset`](crate::Error::ConnectionReset) (after the last
    /// message), [`Error::HostDown`](crate::Error::HostDown), [`Error::Invalid`](crate::Error::Invalid) (it is to no
    /// port), [`Error::Interrupted`](crate::Error::Interrupted), [`Error::NoRnic`](crate::Error::NoRnic).
    pub fn receive(
        &self,
        local: &Mr,
        offset: usize,
        len: usize,
        timeout: Option<Duration>,
    ) -> Result<VqpMessage> {
        let (flags, timeout_ms) = wait_to_raw(timeout);
        let mut raw = sys::kite_pop_message {
            vqp: self.id,
            addr: (local.buffer.as_ptr() as u64).saturating_add(offset as u64),
            key: local.key,
            len: u32::try_from(len).unwrap_or(u32::MAX),
            flags,
            timeout_ms,
            ..Default::default()
        };
        sys::pop_message(self.cluster.as_fd(), &mut raw)?;
        let has = |flag| raw.flags & flag != 0;
        Ok(VqpMessage {
            len: raw.len as usize,
            immediate: has(sys::KITE_WR_WITH_IMM).then_some(raw.immediate),
            is_placed: has(sys::KITE_RECV_PLACED),
        })
    }
}

fn close_handle(cluster: &Cluster, id: u64) {
    if !cluster.is_owner_process() {
        return;
    }
    // What the RNIC took along is gone already.
    let _ = sys::close_vqp(cluster.as_fd(), &mut sys::kite_close_vqp { vqp: id });
}

impl Drop for Vqp {
    fn drop(&mut self) {
        close_handle(&self.cluster, self.id);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        close_handle(&self.cluster, self.id);
    }
}
