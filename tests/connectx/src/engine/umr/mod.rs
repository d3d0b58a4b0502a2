// SPDX-License-Identifier: GPL-2.0 OR MIT
//! UMR work requests, which change a memory key in place. Fast registration, local invalidation, binding of memory
//! windows, keys of keys, and changes to the keys of the driver are such requests.
//!
//! The control segment is followed by a segment that selects the changes, a context with the new values, and the new
//! part of the translation table. A data segment with the address of the part may replace the part.

use crate::device::Device;
use crate::layout::{be, be64, get, get64, set, size};
use crate::object::cq::Syndrome;
use crate::object::mkey::{Access, Mkey, Mode, User, OCTOWORD};
use crate::object::qp::{Qp, Transport};
use crate::object::scatter::{KeyMemory, Segment};

/// Changes of a request, as bits of its mask.
mod mask {
    pub(super) const LENGTH: u64 = 1 << 0;
    pub(super) const PAGE_SIZE: u64 = 1 << 1;
    pub(super) const START: u64 = 1 << 6;
    pub(super) const DOMAIN: u64 = 1 << 7;
    pub(super) const REMOTE_INVALIDATE: u64 = 1 << 8;
    pub(super) const BSF: u64 = 1 << 12;
    pub(super) const KEY: u64 = 1 << 13;
    pub(super) const QP: u64 = 1 << 14;
    pub(super) const LOCAL_READ: u64 = 1 << 17;
    pub(super) const LOCAL_WRITE: u64 = 1 << 18;
    pub(super) const REMOTE_READ: u64 = 1 << 19;
    pub(super) const REMOTE_WRITE: u64 = 1 << 20;
    pub(super) const ATOMIC: u64 = 1 << 21;
    pub(super) const SMALL_FENCE: u64 = 1 << 23;
    pub(super) const FREE: u64 = 1 << 29;

    pub(super) const ALL: u64 = LENGTH
        | PAGE_SIZE
        | START
        | DOMAIN
        | REMOTE_INVALIDATE
        | BSF
        | KEY
        | QP
        | LOCAL_READ
        | LOCAL_WRITE
        | REMOTE_READ
        | REMOTE_WRITE
        | ATOMIC
        | SMALL_FENCE
        | FREE;
}

/// Flags of a request.
mod flag {
    /// The key must not be bound to another QP.
    pub(super) const CHECK_QP: u8 = 1 << 3;
    /// The part of the table begins at the offset.
    pub(super) const OFFSET: u8 = 1 << 4;
    /// The key must be in the free state.
    pub(super) const MUST_BE_FREE: u8 = 1 << 5;
    /// The key must not be in the free state.
    pub(super) const MUST_BE_USED: u8 = 1 << 6;
    /// The part of the table is in the request.
    pub(super) const INLINE: u8 = 1 << 7;
}

/// Size of control segment, UMR segment and context, in bytes.
const HEAD: usize = CONTEXT + size!(mkc);
/// Offset of the UMR segment.
const UMR: usize = 16;
/// Offset of the context.
const CONTEXT: usize = 64;

/// Decoded request.
#[derive(Debug)]
struct UmrRequest<'a> {
    /// The key with its current variant.
    key: u32,
    flags: u8,
    mask: u64,
    context: &'a [u8],
    /// Length and offset of the new part of the table, in bytes.
    length: usize,
    offset: usize,
    /// Bytes after the context.
    rest: &'a [u8],
}

impl UmrRequest<'_> {
    fn decode(wqe: &[u8]) -> Option<UmrRequest<'_>> {
        let flags = *wqe.get(UMR)?;
        let (low, high) = (be(wqe, UMR + 6, 2), be(wqe, UMR + 16, 4));
        let offset = if flags & flag::OFFSET != 0 {
            (high << 16) | low
        } else {
            0
        };
        if flags & flag::OFFSET == 0 && low != 0 {
            // Without an offset, the field is the length of a signature descriptor.
            return None;
        }
        Some(UmrRequest {
            key: be(wqe, 12, 4) as u32,
            flags,
            mask: be64(wqe, UMR + 8),
            context: wqe.get(CONTEXT..HEAD)?,
            length: be(wqe, UMR + 4, 2) as usize * OCTOWORD,
            offset: usize::try_from(offset).ok()?.checked_mul(OCTOWORD)?,
            rest: &wqe[HEAD..],
        })
    }

    fn changes(&self, bits: u64) -> bool {
        self.mask & bits != 0
    }

    /// Returns `true` if the request puts the key into the free state.
    fn frees(&self) -> bool {
        self.changes(mask::FREE) && get!(self.context, mkc, free) != 0
    }
}

