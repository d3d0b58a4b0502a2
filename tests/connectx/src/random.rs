// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Numbers that look random and are the same in each run (SplitMix64).

/// A generator.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The generator that starts with `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// The next number below `bound`; 0 if that is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next().checked_rem(bound).unwrap_or(0)
    }

    /// True in `rate` of all cases, from 0 to 1.
    pub(crate) fn chance(&mut self, rate: f64) -> bool {
        rate > 0.0 && ((self.next() >> 11) as f64) < rate * (1u64 << 53) as f64
    }
}
