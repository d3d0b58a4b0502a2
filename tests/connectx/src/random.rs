// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reproducible pseudo-random numbers (SplitMix64).

/// Pseudo-random number generator.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Returns a generator with this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// Returns the next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns the next number below `bound`. Returns 0 if `bound` is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next().checked_rem(bound).unwrap_or(0)
    }

    /// Returns `true` with the probability `rate`, from 0 to 1.
    pub(crate) fn chance(&mut self, rate: f64) -> bool {
        rate > 0.0 && ((self.next() >> 11) as f64) < rate * (1u64 << 53) as f64
    }
}
