// SPDX-License-Identifier: GPL-2.0 OR MIT
//! System calls of `/dev/kite`, each as a safe function over borrowed memory.
//!
//! This file and `memory::mapping` have all `unsafe` of the crate. The structures and numbers are those of `kite_sys`.

mod name;

use std::fs::{File, OpenOptions};
use std::mem::{size_of, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::error::{Error, Result};
use crate::interrupted::transfer_chunked;
use crate::memory::{Mapping, Pod};

pub(crate) use kite_sys::*;
pub(crate) use name::{pack_name, unpack_name};

/// Arguments of `KITE_IOC_READ` and `KITE_IOC_WRITE` other than the memory.
#[derive(Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) handle: u64,
    pub(crate) offset: u64,
    pub(crate) timeout_ms: u32,
}

macro_rules! impl_pod {
    ($($name:ident)*) => {
        $(
            // SAFETY: the structure has integers only, without padding.
            unsafe impl Pod for $name {}
        )*
    };
}

impl_pod! {
    kite_sqe kite_cqe kite_rw kite_fill kite_copy kite_atomic kite_call
    kite_receive kite_reply kite_recv_header kite_send_wr
}

/// Opens the device.
pub(crate) fn open() -> Result<File> {
    let path = KITE_DEVICE.to_str().map_err(|_| Error::Invalid)?;
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|e| Error::from_open(&e))
}

/// Executes the ioctl `NUMBER` with its structure.
///
/// # Safety
/// Each pointer in `argument` must be valid, for the whole call, for the accesses that the ABI
/// describes.
unsafe fn request<const NUMBER: u32, A>(fd: BorrowedFd<'_>, argument: &mut A) -> Result<()> {
    // The number contains the size of its structure.
    const { assert!(size(NUMBER) == size_of::<A>()) };
    // SAFETY: the descriptor is open. The kernel accesses `size_of::<A>()` bytes of `argument`, which is borrowed
    // mutably, and the memory of its pointers, which is valid by the safety requirements.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), NUMBER as _, argument as *mut A) };
    if result >= 0 {
        return Ok(());
    }
    let errno = std::io::Error::last_os_error().raw_os_error();
    Err(Error::from_errno(errno.unwrap_or(libc::EIO)))
}

/// Defines requests whose structures have no pointers.
macro_rules! plain_requests {
    ($($name:ident($argument:ty) = $number:ident;)*) => {
        $(
            pub(crate) fn $name(fd: BorrowedFd<'_>, argument: &mut $argument) -> Result<()> {
                // SAFETY: the structures in the table below have no pointers.
                unsafe { request::<{ $number }, _>(fd, argument) }
            }
        )*
    };
}

plain_requests! {
    bind(kite_bind) = KITE_IOC_BIND_NR;
    map(kite_map) = KITE_IOC_MAP_NR;
    unmap(kite_handle) = KITE_IOC_UNMAP_NR;
    free(kite_handle) = KITE_IOC_FREE_NR;
    query_region(kite_query_region) = KITE_IOC_QUERY_REGION_NR;
    get_event(kite_event) = KITE_IOC_GET_EVENT_NR;
    atomic(kite_atomic) = KITE_IOC_ATOMIC_NR;
    serve(kite_serve) = KITE_IOC_SERVE_NR;
    lock(kite_lock) = KITE_IOC_LOCK_NR;
    unlock(kite_unlock) = KITE_IOC_UNLOCK_NR;
    barrier(kite_barrier) = KITE_IOC_BARRIER_NR;
    fill(kite_fill) = KITE_IOC_FILL_NR;
    copy(kite_copy) = KITE_IOC_COPY_NR;
    grant(kite_grant) = KITE_IOC_GRANT_NR;
    rename(kite_rename) = KITE_IOC_RENAME_NR;
    enter(kite_enter) = KITE_IOC_ENTER_NR;
    destroy_queue(kite_destroy_queue) = KITE_IOC_DESTROY_QUEUE_NR;
    cancel(kite_cancel) = KITE_IOC_CANCEL_NR;
    set_priority(kite_priority) = KITE_IOC_SET_PRIORITY_NR;
    query_or_set_qos(kite_qos) = KITE_IOC_QOS_NR;
    set_limit(kite_limit) = KITE_IOC_SET_LIMIT_NR;
    query_rnic(kite_query_rnic) = KITE_IOC_QUERY_RNIC_NR;
    get_parameters(kite_parameters) = KITE_IOC_GET_PARAMETERS_NR;
    dereg_mr(kite_dereg_mr) = KITE_IOC_DEREG_MR_NR;
    connect(kite_connect) = KITE_IOC_CONNECT_NR;
    close_vqp(kite_close_vqp) = KITE_IOC_CLOSE_VQP_NR;
    listen(kite_listen) = KITE_IOC_LISTEN_NR;
    close_listener(kite_close_listener) = KITE_IOC_CLOSE_LISTENER_NR;
    accept(kite_accept) = KITE_IOC_ACCEPT_NR;
    pop_message(kite_pop_message) = KITE_IOC_POP_MESSAGE_NR;
    join(kite_join) = KITE_IOC_JOIN_NR;
    probe(kite_probe) = KITE_IOC_PROBE_NR;
}

