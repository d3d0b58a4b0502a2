// SPDX-License-Identifier: GPL-2.0

//! Structures of the device ABI, as types that may be copied to and from user space.
//!
//! # Operation
//!
//! [`Abi`] marks a structure as copyable: every bit pattern is valid, and there is no padding. The size of
//! each structure is checked at compile time. [`UserArray`] reads and writes arrays in user space, and
//! [`write_extensible`] a structure that later versions extend.

use super::source::Requester;
use crate::{bindings, region::home::Grantee};
use kernel::{
    prelude::*,
    transmute::{AsBytes, FromBytes},
    uaccess::{UserPtr, UserSlice},
};
use kite_core::atomic::AtomicOp;

/// Structure of `include/uapi/kite.h`.
///
/// # Safety
///
/// Every bit pattern must be a valid value, and the type must have no padding.
pub(super) unsafe trait Abi: Copy {}

/// Wrapper that implements `FromBytes` and `AsBytes` for any [`Abi`] type.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Raw<T>(T);

// SAFETY: By the contract of `Abi`, every bit pattern is a valid value, and `Raw` is transparent.
unsafe impl<T: Abi> FromBytes for Raw<T> {}
// SAFETY: By the contract of `Abi`, the type has no padding, and `Raw` is transparent.
unsafe impl<T: Abi> AsBytes for Raw<T> {}

macro_rules! abi {
    ($($name:ident $size:literal,)*) => {$(
        // SAFETY: The structure consists of integers and arrays of integers, for which every bit pattern is
        // valid. The asserted size is the sum of the field sizes, so the structure has no padding.
        unsafe impl Abi for bindings::$name {}
        const _: () = assert!(size_of::<bindings::$name>() == $size);
    )*};
}

// Each size is the sum of the field sizes. The sizes are part of the ABI: ioctl numbers encode them.
abi! {
    kite_bind 72,
    kite_alloc 96,
    kite_register 96,
    kite_map 104,
    kite_handle 8,
    kite_rw 40,
    kite_segment 24,
    kite_rwv 24,
    kite_atomic 48,
    kite_serve 16,
    kite_call 56,
    kite_receive 56,
    kite_reply 32,
    kite_reply_receive 88,
    kite_lock 40,
    kite_unlock 16,
    kite_barrier 32,
    kite_fill 32,
    kite_copy 48,
    kite_grant 24,
    kite_migrate 24,
    kite_rename 80,
    kite_ring_header 384,
    kite_sqe 72,
    kite_cqe 24,
    kite_recv_header 32,
    kite_create_queue 48,
    kite_destroy_queue 8,
    kite_cancel 16,
    kite_enter 24,
    kite_priority 8,
    kite_qos 24,
    kite_limit 56,
    kite_list_limits 16,
    kite_query_region 48,
    kite_region_entry 112,
    kite_list_regions 24,
    kite_address 32,
    kite_member 72,
    kite_get_view 24,
    kite_query_rnic 120,
    kite_stats 432,
    kite_get_stats 16,
    kite_parameters 32,
    kite_event 16,
    kite_join 32,
    kite_set_view 24,
    kite_probe 16,
    kite_reg_mr 24,
    kite_dereg_mr 8,
    kite_connect 32,
    kite_close_vqp 8,
    kite_send_wr 56,
    kite_push 24,
    kite_pop 32,
    kite_listen 16,
    kite_close_listener 8,
    kite_accept 32,
    kite_pop_message 40,
    kite_vqp_info 48,
    kite_list_vqps 16,
}

/// Parses a structure. Returns `None` unless `bytes` has exactly the size of the structure.
pub(super) fn from_bytes<T: Abi>(bytes: &[u8]) -> Option<T> {
    Raw::from_bytes_copy(bytes).map(|Raw(value)| value)
}

