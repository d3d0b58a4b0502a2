// SPDX-License-Identifier: GPL-2.0

//! Work requests.

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

/// Send request for a connected QP, always signaled.
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

    /// Creates an RDMA WRITE from local memory to the peer's memory.
    pub(crate) fn write(wr_id: u64, sges: &'a [Sge], remote: RemoteAddr) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, wr_id, sges, remote)
    }

    /// Creates a WRITE with immediate: the peer receives `imm_data`, which consumes a receive buffer. See
    /// [`Self::write`].
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

    /// Makes the request inline: its bytes are copied at posting time. The entries then have kernel virtual
    /// addresses, and need no key.
    pub(crate) fn with_inline(mut self) -> Self {
        self.raw.wr.send_flags |= bindings::ib_send_flags_IB_SEND_INLINE as c_int;
        self
    }

    /// Creates an RDMA READ of the peer's memory.
    pub(crate) fn read(wr_id: u64, sges: &'a [Sge], remote: RemoteAddr) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_RDMA_READ, wr_id, sges, remote)
    }

    /// Creates a SEND to a receive buffer that the peer has posted.
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

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RdmaOpcode {
    Read,
    Write,
    /// Inline WRITE. See [`SendWr::with_inline`].
    WriteInline,
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
            Self::CompareSwap { .. } => bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
            Self::FetchAdd { .. } => bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD,
            Self::Send => bindings::ib_wr_opcode_IB_WR_SEND,
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

/// RDMA operation, independent of its transport.
#[derive(Clone, Copy)]
pub(crate) struct RdmaOp<'a> {
    pub(crate) opcode: RdmaOpcode,
    /// Local memory.
    pub(crate) sges: &'a [Sge],
    pub(crate) remote: RemoteAddr,
    /// Set if the operation must not start before all earlier READs and atomics have completed.
    pub(crate) fence: bool,
}

/// Maximum entries of an [`OwnedSendWr`].
pub(crate) const OWNED_WR_MAX_SGE: usize = 4;

/// Request in the format of the RDMA core. All kinds begin with the same structure.
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

/// Send request that owns its entries, so that several can be posted in one chain.
pub(crate) struct OwnedSendWr {
    raw: RawWr,
    sges: [Sge; OWNED_WR_MAX_SGE],
}

// SAFETY: Before posting, all pointers are null or dangling and not used. At posting, they point to the
// request itself and to the next one in the chain.
unsafe impl Send for OwnedSendWr {}

impl OwnedSendWr {
    /// Creates a request for the peer's memory. Entries beyond [`OWNED_WR_MAX_SGE`] are ignored.
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

    /// Creates a request for `op`.
    pub(crate) fn from_op(op: &RdmaOp<'_>, wr_id: u64) -> Self {
        let mut owned = Self::new(op.opcode, wr_id, op.sges, op.remote);
        if op.fence {
            owned.raw.wr_mut().send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
        }
        owned
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
