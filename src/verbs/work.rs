// SPDX-License-Identifier: GPL-2.0

//! Work requests: what is posted to a queue pair.

use super::address::AddressHandle;
use crate::bindings;
use core::marker::PhantomData;
use kernel::prelude::*;

/// Most scatter-gather entries of a request of ours.
pub(crate) const MAX_SGE: usize = 16;

/// Longest write that is copied into the request itself, in bytes. Queue pairs are made with room for it.
pub(crate) const MAX_INLINE_BYTES: usize = 128;

/// A range of local memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Sge(bindings::ib_sge);

impl Sge {
    /// Names `len` bytes at `addr` by `key`.
    pub(crate) fn new(addr: u64, len: u32, lkey: u32) -> Self {
        Self(bindings::ib_sge {
            addr,
            length: len,
            lkey,
        })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u32 {
        self.0.length
    }

    /// The first `len` bytes, and what is left, if anything.
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

/// Where an RDMA request goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteAddr {
    /// Address in the peer's global memory region.
    pub(crate) addr: u64,
    /// Its key.
    pub(crate) rkey: u32,
}

/// A send request on a connected queue pair, always signalled.
pub(crate) struct SendWr<'a> {
    raw: bindings::ib_rdma_wr,
    _sges: PhantomData<&'a [Sge]>,
}

impl<'a> SendWr<'a> {
    fn new(
        opcode: bindings::ib_wr_opcode,
        wr_id: u64,
        sges: &'a [Sge],
        remote: RemoteAddr,
    ) -> Self {
        let mut raw: bindings::ib_rdma_wr = pin_init::zeroed();
        raw.wr.__bindgen_anon_1.wr_id = wr_id;
        raw.wr.opcode = opcode;
        raw.wr.sg_list = sges.as_ptr().cast_mut().cast();
        raw.wr.num_sge = sges.len() as c_int;
        raw.wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
        raw.remote_addr = remote.addr;
        raw.rkey = remote.rkey;
        Self {
            raw,
            _sges: PhantomData,
        }
    }

    /// Writes local memory to the peer.
    pub(crate) fn write(wr_id: u64, sges: &'a [Sge], remote: RemoteAddr) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, wr_id, sges, remote)
    }

    /// As [`Self::write`], of which the peer hears: it gets `immediate`, and takes a receive for it.
    pub(crate) fn write_with_imm(
        wr_id: u64,
        sges: &'a [Sge],
        remote: RemoteAddr,
        imm_data: u32,
    ) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM;
        let mut wr = Self::new(opcode, wr_id, sges, remote);
        wr.raw.wr.ex.imm_data = imm_data.to_be();
        wr
    }

    /// Copies the bytes into the request when it is posted: the entries have kernel addresses, not those
    /// of the RNIC, and need no key.
    pub(crate) fn with_inline(mut self) -> Self {
        self.raw.wr.send_flags |= bindings::ib_send_flags_IB_SEND_INLINE as c_int;
        self
    }

    /// Reads the peer's memory.
    pub(crate) fn read(wr_id: u64, sges: &'a [Sge], remote: RemoteAddr) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_RDMA_READ, wr_id, sges, remote)
    }

    /// Sends a message to a buffer that the peer has posted.
    pub(crate) fn send(wr_id: u64, sges: &'a [Sge]) -> Self {
        Self::new(
            bindings::ib_wr_opcode_IB_WR_SEND,
            wr_id,
            sges,
            RemoteAddr { addr: 0, rkey: 0 },
        )
    }

    pub(super) fn as_raw(&self) -> *const bindings::ib_send_wr {
        &self.raw.wr
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RdmaOpcode {
    Read,
    Write,
    /// As [`SendWork::inline`].
    WriteInline,
    /// Puts `new` where `expected` is, in 8 bytes of the peer's memory, and what was there in local memory.
    CompareSwap {
        expected: u64,
        new: u64,
    },
    /// Adds to 8 bytes of the peer's memory, and puts what was there in local memory.
    FetchAdd {
        operand: u64,
    },
    Send,
}

impl RdmaOpcode {
    /// Whether it is read, changed and written at once.
    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Its operation code.
    pub(crate) fn ib_opcode(self) -> bindings::ib_wr_opcode {
        match self {
            Self::Read => bindings::ib_wr_opcode_IB_WR_RDMA_READ,
            Self::Write | Self::WriteInline => bindings::ib_wr_opcode_IB_WR_RDMA_WRITE,
            Self::CompareSwap { .. } => bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
            Self::FetchAdd { .. } => bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD,
            Self::Send => bindings::ib_wr_opcode_IB_WR_SEND,
        }
    }

    /// What to compare with, and what to put there or to add.
    pub(crate) fn atomic_operands(self) -> (u64, u64) {
        match self {
            Self::CompareSwap { expected, new } => (expected, new),
            Self::FetchAdd { operand } => (0, operand),
            _ => (0, 0),
        }
    }
}

/// A request, whatever carries it.
#[derive(Clone, Copy)]
pub(crate) struct RdmaOp<'a> {
    pub(crate) opcode: RdmaOpcode,
    /// Local memory.
    pub(crate) sges: &'a [Sge],
    pub(crate) remote: RemoteAddr,
    /// It begins only when all reads and atomic operations that were posted before have ended.
    pub(crate) fence: bool,
}

