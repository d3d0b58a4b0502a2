// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What C passes, as Rust has it, and results as C has them: negative errno.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::slice;
use std::time::Duration;

use kite_rs::{Error, Region, Result, STRIPE_MAX};

use crate::process;

/// A region with that deadline; 0 is the module's.
pub(crate) fn patient(region: Region, timeout_ms: u32) -> Region {
    match timeout_ms {
        0 => region,
        ms => region.with_timeout(Duration::from_millis(ms.into())),
    }
}

/// Memory of C that is read.
///
/// # Safety
/// `at` points to `size` bytes that nobody writes for `'a`, unless it is NULL or the size impossible.
pub(crate) unsafe fn bytes<'a>(at: *const c_void, size: u64) -> Result<&'a [u8]> {
    Ok(match length(at, size)? {
        0 => &[],
        // SAFETY: it is not NULL, the length fits, and the caller vouches for the rest.
        size => unsafe { slice::from_raw_parts(at.cast(), size) },
    })
}

/// Memory of C that is written.
///
/// # Safety
/// `at` points to `size` bytes that nobody else accesses for `'a`, unless it is NULL or the size impossible.
pub(crate) unsafe fn bytes_mut<'a>(at: *mut c_void, size: u64) -> Result<&'a mut [u8]> {
    Ok(match length(at, size)? {
        0 => &mut [],
        // SAFETY: it is not NULL, the length fits, and the caller vouches for the rest. The kernel writes
        // it before anybody reads it.
        size => unsafe { slice::from_raw_parts_mut(at.cast(), size) },
    })
}

/// An array of C that is read.
///
/// # Safety
/// `at` points to `count` of them that nobody writes for `'a`, unless it is NULL.
pub(crate) unsafe fn list<'a, T>(at: *const T, count: c_int) -> Result<&'a [T]> {
    let count = count_of(at, count)?;
    // SAFETY: it is aligned and not NULL, and the caller vouches for the rest.
    Ok(unsafe { slice::from_raw_parts(at, count) })
}

/// An array of C that is written.
///
/// # Safety
/// `at` points to `count` of them that nobody else accesses for `'a`, unless it is NULL; any bytes are a `T`.
pub(crate) unsafe fn list_mut<'a, T>(at: *mut T, count: c_int) -> Result<&'a mut [T]> {
    let count = count_of(at, count)?;
    // SAFETY: as in `list`.
    Ok(unsafe { slice::from_raw_parts_mut(at, count) })
}

/// At least 1.
fn count_of<T>(at: *const T, count: c_int) -> Result<usize> {
    let count = usize::try_from(count).ok().filter(|count| *count != 0);
    let count = count.ok_or(Error::Invalid)?;
    let there = !at.is_null() && at.is_aligned();
    there.then_some(count).ok_or(Error::Fault)
}

/// Writes a result to where the caller wants it, if anywhere.
///
/// # Safety
/// `to` is NULL, or points to a number that may be written.
pub(crate) unsafe fn give(result: Result<u64>, to: *mut u64) -> c_int {
    if let (Ok(value), false) = (&result, to.is_null()) {
        // SAFETY: it is not NULL, and the caller vouches for the rest.
        unsafe { to.write_unaligned(*value) };
    }
    status(result.map(|_| 0))
}

/// A C string; NULL is the empty one.
///
/// # Safety
/// `text` is NULL or a C string that lives for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: it is not NULL, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| Error::Invalid)
}

/// # Safety
/// `numbers` points to `count` numbers, unless that is 0.
pub(crate) unsafe fn numbers(numbers: *const u32, count: u32) -> Result<Vec<u32>> {
    match usize::try_from(count) {
        Ok(0) => Ok(Vec::new()),
        Ok(count) if count <= STRIPE_MAX && !numbers.is_null() && numbers.is_aligned() => {
            // SAFETY: it is aligned and not NULL, and the caller vouches for the rest.
            Ok(unsafe { slice::from_raw_parts(numbers, count) }.to_vec())
        }
        _ => Err(Error::Invalid),
    }
}

/// The size of a buffer, if memory can have it.
pub(crate) fn length(buffer: *const c_void, size: u64) -> Result<usize> {
    let fits = isize::try_from(size).is_ok() && (size == 0 || !buffer.is_null());
    usize::try_from(size)
        .ok()
        .filter(|_| fits)
        .ok_or(Error::Invalid)
}

pub(crate) fn status(result: Result<c_int>) -> c_int {
    result.unwrap_or_else(|error| -error.errno())
}

pub(crate) fn count(result: Result<usize>) -> i64 {
    let count = result.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
    count.unwrap_or_else(|error| -i64::from(error.errno()))
}

pub(crate) fn handle(result: Result<Region>) -> i64 {
    result.map_or_else(|error| -i64::from(error.errno()), process::keep)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null;

    #[test]
    fn buffers_fit_memory() {
        assert_eq!(length(null(), 1), Err(Error::Invalid));
        assert_eq!(length(null(), 0), Ok(0));
        assert_eq!(
            length([0u8; 4].as_ptr().cast(), u64::MAX),
            Err(Error::Invalid)
        );
    }
}
