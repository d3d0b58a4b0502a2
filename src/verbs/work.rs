// SPDX-License-Identifier: GPL-2.0

//! Work requests, in the format of the RDMA core.
//!
//! # Operation
//!
//! [`RdmaOp`] describes an operation of any transport. [`SendWr`] borrows its scatter-gather entries.
//! [`OwnedSendWr`] owns them, so that several requests can be linked into one chain. [`UdSendWr`] is a
//! datagram.

use super::address::AddressHandle;
use crate::bindings;
use core::marker::PhantomData;
use kernel::prelude::*;

/// Maximum scatter-gather entries of kite's requests.
pub(crate) const MAX_SGE: usize = 16;

/// Maximum inline WRITE, in bytes. QPs are created with space for it.
pub(crate) const MAX_INLINE_BYTES: usize = 128;

/// Scatter-gather entry: range of local memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Sge(bindings::ib_sge);

impl Sge {
    /// Creates an entry for `len` bytes at `addr` with key `lkey`.
    pub(crate) fn new(addr: u64, len: u32, lkey: u32) -> Self {
        Self(bindings::ib_sge {
            addr,
            length: len,
            lkey,
        })
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u32 {
        self.0.length
    }

    /// Splits the entry after `len` bytes. The second part is `None` if the entry is not longer.
    pub(crate) fn split_at(self, len: usize) -> (Self, Option<Self>) {
        let bindings::ib_sge { addr, length, lkey } = self.0;
        match u32::try_from(len) {
            Ok(len) if len < length => (
                Self::new(addr, len, lkey),
                Some(Self::new(addr + u64::from(len), length - len, lkey)),
            ),
            _ => (self, None),
        }
    }
}

/// Remote address of an RDMA request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteAddr {
    /// Address in the peer's global memory region.
    pub(crate) addr: u64,
    /// Remote key of that region.
    pub(crate) rkey: u32,
}

/// Operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RdmaOpcode {
    Read,
    Write,
    /// WRITE whose bytes are copied at posting time. The entries have kernel virtual addresses, and need no
    /// key.
    WriteInline,
    /// WRITE after which the peer receives `imm_data`, which consumes a receive buffer.
    WriteWithImm {
        imm_data: u32,
    },
    /// Replaces 8 bytes of the peer's memory by `new` if they equal `expected`. Stores the old value in local
    /// memory.
    CompareSwap {
        expected: u64,
        new: u64,
    },
    /// Adds `operand` to 8 bytes of the peer's memory. Stores the old value in local memory.
    FetchAdd {
        operand: u64,
    },
    /// SEND to a receive buffer that the peer has posted.
    Send,
}

impl RdmaOpcode {
    /// Returns `true` for an atomic read-modify-write.
    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Returns the verbs opcode.
    pub(crate) fn ib_opcode(self) -> bindings::ib_wr_opcode {
        match self {
            Self::Read => bindings::ib_wr_opcode_IB_WR_RDMA_READ,
            Self::Write | Self::WriteInline => bindings::ib_wr_opcode_IB_WR_RDMA_WRITE,
            Self::WriteWithImm { .. } => bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM,
            Self::CompareSwap { .. } => bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
            Self::FetchAdd { .. } => bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD,
            Self::Send => bindings::ib_wr_opcode_IB_WR_SEND,
        }
    }

    /// Returns the immediate data in network byte order, or 0 for an operation without.
    pub(crate) fn imm_data(self) -> u32 {
        match self {
            Self::WriteWithImm { imm_data } => imm_data.to_be(),
            _ => 0,
        }
    }

    /// Returns the compare value, and the value to swap in or to add.
    pub(crate) fn atomic_operands(self) -> (u64, u64) {
        match self {
            Self::CompareSwap { expected, new } => (expected, new),
            Self::FetchAdd { operand } => (0, operand),
            _ => (0, 0),
        }
    }
}

/// Work request of any transport. [`SendWr`], [`OwnedSendWr`] and [`crate::mlx5::wr::Mlx5SendWr`] encode it.
#[derive(Clone, Copy)]
pub(crate) struct RdmaOp<'a> {
    pub(crate) opcode: RdmaOpcode,
    /// Local memory.
    pub(crate) sges: &'a [Sge],
    pub(crate) remote: RemoteAddr,
    /// Set if the operation must not start before all earlier READs and atomics have completed.
    pub(crate) fence: bool,
}

impl RdmaOp<'_> {
    /// Returns the verbs flags. All requests are signaled.
    pub(crate) fn send_flags(&self) -> bindings::ib_send_flags {
        let mut flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        if self.opcode == RdmaOpcode::WriteInline {
            flags |= bindings::ib_send_flags_IB_SEND_INLINE;
        }
        if self.fence {
            flags |= bindings::ib_send_flags_IB_SEND_FENCE;
        }
        flags
    }
}

/// Maximum entries of an [`OwnedSendWr`].
pub(crate) const OWNED_WR_MAX_SGE: usize = 4;

/// Request in the format of the RDMA core, always signaled. All kinds begin with the same structure.
enum RawWr {
    Rdma(bindings::ib_rdma_wr),
    Atomic(bindings::ib_atomic_wr),
}

