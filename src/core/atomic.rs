// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on eight bytes of a region (LITE, section 7.2: `LT_fetch-add`, `LT_test-set`).

/// Atomic operation on one 8-byte word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds `operand` modulo 2⁶⁴.
    FetchAdd {
        /// The addend.
        operand: u64,
    },
    /// Replaces the word if it equals `expected`.
    CompareSwap {
        /// The value to compare with.
        expected: u64,
        /// The new value.
        operand: u64,
    },
    /// Replaces the word unconditionally.
    Swap {
        /// The new value.
        operand: u64,
    },
}

/// Size of a word in bytes, and the required alignment of its offset in a region.
pub const WORD_BYTES: u64 = 8;

impl AtomicOp {
    /// Returns the new value of a word with the value `old`, or `None` if the word stays unchanged.
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
