// SPDX-License-Identifier: GPL-2.0

//! Owner of a region name: the node that maps the name to its region.
//!
//! Every node of a view computes the owner locally, by rendezvous (highest random weight) hashing. LITE
//! (section 4) uses a central directory, which costs a message and is a single point of failure. When a node
//! joins or leaves, only the names of that node move.

use crate::name::{fmix64, Name};

/// Returns the node of `nodes` that owns `name` and stores the region of that name. `None` if `nodes` is
/// empty.
///
/// The result depends only on the name and the set of nodes, not on their order. All nodes of a view must
/// agree on the owner, so the computation is part of the protocol.
pub fn name_owner(name: &Name, nodes: impl Iterator<Item = u32>) -> Option<u32> {
    let hash = name.hash();
    nodes.max_by_key(|node| (fmix64(hash ^ fmix64(u64::from(*node))), *node))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(count: usize) -> impl Iterator<Item = Name> {
        (0..count).map(|i| Name::new(format!("app/region-{i}").as_bytes()).unwrap())
    }

    #[test]
    fn name_owner_without_nodes_is_none() {
        let name = Name::new(b"a").unwrap();
        assert_eq!(name_owner(&name, [].into_iter()), None);
        assert_eq!(name_owner(&name, [7].into_iter()), Some(7));
    }

    #[test]
    fn name_owner_of_known_names_never_changes() {
        let owners: Vec<_> = names(8)
            .map(|name| name_owner(&name, 1..=5).unwrap())
            .collect();
        assert_eq!(owners, [3, 5, 5, 4, 1, 1, 4, 2]);
    }

    #[test]
    fn names_are_spread_evenly_over_nodes() {
        let mut load = [0u32; 10];
        for name in names(10_000) {
            load[name_owner(&name, 0..10).unwrap() as usize] += 1;
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
            let owner = name_owner(&name, nodes.iter().copied());
            prop_assert_eq!(owner, name_owner(&name, shuffled.into_iter()));
            prop_assert!(nodes.contains(&owner.unwrap()));
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
                let old = name_owner(&name, nodes.iter().copied()).unwrap();
                let new = name_owner(&name, after.iter().copied()).unwrap();
                prop_assert!(new == old || new == newcomer);
                moved += usize::from(new != old);
            }
            // Six standard deviations of a uniform random distribution.
            let mean = NAMES as f64 / after.len() as f64;
            prop_assert!((moved as f64 - mean).abs() < 6.0 * mean.sqrt(), "{} {}", moved, mean);
        }
    }
}
