// SPDX-License-Identifier: GPL-2.0

//! What a completion of the RNIC says about its origin.
//!
//! Queue pairs are shared by all processes of a host, so a completion must lead back to whoever waits
//! (KRCORE: the dispatch of completions by the work request's identifier). The identifier holds no
//! pointer: a completion that arrives after its waiter left finds a slot of another generation, and
//! is dropped.

/// The identifier of a work request: a slot in a table, and which use of the slot it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrId {
    /// Index of the slot.
    pub slot: u32,
    /// Counts the uses of the slot, modulo 2³².
    pub generation: u32,
}

impl WrId {
    /// Packs it into the 64 bits that the RNIC hands back: the slot in the low half.
    #[inline]
    pub const fn to_u64(self) -> u64 {
        ((self.generation as u64) << 32) | self.slot as u64
    }

    /// Takes it from what the RNIC handed back. Any 64 bits are an identifier; whether they are one
    /// in use, the table knows.
    #[inline]
    pub const fn from_u64(raw: u64) -> Self {
        Self {
            slot: raw as u32,
            generation: (raw >> 32) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn wr_id_has_the_slot_in_the_low_half() {
        let id = WrId {
            slot: 0x1122_3344,
            generation: 0x5566_7788,
        };
        assert_eq!(id.to_u64(), 0x5566_7788_1122_3344);
    }

    proptest! {
        #[test]
        fn wr_id_round_trips(slot: u32, generation: u32, raw: u64) {
            let id = WrId { slot, generation };
            prop_assert_eq!(WrId::from_u64(id.to_u64()), id);
            prop_assert_eq!(WrId::from_u64(raw).to_u64(), raw);
        }
    }
}
