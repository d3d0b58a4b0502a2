// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Format of a block, which has a key and its value. A block is written once, before a slot points to it.
//!
//! A block has the hash of the key, a checksum of the bytes behind it, the lengths of key and value, the key and the
//! value. The hash comes first, so that a split reads 8 bytes of each block only.

use xxhash_rust::xxh3::xxh3_64;

use crate::hash::Hash;
use crate::layout::UNIT_BYTES;

/// Bytes of the hash.
pub(crate) const HASH_BYTES: usize = 8;

const CHECKSUM_END: usize = HASH_BYTES + 8;
const KEY_LEN_END: usize = CHECKSUM_END + 2;
const HEADER_BYTES: usize = KEY_LEN_END + 2;

/// Maximum bytes of a key and its value together.
pub(crate) const PAYLOAD_MAX_BYTES: usize = 255 * UNIT_BYTES as usize - HEADER_BYTES;

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
}

/// Encodes a block, padded to whole units. Returns `None` if it is too long.
pub(crate) fn encode(key: &[u8], value: &[u8]) -> Option<Vec<u8>> {
    if key.len() + value.len() > PAYLOAD_MAX_BYTES {
        return None;
    }
    let mut body = (key.len() as u16).to_le_bytes().to_vec();
    body.extend((value.len() as u16).to_le_bytes());
    body.extend(key);
    body.extend(value);
    let mut block = Hash::of(key).bits.to_le_bytes().to_vec();
    block.extend(xxh3_64(&body).to_le_bytes());
    block.extend(body);
    block.resize(block.len().next_multiple_of(UNIT_BYTES as usize), 0);
    Some(block)
}

/// Decodes a block. Returns `None` if its checksum is wrong.
pub(crate) fn decode(block: &[u8]) -> Option<Block> {
    let hash = u64::from_le_bytes(block.get(..HASH_BYTES)?.try_into().ok()?);
    let checksum = u64::from_le_bytes(block.get(HASH_BYTES..CHECKSUM_END)?.try_into().ok()?);
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
    let key_end = HEADER_BYTES + len(CHECKSUM_END..KEY_LEN_END)?;
    let end = key_end + len(KEY_LEN_END..HEADER_BYTES)?;
    let body = block.get(CHECKSUM_END..end)?;
    let key = block[HEADER_BYTES..key_end].to_vec();
    let is_valid = xxh3_64(body) == checksum && Hash::of(&key).bits == hash;
    is_valid.then(|| Block {
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
        fn block_encoded_and_decoded_is_unchanged(key: Vec<u8>, value: Vec<u8>) {
            let block = encode(&key, &value).unwrap();
            prop_assert_eq!(block.len() as u64 % UNIT_BYTES, 0);
            prop_assert_eq!(decode(&block), Some(Block { key, value }));
        }

        #[test]
        fn changed_block_is_rejected(key: Vec<u8>, value: Vec<u8>, at: proptest::sample::Index, by in 1u8..) {
            let mut block = encode(&key, &value).unwrap();
            let used = HEADER_BYTES + key.len() + value.len();
            block[at.index(used)] ^= by;
            prop_assert_eq!(decode(&block), None);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes: Vec<u8>) {
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn payload_over_the_maximum_is_rejected() {
        let longest = vec![7; PAYLOAD_MAX_BYTES];
        assert_eq!(
            encode(&[], &longest).unwrap().len(),
            255 * UNIT_BYTES as usize
        );
        assert!(encode(&[1], &longest).is_none());
    }
}
