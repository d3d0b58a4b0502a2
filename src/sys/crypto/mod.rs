// SPDX-License-Identifier: GPL-2.0

//! HMAC-SHA256, and comparison of secret bytes.
//!
//! The `kernel` crate wraps neither `<crypto/sha2.h>` nor `crypto_memneq`. With such an abstraction this
//! module can be removed.

use crate::bindings::{self, inline};

/// Length of an HMAC-SHA256 value, in bytes.
const HMAC_SHA256_BYTES: usize = bindings::SHA256_DIGEST_SIZE as usize;

/// Returns the HMAC-SHA256 value of `data` with `key`.
pub(crate) fn hmac_sha256(key: &[u8], data: &[u8]) -> [u8; HMAC_SHA256_BYTES] {
    let mut value = [0; HMAC_SHA256_BYTES];
    // SAFETY:
    // - `key` and `data` are valid for reads of their lengths.
    // - `value` is valid for writes of `SHA256_DIGEST_SIZE` bytes.
    unsafe {
        bindings::hmac_sha256_usingrawkey(
            key.as_ptr(),
            key.len(),
            data.as_ptr(),
            data.len(),
            value.as_mut_ptr(),
        );
    }
    value
}

/// Returns `true` if both arrays are equal. The time does not depend on the bytes, so a sender of guesses
/// cannot measure how many bytes are right.
pub(crate) fn is_equal_in_constant_time<const N: usize>(a: &[u8; N], b: &[u8; N]) -> bool {
    // SAFETY: Both arrays are valid for reads of `N` bytes.
    unsafe { inline::crypto_memneq(a.as_ptr().cast(), b.as_ptr().cast(), N) == 0 }
}
