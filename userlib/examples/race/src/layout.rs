// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What is where in the memories of the table, and what its words of eight bytes mean.
//!
//! A place is the number of a memory and a byte's distance from its start. The root comes first, then the directory, and
//! then what workers allocate: segments and blocks. All memories begin alike, so that each may be a table of its own; of
//! one that is added to another's table only its size counts, and how far it is allocated. A segment has groups of three buckets: a main one, one for the overflow of
//! both, and another main one. So a main bucket and the overflow are always neighbours, and read by one READ (RACE,
//! section 3.2). A bucket is a header and seven slots, together a cache line of 64 bytes.

/// Bytes of a word, which is what verbs change in one step.
pub(crate) const WORD: usize = 8;

/// Words of a bucket: its header, and its slots.
pub(crate) const BUCKET_WORDS: usize = 8;

/// Bytes of a bucket.
pub(crate) const BUCKET: u64 = (BUCKET_WORDS * WORD) as u64;

/// Buckets of a group.
pub(crate) const GROUP_BUCKETS: u32 = 3;

/// Groups of a segment of a new table: 3 KiB, 336 slots. A split of a segment delays all changes of it, so it is
/// small. The directory is larger in return, and each worker has a copy of it.
pub(crate) const GROUPS: u32 = 16;

/// Most bits of a hash that the directory looks at. There is room for so large a directory from the start.
pub(crate) const DEPTH_MAX: u32 = 14;

/// Blocks begin at multiples of this, and have so many bytes for each of their units.
pub(crate) const UNIT: u64 = 64;

/// First word of the root: "kiteRACE".
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"kiteRACE");

/// Places of the root's words: what it begins with, the groups of a segment, the bytes of the whole memory, how many
/// bits the directory looks at, and where nothing was allocated yet.
pub(crate) const ROOT_MAGIC: u64 = 0;
pub(crate) const ROOT_GROUPS: u64 = 8;
pub(crate) const ROOT_SIZE: u64 = 16;
pub(crate) const ROOT_DEPTH: u64 = 24;
pub(crate) const ROOT_NEXT: u64 = 32;

/// Bytes of the root.
pub(crate) const ROOT: usize = 64;

/// Where the directory is.
pub(crate) const DIRECTORY: u64 = ROOT as u64;

/// Where what is allocated begins.
pub(crate) const ALLOCATED: u64 = DIRECTORY + ((WORD as u64) << DEPTH_MAX);

/// In a slot: its key is not in the table yet, since its worker has to see first whether another has it, too.
const TENTATIVE: u64 = 1 << 0;

/// In a slot or header: it does not change any more, because its segment is or was split.
const FROZEN: u64 = 1 << 1;

/// Bits of a place that are within a memory; above is its number.
const WITHIN: u32 = 40;

/// Most memories of a table: a worker has a virtual queue pair to each, and no more.
pub(crate) const MEMORIES_MAX: usize = 64;

const _: () = assert!(MEMORIES_MAX <= kite::VQPS_MAX && MEMORIES_MAX <= 1 << (48 - WITHIN));

/// Bits of a word for a position.
const PLACE: u64 = ((1 << 48) - 1) & !(UNIT - 1);

/// A slot: eight bits of the hash, the units of the block, and its place. Zero is a vacancy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) u64);

impl Slot {
    pub(crate) const VACANT: Slot = Slot(0);

    pub(crate) fn new(fingerprint: u8, units: u8, block: u64) -> Self {
        debug_assert_eq!(block & !PLACE, 0);
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
        self.block() != 0 && !self.is_tentative()
    }

    pub(crate) fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    /// Returns the frozen word. A tentative insert is dropped, and its worker inserts again elsewhere.
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

    pub(crate) fn block(self) -> u64 {
        self.0 & PLACE
    }
}

/// The header of a bucket: how many bits of a hash lead to its segment, and which.
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

/// An entry of the directory: the place of a segment, and how many bits of a hash lead there. Zero is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(pub(crate) u64);

impl Entry {
    pub(crate) const NONE: Entry = Entry(0);

    pub(crate) fn new(depth: u32, segment: u64) -> Self {
        debug_assert_eq!(segment & !PLACE, 0);
        Entry((u64::from(depth) << 56) | segment)
    }

    pub(crate) fn depth(self) -> u32 {
        (self.0 >> 56) as u32
    }

    pub(crate) fn segment(self) -> u64 {
        self.0 & PLACE
    }
}

