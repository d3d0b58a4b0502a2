// SPDX-License-Identifier: GPL-2.0

//! Memory for what was received: its sender knows that it has come, so it must not be lost for want of memory.

use kernel::{
    prelude::*,
    time::{delay::fsleep, Delta},
};

/// Time between attempts.
const ALLOC_RETRY_MS: i64 = 10;

/// So many bytes, all zero. Waits until there is memory for them.
pub(crate) fn alloc_zeroed_nofail(len: usize) -> KVec<u8> {
    loop {
        match KVec::from_elem(0u8, len, GFP_KERNEL) {
            Ok(bytes) => return bytes,
            Err(_) => fsleep(Delta::from_millis(ALLOC_RETRY_MS)),
        }
    }
}