/// Reads the statistics. Counters that the kernel does not have are 0.
pub(crate) fn get_stats(fd: BorrowedFd<'_>) -> Result<kite_stats> {
    let mut stats = kite_stats::default();
    let mut argument = kite_get_stats {
        stats: (&raw mut stats) as u64,
        size: abi_len(size_of::<kite_stats>()),
        ..Default::default()
    };
    // SAFETY: the kernel writes at most `size` bytes to `stats`, which is not accessed during the call.
    unsafe { request::<KITE_IOC_GET_STATS_NR, _>(fd, &mut argument) }?;
    Ok(stats)
}

pub(crate) fn alloc(fd: BorrowedFd<'_>, nodes: &[u32], argument: &mut kite_alloc) -> Result<()> {
    argument.nodes = nodes.as_ptr() as u64;
    argument.node_count = abi_len(nodes.len());
    // SAFETY: the kernel reads `node_count` numbers from `nodes`, which is borrowed for the call.
    unsafe { request::<KITE_IOC_ALLOC_NR, _>(fd, argument) }
}

pub(crate) fn migrate_region(
    fd: BorrowedFd<'_>,
    nodes: &[u32],
    argument: &mut kite_migrate,
) -> Result<()> {
    argument.nodes = nodes.as_ptr() as u64;
    argument.node_count = abi_len(nodes.len());
    // SAFETY: as for `alloc`.
    unsafe { request::<KITE_IOC_MIGRATE_NR, _>(fd, argument) }
}

/// Creates an I/O queue with the buffer `memory`. The queue must be destroyed before `memory` is unmapped.
pub(crate) fn create_queue(
    fd: BorrowedFd<'_>,
    memory: &Mapping,
    argument: &mut kite_create_queue,
) -> Result<()> {
    (argument.addr, argument.len) = (memory.addr(), memory.len() as u64);
    // SAFETY: a `Mapping` has no references, and may change at any time. The kernel pins the pages: if they are
    // unmapped early, it continues with pages that this process no longer has.
    unsafe { request::<KITE_IOC_CREATE_QUEUE_NR, _>(fd, argument) }
}

/// Registers `memory` as a region.
pub(crate) fn register_region(
    fd: BorrowedFd<'_>,
    memory: &Mapping,
    argument: &mut kite_register,
) -> Result<()> {
    (argument.addr, argument.len) = (memory.addr(), memory.len() as u64);
    // SAFETY: a `Mapping` has no references, and may change at any time. The kernel pins the pages: if they are
    // unmapped early, it continues with pages that this process no longer has.
    unsafe { request::<KITE_IOC_REGISTER_NR, _>(fd, argument) }
}

