// SPDX-License-Identifier: GPL-2.0

//! Owners of a region name: the nodes that map the name to its region.
//!
//! Every node of a view computes the owners locally, by rendezvous (highest random weight) hashing. LITE
//! (section 4) uses a central directory, which costs a message and is a single point of failure. When a node
//! joins or leaves, only the names of that node move.
//!
//! Each name is stored at two nodes. The backup is the node that becomes the owner if the primary leaves. So
//! the loss of one node loses no name.

use crate::name::{fmix64, Name};

/// Nodes that store the region of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameOwners {
    /// Node that serves lookups.
    pub primary: u32,
    /// Primary of the view without [`Self::primary`]. `None` if the view has one node.
    pub backup: Option<u32>,
}

impl NameOwners {
    /// Returns `true` if the node stores the name.
    pub fn contains(&self, node: u32) -> bool {
        self.primary == node || self.backup == Some(node)
    }
}

/// Returns the nodes of `nodes` that own `name`. `None` if `nodes` is empty.
///
/// The result depends only on the name and the set of nodes, not on their order. All nodes of a view must
/// agree on the owners, so the computation is part of the protocol.
pub fn name_owners(name: &Name, nodes: impl Iterator<Item = u32>) -> Option<NameOwners> {
    let hash = name.hash();
    let weight = |node: u32| (fmix64(hash ^ fmix64(u64::from(node))), node);
    let (mut primary, mut backup) = (None, None);
    for node in nodes.map(weight) {
        if Some(node) > primary {
            (primary, backup) = (Some(node), primary);
        } else if Some(node) > backup {
            backup = Some(node);
        }
    }
    Some(NameOwners {
        primary: primary?.1,
        backup: backup.map(|(_, node)| node),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(count: usize) -> impl Iterator<Item = Name> {
        (0..count).map(|i| Name::new(format!("app/region-{i}").as_bytes()).unwrap())
    }

    /// Returns the primary of a name.
    fn primary(name: &Name, nodes: impl Iterator<Item = u32>) -> u32 {
        name_owners(name, nodes).unwrap().primary
    }

    #[test]
    fn name_owners_of_small_views_are_missing() {
        let name = Name::new(b"a").unwrap();
        assert_eq!(name_owners(&name, [].into_iter()), None);
        let only = NameOwners {
            primary: 7,
            backup: None,
        };
        assert_eq!(name_owners(&name, [7].into_iter()), Some(only));
    }

    #[test]
    fn name_owners_of_known_names_never_change() {
        let owners: Vec<_> = names(8)
            .map(|name| name_owners(&name, 1..=5).unwrap())
            .map(|owners| (owners.primary, owners.backup.unwrap()))
            .collect();
        let expected = [
            (3, 2),
            (5, 3),
            (5, 1),
            (4, 5),
            (1, 3),
            (1, 4),
            (4, 1),
            (2, 3),
        ];
        assert_eq!(owners, expected);
    }

    #[test]
    fn names_are_spread_evenly_over_nodes() {
        let mut load = [0u32; 10];
        for name in names(10_000) {
            load[primary(&name, 0..10) as usize] += 1;
        }
        // The standard deviation of a uniform random distribution is 30.
        assert!(load.iter().all(|n| (850..1150).contains(n)), "{load:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn name_owner_is_independent_of_node_order(
            text in prop::collection::vec(1u8.., 1..64),
            (nodes, shuffled) in prop::collection::vec(1u32..65536, 1..50)
                .prop_flat_map(|nodes| (Just(nodes.clone()), Just(nodes).prop_shuffle())),
        ) {
            let name = Name::new(&text).unwrap();
            let owners = name_owners(&name, nodes.iter().copied()).unwrap();
            prop_assert_eq!(Some(owners), name_owners(&name, shuffled.into_iter()));
            prop_assert!(nodes.contains(&owners.primary));
        }

        #[test]
        fn backup_is_the_primary_of_the_view_without_the_primary(
            text in prop::collection::vec(1u8.., 1..64),
            nodes in prop::collection::btree_set(1u32..65536, 2..50),
        ) {
            let name = Name::new(&text).unwrap();
            let owners = name_owners(&name, nodes.iter().copied()).unwrap();
            let others = nodes.iter().copied().filter(|node| *node != owners.primary);
            prop_assert_eq!(owners.backup, Some(primary(&name, others)));
            prop_assert!(nodes.iter().all(|node| owners.contains(*node)
                == (*node == owners.primary || Some(*node) == owners.backup)));
        }

        #[test]
        fn join_moves_names_only_to_the_new_node(
            mut nodes in prop::collection::btree_set(1u32..65536, 2..40),
            pick: prop::sample::Index,
        ) {
            const NAMES: usize = 4000;
            let newcomer = *nodes.iter().nth(pick.index(nodes.len())).unwrap();
            let after = nodes.clone();
            nodes.remove(&newcomer);
            let mut moved = 0;
            for name in names(NAMES) {
                let old = primary(&name, nodes.iter().copied());
                let new = primary(&name, after.iter().copied());
                prop_assert!(new == old || new == newcomer);
                moved += usize::from(new != old);
            }
            // Six standard deviations of a uniform random distribution.
            let mean = NAMES as f64 / after.len() as f64;
            prop_assert!((moved as f64 - mean).abs() < 6.0 * mean.sqrt(), "{} {}", moved, mean);
        }
    }
}
