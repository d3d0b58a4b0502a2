// SPDX-License-Identifier: GPL-2.0

//! Directory of DC addresses: DCT number and DC key (12 bytes) of each node (KRCORE, section 4.2: the meta
//! server).
//!
//! # Operation
//!
//! The table is a hash table in the memory of the directory nodes. A reader fetches one bucket by one RDMA
//! READ. An entry carries three fields for validation:
//!
//! - a checksum, since a READ can race with the writer and return a torn entry;
//! - the incarnation of its node;
//! - the epoch of publication, since all nodes replace their DCTs when a node is removed from the view.
//!
//! A node with a full bucket has no entry, and lookups do not find the node. An overflow needs six node IDs
//! that are equal modulo the number of buckets. The daemon assigns the lowest free IDs, so overflows are
//! unlikely.

use super::{
    codec::{is_valid_range, Field, Reader, Writer},
    memory::MR_TABLE_BYTES,
    Malformed,
};
use crate::{
    name::fmix64,
    view::{is_valid_node_id, NodeInstance},
};

/// Length of an entry, in bytes.
pub const ENTRY_SIZE: usize = 48;

/// Number of entries in a bucket.
pub const BUCKET_ENTRIES: usize = 5;

/// Length of a bucket, in bytes.
pub const BUCKET_SIZE: usize = 256;
const _: () = assert!(BUCKET_ENTRIES * ENTRY_SIZE <= BUCKET_SIZE);

/// Address of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// Node and incarnation that own the DCT.
    pub instance: NodeInstance,
    /// Epoch of the view for which the entry was published.
    pub epoch: u64,
    /// DCT number; 0 if the RNIC has no DC, and peers must use RC.
    pub dctn: u32,
    /// DC access key of the DCT.
    pub dc_key: u64,
    /// Remote key to the memory of the node.
    pub rkey: u32,
    /// Address of the MR table of the node ([`super::memory`]).
    pub mr_table_addr: u64,
}

/// Result of a lookup in a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryLookup {
    /// Valid entry of the required epoch or a later one.
    Found(DirectoryEntry),
    /// No entry, or only an outdated one.
    Absent,
    /// No valid entry, but a torn one: read the bucket again.
    Torn,
}

impl DirectoryEntry {
    /// Computes the checksum. A torn entry has a matching checksum with probability 2⁻³².
    fn checksum(&self) -> u32 {
        let numbers = (u64::from(self.dctn) << 32) | u64::from(self.rkey);
        let fields = [
            u64::from(self.instance.node),
            self.instance.incarnation,
            self.epoch,
            numbers,
            self.dc_key,
            self.mr_table_addr,
        ];
        fields.into_iter().fold(0, |sum, field| fmix64(sum ^ field)) as u32
    }

    /// Encodes the entry with its checksum.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_SIZE] {
        let mut bytes = [0; ENTRY_SIZE];
        let mut writer = Writer::new(&mut bytes, ENTRY_SIZE);
        self.put(&mut writer);
        self.checksum().put(&mut writer);
        bytes
    }

    /// Decodes an entry. Returns `None` if the entry is empty or torn.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let entry = Self::get(&mut reader).ok()?;
        let is_whole = u32::get(&mut reader) == Ok(entry.checksum());
        is_whole.then_some(entry)
    }
}

impl Field<'_> for DirectoryEntry {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let life = NodeInstance::get(from)?;
        let (epoch, number) = Field::get(from)?;
        let ((key, rkey), regions) = Field::get(from)?;
        let target = Self {
            instance: life,
            epoch,
            dctn: number,
            dc_key: key,
            rkey,
            mr_table_addr: regions,
        };
        let is_valid = is_valid_node_id(life.node) && is_valid_range(regions, MR_TABLE_BYTES);
        is_valid.then_some(target).ok_or(Malformed)
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.instance.put(to);
        (self.epoch, self.dctn).put(to);
        ((self.dc_key, self.rkey), self.mr_table_addr).put(to);
    }
}

/// Returns the bucket index of a node. `buckets` is a power of two. Node IDs are dense, so buckets fill
/// evenly.
#[must_use]
pub const fn bucket_index(node: u32, buckets: u32) -> u32 {
    node & buckets.wrapping_sub(1)
}

fn entry_slots(bucket: &[u8; BUCKET_SIZE]) -> impl Iterator<Item = &[u8]> {
    bucket.chunks_exact(ENTRY_SIZE)
}

fn is_free_entry(entry: &[u8]) -> bool {
    entry.iter().all(|byte| *byte == 0)
}

