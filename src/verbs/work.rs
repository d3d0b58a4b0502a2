// SPDX-License-Identifier: GPL-2.0

//! Work requests: what is posted to a queue pair.

use super::address::AddressHandle;
use crate::bindings;
use core::marker::PhantomData;
use kernel::prelude::*;

/// Most scatter-gather entries of a request of ours.
pub(crate) const MAX_SGE: usize = 16;

/// Longest write that is copied into the request itself, in bytes. Queue pairs are made with room for it.
pub(crate) const INLINE_MAX: usize = 128;

/// A range of local memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Sge(bindings::ib_sge);

impl Sge {
    /// Names `len` bytes at `addr` by `key`.
    pub(crate) fn new(addr: u64, len: u32, key: u32) -> Self {
        Self(bindings::ib_sge {
            addr,
            length: len,
            lkey: key,
        })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u32 {
        self.0.length
    }

    /// The first `len` bytes, and what is left, if anything.
    pub(crate) fn split(self, len: usize) -> (Self, Option<Self>) {
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
pub(crate) struct Remote {
    /// Address in the peer's global memory region.
    pub(crate) addr: u64,
    /// Its key.
    pub(crate) key: u32,
}

/// A send request on a connected queue pair, always signalled.
pub(crate) struct SendWork<'a> {
    raw: bindings::ib_rdma_wr,
    _sges: PhantomData<&'a [Sge]>,
}

impl<'a> SendWork<'a> {
    fn new(opcode: bindings::ib_wr_opcode, wr_id: u64, sges: &'a [Sge], remote: Remote) -> Self {
        let mut raw: bindings::ib_rdma_wr = pin_init::zeroed();
        raw.wr.__bindgen_anon_1.wr_id = wr_id;
        raw.wr.opcode = opcode;
        raw.wr.sg_list = sges.as_ptr().cast_mut().cast();
        raw.wr.num_sge = sges.len() as c_int;
        raw.wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
        raw.remote_addr = remote.addr;
        raw.rkey = remote.key;
        Self {
            raw,
            _sges: PhantomData,
        }
    }

    /// Writes local memory to the peer.
    pub(crate) fn write(wr_id: u64, sges: &'a [Sge], remote: Remote) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, wr_id, sges, remote)
    }

    /// As [`Self::write`], of which the peer hears: it gets `immediate`, and takes a receive for it.
    pub(crate) fn write_with(wr_id: u64, sges: &'a [Sge], remote: Remote, immediate: u32) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM;
        let mut work = Self::new(opcode, wr_id, sges, remote);
        work.raw.wr.ex.imm_data = immediate.to_be();
        work
    }

    /// Copies the bytes into the request when it is posted: the entries have kernel addresses, not those
    /// of the RNIC, and need no key.
    pub(crate) fn inline(mut self) -> Self {
        self.raw.wr.send_flags |= bindings::ib_send_flags_IB_SEND_INLINE as c_int;
        self
    }

    /// Reads the peer's memory.
    pub(crate) fn read(wr_id: u64, sges: &'a [Sge], remote: Remote) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_RDMA_READ, wr_id, sges, remote)
    }

    /// Sends a message to a buffer that the peer has posted.
    pub(crate) fn send(wr_id: u64, sges: &'a [Sge]) -> Self {
        Self::new(
            bindings::ib_wr_opcode_IB_WR_SEND,
            wr_id,
            sges,
            Remote { addr: 0, key: 0 },
        )
    }

    pub(super) fn as_raw(&self) -> *const bindings::ib_send_wr {
        &self.raw.wr
    }
}

/// What a [`ShortWork`] does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Read,
    Write,
    /// As [`SendWork::inline`].
    WriteInline,
}

/// Most entries of a [`ShortWork`].
pub(crate) const SHORT_SGES: usize = 4;

/// A send request with entries of its own, so that several can be posted together.
pub(crate) struct ShortWork {
    raw: bindings::ib_rdma_wr,
    sges: [Sge; SHORT_SGES],
}

// SAFETY: Until it is posted its pointers lead nowhere, and then they are to itself and the next.
unsafe impl Send for ShortWork {}

impl ShortWork {
    /// Reads or writes the peer's memory. What is more than [`SHORT_SGES`] entries is left out.
    pub(crate) fn new(verb: Verb, wr_id: u64, entries: &[Sge], remote: Remote) -> Self {
        let work = match verb {
            Verb::Read => SendWork::read(wr_id, &[], remote),
            Verb::Write => SendWork::write(wr_id, &[], remote),
            Verb::WriteInline => SendWork::write(wr_id, &[], remote).inline(),
        };
        let mut raw = work.raw;
        let mut sges = [Sge::new(0, 0, 0); SHORT_SGES];
        for (sge, entry) in sges.iter_mut().zip(entries) {
            *sge = *entry;
            raw.wr.num_sge += 1;
        }
        Self { raw, sges }
    }

    /// Begins only when all reads that were posted before have ended.
    pub(crate) fn fenced(mut self) -> Self {
        self.raw.wr.send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
        self
    }

    /// As given.
    pub(crate) fn wr_id(&self) -> u64 {
        // SAFETY: It was made with a number there.
        unsafe { self.raw.wr.__bindgen_anon_1.wr_id }
    }

    pub(super) fn as_raw(&self) -> *const bindings::ib_send_wr {
        &self.raw.wr
    }

    /// Makes a list of them, which is valid while they neither move nor change. Returns its first.
    pub(super) fn chain(all: &mut [Self]) -> *const bindings::ib_send_wr {
        let mut next = core::ptr::null_mut();
        for work in all.iter_mut().rev() {
            work.raw.wr.sg_list = work.sges.as_mut_ptr().cast();
            work.raw.wr.next = next;
            next = &mut work.raw.wr;
        }
        next
    }
}

/// A datagram.
pub(crate) struct Datagram<'a> {
    raw: bindings::ib_ud_wr,
    _borrows: PhantomData<(&'a [Sge], &'a AddressHandle)>,
}

impl<'a> Datagram<'a> {
    /// Sends to queue pair `qpn` at `to`, which must have the queue key `qkey`.
    pub(crate) fn new(
        wr_id: u64,
        sges: &'a [Sge],
        to: &'a AddressHandle,
        qpn: u32,
        qkey: u32,
    ) -> Self {
        let mut raw: bindings::ib_ud_wr = pin_init::zeroed();
        raw.wr.__bindgen_anon_1.wr_id = wr_id;
        raw.wr.opcode = bindings::ib_wr_opcode_IB_WR_SEND;
        raw.wr.sg_list = sges.as_ptr().cast_mut().cast();
        raw.wr.num_sge = sges.len() as c_int;
        raw.wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
        raw.ah = to.as_raw();
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
