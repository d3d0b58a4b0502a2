// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Layout of the table in its memories, and format of its 8-byte words.
//!
//! A memory is the registered memory of one memory node. An address is the number of a memory and an offset in it. A
//! memory has the root, then the directory, then allocated segments and blocks. All memories have the same format. If a
//! memory extends the table of another one, only the size and the allocation offset in its root are used.
//!
//! A segment has groups of three buckets: two main buckets, and between them the overflow bucket of both. A main bucket
//! and its overflow bucket are adjacent, so one READ reads both (RACE, section 3.2). A bucket has a header and seven
//! slots: 64 bytes, a cache line.

/// Bytes of a word, the unit of atomic operations.
pub(crate) const WORD_BYTES: usize = 8;

/// Words of a bucket: a header and seven slots.
pub(crate) const BUCKET_WORDS: usize = 8;

/// Bytes of a bucket.
pub(crate) const BUCKET_BYTES: u64 = (BUCKET_WORDS * WORD_BYTES) as u64;

/// Buckets of a group.
pub(crate) const GROUP_BUCKETS: u32 = 3;

/// Groups of a segment of a new table: 3 KiB, 336 slots. A segment is small, since a split delays all changes of its
/// keys. The cost is a larger directory, of which each worker has a copy.
pub(crate) const GROUPS: u32 = 16;

/// Maximum depth of the directory: the number of hash bits that it uses. A memory has space for 2¹⁴ entries.
pub(crate) const DEPTH_MAX: u32 = 14;

/// Alignment of blocks, and unit of their length, in bytes.
pub(crate) const UNIT_BYTES: u64 = 64;

/// First word of the root: "kiteRACE".
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"kiteRACE");

/// Offsets of the words of the root: magic number, groups of a segment, bytes of the memory, depth of the directory,
/// and offset of the first byte that is not allocated.
pub(crate) const ROOT_MAGIC: u64 = 0;
pub(crate) const ROOT_GROUPS: u64 = 8;
pub(crate) const ROOT_SIZE: u64 = 16;
pub(crate) const ROOT_DEPTH: u64 = 24;
pub(crate) const ROOT_ALLOC_NEXT: u64 = 32;

/// Bytes of the root.
pub(crate) const ROOT_BYTES: usize = 64;

/// Offset of the directory.
pub(crate) const DIRECTORY_OFFSET: u64 = ROOT_BYTES as u64;

/// Offset of the first byte that can be allocated.
pub(crate) const ALLOC_START: u64 = DIRECTORY_OFFSET + ((WORD_BYTES as u64) << DEPTH_MAX);

/// Bit of a slot: the insert is not complete, since its worker has not checked for another slot of the key.
const TENTATIVE: u64 = 1 << 0;

/// Bit of a slot or header: the word is final, because its segment is being split or was split.
const FROZEN: u64 = 1 << 1;

/// Low bits of an address that are the offset. The bits above are the number of the memory.
const OFFSET_BITS: u32 = 40;

/// Maximum memories of a table. A worker has a virtual queue pair for each.
pub(crate) const MEMORIES_MAX: usize = 64;

const _: () = assert!(MEMORIES_MAX <= kite::VQPS_MAX && MEMORIES_MAX <= 1 << (48 - OFFSET_BITS));

/// Bits of a word that are an address.
const ADDR_MASK: u64 = ((1 << 48) - 1) & !(UNIT_BYTES - 1);

/// Slot: fingerprint (8 bits of the hash), length of the block in units, and its address. Zero is a vacant slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) u64);

impl Slot {
    pub(crate) const VACANT: Slot = Slot(0);

    pub(crate) fn new(fingerprint: u8, units: u8, block: u64) -> Self {
        debug_assert_eq!(block & !ADDR_MASK, 0);
        Slot((u64::from(fingerprint) << 56) | (u64::from(units) << 48) | block)
    }

    pub(crate) fn tentative(self) -> Self {
        Slot(self.0 | TENTATIVE)
    }

    pub(crate) fn is_vacant(self) -> bool {
        self == Self::VACANT
    }

    pub(crate) fn is_tentative(self) -> bool {
        self.0 & TENTATIVE != 0
    }

    /// Returns `true` if the slot is of a key in the table.
    pub(crate) fn is_taken(self) -> bool {
        self.block_addr() != 0 && !self.is_tentative()
    }

    pub(crate) fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    /// Returns the frozen word. A tentative insert is dropped, and its worker retries in the new segment.
    pub(crate) fn frozen(self) -> Self {
        match self.is_taken() {
            true => Slot(self.0 | FROZEN),
            false => Slot(FROZEN),
        }
    }

    /// Returns the word before it was frozen.
    pub(crate) fn thawed(self) -> Self {
        Slot(self.0 & !FROZEN)
    }

    pub(crate) fn fingerprint(self) -> u8 {
        (self.0 >> 56) as u8
    }

    pub(crate) fn units(self) -> u8 {
        (self.0 >> 48) as u8
    }

    pub(crate) fn block_addr(self) -> u64 {
        self.0 & ADDR_MASK
    }
}

/// Header of a bucket: the depth of its segment, and the hash suffix of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header(pub(crate) u64);

impl Header {
    pub(crate) fn new(depth: u32, suffix: u64) -> Self {
        Header((u64::from(depth) << 56) | (suffix << 2))
    }

    pub(crate) fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    pub(crate) fn frozen(self) -> Self {
        Header(self.0 | FROZEN)
    }

    pub(crate) fn thawed(self) -> Self {
        Header(self.0 & !FROZEN)
    }
}