/// Executes the UMR work request `wqe` of `qp`. The error is the syndrome of the completion.
pub fn execute(device: &mut Device, qp: &Qp, wqe: &[u8]) -> Result<(), Syndrome> {
    let request = UmrRequest::decode(wqe).ok_or(Syndrome::LocalQpOperation)?;
    let mkey = device
        .objects
        .mkeys
        .get(request.key >> 8)
        .ok_or(Syndrome::WindowBind)?;
    check(&request, mkey, qp)?;
    let entries = entries(device, qp, &request)?;
    let mkey = device
        .objects
        .mkeys
        .get_mut(request.key >> 8)
        .ok_or(Syndrome::WindowBind)?;
    mkey.set_table(request.offset, &entries)
        .ok_or(Syndrome::LocalQpOperation)?;
    apply(&request, &mut mkey.context);
    Ok(())
}

/// Checks that the request is valid, and that the QP may change this key.
fn check(request: &UmrRequest<'_>, mkey: &Mkey, qp: &Qp) -> Result<(), Syndrome> {
    let privileged = qp.transport == Transport::Umr;
    let new = request.context;
    let log_page_size = get!(new, mkc, log_page_size);
    let paged = matches!(mkey.mode, Mode::Mtt | Mode::Ksm);
    if request.changes(!mask::ALL)
        || (request.changes(mask::BSF) && get!(new, mkc, bsf_en) != 0)
        || (request.changes(mask::DOMAIN) && !privileged)
        || (request.changes(mask::PAGE_SIZE) && paged && !(12..=62).contains(&log_page_size))
    {
        return Err(Syndrome::LocalQpOperation);
    }
    let old = &mkey.context;
    let free = get!(old, mkc, free) != 0;
    let named = u32::from(mkey.variant()) == request.key & 0xff;
    let needs_name = request.frees() || !request.changes(mask::KEY);
    if get!(old, mkc, umr_en) == 0
        || (!privileged && get!(old, mkc, pd) != qp.attributes.pd)
        || (needs_name && !named)
        || (request.flags & flag::MUST_BE_FREE != 0 && !free)
        || (request.flags & flag::MUST_BE_USED != 0 && free)
        || (request.flags & flag::CHECK_QP != 0 && !mkey.is_for(qp.number))
    {
        return Err(Syndrome::WindowBind);
    }
    Ok(())
}

/// Returns the new part of the table.
fn entries(device: &mut Device, qp: &Qp, request: &UmrRequest<'_>) -> Result<Vec<u8>, Syndrome> {
    let mut entries = vec![0; request.length];
    if request.flags & flag::INLINE != 0 {
        let given = request
            .rest
            .get(..request.length)
            .ok_or(Syndrome::LocalQpOperation)?;
        entries.copy_from_slice(given);
    } else if request.length > 0 {
        let segment = request
            .rest
            .get(..Segment::SIZE)
            .ok_or(Syndrome::LocalQpOperation)?;
        let segment = Segment::decode(segment);
        if (segment.length as usize) < request.length {
            return Err(Syndrome::LocalLength);
        }
        let user = User {
            pd: qp.attributes.pd,
            qp: qp.number,
            access: Access::LocalRead,
        };
        let mut memory = KeyMemory {
            dma: &device.dma,
            memic: &device.objects.memic,
            keys: &device.objects.mkeys,
            cost: &mut device.cost,
        };
        let read = memory.read(segment.key, user, segment.address, &mut entries);
        read.map_err(|_| Syndrome::LocalProtection)?;
    }
    Ok(entries)
}

/// Changes the fields that the mask selects.
fn apply(request: &UmrRequest<'_>, old: &mut [u8; size!(mkc)]) {
    let new = request.context;
    macro_rules! take {
        ($bit:ident, $($field:ident),+) => {
            if request.changes(mask::$bit) {
                $(set!(old, mkc, $field, get!(new, mkc, $field));)+
            }
        };
    }
    take!(LENGTH, length64);
    if request.changes(mask::LENGTH) {
        set!(old, mkc, len, get64!(new, mkc, len));
    }
    if request.changes(mask::START) {
        set!(old, mkc, start_addr, get64!(new, mkc, start_addr));
    }
    take!(PAGE_SIZE, log_page_size);
    take!(DOMAIN, pd);
    take!(REMOTE_INVALIDATE, en_rinval);
    take!(KEY, mkey_7_0);
    take!(QP, qpn);
    take!(LOCAL_READ, lr);
    take!(LOCAL_WRITE, lw);
    take!(REMOTE_READ, rr);
    take!(REMOTE_WRITE, rw);
    take!(ATOMIC, a);
    take!(SMALL_FENCE, small_fence_on_rdma_read_response);
    take!(FREE, free);
}

#[cfg(test)]
mod tests;
