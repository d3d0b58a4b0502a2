// SPDX-License-Identifier: GPL-2.0

//! Splits a copy between two regions, or within one region, into segments (LITE: `LT_memcpy`, `LT_memmove`).
//!
//! Each segment lies within one chunk of the source and one chunk of the destination. Hence each end of a
//! segment is on a single node. Within one region the source and the destination may overlap. The segments
//! then come in an order in which no segment overwrites the source of a later one.

use crate::layout::{Layout, OutOfRange};

/// Byte position in a region.
#[derive(Clone, Copy, Debug)]
pub struct RegionPosition {
    /// Chunk layout of the region.
    pub layout: Layout,
    /// Offset in the region, in bytes.
    pub offset: u64,
}

/// Segment of a copy, of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySegment {
    /// Offset from the start of the copy, in bytes; the same for the source and the destination.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// Iterator over the segments of a copy.
#[derive(Clone, Debug)]
pub struct CopySegments {
    source: RegionPosition,
    destination: RegionPosition,
    /// Remaining range `start..end`, as offsets from the start of the copy.
    start: u64,
    end: u64,
    backwards: bool,
    max_len: u32,
}

impl CopySegments {
    /// Splits a copy of `len` bytes into segments of at most `max_len` bytes. A `max_len` of 0 counts as 1.
    ///
    /// `same_region` is `true` if `source` and `destination` are positions in the same region.
    ///
    /// # Errors
    ///
    /// - [`OutOfRange`]: part of the copy lies outside one of the regions.
    pub fn new(
        source: RegionPosition,
        destination: RegionPosition,
        len: u64,
        same_region: bool,
        max_len: u32,
    ) -> Result<Self, OutOfRange> {
        source.layout.pieces(source.offset, len)?;
        destination.layout.pieces(destination.offset, len)?;
        Ok(Self {
            source,
            destination,
            start: 0,
            end: len,
            backwards: same_region && destination.offset > source.offset,
            max_len: max_len.max(1),
        })
    }

    /// Returns the number of bytes that follow offset `at` within its chunk (if `backwards`: that precede
    /// `at`).
    fn contiguous_len(&self, place: &RegionPosition, at: u64) -> u64 {
        let mask = (1u64 << place.layout.shift()) - 1;
        let offset = place.offset + at;
        if self.backwards {
            (offset.wrapping_sub(1) & mask) + 1
        } else {
            mask + 1 - (offset & mask)
        }
    }
}

impl Iterator for CopySegments {
    type Item = CopySegment;

    fn next(&mut self) -> Option<CopySegment> {
        let remaining = self.end - self.start;
        if remaining == 0 {
            return None;
        }
        let position = if self.backwards { self.end } else { self.start };
        let contiguous = self
            .contiguous_len(&self.source, position)
            .min(self.contiguous_len(&self.destination, position));
        let len = remaining.min(contiguous).min(self.max_len.into());
        let at = if self.backwards {
            self.end -= len;
            self.end
        } else {
            self.start += len;
            self.start - len
        };
        // `len` is at most `max_len`, which is a `u32`: the cast does not truncate.
        Some(CopySegment {
            offset: at,
            len: len as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn position(len: u64, shift: u8, offset: u64) -> RegionPosition {
        let layout = Layout::new(len, shift).unwrap();
        RegionPosition { layout, offset }
    }

    /// Returns `true` if a segment lies in one chunk.
    fn is_within_chunk(place: &RegionPosition, step: CopySegment) -> bool {
        let pieces = place
            .layout
            .pieces(place.offset + step.offset, step.len.into());
        pieces.unwrap().count() == 1
    }

    #[test]
    fn copy_out_of_range_is_rejected() {
        let (small, large) = (position(5000, 12, 0), position(9000, 13, 0));
        assert!(CopySegments::new(small, large, 5000, false, 100).is_ok());
        assert_eq!(
            CopySegments::new(small, large, 5001, false, 100).err(),
            Some(OutOfRange)
        );
        assert_eq!(
            CopySegments::new(large, small, 5001, false, 100).err(),
            Some(OutOfRange)
        );
        let out_of_range = position(5000, 12, u64::MAX);
        assert_eq!(
            CopySegments::new(out_of_range, large, 1, false, 100).err(),
            Some(OutOfRange)
        );
        assert_eq!(
            CopySegments::new(small, out_of_range, 1, false, 100).err(),
            Some(OutOfRange)
        );
        assert_eq!(
            CopySegments::new(small, large, 0, false, 100)
                .unwrap()
                .next(),
            None
        );
    }

    proptest! {
        #[test]
        fn segments_cover_each_byte_once(
            shifts in (12u8..15, 12u8..15), offsets in (0u64..20_000, 0u64..20_000), len in 0u64..40_000,
            max_len in 1u32..10_000, same_region: bool,
        ) {
            let from = position(100_000, shifts.0, offsets.0);
            let to = position(100_000, shifts.1, offsets.1);
            let mut copied = vec![0u8; len as usize];
            for step in CopySegments::new(from, to, len, same_region, max_len).unwrap() {
                prop_assert!(step.len <= max_len && is_within_chunk(&from, step) && is_within_chunk(&to, step));
                let at = step.offset as usize;
                copied[at..at + step.len as usize].iter_mut().for_each(|count| *count += 1);
            }
            prop_assert!(copied.iter().all(|count| *count == 1));
        }

        /// Segment-wise copying, with a read before each write, has the same result as `copy_within`.
        #[test]
        fn overlapping_copy_equals_copy_within(
            shift in 12u8..14, from in 0usize..6_000, to in 0usize..6_000, len in 0usize..20_000,
            max_len in 1u32..5_000,
        ) {
            let mut bytes: Vec<u8> = (0..30_000u32).map(|i| (i % 251) as u8).collect();
            let mut expected = bytes.clone();
            expected.copy_within(from..from + len, to);
            let region_len = bytes.len() as u64;
            let (source, target) = (position(region_len, shift, from as u64), position(region_len, shift, to as u64));
            for step in CopySegments::new(source, target, len as u64, true, max_len).unwrap() {
                let at = step.offset as usize;
                bytes.copy_within(from + at..from + at + step.len as usize, to + at);
            }
            prop_assert_eq!(bytes, expected);
        }
    }
}
