// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on eight bytes of a region (LITE, section 7.2: `LT_fetch-add`, `LT_test-set`).

/// What to do to a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds, modulo 2⁶⁴.
    FetchAdd {
        /// What to add.
        operand: u64,
    },
    /// Replaces the word if it is as expected.
    CompareSwap {
        /// What the word has to be.
        expected: u64,
        /// What it is to become.
        operand: u64,
    },
    /// Replaces the word.
    Swap {
        /// What it is to become.
        operand: u64,
    },
}

/// Bytes of a word, and of what its place in a region is a multiple of.
pub const WORD_BYTES: u64 = 8;

impl AtomicOp {
    /// The word after the operation, if it was `old` before; `None` if it stays.
    #[inline]
    pub const fn apply(self, old: u64) -> Option<u64> {
        match self {
            Self::FetchAdd { operand } => Some(old.wrapping_add(operand)),
            Self::CompareSwap { expected, .. } if old != expected => None,
            Self::CompareSwap { operand, .. } | Self::Swap { operand } => Some(operand),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fetch_add_overflow_wraps_around() {
        let add = AtomicOp::FetchAdd { operand: 3 };
        assert_eq!(add.apply(u64::MAX), Some(2));
    }

    #[test]
    fn compare_swap_replaces_only_the_expected_value() {
        let (expected, operand) = (1, 7);
        let swap = AtomicOp::CompareSwap { expected, operand };
        assert_eq!((swap.apply(1), swap.apply(2)), (Some(7), None));
        assert_eq!(AtomicOp::Swap { operand }.apply(2), Some(7));
    }
}
