// SPDX-License-Identifier: GPL-2.0

//! Parsers for the structures of `include/uapi/kite.h`, with the checks that all requesters share.
//!
//! System calls and submissions of I/O queues pass the structures of the ABI. Most functions for kernel
//! modules fill the same structures; the others call the checks of single arguments. Requests that two or
//! more of them have are parsed here. Each parser checks flags, reserved fields, and the memory of the
//! requester. The session checks the handle and its rights ([`super::handles`]). The layers below check the
//! range: [`crate::region::map`] that of a region, [`crate::vqp::send`] that of an MR.

use super::{call_args::RpcRequest, iovec::IoVec, source::Requester, uapi, Session};
use crate::{
    bindings,
    fabric::send::inflight::Direction,
    region::{
        grant::GrantRequest,
        map::{
            access::{AccessRequest, RegionRange},
            atomic::AtomicRequest,
            copy::FillRequest,
        },
    },
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{page::PAGE_SIZE, prelude::*};
use kite_core::rights::Rights;

/// Checks that a reserved field is zero.
pub(super) fn check_reserved(reserved: u32) -> Result {
    if reserved == 0 {
        Ok(())
    } else {
        Err(EINVAL)
    }
}

/// Returns the deadline for a timeout in milliseconds. 0 selects the default of the module. A timeout of more
/// than one hour counts as one hour: a request may occupy a worker until its deadline.
pub(super) fn deadline(timeout_ms: u32) -> Deadline {
    let timeout_ms = match timeout_ms {
        0 => crate::params::default_timeout_ms(),
        ms => ms,
    };
    Deadline::after_ms(timeout_ms.min(bindings::KITE_TIMEOUT_MAX_MS))
}

/// Returns the deadline of a request with `flags`, or `None` with [`bindings::KITE_NOWAIT`].
///
/// # Errors
///
/// - `EINVAL`: there are other flags.
pub(super) fn wait_until(flags: u32, timeout_ms: u32) -> Result<Option<Deadline>> {
    match flags {
        0 => Ok(Some(deadline(timeout_ms))),
        bindings::KITE_NOWAIT => Ok(None),
        _ => Err(EINVAL),
    }
}

/// Parses rights.
///
/// # Errors
///
/// - `EINVAL`: unknown rights.
pub(super) fn parse_rights(bits: u32) -> Result<Rights> {
    Rights::from_bits(bits).ok_or(EINVAL)
}

/// Parses the rights of a new handle.
///
/// # Errors
///
/// - `EINVAL`: unknown rights, or none.
pub(super) fn parse_map_rights(bits: u32) -> Result<Rights> {
    let rights = parse_rights(bits)?;
    if rights.is_empty() {
        return Err(EINVAL);
    }
    Ok(rights)
}

/// Returns the user that must own a mapped region, in the initial user namespace, or `None` for any user.
///
/// # Errors
///
/// - `EINVAL`: unknown flags, a UID that is not in the user namespace of the caller, or a UID without
///   `KITE_MAP_OWNER`.
pub(super) fn parse_required_owner(
    caller: Requester<'_>,
    uid: u32,
    flags: u32,
) -> Result<Option<u32>> {
    match (flags, uid) {
        (0, 0) => Ok(None),
        (bindings::KITE_MAP_OWNER, uid) => Ok(Some(caller.to_initial_uid(uid)?)),
        _ => Err(EINVAL),
    }
}

/// Checks the length of a new region in bytes.
///
/// # Errors
///
/// - `EINVAL`: the length is 0.
pub(super) fn check_region_len(len: u64) -> Result<u64> {
    if len == 0 {
        return Err(EINVAL);
    }
    Ok(len)
}

/// Checks the memory that is registered as a region.
///
/// # Errors
///
/// - `EINVAL`: `base` is not a multiple of the page size, or `len` is 0.
pub(super) fn check_region_memory(base: usize, len: usize) -> Result {
    if len == 0 || base % PAGE_SIZE != 0 {
        return Err(EINVAL);
    }
    Ok(())
}

/// Returns the number of nodes of a stripe, which may be 0.
///
/// # Errors
///
/// - `EINVAL`: more than `KITE_STRIPE_MAX`.
pub(super) fn check_node_count(count: u32) -> Result<usize> {
    match count {
        0..=bindings::KITE_STRIPE_MAX => Ok(count as usize),
        _ => Err(EINVAL),
    }
}

/// Parses a change of rights.
pub(super) fn parse_grant(
    caller: Requester<'_>,
    grant: &bindings::kite_grant,
) -> Result<GrantRequest> {
    Ok(GrantRequest {
        grantee: uapi::parse_grantee(caller, grant.uid, grant.flags)?,
        rights: parse_rights(grant.rights)?,
        deadline: deadline(grant.timeout_ms),
    })
}

/// Returns the number of work requests of a push.
///
/// # Errors
///
/// - `EINVAL`: 0, or more than `KITE_PUSH_MAX`.
pub(super) fn check_push_count(count: u32) -> Result<usize> {
    match count {
        1..=bindings::KITE_PUSH_MAX => Ok(count as usize),
        _ => Err(EINVAL),
    }
}

/// Checks the maximum number of completions of a pop.
///
/// # Errors
///
/// - `EINVAL`: the number is 0.
pub(super) fn check_pop_count(count: u32) -> Result<u32> {
    if count == 0 {
        return Err(EINVAL);
    }
    Ok(count)
}

/// Parses the wait of a pop of a message.
///
/// # Errors
///
/// - `EINVAL`: unknown flags, or a reserved field is not zero.
pub(super) fn parse_pop_message(pop: &bindings::kite_pop_message) -> Result<Option<Deadline>> {
    check_reserved(pop.reserved)?;
    wait_until(pop.flags, pop.timeout_ms)
}

/// Checks the length of an MR in bytes.
///
/// # Errors
///
/// - `EINVAL`: 0, or more than `KITE_MR_SIZE_MAX`.
pub(super) fn check_mr_len(len: u64) -> Result<usize> {
    if len == 0 || len > bindings::KITE_MR_SIZE_MAX.into() {
        return Err(EINVAL);
    }
    Ok(len as usize)
}

/// Parses a read or write. Returns the request and its local buffer.
pub(super) fn parse_access(
    caller: Requester<'_>,
    direction: Direction,
    rw: &bindings::kite_rw,
) -> Result<(AccessRequest, Buffer)> {
    check_reserved(rw.reserved)?;
    let access = AccessRequest {
        direction,
        offset: rw.offset,
        len: rw.len,
        // Of a kernel module, only fatal signals interrupt a read or write.
        deadline: match caller {
            Requester::KernelModule => deadline(rw.timeout_ms),
            _ => deadline(rw.timeout_ms).interruptible(),
        },
    };
    Ok((access, caller.buffer_at(rw.addr, rw.len)?))
}

/// Parses the segments of a vectored read or write. `read` returns the segment of an index.
pub(super) fn parse_segments(
    caller: Requester<'_>,
    count: u32,
    read: impl Fn(usize) -> Result<bindings::kite_segment>,
) -> Result<IoVec> {
    if count > bindings::KITE_SEGMENTS_MAX {
        return Err(EINVAL);
    }
    let mut segments = IoVec::with_capacity(count as usize)?;
    for i in 0..count as usize {
        let segment = read(i)?;
        let (range, memory) = (
            RegionRange {
                offset: segment.offset,
                len: segment.len,
            },
            caller.buffer_at(segment.addr, segment.len)?,
        );
        segments.push(range, memory)?;
    }
    Ok(segments)
}

/// Parses a fill.
pub(super) fn parse_fill(set: &bindings::kite_fill) -> Result<FillRequest> {
    Ok(FillRequest {
        offset: set.offset,
        len: set.len,
        byte: u8::try_from(set.byte).map_err(|_| EINVAL)?,
        deadline: deadline(set.timeout_ms),
    })
}

/// Arguments of a copy. `from` and `to` are pairs of handle and offset.
pub(super) struct CopyArgs {
    pub(super) from: (u64, u64),
    to: (u64, u64),
    pub(super) len: u64,
    pub(super) deadline: Deadline,
}

/// Parses a copy.
pub(super) fn parse_copy(copy: &bindings::kite_copy) -> Result<CopyArgs> {
    check_reserved(copy.reserved)?;
    Ok(CopyArgs {
        from: (copy.from, copy.from_offset),
        to: (copy.to, copy.to_offset),
        len: copy.len,
        deadline: deadline(copy.timeout_ms),
    })
}

impl CopyArgs {
    /// Executes the copy.
    pub(super) fn run(&self, session: &Session) -> Result {
        session.copy(self.from, self.to, self.len, self.deadline)
    }
}

/// Parses an atomic operation.
pub(super) fn parse_atomic_update(a: &bindings::kite_atomic) -> Result<AtomicRequest> {
    Ok(AtomicRequest {
        offset: a.offset,
        op: uapi::parse_atomic(a.operation, a.operand, a.expected)?,
        deadline: deadline(a.timeout_ms),
    })
}

/// Parses an RPC or a one-way message.
pub(super) fn parse_call(caller: Requester<'_>, call: &bindings::kite_call) -> Result<RpcRequest> {
    let wants_reply = match call.flags {
        0 => true,
        bindings::KITE_CALL_ONEWAY if call.reply_len == 0 => false,
        _ => return Err(EINVAL),
    };
    check_reserved(call.reserved)?;
    Ok(RpcRequest {
        function: call.function,
        uid: caller.uid(),
        data: caller.buffer_at(call.addr, call.len)?,
        len: call.len,
        reply_buffer: caller.buffer_at(call.reply, call.reply_len)?,
        max_reply_len: call.reply_len,
        wants_reply,
        deadline: deadline(call.timeout_ms),
    })
}

/// Arguments of a receive submitted through an I/O queue.
pub(super) struct ReceiveArgs {
    pub(super) handle: u64,
    /// Buffer for `struct kite_recv_header`. The data follow the header.
    pub(super) header: Buffer,
    pub(super) data: Buffer,
    pub(super) max_len: u64,
    pub(super) deadline: Deadline,
}

/// Parses a receive submitted through an I/O queue. Zeroes the header, which proves that the header's memory
/// is writable.
pub(super) fn parse_receive(
    caller: Requester<'_>,
    r: &bindings::kite_receive,
) -> Result<ReceiveArgs> {
    const HEADER_SIZE: usize = size_of::<bindings::kite_recv_header>();
    check_reserved(r.reserved | r.flags)?;
    let header = caller.buffer_at(r.addr, HEADER_SIZE as u64)?;
    header.write_slice(0, &[0; HEADER_SIZE])?;
    let data = r.addr.checked_add(HEADER_SIZE as u64).ok_or(EFAULT)?;
    Ok(ReceiveArgs {
        handle: r.handle,
        header,
        data: caller.buffer_at(data, r.len)?,
        max_len: r.len,
        deadline: deadline(r.timeout_ms),
    })
}

/// Arguments of a reply.
pub(super) struct ReplyArgs {
    call_id: u64,
    /// Buffer and length of the reply data. `None` aborts the call.
    data: Option<(Buffer, u64)>,
    pub(super) deadline: Deadline,
}

/// Parses a reply.
pub(super) fn parse_reply(
    caller: Requester<'_>,
    reply: &bindings::kite_reply,
) -> Result<ReplyArgs> {
    let data = match reply.flags {
        0 => Some((caller.buffer_at(reply.addr, reply.len)?, reply.len)),
        bindings::KITE_REPLY_ABORT if reply.len == 0 => None,
        _ => return Err(EINVAL),
    };
    Ok(ReplyArgs {
        call_id: reply.call,
        data,
        deadline: deadline(reply.timeout_ms),
    })
}

impl ReplyArgs {
    /// Returns the length of the reply data in bytes.
    pub(super) fn len(&self) -> u64 {
        self.data.as_ref().map_or(0, |(_, len)| *len)
    }

    /// Like [`Self::run`], but aborts the call on failure. `EBADF` is the exception: the call does not exist,
    /// or another thread is replying.
    pub(super) fn run_or_abort(&self, session: &Session) -> Result {
        let result = self.run(session);
        if result.is_err_and(|error| error != EBADF) {
            self.abort(session);
        }
        result
    }

    /// Aborts the call: the caller receives an error.
    pub(super) fn abort(&self, session: &Session) {
        // Fails if the call has ended already, or the RNIC was removed.
        let _ = session.abort_call(self.call_id);
    }

    /// Sends the reply, or aborts the call.
    pub(super) fn run(&self, session: &Session) -> Result {
        match &self.data {
            Some((memory, len)) => session.reply(self.call_id, memory, *len, self.deadline),
            None => session.abort_call(self.call_id),
        }
    }
}
