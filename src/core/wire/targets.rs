// SPDX-License-Identifier: GPL-2.0

//! The directory of DC targets (KRCORE, section 4.2: the meta server): by which 12 bytes each node is reached.
//!
//! A table is memory of a few directory nodes, which others read with one READ of one bucket. Whoever reads may
//! meet a writer, so each entry tells by a checksum whether it is whole, by the life of its node whose it is,
//! and by an epoch whether it is from before somebody left, when all nodes took other targets. A node whose
//! bucket is full is not in the table, and not found: that takes six numbers that are alike modulo the buckets, where a
//! daemon gives the lowest that are free.

use super::{
    codec::{Field, Reader, Writer},
    Malformed,
};
use crate::{
    name::mix,
    view::{is_node, Life},
};

/// Bytes of an entry.
pub const ENTRY_SIZE: usize = 48;

/// Entries of a bucket.
pub const BUCKET_ENTRIES: usize = 5;

/// Bytes of a bucket.
pub const BUCKET_SIZE: usize = 256;
const _: () = assert!(BUCKET_ENTRIES * ENTRY_SIZE <= BUCKET_SIZE);

/// By what a node is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The node, in the life that has the target.
    pub life: Life,
    /// Epoch of the view as of which it is told.
    pub epoch: u64,
    /// Number of its DC target; 0 if its RNIC has no DC, and it is to be connected to.
    pub number: u32,
    /// Key without which that refuses.
    pub key: u64,
    /// Key to its memory.
    pub rkey: u32,
    /// Address of its table of memory regions.
    pub regions: u64,
}

/// What a bucket says of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// This, as new as is needed.
    Target(Target),
    /// Nothing, or nothing new enough.
    Absent,
    /// Somebody is writing: read it again.
    Torn,
}

impl Target {
    /// A mix of an old and a new entry has the right one by a chance of one in four billion.
    fn checksum(&self) -> u32 {
        let numbers = (u64::from(self.number) << 32) | u64::from(self.rkey);
        let fields = [
            u64::from(self.life.node),
            self.life.incarnation,
            self.epoch,
            numbers,
            self.key,
            self.regions,
        ];
        fields.into_iter().fold(0, |sum, field| mix(sum ^ field)) as u32
    }

    /// As it is in a table.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_SIZE] {
        let mut bytes = [0; ENTRY_SIZE];
        let mut to = Writer::new(&mut bytes, ENTRY_SIZE);
        self.put(&mut to);
        self.checksum().put(&mut to);
        bytes
    }

    /// What an entry of a table says, if it is whole.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader::new(bytes);
        let target = Self::get(&mut from).ok()?;
        let whole = u32::get(&mut from) == Ok(target.checksum());
        whole.then_some(target)
    }
}

impl Field<'_> for Target {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let life = Life::get(from)?;
        let (epoch, number) = Field::get(from)?;
        let ((key, rkey), regions) = Field::get(from)?;
        let target = Self {
            life,
            epoch,
            number,
            key,
            rkey,
            regions,
        };
        is_node(life.node).then_some(target).ok_or(Malformed)
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.life.put(to);
        (self.epoch, self.number).put(to);
        ((self.key, self.rkey), self.regions).put(to);
    }
}

/// The bucket of a node in a table of so many, a power of two. Numbers of nodes are dense, so buckets are even.
#[must_use]
pub const fn bucket(node: u32, buckets: u32) -> u32 {
    node & buckets.wrapping_sub(1)
}

fn entries(bucket: &[u8; BUCKET_SIZE]) -> impl Iterator<Item = &[u8]> {
    bucket.chunks_exact(ENTRY_SIZE)
}

fn is_free(entry: &[u8]) -> bool {
    entry.iter().all(|byte| *byte == 0)
}