/// Most entries of a [`ShortWork`].
pub(crate) const OWNED_WR_MAX_SGE: usize = 4;

/// As the RDMA core wants it: all kinds begin with the same.
enum RawWr {
    Rdma(bindings::ib_rdma_wr),
    Atomic(bindings::ib_atomic_wr),
}

impl RawWr {
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

/// A send request with entries of its own, so that several can be posted together.
pub(crate) struct OwnedSendWr {
    raw: RawWr,
    sges: [Sge; OWNED_WR_MAX_SGE],
}

// SAFETY: Until it is posted its pointers lead nowhere, and then they are to itself and the next.
unsafe impl Send for OwnedSendWr {}

impl OwnedSendWr {
    /// Does something with the peer's memory. What is more than [`SHORT_SGES`] entries is left out.
    pub(crate) fn new(opcode: RdmaOpcode, wr_id: u64, entries: &[Sge], remote: RemoteAddr) -> Self {
        let SendWr { raw, .. } = SendWr::new(opcode.ib_opcode(), wr_id, &[], remote);
        let mut raw = match opcode.is_atomic() {
            true => RawWr::Atomic(atomic_wr(raw.wr, opcode.atomic_operands(), remote)),
            false => RawWr::Rdma(raw),
        };
        let wr = raw.wr_mut();
        if opcode == RdmaOpcode::WriteInline {
            wr.send_flags |= bindings::ib_send_flags_IB_SEND_INLINE as c_int;
        }
        let mut sges = [Sge::new(0, 0, 0); OWNED_WR_MAX_SGE];
        for (sge, entry) in sges.iter_mut().zip(entries) {
            *sge = *entry;
            wr.num_sge += 1;
        }
        Self { raw, sges }
    }

    /// What `op` says.
    pub(crate) fn from_op(op: &RdmaOp<'_>, wr_id: u64) -> Self {
        let mut owned = Self::new(op.opcode, wr_id, op.sges, op.remote);
        if op.fence {
            owned.raw.wr_mut().send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
        }
        owned
    }

    /// As given.
    pub(crate) fn wr_id(&self) -> u64 {
        // SAFETY: It was made with a number there.
        unsafe { self.raw.wr().__bindgen_anon_1.wr_id }
    }

    pub(super) fn as_raw(&self) -> *const bindings::ib_send_wr {
        self.raw.wr()
    }

    /// Makes a list of them, which is valid while they neither move nor change. Returns its first.
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

/// A datagram.
pub(crate) struct UdSendWr<'a> {
    raw: bindings::ib_ud_wr,
    _borrows: PhantomData<(&'a [Sge], &'a AddressHandle)>,
}

impl<'a> UdSendWr<'a> {
    /// Sends to queue pair `qpn` at `to`, which must have the queue key `qkey`.
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
