// SPDX-License-Identifier: GPL-2.0

//! What a view of the cluster must satisfy before a node acts on it.
//!
//! The daemon hands views to the kernel (LITE, section 4, has a management service for membership).
//! The kernel searches them by halves and trusts the incarnations, so it checks them first.

/// Highest number of a node: `KITE_NODE_MAX` of the ABI. The lowest is 1.
pub const NODE_MAX: u32 = 65535;

/// Whether `node` can be the number of a node.
#[inline]
pub const fn is_node(node: u32) -> bool {
    node != 0 && node <= NODE_MAX
}

/// A node between joining the cluster and leaving it. What one life promised, the next knows nothing of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Life {
    /// Number of the node, 1 … [`NODE_MAX`].
    pub node: u32,
    /// Differs in each life, and is never 0.
    pub incarnation: u64,
}

/// Whether `members`, pairs of a node's number and its incarnation, are a view that the node
/// `self_node` in its life `self_incarnation` can act on.
///
/// The numbers must be 1 … [`NODE_MAX`] and ascend strictly, no incarnation may be 0, and the node
/// itself must be among them in this very life.
pub fn check(
    members: impl Iterator<Item = (u32, u64)>,
    self_node: u32,
    self_incarnation: u64,
) -> bool {
    let mut before = 0;
    let mut found = false;
    for (node, incarnation) in members {
        if node <= before || !is_node(node) || incarnation == 0 {
            return false;
        }
        before = node;
        found |= (node, incarnation) == (self_node, self_incarnation);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn ok(members: &[(u32, u64)], node: u32, incarnation: u64) -> bool {
        check(members.iter().copied(), node, incarnation)
    }

    #[test]
    fn takes_good_views() {
        assert!(ok(&[(1, 5)], 1, 5));
        assert!(ok(&[(1, 5), (2, 6), (65535, u64::MAX)], 2, 6));
    }

    #[test]
    fn rejects_bad_views() {
        assert!(!ok(&[], 1, 5), "empty");
        assert!(!ok(&[(0, 5), (1, 5)], 1, 5), "node 0");
        assert!(!ok(&[(1, 5), (65536, 5)], 1, 5), "node too high");
        assert!(!ok(&[(1, 5), (1, 5)], 1, 5), "twice");
        assert!(!ok(&[(2, 5), (1, 5)], 1, 5), "descending");
        assert!(!ok(&[(1, 5), (2, 0)], 1, 5), "incarnation 0");
        assert!(!ok(&[(2, 5)], 1, 5), "without this node");
        assert!(!ok(&[(1, 4), (2, 5)], 1, 5), "this node in another life");
    }

    proptest! {
        #[test]
        fn takes_any_map_with_self(
            members in prop::collection::btree_map(1u32..=NODE_MAX, 1u64.., 1..40),
            pick: prop::sample::Index,
        ) {
            let (node, incarnation) = members.iter().nth(pick.index(members.len())).unwrap();
            let (node, incarnation) = (*node, *incarnation);
            prop_assert!(check(members.clone().into_iter(), node, incarnation));
            prop_assert!(!check(members.clone().into_iter(), node, incarnation ^ 1));
            prop_assert!(!check(members.into_iter().filter(|m| m.0 != node), node, incarnation));
        }

        #[test]
        fn takes_nothing_else(members in prop::collection::vec((0u32..6, 0u64..4), 0..5)) {
            let map: BTreeMap<_, _> = members.iter().copied().collect();
            let good = members.iter().all(|m| m.0 > 0 && m.1 > 0)
                && map.into_iter().collect::<Vec<_>>() == members;
            for (node, incarnation) in (0..6).flat_map(|n| (0..4).map(move |i| (n, i))) {
                let expected = good && members.contains(&(node, incarnation));
                prop_assert_eq!(ok(&members, node, incarnation), expected);
            }
        }
    }
}
