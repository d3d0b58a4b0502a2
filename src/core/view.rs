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

/// Member of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewMember {
    /// Node and incarnation.
    pub instance: NodeInstance,
    /// Epoch of the view that admitted the node last.
    pub admitted_epoch: u64,
    /// Epoch of the view since which the node is unreachable; 0 while it is reachable.
    pub unreachable_since: u64,
}

impl ViewMember {
    /// Returns `true` if the member may be part of the view of `epoch`: a node is unreachable after its
    /// admission.
    const fn is_valid(&self, epoch: u64) -> bool {
        let (admitted, unreachable) = (self.admitted_epoch, self.unreachable_since);
        let has_valid_epochs = match unreachable {
            0 => admitted <= epoch,
            _ => admitted < unreachable && unreachable <= epoch,
        };
        has_valid_epochs && is_valid_node_id(self.instance.node) && self.instance.incarnation != 0
    }
}

/// Returns `true` if the node `local` can act on the view `members` of `epoch`.
///
/// The node ids must be 1 … [`MAX_NODE_ID`] in strictly ascending order. No incarnation may be 0. No epoch of
/// a member may be above that of the view, and a member is unreachable only after its admission. `local`
/// must be a reachable member in exactly this incarnation.
pub fn is_valid_view(
    epoch: u64,
    members: impl Iterator<Item = ViewMember>,
    local: NodeInstance,
) -> bool {
    let mut previous = 0;
    let mut has_local = false;
    for member in members {
        if member.instance.node <= previous || !member.is_valid(epoch) {
            return false;
        }
        previous = member.instance.node;
        has_local |= member.instance == local && member.unreachable_since == 0;
    }
    has_local
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Members with these incarnations, admitted at epoch 1 and reachable.
    fn reachable(members: &[(u32, u64)]) -> Vec<ViewMember> {
        let member = |&(node, incarnation)| ViewMember {
            instance: NodeInstance { node, incarnation },
            admitted_epoch: 1,
            unreachable_since: 0,
        };
        members.iter().map(member).collect()
    }

    fn is_valid(members: &[(u32, u64)], node: u32, incarnation: u64) -> bool {
        let local = NodeInstance { node, incarnation };
        is_valid_view(1, reachable(members).into_iter(), local)
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
            "this node in another incarnation"
        );
    }

    #[test]
    fn epochs_of_members_are_checked() {
        let cases = [
            ("admitted in this view", 9, 0, true),
            ("unreachable in this view", 8, 9, true),
            ("unreachable in an earlier view", 3, 4, true),
            ("admitted in a later view", 10, 0, false),
            ("unreachable in a later view", 3, 10, false),
            ("unreachable since the admission", 4, 4, false),
            ("unreachable before the admission", 5, 4, false),
        ];
        let [local, other] = reachable(&[(1, 5), (2, 6)])[..] else {
            unreachable!()
        };
        for (what, admitted_epoch, unreachable_since, expected) in cases {
            let other = ViewMember {
                admitted_epoch,
                unreachable_since,
                ..other
            };
            let accepts =
                |local: ViewMember| is_valid_view(9, [local, other].into_iter(), local.instance);
            assert_eq!(accepts(local), expected, "{what}");
            let unreachable_since = 2;
            assert!(
                !accepts(ViewMember {
                    unreachable_since,
                    ..local
                }),
                "this node is unreachable"
            );
        }
    }

    proptest! {
        #[test]
        fn view_with_self_is_accepted(
            members in prop::collection::btree_map(1u32..=MAX_NODE_ID, 1u64.., 1..40),
            pick: prop::sample::Index,
        ) {
            let (node, incarnation) = members.iter().nth(pick.index(members.len())).unwrap();
            let (node, incarnation) = (*node, *incarnation);
            let all: Vec<_> = members.into_iter().collect();
            let without_self: Vec<_> = all.iter().copied().filter(|m| m.0 != node).collect();
            prop_assert!(is_valid(&all, node, incarnation));
            prop_assert!(!is_valid(&all, node, incarnation ^ 1));
            prop_assert!(!is_valid(&without_self, node, incarnation));
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
