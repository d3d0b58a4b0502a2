// SPDX-License-Identifier: GPL-2.0

//! Tickets: how a node stands in line for a lock or at a barrier of another.
//!
//! A ticket is the number of the request that asks for it ([`crate::proto::once`]), so that the home makes it once.
//! What the home says of it fits a word, which is what is remembered of an answer.

/// What a ticket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireKind {
    /// A lock ([`crate::sync::lock`]).
    Lock {
        /// To share it with others that do.
        shared: bool,
    },
    /// To pass a barrier ([`crate::sync::barrier`]).
    Barrier {
        /// As one of so many.
        count: u32,
    },
}

/// What the home says of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireReply {
    /// It will never be: it was given up before its request came.
    Cancelled,
    /// It waits in line.
    Queued,
    /// It has the lock.
    Granted {
        /// Whether another died with the lock ([`crate::sync::lock`]).
        owner_died: bool,
    },
    /// It passed the barrier, with this generation, less than 2⁶⁰.
    BarrierPassed(u64),
    /// There is none, because of this errno.
    Denied(u16),
}

/// Bits of a word that say which it is.
const KIND_BITS: u32 = 4;

impl AcquireReply {
    /// As a word.
    #[must_use]
    pub const fn to_word(self) -> u64 {
        let (kind, value) = match self {
            Self::Cancelled => (0, 0),
            Self::Queued => (1, 0),
            Self::Granted { owner_died: warned } => (2, warned as u64),
            Self::BarrierPassed(generation) => (3, generation),
            Self::Denied(errno) => (4, errno as u64),
        };
        (value << KIND_BITS) | kind
    }

    /// Takes it from a word; `None` if it is no such word.
    #[must_use]
    pub const fn from_word(word: u64) -> Option<Self> {
        let value = word >> KIND_BITS;
        let reply = match (word & ((1 << KIND_BITS) - 1), value) {
            (0, 0) => Self::Cancelled,
            (1, 0) => Self::Queued,
            (2, 0 | 1) => Self::Granted {
                owner_died: value == 1,
            },
            (3, generation) => Self::BarrierPassed(generation),
            (4, 1..=4095) => Self::Denied(value as u16),
            _ => return None,
        };
        Some(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn acquire_reply_round_trips(generation in 0u64..1 << 60, errno in 1u16..4096, owner_died: bool) {
            for reply in [
                AcquireReply::Cancelled,
                AcquireReply::Queued,
                AcquireReply::Granted { owner_died },
                AcquireReply::BarrierPassed(generation),
                AcquireReply::Denied(errno),
            ] {
                prop_assert_eq!(AcquireReply::from_word(reply.to_word()), Some(reply));
            }
        }

        #[test]
        fn acquire_reply_has_one_encoding(word in prop_oneof![any::<u64>(), 0u64..1 << 18]) {
            if let Some(reply) = AcquireReply::from_word(word) {
                prop_assert_eq!(reply.to_word(), word);
            }
        }
    }
}
