// SPDX-License-Identifier: GPL-2.0

//! How a copy between two places of regions is cut into steps (LITE: `LT_memcpy`, `LT_memmove`).
//!
//! Each step lies within one chunk of the source and one of the destination, so that it is one node that has
//! either. Within a region the two may overlap: then the steps come in the order in which none writes what a
//! later one reads.

use crate::layout::{Layout, OutOfRange};

/// A place in a region.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// How the region is cut.
    pub layout: Layout,
    /// First byte in it.
    pub offset: u64,
}

/// Part of a copy. It has at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// First byte, counted from either place.
    pub at: u64,
    /// Bytes.
    pub len: u32,
}

/// The steps of a copy.
#[derive(Clone, Debug)]
pub struct Steps {
    from: Place,
    to: Place,
    /// What is left to do.
    at: u64,
    end: u64,
    backwards: bool,
    most: u32,
}

impl Steps {
    /// Cuts a copy of `len` bytes into steps of at most `most`, which is at least 1. `same` says whether both
    /// places are in one region.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if not all of the bytes are in both regions.
    pub fn new(
        from: Place,
        to: Place,
        len: u64,
        same: bool,
        most: u32,
    ) -> Result<Self, OutOfRange> {
        from.layout.pieces(from.offset, len)?;
        to.layout.pieces(to.offset, len)?;
        Ok(Self {
            from,
            to,
            at: 0,
            end: len,
            backwards: same && to.offset > from.offset,
            most: most.max(1),
        })
    }

    /// Bytes from `at` on that are in one chunk of a place, or up to `at`.
    fn run(&self, place: &Place, at: u64) -> u64 {
        let mask = (1u64 << place.layout.shift()) - 1;
        let offset = place.offset + at;
        if self.backwards {
            (offset.wrapping_sub(1) & mask) + 1
        } else {
            mask + 1 - (offset & mask)
        }
    }
}

impl Iterator for Steps {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let left = self.end - self.at;
        if left == 0 {
            return None;
        }
        let edge = if self.backwards { self.end } else { self.at };
        let both = self.run(&self.from, edge).min(self.run(&self.to, edge));
        let len = left.min(both).min(self.most.into());
        let at = if self.backwards {
            self.end -= len;
            self.end
        } else {
            self.at += len;
            self.at - len
        };
        // No longer than `most`.
        Some(Step {
            at,
            len: len as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(len: u64, shift: u8, offset: u64) -> Place {
        let layout = Layout::new(len, shift).unwrap();
        Place { layout, offset }
    }

    /// Whether a step lies in one chunk.
    fn fits(place: &Place, step: Step) -> bool {
        let pieces = place.layout.pieces(place.offset + step.at, step.len.into());
        pieces.unwrap().count() == 1
    }

    #[test]
    fn what_is_outside_is_refused() {
        let (small, large) = (place(5000, 12, 0), place(9000, 13, 0));
        assert!(Steps::new(small, large, 5000, false, 100).is_ok());
        assert_eq!(
            Steps::new(small, large, 5001, false, 100).err(),
            Some(OutOfRange)
        );
        assert_eq!(
            Steps::new(large, small, 5001, false, 100).err(),
            Some(OutOfRange)
        );
        let far = place(5000, 12, u64::MAX);
        assert_eq!(
            Steps::new(far, large, 1, false, 100).err(),
            Some(OutOfRange)
        );
        assert_eq!(
            Steps::new(small, far, 1, false, 100).err(),
            Some(OutOfRange)
        );
        assert_eq!(
            Steps::new(small, large, 0, false, 100).unwrap().next(),
            None
        );
    }

    proptest! {
        #[test]
        fn each_byte_is_copied_once(
            shifts in (12u8..15, 12u8..15), offsets in (0u64..20_000, 0u64..20_000), len in 0u64..40_000,
            most in 1u32..10_000, same: bool,
        ) {
            let from = place(100_000, shifts.0, offsets.0);
            let to = place(100_000, shifts.1, offsets.1);
            let mut copied = vec![0u8; len as usize];
            for step in Steps::new(from, to, len, same, most).unwrap() {
                prop_assert!(step.len <= most && fits(&from, step) && fits(&to, step));
                let at = step.at as usize;
                copied[at..at + step.len as usize].iter_mut().for_each(|count| *count += 1);
            }
            prop_assert!(copied.iter().all(|count| *count == 1));
        }

        /// Step by step, each of which reads before it writes, the result is that of copying at once.
        #[test]
        fn overlapping_places_end_up_right(
            shift in 12u8..14, from in 0usize..6_000, to in 0usize..6_000, len in 0usize..20_000,
            most in 1u32..5_000,
        ) {
            let mut bytes: Vec<u8> = (0..30_000u32).map(|i| (i % 251) as u8).collect();
            let mut expected = bytes.clone();
            expected.copy_within(from..from + len, to);
            let whole = bytes.len() as u64;
            let (source, target) = (place(whole, shift, from as u64), place(whole, shift, to as u64));
            for step in Steps::new(source, target, len as u64, true, most).unwrap() {
                let at = step.at as usize;
                bytes.copy_within(from + at..from + at + step.len as usize, to + at);
            }
            prop_assert_eq!(bytes, expected);
        }
    }
}