/// Registers `memory` for VQPs.
pub(crate) fn reg_mr(
    fd: BorrowedFd<'_>,
    memory: &Mapping,
    argument: &mut kite_reg_mr,
) -> Result<()> {
    (argument.addr, argument.len) = (memory.addr(), memory.len() as u64);
    // SAFETY: as in `register_region`.
    unsafe { request::<KITE_IOC_REG_MR_NR, _>(fd, argument) }
}

/// Pushes work requests to a VQP. They access registered memory only.
pub(crate) fn push(
    fd: BorrowedFd<'_>,
    wrs: &[kite_send_wr],
    argument: &mut kite_push,
) -> Result<()> {
    (argument.wrs, argument.count) = (wrs.as_ptr() as u64, abi_len(wrs.len()));
    // SAFETY: the kernel reads `count` structures from `wrs`, which is borrowed for the call.
    unsafe { request::<KITE_IOC_PUSH_NR, _>(fd, argument) }
}

/// Pops completions of a VQP.
pub(crate) fn pop<'a>(
    fd: BorrowedFd<'_>,
    completions: &'a mut [kite_cqe],
    argument: &mut kite_pop,
) -> Result<&'a [kite_cqe]> {
    (argument.completions, argument.count) =
        (completions.as_mut_ptr() as u64, abi_len(completions.len()));
    // SAFETY: the kernel writes at most `count` structures to `completions`, which is borrowed mutably.
    unsafe { request::<KITE_IOC_POP_NR, _>(fd, argument) }?;
    Ok(completions
        .get(..argument.count as usize)
        .unwrap_or_default())
}

/// Reads `buffer.len()` bytes to memory that may be uninitialized.
pub(crate) fn read_uninit<'a>(
    fd: BorrowedFd<'_>,
    target: Transfer,
    buffer: &'a mut [MaybeUninit<u8>],
) -> Result<&'a mut [u8]> {
    let to = buffer.as_mut_ptr() as u64;
    // SAFETY: the kernel writes at most `len` bytes to `buffer`, which is borrowed mutably.
    unsafe { transfer::<KITE_IOC_READ_NR>(fd, target, to, buffer.len()) }?;
    // SAFETY: a successful transfer has written all bytes.
    Ok(unsafe { &mut *(buffer as *mut [MaybeUninit<u8>] as *mut [u8]) })
}

/// Reads `buffer.len()` bytes.
pub(crate) fn read(fd: BorrowedFd<'_>, target: Transfer, buffer: &mut [u8]) -> Result<()> {
    let to = buffer.as_mut_ptr() as u64;
    // SAFETY: as in `read_uninit`. The kernel writes initialized bytes.
    unsafe { transfer::<KITE_IOC_READ_NR>(fd, target, to, buffer.len()) }
}

pub(crate) fn write(fd: BorrowedFd<'_>, target: Transfer, from: &[u8]) -> Result<()> {
    // SAFETY: the kernel reads at most `len` bytes from `from`, which is borrowed for the call.
    unsafe { transfer::<KITE_IOC_WRITE_NR>(fd, target, from.as_ptr() as u64, from.len()) }
}

/// Reads several ranges, each given by its offset and its buffer.
pub(crate) fn read_vectored(
    fd: BorrowedFd<'_>,
    args: kite_rwv,
    segments: &mut [(u64, &mut [u8])],
) -> Result<()> {
    let segment = |(offset, buffer): &mut (u64, &mut [u8])| kite_segment {
        offset: *offset,
        addr: buffer.as_mut_ptr() as u64,
        len: buffer.len() as u64,
    };
    let list: Vec<kite_segment> = segments.iter_mut().map(segment).collect();
    // SAFETY: the kernel writes at most `len` bytes to each buffer, all of which are borrowed mutably.
    unsafe { transfer_vectored::<KITE_IOC_READV_NR>(fd, args, &list) }
}

