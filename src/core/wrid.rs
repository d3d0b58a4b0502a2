// SPDX-License-Identifier: GPL-2.0

//! Work request identifiers: they map a completion back to the request that is waiting for it.
//!
//! All processes of a host share the QPs, so a completion must identify its waiter (KRCORE: completions are
//! dispatched by work request id). The id holds a slot number and a generation instead of a pointer. A
//! completion that arrives after its waiter has left finds a slot of another generation and is dropped.

/// Id of a work request: a slot of a table and the generation of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrId {
    /// Index of the slot.
    pub slot: u32,
    /// Use counter of the slot, modulo 2³².
    pub generation: u32,
}

impl WrId {
    /// Packs the id into the 64-bit `wr_id` of the RNIC, with the slot in the low half.
    #[inline]
    pub const fn to_u64(self) -> u64 {
        ((self.generation as u64) << 32) | self.slot as u64
    }

    /// Unpacks the id from the `wr_id` of a completion. Every value is a well-formed id. Only the slot table
    /// can decide if the id is in use.
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
