// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Device memory (MEMIC): a part of BAR 0 that processors map. Keys refer to its bytes by offset.

use std::cell::Cell;
use std::collections::BTreeMap;

/// Offset in BAR 0.
pub const BAR_OFFSET: u64 = 24 << 20;
/// Size in bytes.
pub const SIZE: u64 = 128 << 10;
/// Log2 of the minimum size of an allocation.
pub const LOG_MIN_ALLOCATION: u32 = 6;
/// Log2 of the maximum alignment.
pub const LOG_MAX_ALIGNMENT: u32 = 12;

/// Device memory.
pub struct Memic {
    bytes: Box<[Cell<u8>]>,
    /// Allocations: start and size.
    allocations: BTreeMap<u64, u64>,
}

impl Default for Memic {
    fn default() -> Self {
        Memic {
            bytes: vec![Cell::new(0); SIZE as usize].into(),
            allocations: BTreeMap::new(),
        }
    }
}

impl std::fmt::Debug for Memic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memic")
            .field("allocations", &self.allocations)
            .finish_non_exhaustive()
    }
}

impl Memic {
    /// Reads all of `bytes` from the offset `at`. Returns `None` beyond the end.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let cells = self.range(at, bytes.len())?;
        bytes
            .iter_mut()
            .zip(cells)
            .for_each(|(byte, cell)| *byte = cell.get());
        Some(())
    }

    /// Writes all of `bytes` to the offset `at`. Returns `None` beyond the end.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        let cells = self.range(at, bytes.len())?;
        bytes
            .iter()
            .zip(cells)
            .for_each(|(byte, cell)| cell.set(*byte));
        Some(())
    }

    /// Allocates `size` bytes, aligned to `alignment`, a power of two, within `within`.
    pub fn allocate(
        &mut self,
        within: std::ops::Range<u64>,
        size: u64,
        alignment: u64,
    ) -> Option<u64> {
        let end = within.end.min(SIZE);
        let mut start = within.start.checked_next_multiple_of(alignment)?;
        while start.checked_add(size)? <= end {
            let Some(next) = self.taken(start, size) else {
                self.allocations.insert(start, size);
                return Some(start);
            };
            start = next.checked_next_multiple_of(alignment)?;
        }
        None
    }

    /// Frees the allocation of `size` bytes at `start`. Returns `None` if it does not exist.
    pub fn free(&mut self, start: u64, size: u64) -> Option<()> {
        self.allocations
            .get(&start)
            .filter(|allocated| **allocated == size)?;
        self.allocations.remove(&start);
        Some(())
    }

    /// Returns `true` if the range is within one allocation. A key may name only such a range.
    pub fn is_allocated(&self, start: u64, size: u64) -> bool {
        let Some(end) = start.checked_add(size) else {
            return false;
        };
        let below = self.allocations.range(..=start).next_back();
        below.is_some_and(|(at, allocated)| end <= at + allocated)
    }

    /// Returns the end of an allocation that overlaps the range.
    fn taken(&self, start: u64, size: u64) -> Option<u64> {
        let (at, allocated) = self.allocations.range(..start + size).next_back()?;
        Some(at + allocated).filter(|end| *end > start)
    }

    fn range(&self, at: u64, length: usize) -> Option<&[Cell<u8>]> {
        self.bytes.get(usize::try_from(at).ok()?..)?.get(..length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memic_is_read_back_and_access_beyond_end_fails() {
        let memic = Memic::default();
        assert_eq!(memic.write(SIZE - 2, &[1, 2]), Some(()));
        let mut bytes = [9; 3];
        assert_eq!(memic.read(SIZE - 3, &mut bytes), Some(()));
        assert_eq!(bytes, [0, 1, 2]);
        assert_eq!(memic.write(SIZE - 1, &[1, 2]), None);
        assert_eq!(memic.read(u64::MAX, &mut bytes), None);
    }

    #[test]
    fn allocations_do_not_overlap_and_freed_memory_is_reused() {
        let mut memic = Memic::default();
        assert_eq!(memic.allocate(0..4096, 3000, 64), Some(0));
        assert_eq!(memic.allocate(0..4096, 1000, 64), Some(3008));
        assert_eq!(memic.allocate(0..4096, 128, 64), None);
        assert!(memic.is_allocated(3008, 1000) && !memic.is_allocated(3008, 1001));
        assert_eq!(memic.free(0, 2999), None);
        assert_eq!(memic.free(0, 3000), Some(()));
        assert_eq!(memic.allocate(64..8192, 64, 4096), Some(4096));
        assert_eq!(memic.allocate(SIZE - 64..u64::MAX, 128, 64), None);
    }
}