impl RawWr {
    /// Encodes `op` without its entries.
    fn new(op: &RdmaOp<'_>, wr_id: u64) -> Self {
        let mut wr: bindings::ib_send_wr = pin_init::zeroed();
        wr.__bindgen_anon_1.wr_id = wr_id;
        wr.opcode = op.opcode.ib_opcode();
        wr.send_flags = op.send_flags() as c_int;
        wr.ex.imm_data = op.opcode.imm_data();
        if op.opcode.is_atomic() {
            return Self::Atomic(atomic_wr(wr, op.opcode.atomic_operands(), op.remote));
        }
        Self::Rdma(bindings::ib_rdma_wr {
            wr,
            remote_addr: op.remote.addr,
            rkey: op.remote.rkey,
        })
    }

    fn wr(&self) -> &bindings::ib_send_wr {
        match self {
            Self::Rdma(raw) => &raw.wr,
            Self::Atomic(raw) => &raw.wr,
        }
    }

    fn wr_mut(&mut self) -> &mut bindings::ib_send_wr {
        match self {
            Self::Rdma(raw) => &mut raw.wr,
            Self::Atomic(raw) => &mut raw.wr,
        }
    }
}

/// Request that borrows its entries.
pub(crate) struct SendWr<'a> {
    raw: RawWr,
    _sges: PhantomData<&'a [Sge]>,
}

impl<'a> SendWr<'a> {
    /// Encodes `op`.
    pub(crate) fn new(op: &RdmaOp<'a>, wr_id: u64) -> Self {
        let mut raw = RawWr::new(op, wr_id);
        let wr = raw.wr_mut();
        wr.sg_list = op.sges.as_ptr().cast_mut().cast();
        wr.num_sge = op.sges.len() as c_int;
        Self {
            raw,
            _sges: PhantomData,
        }
    }

    pub(super) fn as_raw(&self) -> *const bindings::ib_send_wr {
        self.raw.wr()
    }
}

/// Request that owns its entries, so that several can be posted in one chain.
pub(crate) struct OwnedSendWr {
    raw: RawWr,
    sges: [Sge; OWNED_WR_MAX_SGE],
}

// SAFETY: Before posting, all pointers are null or dangling and not used. At posting, they point to the
// request itself and to the next one in the chain.
unsafe impl Send for OwnedSendWr {}

impl OwnedSendWr {
    /// Encodes `op`. Entries beyond [`OWNED_WR_MAX_SGE`] are ignored.
    pub(crate) fn new(op: &RdmaOp<'_>, wr_id: u64) -> Self {
        let mut raw = RawWr::new(op, wr_id);
        let mut sges = [Sge::new(0, 0, 0); OWNED_WR_MAX_SGE];
        for (sge, entry) in sges.iter_mut().zip(op.sges) {
            *sge = *entry;
            raw.wr_mut().num_sge += 1;
        }
        Self { raw, sges }
    }

    /// Returns the ID of the request.
    pub(crate) fn wr_id(&self) -> u64 {
        // SAFETY: `new` has initialized this union with a number.
        unsafe { self.raw.wr().__bindgen_anon_1.wr_id }
    }

    pub(super) fn as_raw(&self) -> *const bindings::ib_send_wr {
        self.raw.wr()
    }

    /// Links requests into a chain and returns its first element. The chain is valid while the requests are
    /// neither moved nor changed.
    pub(super) fn link_chain(wrs: &mut [Self]) -> *const bindings::ib_send_wr {
        let mut next = core::ptr::null_mut();
        for owned in wrs.iter_mut().rev() {
            let wr = owned.raw.wr_mut();
            wr.sg_list = owned.sges.as_mut_ptr().cast();
            wr.next = next;
            next = wr;
        }
        next
    }
}

fn atomic_wr(
    wr: bindings::ib_send_wr,
    (compare, value): (u64, u64),
    remote: RemoteAddr,
) -> bindings::ib_atomic_wr {
    let is_fetch_add = wr.opcode == bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD;
    bindings::ib_atomic_wr {
        wr,
        remote_addr: remote.addr,
        compare_add: if is_fetch_add { value } else { compare },
        swap: if is_fetch_add { 0 } else { value },
        rkey: remote.rkey,
        ..pin_init::zeroed()
    }
}

/// Datagram.
pub(crate) struct UdSendWr<'a> {
    raw: bindings::ib_ud_wr,
    _borrows: PhantomData<(&'a [Sge], &'a AddressHandle)>,
}

impl<'a> UdSendWr<'a> {
    /// Creates a datagram to QP `qpn` at `ah`. `qkey` must be the queue key of the QP.
    pub(crate) fn new(
        wr_id: u64,
        sges: &'a [Sge],
        ah: &'a AddressHandle,
        qpn: u32,
        qkey: u32,
    ) -> Self {
        let mut raw: bindings::ib_ud_wr = pin_init::zeroed();
        raw.wr.__bindgen_anon_1.wr_id = wr_id;
        raw.wr.opcode = bindings::ib_wr_opcode_IB_WR_SEND;
        raw.wr.sg_list = sges.as_ptr().cast_mut().cast();
        raw.wr.num_sge = sges.len() as c_int;
        raw.wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
        raw.ah = ah.as_raw();
        raw.remote_qpn = qpn;
        raw.remote_qkey = qkey;
        Self {
            raw,
            _borrows: PhantomData,
        }
    }

    pub(super) fn as_raw(&self) -> *const bindings::ib_send_wr {
        &self.raw.wr
    }
}
