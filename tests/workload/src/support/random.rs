// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reproducible random numbers.

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Returns the generator of `seed` for worker `stream`.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut random = Random(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }

    /// Returns a random number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns a number of 1 to `max`. All orders of magnitude are equally likely.
    pub(crate) fn size(&mut self, max: u64) -> u64 {
        let bits = u64::BITS - max.leading_zeros();
        let magnitude = 1 << self.below(bits.into());
        (magnitude + self.below(magnitude)).min(max)
    }

    /// Returns one of `choices`.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Fills `bytes` with random values.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_returns_the_whole_range_and_no_other_value() {
        let mut random = Random::new(1, 1);
        let sizes: Vec<u64> = (0..1000).map(|_| random.size(5000)).collect();
        assert!(sizes.iter().all(|size| (1..=5000).contains(size)));
        assert!(sizes.contains(&1) && sizes.contains(&5000));
    }

    #[test]
    fn equal_seeds_repeat_numbers_and_streams_differ() {
        let draw = |stream| Random::new(7, stream).next();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