/// Returns the bytes of a structure.
pub(super) fn as_bytes<T: Abi>(value: &T) -> &[u8] {
    // SAFETY: `value` is valid for `size_of::<T>()` bytes. By the contract of `Abi` there is no padding, so
    // all bytes are initialized.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Copies a structure that later versions extend to `size` bytes of user space at `addr`. `size` is that of
/// the caller's version: a longer `value` is truncated, a shorter one padded with zeros.
///
/// # Errors
///
/// - `EFAULT`: the memory is not writable.
/// - `EINVAL`: `size` is more than `KITE_STATS_SIZE_MAX`.
/// - `ENOMEM`: out of memory.
pub(super) fn write_extensible<T: Abi>(addr: u64, size: u32, value: &T) -> Result {
    if size > bindings::KITE_STATS_SIZE_MAX {
        return Err(EINVAL);
    }
    let size = size as usize;
    let mut bytes = KVec::from_elem(0u8, size, GFP_KERNEL)?;
    for (to, from) in bytes.iter_mut().zip(as_bytes(value)) {
        *to = *from;
    }
    let addr = UserPtr::from_addr(usize::try_from(addr).map_err(|_| EFAULT)?);
    UserSlice::new(addr, size).writer().write_slice(&bytes)
}

/// Returns the CQE of a completed request.
pub(super) fn cqe(tag: u64, result: Result<u64>) -> bindings::kite_cqe {
    bindings::kite_cqe {
        tag,
        value: *result.as_ref().unwrap_or(&0),
        error: result.map_or_else(|error| error.to_errno().unsigned_abs(), |_| 0),
        reserved: 0,
    }
}

/// Returns the operation of `struct kite_atomic`.
///
/// # Errors
///
/// - `EINVAL`: unknown operation, or a nonzero `expected` for an operation without comparison.
pub(super) fn parse_atomic(operation: u32, operand: u64, expected: u64) -> Result<AtomicOp> {
    match (operation, expected) {
        (bindings::KITE_ATOMIC_FETCH_ADD, 0) => Ok(AtomicOp::FetchAdd { operand }),
        (bindings::KITE_ATOMIC_COMPARE_SWAP, expected) => {
            Ok(AtomicOp::CompareSwap { expected, operand })
        }
        (bindings::KITE_ATOMIC_SWAP, 0) => Ok(AtomicOp::Swap { operand }),
        _ => Err(EINVAL),
    }
}

/// Returns the grantee of `struct kite_grant`.
///
/// # Errors
///
/// - `EINVAL`: unknown flags, a UID that is not in the user namespace of the caller, or a UID together with
///   `KITE_GRANT_OTHERS`.
pub(super) fn parse_grantee(caller: Requester<'_>, uid: u32, flags: u32) -> Result<Grantee> {
    match (flags, uid) {
        (0, uid) => Ok(Grantee::User(caller.to_initial_uid(uid)?)),
        (bindings::KITE_GRANT_OTHERS, 0) => Ok(Grantee::Others),
        _ => Err(EINVAL),
    }
}

// SAFETY: An integer: every bit pattern is valid, and there is no padding.
unsafe impl Abi for u32 {}

// SAFETY: An array of integers: every bit pattern is valid, and there is no padding.
unsafe impl Abi for [u64; 7] {}

/// Array of `T` in user space, or a single `T`.
pub(super) struct UserArray<T> {
    addr: u64,
    _marker: core::marker::PhantomData<T>,
}

impl<T: Abi> UserArray<T> {
    /// Returns the array at `addr`.
    pub(super) fn new(addr: u64) -> Self {
        Self {
            addr,
            _marker: core::marker::PhantomData,
        }
    }

    fn user_slice(&self, index: usize) -> Result<UserSlice> {
        let byte_offset = index.checked_mul(size_of::<T>()).ok_or(EFAULT)?;
        let addr = usize::try_from(self.addr)
            .ok()
            .and_then(|addr| addr.checked_add(byte_offset));
        Ok(UserSlice::new(
            UserPtr::from_addr(addr.ok_or(EFAULT)?),
            size_of::<T>(),
        ))
    }

    /// Reads one item.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is not readable, or the address overflows.
    pub(super) fn read(&self, index: usize) -> Result<T> {
        Ok(self.user_slice(index)?.reader().read::<Raw<T>>()?.0)
    }

    /// Writes one item.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is not writable, or the address overflows.
    pub(super) fn write(&self, index: usize, item: T) -> Result {
        self.user_slice(index)?.writer().write(&Raw(item))
    }

    /// Reads `count` items.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is not readable, or the address overflows.
    /// - `ENOMEM`: out of memory.
    pub(super) fn read_all(&self, count: usize) -> Result<KVec<T>> {
        let mut items = KVec::with_capacity(count, GFP_KERNEL)?;
        for i in 0..count {
            items.push(self.read(i)?, GFP_KERNEL)?;
        }
        Ok(items)
    }
}
