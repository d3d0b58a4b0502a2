// SPDX-License-Identifier: GPL-2.0

//! Validation of a membership view.
//!
//! The daemon passes views to the kernel (LITE, section 4, has a management service for membership). The
//! kernel uses binary search on the members and relies on their incarnations. Hence it validates a view
//! before acting on the view.

/// Highest node id: `KITE_NODE_MAX` of the ABI. The lowest is 1.
pub const MAX_NODE_ID: u32 = 65535;

/// Returns `true` if `node` is a valid node id.
#[inline]
pub const fn is_valid_node_id(node: u32) -> bool {
    node != 0 && node <= MAX_NODE_ID
}

/// One membership of a node, between join and removal. State of one incarnation is invalid in the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeInstance {
    /// Id of the node, 1 … [`MAX_NODE_ID`].
    pub node: u32,
    /// Incarnation: different for each membership of the node, never 0.
    pub incarnation: u64,
}

/// Returns `true` if the node `self_node` with incarnation `self_incarnation` can act on the view `members`.
///
/// Each member is a node id and an incarnation. The node ids must be 1 … [`MAX_NODE_ID`] in strictly
/// ascending order. No incarnation may be 0. The node itself must be a member with exactly the given
/// incarnation.
pub fn is_valid_view(
    members: impl Iterator<Item = (u32, u64)>,
    self_node: u32,
    self_incarnation: u64,
) -> bool {
    let mut previous = 0;
    let mut has_self = false;
    for (node, incarnation) in members {
        if node <= previous || !is_valid_node_id(node) || incarnation == 0 {
            return false;
        }
        previous = node;
        has_self |= (node, incarnation) == (self_node, self_incarnation);
    }
    has_self
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn is_valid(members: &[(u32, u64)], node: u32, incarnation: u64) -> bool {
        is_valid_view(members.iter().copied(), node, incarnation)
    }

    #[test]
    fn valid_views_are_accepted() {
        assert!(is_valid(&[(1, 5)], 1, 5));
        assert!(is_valid(&[(1, 5), (2, 6), (65535, u64::MAX)], 2, 6));
    }

    #[test]
    fn invalid_views_are_rejected() {
        assert!(!is_valid(&[], 1, 5), "empty");
        assert!(!is_valid(&[(0, 5), (1, 5)], 1, 5), "node 0");
        assert!(!is_valid(&[(1, 5), (65536, 5)], 1, 5), "node too high");
        assert!(!is_valid(&[(1, 5), (1, 5)], 1, 5), "twice");
        assert!(!is_valid(&[(2, 5), (1, 5)], 1, 5), "descending");
        assert!(!is_valid(&[(1, 5), (2, 0)], 1, 5), "incarnation 0");
        assert!(!is_valid(&[(2, 5)], 1, 5), "without this node");
        assert!(
            !is_valid(&[(1, 4), (2, 5)], 1, 5),
            "this node in another life"
        );
    }

    proptest! {
        #[test]
        fn view_with_self_is_accepted(
            members in prop::collection::btree_map(1u32..=MAX_NODE_ID, 1u64.., 1..40),
            pick: prop::sample::Index,
        ) {
            let (node, incarnation) = members.iter().nth(pick.index(members.len())).unwrap();
            let (node, incarnation) = (*node, *incarnation);
            prop_assert!(is_valid_view(members.clone().into_iter(), node, incarnation));
            prop_assert!(!is_valid_view(members.clone().into_iter(), node, incarnation ^ 1));
            prop_assert!(!is_valid_view(members.into_iter().filter(|m| m.0 != node), node, incarnation));
        }

        #[test]
        fn only_ascending_views_with_self_are_accepted(members in prop::collection::vec((0u32..6, 0u64..4), 0..5)) {
            let map: BTreeMap<_, _> = members.iter().copied().collect();
            let expected_valid = members.iter().all(|m| m.0 > 0 && m.1 > 0)
                && map.into_iter().collect::<Vec<_>>() == members;
            for (node, incarnation) in (0..6).flat_map(|n| (0..4).map(move |i| (n, i))) {
                let expected = expected_valid && members.contains(&(node, incarnation));
                prop_assert_eq!(is_valid(&members, node, incarnation), expected);
            }
        }
    }
}
