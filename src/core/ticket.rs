// SPDX-License-Identifier: GPL-2.0

//! Tickets: how a node stands in line for a lock or at a barrier of another.
//!
//! A ticket is the number of the request that asks for it ([`crate::once`]), so that the home makes it once.
//! What the home says of it fits a word, which is what is remembered of an answer.

/// What a ticket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// A lock ([`crate::lock`]).
    Lock {
        /// To share it with others that do.
        shared: bool,
    },
    /// To pass a barrier ([`crate::barrier`]).
    Barrier {
        /// As one of so many.
        count: u32,
    },
}

/// What the home says of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// It will never be: it was given up before its request came.
    Never,
    /// It waits in line.
    Waits,
    /// It has the lock.
    Locked {
        /// Whether another died with the lock ([`crate::lock`]).
        warned: bool,
    },
    /// It passed the barrier, with this generation, less than 2⁶⁰.
    Passed(u64),
    /// There is none, because of this errno.
    Refused(u16),
}

/// Bits of a word that say which it is.
const KIND_BITS: u32 = 4;

impl Said {
    /// As a word.
    #[must_use]
    pub const fn to_word(self) -> u64 {
        let (kind, value) = match self {
            Self::Never => (0, 0),
            Self::Waits => (1, 0),
            Self::Locked { warned } => (2, warned as u64),
            Self::Passed(generation) => (3, generation),
            Self::Refused(errno) => (4, errno as u64),
        };
        (value << KIND_BITS) | kind
    }

    /// Takes it from a word; `None` if it is no such word.
    #[must_use]
    pub const fn from_word(word: u64) -> Option<Self> {
        let value = word >> KIND_BITS;
        let said = match (word & ((1 << KIND_BITS) - 1), value) {
            (0, 0) => Self::Never,
            (1, 0) => Self::Waits,
            (2, 0 | 1) => Self::Locked { warned: value == 1 },
            (3, generation) => Self::Passed(generation),
            (4, 1..=4095) => Self::Refused(value as u16),
            _ => return None,
        };
        Some(said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_round_trip(generation in 0u64..1 << 60, errno in 1u16..4096, warned: bool) {
            for said in [
                Said::Never,
                Said::Waits,
                Said::Locked { warned },
                Said::Passed(generation),
                Said::Refused(errno),
            ] {
                prop_assert_eq!(Said::from_word(said.to_word()), Some(said));
            }
        }

        #[test]
        fn a_word_says_one_thing(word in prop_oneof![any::<u64>(), 0u64..1 << 18]) {
            if let Some(said) = Said::from_word(word) {
                prop_assert_eq!(said.to_word(), word);
            }
        }
    }
}
