// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory that requests may write to, and addresses that they must not access.

use anyhow::{ensure, Result};
use libc::{
    mmap, mprotect, MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_NONE, PROT_READ, PROT_WRITE,
};

/// Bytes of the mapping. A part is read-only, and the end is inaccessible.
const SCRATCH: usize = 1 << 20;

/// Mapping for the results of requests, with a list of valid and invalid addresses.
pub(super) struct Scratch {
    pub(super) base: usize,
    pub(super) addresses: Vec<usize>,
}

impl Scratch {
    pub(super) fn new() -> Result<Self> {
        let flags = MAP_PRIVATE | MAP_ANONYMOUS;
        let protection = PROT_READ | PROT_WRITE;
        // SAFETY: a new mapping, without references.
        let base = unsafe { mmap(std::ptr::null_mut(), SCRATCH, protection, flags, -1, 0) };
        ensure!(base != MAP_FAILED, "mmap");
        let base = base as usize;
        let protect = |offset: usize, protection| {
            // SAFETY: a part of the mapping made above.
            unsafe { mprotect((base + offset) as *mut _, 65_536, protection) }
        };
        ensure!(
            protect(SCRATCH - 65_536, PROT_NONE) == 0 && protect(SCRATCH / 2, PROT_READ) == 0,
            "mprotect"
        );
        let addresses = vec![
            base,
            base + 1,
            base + 4095,
            base + 65_536,
            base + SCRATCH / 2 - 8,
            base + SCRATCH / 2,
            base + SCRATCH - 65_536 - 8,
            base + SCRATCH - 65_536,
            0,
            8,
            0xffff_8880_0000_0000,
            0xffff_ffff_8100_0000,
            0x7fff_ffff_f000,
            0x8000_0000_0000,
            usize::MAX,
            usize::MAX - 4095,
        ];
        Ok(Scratch { base, addresses })
    }
}