/// Writes several ranges, each given by its offset and its data.
pub(crate) fn write_vectored(
    fd: BorrowedFd<'_>,
    args: kite_rwv,
    segments: &[(u64, &[u8])],
) -> Result<()> {
    let segment = |(offset, buffer): &(u64, &[u8])| kite_segment {
        offset: *offset,
        addr: buffer.as_ptr() as u64,
        len: buffer.len() as u64,
    };
    let list: Vec<kite_segment> = segments.iter().map(segment).collect();
    // SAFETY: the kernel reads at most `len` bytes from each buffer, all of which are borrowed.
    unsafe { transfer_vectored::<KITE_IOC_WRITEV_NR>(fd, args, &list) }
}

/// Reads or writes segments, `KITE_SEGMENTS_MAX` per system call.
///
/// # Safety
/// The `len` bytes at each `addr` must be valid, for the whole call, for what `NUMBER` does to them.
unsafe fn transfer_vectored<const NUMBER: u32>(
    fd: BorrowedFd<'_>,
    args: kite_rwv,
    segments: &[kite_segment],
) -> Result<()> {
    let request_chunk = |segments: &[kite_segment]| {
        let mut argument = kite_rwv {
            segments: segments.as_ptr() as u64,
            count: abi_len(segments.len()),
            ..args
        };
        // SAFETY: the kernel reads `count` segments, which are borrowed. Their memory is valid by the safety
        // requirements.
        unsafe { request::<NUMBER, _>(fd, &mut argument) }
    };
    if segments.is_empty() {
        return request_chunk(&[]);
    }
    segments
        .chunks(KITE_SEGMENTS_MAX as usize)
        .try_for_each(request_chunk)
}

/// Executes a call with `data`. Returns the bytes of the reply.
pub(crate) fn call(
    fd: BorrowedFd<'_>,
    mut args: kite_call,
    data: &[u8],
    reply: &mut [u8],
) -> Result<usize> {
    (args.addr, args.len) = (data.as_ptr() as u64, data.len() as u64);
    (args.reply, args.reply_len) = (reply.as_mut_ptr() as u64, reply.len() as u64);
    // SAFETY: the kernel reads `len` bytes of `data` and writes at most `reply_len` bytes to `reply`,
    // which are borrowed for the call, the latter mutably.
    unsafe { request::<KITE_IOC_CALL_NR, _>(fd, &mut args) }?;
    Ok(args.reply_len as usize)
}