/// Where a memory begins.
pub(crate) fn start(memory: usize) -> u64 {
    (memory as u64) << WITHIN
}

/// The number of the memory where a place is.
pub(crate) fn memory(place: u64) -> usize {
    (place >> WITHIN) as usize
}

/// Where in its memory a place is.
pub(crate) fn within(place: u64) -> u64 {
    low(place, WITHIN)
}

/// Where the entry of this number is.
pub(crate) fn entry_place(index: u64) -> u64 {
    DIRECTORY + index * WORD as u64
}

/// Bytes of a segment.
pub(crate) fn segment_size(groups: u32) -> u64 {
    u64::from(groups * GROUP_BUCKETS) * BUCKET
}

/// The lowest bits.
pub(crate) fn low(bits: u64, count: u32) -> u64 {
    bits & ((1 << count) - 1)
}

/// Words of bytes that were read.
pub(crate) fn words(bytes: &[u8]) -> Vec<u64> {
    let words = bytes.chunks_exact(WORD);
    words
        .map(|word| u64::from_le_bytes(word.try_into().expect("a chunk is a word")))
        .collect()
}

/// Bytes of words that are to be written.
pub(crate) fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The words of a segment without keys.
pub(crate) fn empty_segment(groups: u32, depth: u32, suffix: u64) -> Vec<u64> {
    let mut bucket = [0; BUCKET_WORDS];
    bucket[0] = Header::new(depth, suffix).0;
    bucket.repeat((groups * GROUP_BUCKETS) as usize)
}

/// Returns the first bytes of a memory of `size` bytes with a new table. The rest may be arbitrary.
pub(crate) fn new_table(size: u64, groups: u32) -> Vec<u8> {
    let mut words = vec![0; ALLOCATED as usize / WORD];
    let mut set = |place: u64, word| words[place as usize / WORD] = word;
    set(ROOT_MAGIC, MAGIC);
    set(ROOT_GROUPS, groups.into());
    set(ROOT_SIZE, size);
    set(ROOT_NEXT, ALLOCATED + segment_size(groups));
    set(entry_place(0), Entry::new(0, ALLOCATED).0);
    words.extend(empty_segment(groups, 0, 0));
    bytes(&words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slots_keep_what_they_are_made_of(fingerprint: u8, units in 1u8.., block in 1..1u64 << 42) {
            let block = block * UNIT;
            let slot = Slot::new(fingerprint, units, block);
            for slot in [slot, slot.frozen(), slot.frozen().thawed(), slot.tentative()] {
                prop_assert_eq!((slot.fingerprint(), slot.units(), slot.block()), (fingerprint, units, block));
            }
            prop_assert!(slot.is_taken() && slot.frozen().is_taken());
            prop_assert!(!slot.tentative().is_taken());
            prop_assert_eq!(slot.frozen().thawed(), slot);
            prop_assert!(slot.tentative().frozen().thawed().is_vacant());
            prop_assert!(slot.frozen().is_frozen() && !slot.is_frozen());
        }

        #[test]
        fn entries_keep_what_they_are_made_of(depth in 0..=DEPTH_MAX, segment in 1..1u64 << 42) {
            let entry = Entry::new(depth, segment * UNIT);
            prop_assert_eq!((entry.depth(), entry.segment()), (depth, segment * UNIT));
            prop_assert_ne!(entry, Entry::NONE);
        }

        #[test]
        fn headers_freeze_and_thaw(depth in 0..=DEPTH_MAX, bits: u64) {
            let header = Header::new(depth, low(bits, depth));
            prop_assert!(header.frozen().is_frozen() && !header.is_frozen());
            prop_assert_eq!(header.frozen().thawed(), header);
        }
    }

    #[test]
    fn words_have_places_in_all_memories() {
        for number in [0, 1, MEMORIES_MAX - 1] {
            let place = start(number) + 3 * UNIT;
            assert_eq!((memory(place), within(place)), (number, 3 * UNIT));
            assert_eq!(Slot::new(255, 255, place).block(), place);
            assert_eq!(Entry::new(DEPTH_MAX, place).segment(), place);
        }
    }

    #[test]
    fn a_vacancy_freezes_to_a_vacancy() {
        assert!(Slot::VACANT.frozen().is_frozen());
        assert!(Slot::VACANT.frozen().thawed().is_vacant());
    }

    #[test]
    fn what_is_allocated_is_aligned() {
        assert_eq!(ALLOCATED % UNIT, 0);
        assert_eq!(segment_size(GROUPS), 3072);
    }
}