/// Finds the entry of a node instance with an epoch of at least `min_epoch`.
#[must_use]
pub fn lookup(
    bucket: &[u8; BUCKET_SIZE],
    instance: NodeInstance,
    min_epoch: u64,
) -> DirectoryLookup {
    let mut is_torn = false;
    for entry in entry_slots(bucket) {
        match DirectoryEntry::decode(entry) {
            Some(target) if target.instance == instance && target.epoch >= min_epoch => {
                return DirectoryLookup::Found(target)
            }
            Some(_) => {}
            None => is_torn |= !is_free_entry(entry),
        }
    }
    if is_torn {
        DirectoryLookup::Torn
    } else {
        DirectoryLookup::Absent
    }
}

/// Returns the offset in bytes at which to write the entry of `node`: its existing entry, or a free one.
///
/// Returns `None` if the bucket is full. The caller must be the only writer of the table.
#[must_use]
pub fn entry_offset(bucket: &[u8; BUCKET_SIZE], node: u32) -> Option<usize> {
    let is_own = |entry: &[u8]| {
        DirectoryEntry::decode(entry).is_some_and(|target| target.instance.node == node)
    };
    let own_index = entry_slots(bucket).position(is_own);
    let index = own_index.or_else(|| entry_slots(bucket).position(is_free_entry))?;
    Some(index.saturating_mul(ENTRY_SIZE))
}

