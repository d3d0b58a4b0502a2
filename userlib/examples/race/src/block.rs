// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A key and its value, as they are in memory: written once, before a slot points there, and never changed.
//!
//! The hash of the key comes first, so a worker that splits a segment need not read the rest. A checksum of all that
//! follows is next, then the lengths, the key and the value.

use xxhash_rust::xxh3::xxh3_64;

use crate::hash::Hash;
use crate::layout::UNIT;

/// Bytes of the hash, all that is read to split a segment.
pub(crate) const HASH: usize = 8;

const SUM: usize = HASH + 8;
const KEY_LEN: usize = SUM + 2;
const VALUE_LEN: usize = KEY_LEN + 2;

/// Most bytes of a key and its value together.
pub(crate) const PAIR_MAX: usize = 255 * UNIT as usize - VALUE_LEN;

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
}

/// The bytes of a block, whole units; none if that would be too long.
pub(crate) fn encode(key: &[u8], value: &[u8]) -> Option<Vec<u8>> {
    if key.len() + value.len() > PAIR_MAX {
        return None;
    }
    let mut body = (key.len() as u16).to_le_bytes().to_vec();
    body.extend((value.len() as u16).to_le_bytes());
    body.extend(key);
    body.extend(value);
    let mut block = Hash::of(key).bits.to_le_bytes().to_vec();
    block.extend(xxh3_64(&body).to_le_bytes());
    block.extend(body);
    block.resize(block.len().next_multiple_of(UNIT as usize), 0);
    Some(block)
}

/// Decodes a block. Returns `None` if its checksum is wrong.
pub(crate) fn decode(block: &[u8]) -> Option<Block> {
    let hash = u64::from_le_bytes(block.get(..HASH)?.try_into().ok()?);
    let sum = u64::from_le_bytes(block.get(HASH..SUM)?.try_into().ok()?);
    let len = |range| -> Option<usize> {
        Some(
            u16::from_le_bytes(
                block
                    .get::<std::ops::Range<usize>>(range)?
                    .try_into()
                    .ok()?,
            )
            .into(),
        )
    };
    let key_end = VALUE_LEN + len(SUM..KEY_LEN)?;
    let end = key_end + len(KEY_LEN..VALUE_LEN)?;
    let body = block.get(SUM..end)?;
    let key = block[VALUE_LEN..key_end].to_vec();
    let whole = xxh3_64(body) == sum && Hash::of(&key).bits == hash;
    whole.then(|| Block {
        key,
        value: block[key_end..end].to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(key: Vec<u8>, value: Vec<u8>) {
            let block = encode(&key, &value).unwrap();
            prop_assert_eq!(block.len() as u64 % UNIT, 0);
            prop_assert_eq!(decode(&block), Some(Block { key, value }));
        }

        #[test]
        fn a_change_of_what_counts_is_noticed(key: Vec<u8>, value: Vec<u8>, at: proptest::sample::Index, by in 1u8..) {
            let mut block = encode(&key, &value).unwrap();
            let counts = VALUE_LEN + key.len() + value.len();
            block[at.index(counts)] ^= by;
            prop_assert_eq!(decode(&block), None);
        }

        #[test]
        fn no_bytes_are_too_odd(bytes: Vec<u8>) {
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn a_pair_fits_or_is_refused() {
        let longest = vec![7; PAIR_MAX];
        assert_eq!(encode(&[], &longest).unwrap().len(), 255 * UNIT as usize);
        assert!(encode(&[1], &longest).is_none());
    }
}