/// Waits for a call, and stores its data in `buffer`.
pub(crate) fn receive(
    fd: BorrowedFd<'_>,
    mut args: kite_receive,
    buffer: &mut [u8],
) -> Result<kite_receive> {
    (args.addr, args.len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
    // SAFETY: the kernel writes at most `len` bytes to `buffer`, which is borrowed mutably.
    unsafe { request::<KITE_IOC_RECEIVE_NR, _>(fd, &mut args) }?;
    Ok(args)
}

pub(crate) fn reply(fd: BorrowedFd<'_>, mut args: kite_reply, data: &[u8]) -> Result<()> {
    (args.addr, args.len) = (data.as_ptr() as u64, data.len() as u64);
    // SAFETY: the kernel reads `len` bytes of `data`, which is borrowed for the call.
    unsafe { request::<KITE_IOC_REPLY_NR, _>(fd, &mut args) }
}

/// [`reply`] and then [`receive`], in one system call.
pub(crate) fn reply_receive(
    fd: BorrowedFd<'_>,
    mut args: kite_reply_receive,
    data: &[u8],
    buffer: &mut [u8],
) -> Result<kite_receive> {
    (args.reply.addr, args.reply.len) = (data.as_ptr() as u64, data.len() as u64);
    (args.receive.addr, args.receive.len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
    // SAFETY: the kernel reads `len` bytes of `data` and writes at most `buffer.len()` bytes to `buffer`. Both are
    // borrowed for the call, the latter mutably.
    unsafe { request::<KITE_IOC_REPLY_RECEIVE_NR, _>(fd, &mut args) }?;
    Ok(args.receive)
}

/// Reads or writes a buffer completely, also if signals interrupt the transfer.
///
/// # Safety
/// The `len` bytes at `addr` must be valid, for the whole call, for what `NUMBER` does to them.
unsafe fn transfer<const NUMBER: u32>(
    fd: BorrowedFd<'_>,
    target: Transfer,
    addr: u64,
    len: usize,
) -> Result<()> {
    transfer_chunked(len, target.timeout_ms, |at, len, timeout_ms| {
        let mut argument = kite_rw {
            handle: target.handle,
            offset: target.offset + at as u64,
            addr: addr + at as u64,
            len: len as u64,
            timeout_ms,
            ..Default::default()
        };
        // SAFETY: the chunk is within the buffer, which is valid by the safety requirements.
        unsafe { request::<NUMBER, _>(fd, &mut argument) }
    })
}

/// Lists regions to `entries`. Returns the number of entries written and the cursor of the next call.
pub(crate) fn list_regions(
    fd: BorrowedFd<'_>,
    node: u32,
    cursor: u64,
    entries: &mut [kite_region_entry],
) -> Result<(usize, u64)> {
    let mut argument = kite_list_regions {
        node,
        count: abi_len(entries.len()),
        cursor,
        entries: entries.as_mut_ptr() as u64,
    };
    // SAFETY: the kernel writes at most `count` entries, plain integers and bytes of which any
    // value is valid, to `entries`, which is borrowed mutably.
    unsafe { request::<KITE_IOC_LIST_REGIONS_NR, _>(fd, &mut argument) }?;
    Ok((
        (argument.count as usize).min(entries.len()),
        argument.cursor,
    ))
}

/// Lists limits to `limits`, as many as fit. Returns the number of limits.
pub(crate) fn list_limits(fd: BorrowedFd<'_>, limits: &mut [kite_limit]) -> Result<usize> {
    let mut argument = kite_list_limits {
        count: abi_len(limits.len()),
        limits: limits.as_mut_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the kernel writes at most `count` limits, plain integers of which any value is valid, to `limits`,
    // which is borrowed mutably.
    unsafe { request::<KITE_IOC_LIST_LIMITS_NR, _>(fd, &mut argument) }?;
    Ok(argument.count as usize)
}

/// Lists VQPs to `vqps`, as many as fit. Returns the number of VQPs.
pub(crate) fn list_vqps(fd: BorrowedFd<'_>, vqps: &mut [kite_vqp_info]) -> Result<usize> {
    let mut argument = kite_list_vqps {
        count: abi_len(vqps.len()),
        vqps: vqps.as_mut_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the kernel writes at most `count` entries, plain integers of which any value is valid, to
    // `vqps`, which is borrowed mutably.
    unsafe { request::<KITE_IOC_LIST_VQPS_NR, _>(fd, &mut argument) }?;
    Ok(argument.count as usize)
}

/// Stores the members of the view in `members`, as many as fit. Returns the view.
pub(crate) fn get_view(fd: BorrowedFd<'_>, members: &mut [kite_member]) -> Result<kite_get_view> {
    let mut argument = kite_get_view {
        count: abi_len(members.len()),
        members: members.as_mut_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the kernel writes at most `count` members, plain integers of which any value is
    // valid, to `members`, which is borrowed mutably.
    unsafe { request::<KITE_IOC_GET_VIEW_NR, _>(fd, &mut argument) }?;
    Ok(argument)
}

pub(crate) fn set_view(fd: BorrowedFd<'_>, epoch: u64, members: &[kite_member]) -> Result<()> {
    let mut argument = kite_set_view {
        epoch,
        count: abi_len(members.len()),
        members: members.as_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the kernel reads `count` members from `members`, which is borrowed for the call.
    unsafe { request::<KITE_IOC_SET_VIEW_NR, _>(fd, &mut argument) }
}

/// Returns a length for the ABI. `u32::MAX` exceeds all limits of the kernel, which then fails or uses less of the
/// memory, never more.
fn abi_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
