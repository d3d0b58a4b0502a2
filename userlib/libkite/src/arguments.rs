// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Conversion of arguments of C to Rust, and of results to negative errnos.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::slice;
use std::time::Duration;

use kite_rs::{Error, Region, Result, STRIPE_WIDTH_MAX};

use crate::process;

/// Sets the deadline of a region in milliseconds; 0 is the default of the module.
pub(crate) fn with_timeout_ms(region: Region, timeout_ms: u32) -> Region {
    match timeout_ms {
        0 => region,
        ms => region.with_timeout(Duration::from_millis(ms.into())),
    }
}

/// Returns memory of C to read.
///
/// # Safety
/// `ptr` must be NULL, or `size` too large for a slice, or `size` bytes at `ptr` must be readable and not written
/// during `'a`.
pub(crate) unsafe fn bytes_from_c<'a>(ptr: *const c_void, size: u64) -> Result<&'a [u8]> {
    Ok(match checked_len(ptr, size)? {
        0 => &[],
        // SAFETY: `ptr` is not NULL and the length fits, as checked. The rest holds by the safety requirements.
        size => unsafe { slice::from_raw_parts(ptr.cast(), size) },
    })
}

/// Returns memory of C to write.
///
/// # Safety
/// `ptr` must be NULL, or `size` too large for a slice, or `size` bytes at `ptr` must be writable and not accessed
/// otherwise during `'a`.
pub(crate) unsafe fn bytes_mut_from_c<'a>(ptr: *mut c_void, size: u64) -> Result<&'a mut [u8]> {
    Ok(match checked_len(ptr, size)? {
        0 => &mut [],
        // SAFETY: `ptr` is not NULL and the length fits, as checked. The rest holds by the safety requirements. The
        // kernel writes the bytes before they are read.
        size => unsafe { slice::from_raw_parts_mut(ptr.cast(), size) },
    })
}

/// Returns an array of C to read, of at least one value.
///
/// # Safety
/// `ptr` must be NULL, or point to `count` values that are not written during `'a`.
pub(crate) unsafe fn array_from_c<'a, T>(ptr: *const T, count: c_int) -> Result<&'a [T]> {
    let count = checked_count(ptr, count)?;
    // SAFETY: `ptr` is aligned and not NULL, as checked. The rest holds by the safety requirements.
    Ok(unsafe { slice::from_raw_parts(ptr, count) })
}

/// Returns an array of C to write, of at least one value.
///
/// # Safety
/// `ptr` must be NULL, or point to `count` values that are not accessed otherwise during `'a`. Every bit pattern must
/// be a valid `T`.
pub(crate) unsafe fn array_mut_from_c<'a, T>(ptr: *mut T, count: c_int) -> Result<&'a mut [T]> {
    let count = checked_count(ptr, count)?;
    // SAFETY: as in `array_from_c`. Every bit pattern is a valid `T`.
    Ok(unsafe { slice::from_raw_parts_mut(ptr, count) })
}

/// Checks pointer and length of an array. Returns the length, at least 1.
fn checked_count<T>(ptr: *const T, count: c_int) -> Result<usize> {
    let count = usize::try_from(count).ok().filter(|count| *count != 0);
    let count = count.ok_or(Error::Invalid)?;
    let is_valid = !ptr.is_null() && ptr.is_aligned();
    is_valid.then_some(count).ok_or(Error::Fault)
}

/// Writes the value of a result to `to`, unless `to` is NULL. Returns 0 or the negative errno.
///
/// # Safety
/// `to` must be NULL or writable.
pub(crate) unsafe fn write_result(result: Result<u64>, to: *mut u64) -> c_int {
    if let (Ok(value), false) = (&result, to.is_null()) {
        // SAFETY: `to` is not NULL, and is writable by the safety requirements.
        unsafe { to.write_unaligned(*value) };
    }
    to_status(result.map(|_| 0))
}

/// Returns a C string; NULL is the empty string.
///
/// # Safety
/// `ptr` must be NULL or a C string that is not written during `'a`.
pub(crate) unsafe fn str_from_c<'a>(ptr: *const c_char) -> Result<&'a str> {
    if ptr.is_null() {
        return Ok("");
    }
    // SAFETY: `ptr` is not NULL, and is a C string by the safety requirements.
    unsafe { CStr::from_ptr(ptr) }
        .to_str()
        .map_err(|_| Error::Invalid)
}

/// Returns an array of node IDs. A `count` of 0 returns an empty list, for any `ptr`.
///
/// # Safety
/// `ptr` must be NULL or point to `count` numbers that no other thread writes during the call.
pub(crate) unsafe fn node_ids_from_c(ptr: *const u32, count: u32) -> Result<Vec<u32>> {
    match usize::try_from(count) {
        Ok(0) => Ok(Vec::new()),
        Ok(count) if count <= STRIPE_WIDTH_MAX && !ptr.is_null() && ptr.is_aligned() => {
            // SAFETY: `ptr` is aligned and not NULL, as checked. The rest holds by the safety requirements.
            Ok(unsafe { slice::from_raw_parts(ptr, count) }.to_vec())
        }
        _ => Err(Error::Invalid),
    }
}

/// Checks pointer and size of a buffer. Returns the size in bytes.
///
/// # Errors
/// - [`Error::Invalid`]: the size exceeds `isize::MAX`, or the pointer of a size other than 0 is NULL.
pub(crate) fn checked_len(ptr: *const c_void, size: u64) -> Result<usize> {
    let is_valid = isize::try_from(size).is_ok() && (size == 0 || !ptr.is_null());
    usize::try_from(size)
        .ok()
        .filter(|_| is_valid)
        .ok_or(Error::Invalid)
}

/// Returns the status of C: the value, or the negative errno.
pub(crate) fn to_status(result: Result<c_int>) -> c_int {
    result.unwrap_or_else(|error| -error.errno())
}

/// Returns the number of bytes, or the negative errno.
pub(crate) fn to_count(result: Result<usize>) -> i64 {
    let count = result.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
    count.unwrap_or_else(|error| -i64::from(error.errno()))
}

/// Returns the handle of a new region, or the negative errno.
pub(crate) fn to_handle(result: Result<Region>) -> i64 {
    result.map_or_else(|error| -i64::from(error.errno()), process::insert_region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null;

    #[test]
    fn length_without_buffer_or_beyond_isize_is_rejected() {
        assert_eq!(checked_len(null(), 1), Err(Error::Invalid));
        assert_eq!(checked_len(null(), 0), Ok(0));
        assert_eq!(
            checked_len([0u8; 4].as_ptr().cast(), u64::MAX),
            Err(Error::Invalid)
        );
    }
}
