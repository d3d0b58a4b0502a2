// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests, and the addresses that peers exchange.

use serde::{Deserialize, Serialize};

use crate::raw::*;

/// Address of a QP, and of its buffer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QpAddress {
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) qpn: u32,
    pub(crate) mtu: u32,
    /// Address and key of the buffer.
    pub remote_addr: RemoteAddr,
}

/// Address and key of memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RemoteAddr {
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
}

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// Atomic compare-and-swap of 8 remote bytes. The previous value is written to the buffer.
    CompareSwap {
        /// Comparand.
        expected: u64,
        /// New value.
        new: u64,
    },
    /// Atomic fetch-and-add of 8 remote bytes. The previous value is written to the buffer.
    FetchAdd {
        /// Addend.
        operand: u64,
    },
    /// SEND to a receive of the peer. The remote address is ignored.
    Send,
}

/// Work request of a send queue.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Operation.
    pub verb: Verb,
    /// Offset in the buffer.
    pub offset: usize,
    /// Number of bytes: 8 for atomic operations.
    pub len: usize,
    /// Memory of the peer, unless the verb is a SEND.
    pub remote_addr: RemoteAddr,
    /// Requests a completion on success. A failed request always has a completion.
    pub signaled: bool,
}

impl RemoteAddr {
    /// Returns the address `offset` bytes further.
    pub fn offset_by(self, offset: usize) -> Self {
        RemoteAddr {
            addr: self.addr + offset as u64,
            ..self
        }
    }
}

impl Request {
    /// Creates a request for the first `len` bytes of the buffer, with a completion.
    pub(crate) fn from_start(verb: Verb, remote_addr: RemoteAddr, len: usize) -> Self {
        Self {
            verb,
            offset: 0,
            len,
            remote_addr,
            signaled: true,
        }
    }

    /// Fills in the request of libibverbs, which must be zero.
    pub(crate) fn fill(&self, raw: &mut ibv_send_wr, sge: *mut ibv_sge) {
        (raw.sg_list, raw.num_sge) = (sge, 1);
        raw.send_flags = if self.signaled { IBV_SEND_SIGNALED } else { 0 };
        let RemoteAddr { addr, rkey } = self.remote_addr;
        let (opcode, operands) = match self.verb {
            Verb::Send => (IBV_WR_SEND, None),
            Verb::Write => (IBV_WR_RDMA_WRITE, None),
            Verb::Read => (IBV_WR_RDMA_READ, None),
            Verb::CompareSwap { expected, new } => {
                (IBV_WR_ATOMIC_CMP_AND_SWP, Some((expected, new)))
            }
            Verb::FetchAdd { operand } => (IBV_WR_ATOMIC_FETCH_AND_ADD, Some((operand, 0))),
        };
        raw.opcode = opcode;
        match operands {
            None => (raw.wr.rdma.remote_addr, raw.wr.rdma.rkey) = (addr, rkey),
            Some((compare_add, swap)) => {
                (raw.wr.atomic.remote_addr, raw.wr.atomic.rkey) = (addr, rkey);
                (raw.wr.atomic.compare_add, raw.wr.atomic.swap) = (compare_add, swap);
            }
        }
    }
}