/// Finds what a bucket says of a node in this life, as of `epoch` or later.
#[must_use]
pub fn find(bucket: &[u8; BUCKET_SIZE], life: Life, epoch: u64) -> Found {
    let mut torn = false;
    for entry in entries(bucket) {
        match Target::decode(entry) {
            Some(target) if target.life == life && target.epoch >= epoch => {
                return Found::Target(target)
            }
            Some(_) => {}
            None => torn |= !is_free(entry),
        }
    }
    if torn {
        Found::Torn
    } else {
        Found::Absent
    }
}

/// Where in a bucket what is told of `node` goes, in bytes, as its one writer asks: in the place of what was told
/// before, or in a free one. `None` if there is none.
#[must_use]
pub fn place(bucket: &[u8; BUCKET_SIZE], node: u32) -> Option<usize> {
    let own = |entry: &[u8]| Target::decode(entry).is_some_and(|target| target.life.node == node);
    let own = entries(bucket).position(own);
    let index = own.or_else(|| entries(bucket).position(is_free))?;
    Some(index * ENTRY_SIZE)
}

/// The places in a bucket, in bytes, of what was told of nodes of which `stays` does not hold.
pub fn stale<'a>(
    bucket: &'a [u8; BUCKET_SIZE],
    stays: impl Fn(Life) -> bool + 'a,
) -> impl Iterator<Item = usize> + 'a {
    let stale = move |entry: &[u8]| Target::decode(entry).is_some_and(|target| !stays(target.life));
    let all = entries(bucket).enumerate();
    all.filter_map(move |(index, entry)| stale(entry).then_some(index * ENTRY_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUCKETS: u32 = 256;

    /// A table, and what its one writer does to it.
    struct Table(Vec<[u8; BUCKET_SIZE]>);

    impl Table {
        fn new(buckets: u32) -> Self {
            Self(vec![[0; BUCKET_SIZE]; buckets as usize])
        }

        fn bucket(&mut self, node: u32) -> &mut [u8; BUCKET_SIZE] {
            let at = bucket(node, self.0.len() as u32);
            &mut self.0[at as usize]
        }

        fn publish(&mut self, target: &Target) -> bool {
            let bucket = self.bucket(target.life.node);
            let Some(at) = place(bucket, target.life.node) else {
                return false;
            };
            bucket[at..at + ENTRY_SIZE].copy_from_slice(&target.encode());
            true
        }

        fn forget(&mut self, stays: impl Fn(Life) -> bool) {
            for bucket in &mut self.0 {
                let places: Vec<_> = stale(bucket, &stays).collect();
                for at in places {
                    bucket[at..at + ENTRY_SIZE].fill(0);
                }
            }
        }

        fn find(&mut self, life: Life, epoch: u64) -> Found {
            find(self.bucket(life.node), life, epoch)
        }
    }

    fn target(node: u32, incarnation: u64, epoch: u64) -> Target {
        Target {
            life: Life { node, incarnation },
            epoch,
            number: node * 7,
            key: mix(incarnation),
            rkey: !node,
            regions: incarnation << 12,
        }
    }

    #[test]
    fn an_entry_fits_its_place() {
        let mut room = [0; ENTRY_SIZE];
        let mut to = Writer::new(&mut room, ENTRY_SIZE);
        target(1, 1, 1).put(&mut to);
        0u32.put(&mut to);
        assert_eq!(to.len(), Some(ENTRY_SIZE));
        assert_eq!(entries(&[0; BUCKET_SIZE]).count(), BUCKET_ENTRIES);
    }

    #[test]
    fn a_later_life_takes_the_place_of_the_former() {
        let mut table = Table::new(BUCKETS);
        let (first, second) = (target(9, 1, 5), target(9, 2, 6));
        assert_eq!(table.find(first.life, 0), Found::Absent);
        assert!(table.publish(&first));
        assert_eq!(table.find(first.life, 5), Found::Target(first));
        assert_eq!(
            table.find(first.life, 6),
            Found::Absent,
            "somebody left since"
        );
        assert!(table.publish(&second));
        assert_eq!(table.find(first.life, 0), Found::Absent);
        assert_eq!(table.find(second.life, 0), Found::Target(second));
        table.forget(|life| life != second.life);
        assert_eq!(table.find(second.life, 0), Found::Absent);
        assert!(table.0.iter().flatten().all(|byte| *byte == 0));
    }

    #[test]
    fn a_full_bucket_refuses_and_loses_nothing() {
        let mut table = Table::new(BUCKETS);
        let nodes = (1..=BUCKET_ENTRIES as u32 + 1).map(|i| i * BUCKETS + 1);
        let targets: Vec<_> = nodes.map(|node| target(node, 1, 1)).collect();
        let (last, others) = targets.split_last().unwrap();
        assert!(others.iter().all(|target| table.publish(target)));
        assert!(!table.publish(last));
        for target in others {
            assert_eq!(table.find(target.life, 1), Found::Target(*target));
        }
        assert_eq!(table.find(last.life, 1), Found::Absent);
    }

    /// Ten thousand nodes, of which a tenth live again, look each other up with one read each.
    #[test]
    fn ten_thousand_nodes_find_each_other_at_once() {
        const NODES: u32 = 10_000;
        let mut table = Table::new(4096);
        let now = |node: u32| target(node, if node % 10 == 0 { 2 } else { 1 }, 7);
        for node in 1..=NODES {
            assert!(table.publish(&target(node, 1, 6)));
        }
        table.forget(|life| life.node % 10 != 0);
        for node in 1..=NODES {
            assert!(table.publish(&now(node)));
        }
        for node in 1..=NODES {
            assert_eq!(table.find(now(node).life, 7), Found::Target(now(node)));
        }
        let bytes = table.0.len() * BUCKET_SIZE;
        assert!(bytes / NODES as usize <= 128, "{bytes} bytes in all");
    }

    proptest! {
        /// Whoever reads while somebody writes, word by word in any order, gets the old, the new, or nothing.
        #[test]
        fn a_mix_is_never_taken_for_an_entry(
            node in 1u32..=65535,
            old in 1u64..,
            new in 1u64..,
            written in any::<[bool; ENTRY_SIZE / 4]>(),
            others in prop::collection::vec(1u32..=65535, 0..3),
        ) {
            let (old, new) = (target(node, old, 3), target(node, new, 4));
            let mut bucket = [0; BUCKET_SIZE];
            for (i, other) in others.iter().filter(|other| **other != node).enumerate() {
                let at = (i + 1) * ENTRY_SIZE;
                bucket[at..at + ENTRY_SIZE].copy_from_slice(&target(*other, 1, 3).encode());
            }
            bucket[..ENTRY_SIZE].copy_from_slice(&old.encode());
            for (i, word) in new.encode().chunks(4).enumerate() {
                if written[i] {
                    bucket[i * 4..i * 4 + 4].copy_from_slice(word);
                }
            }
            for wanted in [old, new] {
                match find(&bucket, wanted.life, 0) {
                    Found::Target(found) => prop_assert!(found == old || found == new),
                    Found::Absent | Found::Torn => {}
                }
            }
            let mixed = bucket[..ENTRY_SIZE] != old.encode() && bucket[..ENTRY_SIZE] != new.encode();
            if mixed {
                prop_assert_eq!(find(&bucket, new.life, 0), Found::Torn);
            }
        }

        #[test]
        fn no_bytes_panic(bucket in prop::collection::vec(any::<u8>(), BUCKET_SIZE), node: u32) {
            let bucket: [u8; BUCKET_SIZE] = bucket.try_into().unwrap();
            let life = Life { node, incarnation: 1 };
            prop_assert!(!matches!(find(&bucket, life, 0), Found::Target(_)));
            if let Some(at) = place(&bucket, node) {
                prop_assert!(at + ENTRY_SIZE <= BUCKET_SIZE);
            }
        }
    }
}
