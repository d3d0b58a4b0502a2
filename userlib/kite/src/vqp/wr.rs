// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Work requests of virtual queue pairs.

use super::mr::{Mr, RemoteMemory};
use crate::sys;

/// Operation of a work request.
///
/// # Examples
/// ```
/// let increment = kite::WrOp::FetchAdd { operand: 1 };
/// assert_ne!(increment, kite::WrOp::Read);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Copies remote memory to local memory.
    Read,
    /// Copies local memory to remote memory.
    Write,
    /// Replaces the remote 8-byte word by `new` if it is `expected`. Local memory receives the previous value.
    CompareSwap {
        /// Comparand.
        expected: u64,
        /// New value.
        new: u64,
    },
    /// Adds to the remote 8-byte word. Local memory receives the previous value.
    FetchAdd {
        /// Addend.
        operand: u64,
    },
    /// Sends local memory as a message to the other end. There is no remote memory.
    Send,
}

/// Work request.
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// # let local = cluster.reg_mr(kite::Buffer::new(4096)?, kite::Rights::empty())?;
/// # let vqp = cluster.connect_to(2, 7)?;
/// use kite::{RemoteMemory, SendWr, WrOp};
///
/// let message = SendWr {
///     tag: 1,
///     op: WrOp::Send,
///     local: &local,
///     local_offset: 0,
///     len: 5,
///     remote: RemoteMemory::default(),
///     remote_offset: 0,
///     immediate: Some(42),
///     signaled: true,
///     fence: false,
/// };
/// vqp.push(&[message])?;
/// vqp.pop(1, Some(std::time::Duration::from_secs(10)))?[0].result?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Copied to the completion.
    pub tag: u64,
    /// Operation.
    pub op: WrOp,
    /// Local memory.
    pub local: &'a Mr,
    /// Offset of the first byte in the local memory.
    pub local_offset: usize,
    /// Bytes, at least 1; 8 for atomic operations.
    pub len: usize,
    /// Remote memory.
    pub remote: RemoteMemory,
    /// Offset of the first byte in the remote memory.
    pub remote_offset: u64,
    /// Immediate data of a message. A write with immediate data is followed by a message without bytes.
    pub immediate: Option<u32>,
    /// Requests a completion on success. A failed work request always has a completion.
    pub signaled: bool,
    /// Starts the work request after all earlier reads and atomic operations have completed. Without the fence a
    /// write may overtake them.
    pub fence: bool,
}

impl SendWr<'_> {
    pub(crate) fn as_raw(&self) -> sys::kite_send_wr {
        let (op, operand, expected) = match self.op {
            WrOp::Read => (sys::KITE_WR_OP_READ, 0, 0),
            WrOp::Write => (sys::KITE_WR_OP_WRITE, 0, 0),
            WrOp::CompareSwap { expected, new } => (sys::KITE_WR_OP_COMPARE_SWAP, new, expected),
            WrOp::FetchAdd { operand } => (sys::KITE_WR_OP_FETCH_ADD, operand, 0),
            WrOp::Send => (sys::KITE_WR_OP_SEND, 0, 0),
        };
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let flags = flag(self.signaled, sys::KITE_WR_FLAG_SIGNALED)
            | flag(self.fence, sys::KITE_WR_FLAG_FENCE)
            | flag(self.immediate.is_some(), sys::KITE_WR_FLAG_WITH_IMM);
        let (key, addr) = self.local.key_and_addr(self.local_offset);
        // The kernel rejects a length or an address that does not fit its type, as out of range.
        sys::kite_send_wr {
            tag: self.tag,
            addr,
            remote_addr: self.remote.addr.saturating_add(self.remote_offset),
            operand: self.immediate.map_or(operand, u64::from),
            expected,
            len: u32::try_from(self.len).unwrap_or(u32::MAX),
            key,
            remote_key: self.remote.rkey,
            op: op as u16,
            flags: flags as u16,
        }
    }
}
