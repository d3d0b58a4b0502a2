// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests, and the addresses that peers exchange.

use serde::{Deserialize, Serialize};

use crate::raw::*;

/// One side of a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) qpn: u32,
    pub(crate) mtu: u32,
    /// The buffer.
    pub spot: Spot,
}

/// Memory of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spot {
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
}

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// To the other side.
    Write,
    /// From the other side.
    Read,
    /// Makes eight bytes of the other side `new` if they are `expected`; what they were comes back.
    CompareSwap {
        /// Comparand.
        expected: u64,
        /// New value.
        new: u64,
    },
    /// Adds to eight bytes of the other side; what they were comes back.
    FetchAdd {
        /// Addend.
        operand: u64,
    },
    /// To where the other side has posted that it receives; it has no [`Spot`].
    Send,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Operation.
    pub verb: Verb,
    /// The first byte of the buffer.
    pub at: usize,
    /// Bytes; 8 of atomic operations.
    pub len: usize,
    /// Memory of the other side, if the verb has any.
    pub spot: Spot,
    /// Requests a completion on success. A failed request always has a completion.
    pub signalled: bool,
}

impl Spot {
    /// So many bytes behind.
    pub fn plus(self, offset: usize) -> Self {
        Spot {
            addr: self.addr + offset as u64,
            ..self
        }
    }
}

impl Request {
    /// Creates a request for the first `len` bytes of the buffer, with a completion.
    pub(crate) fn whole(verb: Verb, spot: Spot, len: usize) -> Self {
        Self {
            verb,
            at: 0,
            len,
            spot,
            signalled: true,
        }
    }

    /// Fills in the request of libibverbs, which must be zero.
    pub(crate) fn fill(&self, raw: &mut ibv_send_wr, piece: *mut ibv_sge) {
        (raw.sg_list, raw.num_sge) = (piece, 1);
        raw.send_flags = if self.signalled { IBV_SEND_SIGNALED } else { 0 };
        let Spot { addr, rkey } = self.spot;
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