/// Returns the offsets in bytes of the entries of nodes for which `is_current` is false.
pub fn stale_offsets<'a>(
    bucket: &'a [u8; BUCKET_SIZE],
    is_current: impl Fn(NodeInstance) -> bool + 'a,
) -> impl Iterator<Item = usize> + 'a {
    let is_stale = move |entry: &[u8]| {
        DirectoryEntry::decode(entry).is_some_and(|target| !is_current(target.instance))
    };
    let all = entry_slots(bucket).enumerate();
    all.filter_map(move |(index, entry)| {
        is_stale(entry).then_some(index.saturating_mul(ENTRY_SIZE))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUCKETS: u32 = 256;

    /// Directory table with the operations of its single writer.
    struct TestDirectory(Vec<[u8; BUCKET_SIZE]>);

    impl TestDirectory {
        fn new(buckets: u32) -> Self {
            Self(vec![[0; BUCKET_SIZE]; buckets as usize])
        }

        fn bucket(&mut self, node: u32) -> &mut [u8; BUCKET_SIZE] {
            let at = bucket_index(node, self.0.len() as u32);
            &mut self.0[at as usize]
        }

        fn publish(&mut self, target: &DirectoryEntry) -> bool {
            let bucket = self.bucket(target.instance.node);
            let Some(offset) = entry_offset(bucket, target.instance.node) else {
                return false;
            };
            bucket[offset..offset + ENTRY_SIZE].copy_from_slice(&target.encode());
            true
        }

        fn remove_stale(&mut self, is_current: impl Fn(NodeInstance) -> bool) {
            for bucket in &mut self.0 {
                let offsets: Vec<_> = stale_offsets(bucket, &is_current).collect();
                for at in offsets {
                    bucket[at..at + ENTRY_SIZE].fill(0);
                }
            }
        }

        fn find(&mut self, life: NodeInstance, epoch: u64) -> DirectoryLookup {
            lookup(self.bucket(life.node), life, epoch)
        }
    }

    fn sample_entry(node: u32, incarnation: u64, epoch: u64) -> DirectoryEntry {
        DirectoryEntry {
            instance: NodeInstance { node, incarnation },
            epoch,
            dctn: node * 7,
            dc_key: fmix64(incarnation),
            rkey: !node,
            mr_table_addr: incarnation << 12,
        }
    }

    #[test]
    fn encoded_entry_fits_the_entry_size() {
        let mut buffer = [0; ENTRY_SIZE];
        let mut to = Writer::new(&mut buffer, ENTRY_SIZE);
        sample_entry(1, 1, 1).put(&mut to);
        0u32.put(&mut to);
        assert_eq!(to.len(), Some(ENTRY_SIZE));
        assert_eq!(entry_slots(&[0; BUCKET_SIZE]).count(), BUCKET_ENTRIES);
    }

    #[test]
    fn entry_of_a_new_incarnation_replaces_the_old_one() {
        let mut table = TestDirectory::new(BUCKETS);
        let (first, second) = (sample_entry(9, 1, 5), sample_entry(9, 2, 6));
        assert_eq!(table.find(first.instance, 0), DirectoryLookup::Absent);
        assert!(table.publish(&first));
        assert_eq!(table.find(first.instance, 5), DirectoryLookup::Found(first));
        assert_eq!(
            table.find(first.instance, 6),
            DirectoryLookup::Absent,
            "a node left after the entry was written"
        );
        assert!(table.publish(&second));
        assert_eq!(table.find(first.instance, 0), DirectoryLookup::Absent);
        assert_eq!(
            table.find(second.instance, 0),
            DirectoryLookup::Found(second)
        );
        table.remove_stale(|life| life != second.instance);
        assert_eq!(table.find(second.instance, 0), DirectoryLookup::Absent);
        assert!(table.0.iter().flatten().all(|byte| *byte == 0));
    }

    #[test]
    fn entry_with_mr_table_beyond_the_address_space_is_not_found() {
        let mut table = TestDirectory::new(BUCKETS);
        let last_addr = u64::MAX - MR_TABLE_BYTES;
        for (mr_table_addr, is_valid) in [(last_addr, true), (last_addr + 1, false)] {
            let entry = DirectoryEntry {
                mr_table_addr,
                ..sample_entry(9, 1, 5)
            };
            assert!(table.publish(&entry));
            let found = table.find(entry.instance, 0);
            assert_eq!(found == DirectoryLookup::Found(entry), is_valid);
        }
    }

    #[test]
    fn full_bucket_rejects_a_new_node_and_keeps_its_entries() {
        let mut table = TestDirectory::new(BUCKETS);
        let nodes = (1..=BUCKET_ENTRIES as u32 + 1).map(|i| i * BUCKETS + 1);
        let targets: Vec<_> = nodes.map(|node| sample_entry(node, 1, 1)).collect();
        let (last, others) = targets.split_last().unwrap();
        assert!(others.iter().all(|target| table.publish(target)));
        assert!(!table.publish(last));
        for target in others {
            assert_eq!(
                table.find(target.instance, 1),
                DirectoryLookup::Found(*target)
            );
        }
        assert_eq!(table.find(last.instance, 1), DirectoryLookup::Absent);
    }

    /// Looks up 10,000 nodes, a tenth of them in their second incarnation, with one read each.
    #[test]
    fn ten_thousand_nodes_are_found_with_one_read_each() {
        const NODES: u32 = 10_000;
        let mut table = TestDirectory::new(4096);
        let current = |node: u32| sample_entry(node, if node % 10 == 0 { 2 } else { 1 }, 7);
        for node in 1..=NODES {
            assert!(table.publish(&sample_entry(node, 1, 6)));
        }
        table.remove_stale(|life| life.node % 10 != 0);
        for node in 1..=NODES {
            assert!(table.publish(&current(node)));
        }
        for node in 1..=NODES {
            assert_eq!(
                table.find(current(node).instance, 7),
                DirectoryLookup::Found(current(node))
            );
        }
        let bytes = table.0.len() * BUCKET_SIZE;
        assert!(bytes / NODES as usize <= 128, "{bytes} bytes in all");
    }

    proptest! {
        /// A read that races with a writer, which stores 4-byte words in any order, returns the old entry,
        /// the new entry or no entry.
        #[test]
        fn torn_entry_is_never_found(
            node in 1u32..=65535,
            old in 1u64..,
            new in 1u64..,
            written in any::<[bool; ENTRY_SIZE / 4]>(),
            other_nodes in prop::collection::vec(1u32..=65535, 0..3),
        ) {
            let (old, new) = (sample_entry(node, old, 3), sample_entry(node, new, 4));
            let mut bucket = [0; BUCKET_SIZE];
            for (i, other) in other_nodes.iter().filter(|other| **other != node).enumerate() {
                let at = (i + 1) * ENTRY_SIZE;
                bucket[at..at + ENTRY_SIZE].copy_from_slice(&sample_entry(*other, 1, 3).encode());
            }
            bucket[..ENTRY_SIZE].copy_from_slice(&old.encode());
            for (i, word) in new.encode().chunks(4).enumerate() {
                if written[i] {
                    bucket[i * 4..i * 4 + 4].copy_from_slice(word);
                }
            }
            for wanted in [old, new] {
                match lookup(&bucket, wanted.instance, 0) {
                    DirectoryLookup::Found(found) => prop_assert!(found == old || found == new),
                    DirectoryLookup::Absent | DirectoryLookup::Torn => {}
                }
            }
            let is_mixed = bucket[..ENTRY_SIZE] != old.encode() && bucket[..ENTRY_SIZE] != new.encode();
            if is_mixed {
                prop_assert_eq!(lookup(&bucket, new.instance, 0), DirectoryLookup::Torn);
            }
        }

        #[test]
        fn lookup_in_random_bytes_finds_nothing_and_never_panics(bucket in prop::collection::vec(any::<u8>(), BUCKET_SIZE), node: u32) {
            let bucket: [u8; BUCKET_SIZE] = bucket.try_into().unwrap();
            let life = NodeInstance { node, incarnation: 1 };
            prop_assert!(!matches!(lookup(&bucket, life, 0), DirectoryLookup::Found(_)));
            if let Some(at) = entry_offset(&bucket, node) {
                prop_assert!(at + ENTRY_SIZE <= BUCKET_SIZE);
            }
        }
    }
}
