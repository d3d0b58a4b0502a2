// SPDX-License-Identifier: GPL-2.0

//! Buffers for received messages, with allocations that retry until they succeed.
//!
//! The transport has already acknowledged the message to its sender, so running out of memory must not lose
//! the message. The `kernel` crate has no flag `__GFP_NOFAIL`. With that flag this file can be removed.

use kernel::{
    prelude::*,
    time::{delay::fsleep, Delta},
};

/// Delay between two allocation attempts, in milliseconds.
const ALLOC_RETRY_MS: i64 = 10;

/// Allocates `len` zeroed bytes. Sleeps and retries until the allocation succeeds.
pub(crate) fn alloc_zeroed_nofail(len: usize) -> KVec<u8> {
    loop {
        match KVec::from_elem(0u8, len, GFP_KERNEL) {
            Ok(bytes) => return bytes,
            Err(_) => fsleep(Delta::from_millis(ALLOC_RETRY_MS)),
        }
    }
}
