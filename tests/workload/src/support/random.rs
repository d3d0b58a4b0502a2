// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Random numbers that a seed repeats.

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The generator of `seed` for worker `stream`.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut random = Random(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }

    /// Any number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A number of 1 … `most`; each order of magnitude comes as often as another.
    pub(crate) fn size(&mut self, most: u64) -> u64 {
        let bits = u64::BITS - most.leading_zeros();
        let magnitude = 1 << self.below(bits.into());
        (magnitude + self.below(magnitude)).min(most)
    }

    /// One of `choices`.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Fills `bytes`.
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
    fn sizes_are_in_range_and_reach_both_ends() {
        let mut random = Random::new(1, 1);
        let sizes: Vec<u64> = (0..1000).map(|_| random.size(5000)).collect();
        assert!(sizes.iter().all(|size| (1..=5000).contains(size)));
        assert!(sizes.contains(&1) && sizes.contains(&5000));
    }

    #[test]
    fn a_seed_repeats_and_streams_differ() {
        let draw = |stream| Random::new(7, stream).next();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
