// SPDX-License-Identifier: GPL-2.0

//! Reservation of RAM by loans that are being allocated.
//!
//! # Operation
//!
//! A loan reserves all of its memory before it allocates the first chunk, and releases the reservation chunk by
//! chunk. So loans that are allocated at the same time see the memory of each other.
//!
//! The counter is a relaxed atomic without a lock. A reservation that fails may let another one fail that would
//! fit alone.

use crate::{bindings, stats::Counter, sys::pages};
use kernel::{page::PAGE_SIZE, prelude::*};

/// Bytes that loans will still allocate. All RNICs of this node share the counter.
static UNALLOCATED_BYTES: Counter = Counter::new();

/// Memory of this node that a loan has reserved and not allocated yet. Allocated memory is not available, so
/// [`lendable_bytes`] does not contain it any longer.
pub(super) struct RamReservation {
    bytes: u64,
}

impl RamReservation {
    /// Reserves memory, so concurrent loans together leave the reserve of [`lendable_bytes`].
    ///
    /// # Errors
    ///
    /// - `ENOSPC`: this much memory is not available.
    pub(super) fn new(bytes: u64) -> Result<Self> {
        // Without an addition, so that a request for too much memory disturbs no other.
        if bytes > lendable_bytes() {
            return Err(ENOSPC);
        }
        UNALLOCATED_BYTES.add(bytes);
        let reservation = Self { bytes };
        // Read after the addition: a loan may have allocated its memory, and released its reservation, meanwhile.
        match UNALLOCATED_BYTES.get() <= lendable_bytes() {
            true => Ok(reservation),
            false => Err(ENOSPC),
        }
    }

    /// Releases the part that has been allocated.
    pub(super) fn release(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        UNALLOCATED_BYTES.sub(bytes);
        self.bytes -= bytes;
    }
}

impl Drop for RamReservation {
    fn drop(&mut self) {
        UNALLOCATED_BYTES.sub(self.bytes);
    }
}

/// Returns the bytes that a region may take: the available memory minus a reserve of 1/8 of RAM.
fn lendable_bytes() -> u64 {
    // SAFETY: The function has no preconditions.
    let pages = unsafe { bindings::si_mem_available() };
    let available = u64::try_from(pages).unwrap_or(0) * PAGE_SIZE as u64;
    available.saturating_sub(pages::total_ram_bytes() / 8)
}
