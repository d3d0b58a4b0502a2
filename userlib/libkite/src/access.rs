// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Access to the memory of regions: reads, writes, fills, copies and atomic operations.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::slice;

use kite_rs::{Error, Region, Result};

use crate::arguments::{bytes_from_c, bytes_mut_from_c, checked_len, to_status, write_result};
use crate::process;

/// # Safety
/// `buffer` must be writable for `size` bytes. No other thread may access it during the call.
#[no_mangle]
unsafe extern "C" fn LT_read(lh: i64, offset: u64, buffer: *mut c_void, size: u64) -> c_int {
    let read = |region: Region| {
        let buffer: &mut [MaybeUninit<u8>] = match checked_len(buffer, size)? {
            0 => &mut [],
            // SAFETY: `buffer` is not NULL and the length fits, as checked. The rest holds by the safety requirements.
            size => unsafe { slice::from_raw_parts_mut(buffer.cast(), size) },
        };
        region.read_uninit_at(buffer, offset).map(|_| 0)
    };
    to_status(process::region(lh).and_then(read))
}

/// # Safety
/// `buffer` must be readable for `size` bytes. No other thread may write it during the call.
#[no_mangle]
unsafe extern "C" fn LT_write(lh: i64, offset: u64, buffer: *const c_void, size: u64) -> c_int {
    let write = |region: Region| {
        // SAFETY: `buffer` is valid by the safety requirements.
        let buffer = unsafe { bytes_from_c(buffer, size) }?;
        region.write_at(buffer, offset).map(|()| 0)
    };
    to_status(process::region(lh).and_then(write))
}

/// `struct LT_segment`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LtSegment {
    offset: u64,
    data: *mut c_void,
    size: u64,
}

/// Returns an array of segments. A `count` of 0 returns an empty array, for any `ptr`.
///
/// # Safety
/// `ptr` must be NULL or point to `count` segments that no other thread writes during `'a`.
unsafe fn segments_from_c<'a>(ptr: *const LtSegment, count: u32) -> Result<&'a [LtSegment]> {
    match usize::try_from(count).map_err(|_| Error::Invalid)? {
        0 => Ok(&[]),
        _ if ptr.is_null() => Err(Error::Invalid),
        // SAFETY: `ptr` is not NULL. The rest holds by the safety requirements.
        count => Ok(unsafe { slice::from_raw_parts(ptr, count) }),
    }
}

/// # Safety
/// `list` must be NULL or point to `count` segments. The data of each must be writable for its size. They must not
/// overlap, and no other thread may access them during the call.
#[no_mangle]
unsafe extern "C" fn LT_readv(lh: i64, list: *const LtSegment, count: u32) -> c_int {
    let read = |region: Region| {
        // SAFETY: `list` is valid by the safety requirements.
        let list = unsafe { segments_from_c(list, count) }?;
        let buffers: Result<Vec<_>> = list
            .iter()
            .map(|segment| {
                // SAFETY: the data of the segment are writable, and not shared, by the safety requirements.
                let bytes = unsafe { bytes_mut_from_c(segment.data, segment.size) };
                Ok((segment.offset, bytes?))
            })
            .collect();
        region.read_vectored_at(&mut buffers?).map(|()| 0)
    };
    to_status(process::region(lh).and_then(read))
}

/// # Safety
/// `list` must be NULL or point to `count` segments. The data of each must be readable for its size. No other thread
/// may write them during the call.
#[no_mangle]
unsafe extern "C" fn LT_writev(lh: i64, list: *const LtSegment, count: u32) -> c_int {
    let write = |region: Region| {
        // SAFETY: `list` is valid by the safety requirements.
        let list = unsafe { segments_from_c(list, count) }?;
        let buffers: Result<Vec<_>> = list
            .iter()
            .map(|segment| {
                // SAFETY: the data of the segment are readable by the safety requirements.
                let bytes = unsafe { bytes_from_c(segment.data, segment.size) };
                Ok((segment.offset, bytes?))
            })
            .collect();
        region.write_vectored_at(&buffers?).map(|()| 0)
    };
    to_status(process::region(lh).and_then(write))
}

#[no_mangle]
extern "C" fn LT_memset(lh: i64, offset: u64, byte: c_int, size: u64) -> c_int {
    // As `memset`, which converts to `unsigned char`.
    let byte = byte as u8;
    let result = process::region(lh).and_then(|region| region.fill(byte, offset, size));
    to_status(result.map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_memmove(to: i64, to_offset: u64, from: i64, from_offset: u64, size: u64) -> c_int {
    let copy = || {
        let (from, to) = (process::region(from)?, process::region(to)?);
        from.copy_to(from_offset, &to, to_offset, size)
    };
    to_status(copy().map(|()| 0))
}

#[no_mangle]
extern "C" fn LT_memcpy(to: i64, to_offset: u64, from: i64, from_offset: u64, size: u64) -> c_int {
    LT_memmove(to, to_offset, from, from_offset, size)
}

/// # Safety
/// `value` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_fetch_add(lh: i64, offset: u64, operand: u64, value: *mut u64) -> c_int {
    let old_value = process::region(lh).and_then(|region| region.fetch_add(offset, operand));
    // SAFETY: `value` is valid by the safety requirements.
    unsafe { write_result(old_value, value) }
}

/// # Safety
/// `value` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_compare_swap(
    lh: i64,
    offset: u64,
    expected: u64,
    new: u64,
    value: *mut u64,
) -> c_int {
    let old_value =
        process::region(lh).and_then(|region| region.compare_swap(offset, expected, new));
    // SAFETY: `value` is valid by the safety requirements.
    unsafe { write_result(old_value, value) }
}

/// # Safety
/// `value` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn LT_swap(lh: i64, offset: u64, new: u64, value: *mut u64) -> c_int {
    let old_value = process::region(lh).and_then(|region| region.swap(offset, new));
    // SAFETY: `value` is valid by the safety requirements.
    unsafe { write_result(old_value, value) }
}

#[no_mangle]
extern "C" fn LT_test_set(lh: i64, offset: u64) -> c_int {
    let result = process::region(lh).and_then(|region| region.test_and_set(offset));
    to_status(result.map(c_int::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn access_calls_without_join_return_ebadf() {
        let bad = -libc::EBADF;
        // SAFETY: all pointers are NULL, with a size of 0 or where NULL is rejected.
        unsafe {
            assert_eq!(LT_read(1, 0, null_mut(), 0), bad);
            assert_eq!(LT_write(0, 0, null(), 0), bad);
            assert_eq!(LT_readv(1, null(), 0), bad);
            assert_eq!(LT_writev(1, null(), 1), bad);
            assert_eq!(LT_fetch_add(1, 0, 1, null_mut()), bad);
        }
        assert_eq!(LT_memset(1, 0, 0, 1), bad);
        assert_eq!(LT_memcpy(1, 0, 2, 0, 1), bad);
    }
}
