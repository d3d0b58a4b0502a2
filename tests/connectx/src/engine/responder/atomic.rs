// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Arithmetic of atomic operations, masked ones included.

use crate::network::packet::AtomicOperation;

/// Returns the value that an atomic operation stores.
pub(super) fn apply(operation: AtomicOperation, found: u64) -> u64 {
    match operation {
        AtomicOperation::CompareSwap {
            compare,
            swap,
            compare_mask,
            swap_mask,
        } if (found ^ compare) & compare_mask == 0 => found & !swap_mask | swap & swap_mask,
        AtomicOperation::CompareSwap { .. } => found,
        AtomicOperation::FetchAdd { add, boundary } => {
            // Fields are added at once, without the bit at the end of each: no carry leaves a field.
            let low = (found & !boundary).wrapping_add(add & !boundary);
            low ^ ((found ^ add) & boundary)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_fetch_add_does_not_carry_between_fields() {
        let add = |found, add, boundary| apply(AtomicOperation::FetchAdd { add, boundary }, found);
        assert_eq!(add(u64::MAX, 1, 0), 0);
        assert_eq!(add(0xff, 1, 1 << 7), 0);
        assert_eq!(add(0x7f_ff, 0x01_01, 1 << 7), 0x80_00);
        let bytes = 0x8080_8080_8080_8080;
        assert_eq!(
            add(0xff01_7f80_00fe_ff10, 0x0101_0101_0101_0101, bytes),
            0x0002_8081_01ff_0011
        );
    }

    #[test]
    fn masked_compare_swap_affects_masked_bits_only() {
        let swap = |found| {
            let operation = AtomicOperation::CompareSwap {
                compare: 0x12_00,
                swap: 0xab_cd,
                compare_mask: 0xff_00,
                swap_mask: 0x00_ff,
            };
            apply(operation, found)
        };
        assert_eq!(swap(0x99_12_34), 0x99_12_cd);
        assert_eq!(swap(0x99_13_34), 0x99_13_34);
    }
}
