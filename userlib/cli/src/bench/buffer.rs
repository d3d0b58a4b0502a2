// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Buffers for measurements: page-aligned, resident, and with contents that show whether a transfer took place.

use anyhow::{ensure, Context, Result};
use kite::Region;

use super::Operation;

const PAGE_BYTES: usize = 4096;

/// Period of a pattern in bytes. It is odd, so data at an offset wrong by a power of two differs.
const PATTERN_PERIOD: u64 = 251;

/// Buffer, and the part of a region that it is copied to and from.
pub(super) struct BenchBuffer<'a> {
    region: &'a Region,
    offset: u64,
    memory: AlignedMemory,
}

impl<'a> BenchBuffer<'a> {
    pub(super) fn new(region: &'a Region, offset: u64, len: u64) -> Result<Self> {
        let memory = AlignedMemory::new(usize::try_from(len)?);
        Ok(Self {
            region,
            offset,
            memory,
        })
    }

    /// Makes buffer and region differ, so that [`Self::verify`] detects whether `operation` took place.
    pub(super) fn prepare(&mut self, operation: Operation) -> Result<()> {
        if operation == Operation::Read {
            self.memory.fill(self.offset);
            self.write_region()?;
        }
        self.memory.bytes().fill(0);
        if operation == Operation::Write {
            self.write_region()?;
            self.memory.fill(self.offset);
        }
        Ok(())
    }

    /// Changes the first bytes of the buffer, so that each write differs from the previous one.
    pub(super) fn stamp(&mut self, operation: Operation, count: u64) {
        if operation == Operation::Write {
            self.memory.stamp(count);
        }
    }

    /// Transfers the whole buffer once.
    pub(super) fn transfer(&mut self, operation: Operation) -> kite::Result<()> {
        match operation {
            Operation::Write => self.region.write_at(self.memory.bytes(), self.offset),
            Operation::Read => self.region.read_at(self.memory.bytes(), self.offset),
        }
    }

    /// Compares buffer and region.
    pub(super) fn verify(&mut self, operation: Operation) -> Result<()> {
        let mut expected = AlignedMemory::new(self.memory.len);
        match operation {
            Operation::Read => expected.fill(self.offset),
            Operation::Write => self
                .region
                .read_at(expected.bytes(), self.offset)
                .context("reading back what was written")?,
        }
        let is_equal = expected.bytes() == self.memory.bytes();
        let name = operation.name();
        ensure!(
            is_equal,
            "wrong data after the last {name}; the times are invalid"
        );
        Ok(())
    }

    fn write_region(&mut self) -> Result<()> {
        self.transfer(Operation::Write)
            .context("preparing the region")
    }
}

/// Page-aligned bytes.
struct AlignedMemory {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedMemory {
    fn new(len: usize) -> Self {
        // Written, not only reserved, so that no page fault occurs during the measurement.
        let mut memory = vec![1; len + PAGE_BYTES];
        memory.fill(0);
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        Self { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }

    /// Fills the memory with a pattern without zeros, which depends on `seed`.
    fn fill(&mut self, seed: u64) {
        for (byte, i) in self.bytes().iter_mut().zip(seed..) {
            *byte = (i % PATTERN_PERIOD) as u8 + 1;
        }
    }

    fn stamp(&mut self, count: u64) {
        for (byte, stamp) in self.bytes().iter_mut().zip(count.to_ne_bytes()) {
            *byte = stamp;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_page_aligned() {
        for len in [1, 8, PAGE_BYTES, 3 * PAGE_BYTES + 5] {
            let mut memory = AlignedMemory::new(len);
            assert_eq!(memory.bytes().as_ptr() as usize % PAGE_BYTES, 0);
            assert_eq!(memory.bytes().len(), len);
        }
    }

    #[test]
    fn patterns_have_no_zeros_and_differ_by_seed() {
        let (mut one, mut other) = (AlignedMemory::new(1000), AlignedMemory::new(1000));
        one.fill(0);
        other.fill(1000);
        assert!(one.bytes().iter().all(|&byte| byte != 0));
        assert_ne!(one.bytes(), other.bytes());
    }

    #[test]
    fn stamp_longer_than_the_memory_is_cut() {
        for len in [1, 3, 8, 20] {
            let mut memory = AlignedMemory::new(len);
            memory.stamp(u64::MAX);
            let stamped = memory.bytes().iter().filter(|&&byte| byte == 255).count();
            assert_eq!(stamped, len.min(8));
        }
    }
}
