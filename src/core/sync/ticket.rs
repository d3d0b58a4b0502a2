// SPDX-License-Identifier: GPL-2.0

//! Tickets: requests of a node for a lock or a barrier with its home on another node.
//!
//! A ticket is the sequence number of its request ([`crate::proto::once`]), so the home creates each ticket
//! at most once. The reply of the home is encoded in 64 bits, the size of a cached reply.

/// Object that a ticket requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireKind {
    /// Lock ([`crate::sync::lock`]).
    Lock {
        /// `true` to share the lock with other shared holders.
        shared: bool,
    },
    /// Passage of a barrier ([`crate::sync::barrier`]).
    Barrier {
        /// Number of participants.
        count: u32,
    },
}

/// Reply of the home to the request for a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireReply {
    /// The ticket was canceled before its request arrived, and is never created.
    Canceled,
    /// The ticket waits in the queue.
    Queued,
    /// The ticket holds the lock.
    Granted {
        /// `true` if an earlier exclusive holder died ([`crate::sync::lock`]).
        owner_died: bool,
    },
    /// The barrier was passed with this generation, less than 2⁶⁰.
    BarrierPassed(u64),
    /// The ticket was denied with this errno.
    Denied(u16),
}

/// Width in bits of the variant tag, in the low bits of an encoded reply.
const KIND_BITS: u32 = 4;

impl AcquireReply {
    /// Encodes the reply in 64 bits.
    #[must_use]
    pub const fn to_word(self) -> u64 {
        let (kind, value) = match self {
            Self::Canceled => (0, 0),
            Self::Queued => (1, 0),
            Self::Granted { owner_died: warned } => (2, warned as u64),
            Self::BarrierPassed(generation) => (3, generation),
            Self::Denied(errno) => (4, errno as u64),
        };
        (value << KIND_BITS) | kind
    }

    /// Decodes a reply. Returns `None` if `word` is not a valid encoding.
    #[must_use]
    pub const fn from_word(word: u64) -> Option<Self> {
        let value = word >> KIND_BITS;
        let reply = match (word & ((1 << KIND_BITS) - 1), value) {
            (0, 0) => Self::Canceled,
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
                AcquireReply::Canceled,
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