/// Directory entry: depth and address of a segment. Zero is no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(pub(crate) u64);

impl Entry {
    pub(crate) const NONE: Entry = Entry(0);

    pub(crate) fn new(depth: u32, segment: u64) -> Self {
        debug_assert_eq!(segment & !ADDR_MASK, 0);
        Entry((u64::from(depth) << 56) | segment)
    }

    pub(crate) fn depth(self) -> u32 {
        (self.0 >> 56) as u32
    }

    pub(crate) fn addr(self) -> u64 {
        self.0 & ADDR_MASK
    }
}

/// Returns the address of the first byte of a memory.
pub(crate) fn memory_base(memory: usize) -> u64 {
    (memory as u64) << OFFSET_BITS
}

/// Returns the number of the memory of an address.
pub(crate) fn memory_of(addr: u64) -> usize {
    (addr >> OFFSET_BITS) as usize
}

/// Returns the offset of an address in its memory.
pub(crate) fn offset_in_memory(addr: u64) -> u64 {
    low(addr, OFFSET_BITS)
}

/// Returns the address of a directory entry, in the first memory.
pub(crate) fn entry_addr(index: u64) -> u64 {
    DIRECTORY_OFFSET + index * WORD_BYTES as u64
}

/// Returns the bytes of a segment.
pub(crate) fn segment_size(groups: u32) -> u64 {
    u64::from(groups * GROUP_BUCKETS) * BUCKET_BYTES
}

/// Returns the lowest `count` bits.
pub(crate) fn low(bits: u64, count: u32) -> u64 {
    bits & ((1 << count) - 1)
}

/// Decodes words from bytes.
pub(crate) fn words(bytes: &[u8]) -> Vec<u64> {
    let words = bytes.chunks_exact(WORD_BYTES);
    words
        .map(|word| u64::from_le_bytes(word.try_into().expect("a chunk is a word")))
        .collect()
}

/// Encodes words as bytes.
pub(crate) fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns the words of a segment without keys.
pub(crate) fn empty_segment(groups: u32, depth: u32, suffix: u64) -> Vec<u64> {
    let mut bucket = [0; BUCKET_WORDS];
    bucket[0] = Header::new(depth, suffix).0;
    bucket.repeat((groups * GROUP_BUCKETS) as usize)
}

/// Returns the first bytes of a memory of `size` bytes with a new table. The rest may be arbitrary.
pub(crate) fn new_table(size: u64, groups: u32) -> Vec<u8> {
    let mut words = vec![0; ALLOC_START as usize / WORD_BYTES];
    let mut set = |addr: u64, word| words[addr as usize / WORD_BYTES] = word;
    set(ROOT_MAGIC, MAGIC);
    set(ROOT_GROUPS, groups.into());
    set(ROOT_SIZE, size);
    set(ROOT_ALLOC_NEXT, ALLOC_START + segment_size(groups));
    set(entry_addr(0), Entry::new(0, ALLOC_START).0);
    words.extend(empty_segment(groups, 0, 0));
    bytes(&words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slot_fields_survive_freezing_and_the_tentative_bit(fingerprint: u8, units in 1u8.., block in 1..1u64 << 42) {
            let block = block * UNIT_BYTES;
            let slot = Slot::new(fingerprint, units, block);
            for slot in [slot, slot.frozen(), slot.frozen().thawed(), slot.tentative()] {
                prop_assert_eq!((slot.fingerprint(), slot.units(), slot.block_addr()), (fingerprint, units, block));
            }
            prop_assert!(slot.is_taken() && slot.frozen().is_taken());
            prop_assert!(!slot.tentative().is_taken());
            prop_assert_eq!(slot.frozen().thawed(), slot);
            prop_assert!(slot.tentative().frozen().thawed().is_vacant());
            prop_assert!(slot.frozen().is_frozen() && !slot.is_frozen());
        }

        #[test]
        fn entry_encoded_and_decoded_is_unchanged(depth in 0..=DEPTH_MAX, segment in 1..1u64 << 42) {
            let entry = Entry::new(depth, segment * UNIT_BYTES);
            prop_assert_eq!((entry.depth(), entry.addr()), (depth, segment * UNIT_BYTES));
            prop_assert_ne!(entry, Entry::NONE);
        }

        #[test]
        fn header_frozen_and_thawed_is_unchanged(depth in 0..=DEPTH_MAX, bits: u64) {
            let header = Header::new(depth, low(bits, depth));
            prop_assert!(header.frozen().is_frozen() && !header.is_frozen());
            prop_assert_eq!(header.frozen().thawed(), header);
        }
    }

    #[test]
    fn addresses_in_all_memories_fit_into_words() {
        for number in [0, 1, MEMORIES_MAX - 1] {
            let addr = memory_base(number) + 3 * UNIT_BYTES;
            assert_eq!(
                (memory_of(addr), offset_in_memory(addr)),
                (number, 3 * UNIT_BYTES)
            );
            assert_eq!(Slot::new(255, 255, addr).block_addr(), addr);
            assert_eq!(Entry::new(DEPTH_MAX, addr).addr(), addr);
        }
    }

    #[test]
    fn vacant_slot_frozen_and_thawed_is_vacant() {
        assert!(Slot::VACANT.frozen().is_frozen());
        assert!(Slot::VACANT.frozen().thawed().is_vacant());
    }

    #[test]
    fn allocations_are_aligned_to_units() {
        assert_eq!(ALLOC_START % UNIT_BYTES, 0);
        assert_eq!(segment_size(GROUPS), 3072);
    }
}
