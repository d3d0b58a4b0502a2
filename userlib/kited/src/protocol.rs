// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages between daemons.
//!
//! A member connects to the seed and sends [`Message::Hello`]. The seed replies with `Welcome`, `Evicted` or
//! `Rejected`, and then sends each new view. Both sides send heartbeats. The seed requests probes over RDMA from members
//! before it marks a node as unreachable. postcard encodes messages, and `wire` transfers them.

use kite::daemon::SECRET_BYTES;
use kite::{FabricAddress, Member, MEMBERS_MAX, NODE_ID_MAX};
use serde::{Deserialize, Serialize};

use crate::host::Host;

/// Secret that authenticates the kernels of a cluster to each other.
pub type Secret = [u8; SECRET_BYTES];

/// Hosts of nodes, by the numbers of the nodes. The IP addresses are those of their connections with the seed.
pub type Hosts = Vec<(u32, Host)>;

/// Number of the seed.
pub const SEED_NODE: u32 = 1;

/// Upper bound of epochs, far below the end of the number range: incrementing an epoch that a peer sent cannot
/// overflow.
const EPOCH_MAX: u64 = 1 << 62;

/// Distance between two epochs of the seed. The epochs between them are those of the survivors of the seed.
const EPOCH_STRIDE: u64 = 4;

/// Returns the next epoch that a seed assigns after `epoch`.
pub(crate) fn next_seed_epoch(epoch: u64) -> u64 {
    (epoch / EPOCH_STRIDE + 1) * EPOCH_STRIDE + 1
}

/// Returns the last epoch that the survivors of a seed can derive from its view of `epoch`.
pub(crate) fn last_derived_epoch(epoch: u64) -> u64 {
    epoch / EPOCH_STRIDE * EPOCH_STRIDE + EPOCH_STRIDE - 1
}

/// Kernel of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Address of the kernel. The GID identifies the node across incarnations.
    pub address: FabricAddress,
    /// Version of the messages between kernels.
    pub wire_version: u32,
    /// Optional features, which other kernels of the cluster may lack. kited passes on the bits, and knows none.
    pub features: u64,
}

impl KernelInfo {
    /// Returns the member with this kernel, which no view has admitted yet.
    pub(crate) fn new_member(&self, instance: Instance) -> Member {
        let Instance { node, incarnation } = instance;
        Member {
            node,
            incarnation,
            address: self.address,
            admitted_epoch: 0,
            unreachable_since: 0,
            features: self.features,
        }
    }
}

/// One membership of a node, between join and removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Instance {
    /// Number of the node.
    pub node: u32,
    /// Incarnation of the node.
    pub incarnation: u64,
}

impl From<&Member> for Instance {
    fn from(member: &Member) -> Self {
        Self {
            node: member.node,
            incarnation: member.incarnation,
        }
    }
}

/// Members of the cluster in an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Number of the view. The seed assigns epochs with the remainder 1 modulo 4. The survivors of the seed derive the
    /// next two, so their view is never mistaken for a view of the seed.
    pub epoch: u64,
    /// Members in ascending order of their numbers.
    pub members: Vec<Member>,
}

impl View {
    /// Returns the member with this number.
    pub fn find_member(&self, node: u32) -> Option<&Member> {
        let index = self.members.binary_search_by_key(&node, |m| m.node);
        index.ok().map(|index| &self.members[index])
    }

    /// Returns the member with this number if the node is reachable.
    pub fn find_reachable(&self, node: u32) -> Option<&Member> {
        self.find_member(node).filter(|m| m.is_reachable())
    }

    /// Returns `true` if this incarnation of the node is a member.
    pub fn has_member(&self, node: u32, incarnation: u64) -> bool {
        self.find_member(node)
            .is_some_and(|m| m.incarnation == incarnation)
    }

    /// Returns the view that each survivor derives if the seed does not respond.
    pub fn with_unreachable_seed(&self) -> Self {
        let mut view = Self {
            epoch: self.epoch + 1,
            members: self.members.clone(),
        };
        let epoch = view.epoch;
        let seed = view.members.iter_mut().find(|m| m.node == SEED_NODE);
        if let Some(seed) = seed.filter(|seed| seed.is_reachable()) {
            seed.unreachable_since = epoch;
        }
        view
    }

    /// Returns the view that each survivor derives if the seed leaves the cluster.
    pub fn without_seed(&self) -> Self {
        let members = self.members.iter().filter(|m| m.node != SEED_NODE);
        Self {
            epoch: last_derived_epoch(self.epoch).max(self.epoch + 1),
            members: members.copied().collect(),
        }
    }

    /// Returns the view with which an unreachable node continues: the node is reachable, and no other member is.
    pub fn isolated(&self, node: u32) -> Self {
        let epoch = self.epoch;
        let isolate = |member: &Member| {
            let mut member = *member;
            if member.node == node {
                member.unreachable_since = 0;
            } else if member.is_reachable() {
                member.unreachable_since = epoch;
                // A node is unreachable only after its admission.
                member.admitted_epoch = member.admitted_epoch.min(epoch - 1);
            }
            member
        };
        Self {
            epoch,
            members: self.members.iter().map(isolate).collect(),
        }
    }

    /// Returns the view for the kernel of a member: this view if the node is reachable, else the isolated one.
    pub fn for_node(&self, node: u32) -> Self {
        match self.find_reachable(node) {
            Some(_) => self.clone(),
            None => self.isolated(node),
        }
    }

    /// Returns `true` if kernels accept the view. A view from a peer is checked before use.
    pub fn is_valid(&self) -> bool {
        (1..EPOCH_MAX).contains(&self.epoch)
            && (1..=MEMBERS_MAX).contains(&self.members.len())
            && self.members.iter().all(|m| self.is_valid_member(m))
            && self
                .members
                .windows(2)
                .all(|pair| pair[0].node < pair[1].node)
    }

    fn is_valid_member(&self, member: &Member) -> bool {
        let (admitted, unreachable) = (member.admitted_epoch, member.unreachable_since);
        let has_valid_epochs = match unreachable {
            0 => admitted <= self.epoch,
            _ => admitted < unreachable && unreachable <= self.epoch,
        };
        has_valid_epochs && (1..=NODE_ID_MAX).contains(&member.node) && member.incarnation != 0
    }

    /// Returns a member whose connections with `own` would be those of a pair that was fenced: `prior` is an earlier
    /// view of the kernel of `own`, and this view has no later admission of either node.
    pub(crate) fn find_stale_pair(&self, own: &Member, prior: &Self) -> Option<&Member> {
        let own_before = prior.find_member(own.node)?;
        let is_stale = |member: &&Member| {
            let before = prior.find_member(member.node);
            let before = before.filter(|before| before.incarnation == member.incarnation);
            before.is_some_and(|before| {
                let admission = Self::pair_admission(own, member);
                let former = Self::pair_admission(own_before, before);
                admission < former || (admission == former && !before.is_reachable())
            })
        };
        let others = self.members.iter().filter(|m| m.node != own.node);
        others.filter(|m| m.is_reachable()).find(is_stale)
    }

    /// Returns the admission that identifies the connections between two members: the later one of their admissions.
    pub(crate) fn pair_admission(one: &Member, other: &Member) -> u64 {
        one.admitted_epoch.max(other.admitted_epoch)
    }
}

/// State of a member that joined before, for a seed that may have lost it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriorMembership {
    /// Number of the member.
    pub node: u32,
    /// Secret that the member's kernel uses.
    pub secret: Secret,
    /// Incarnation of the seed that the member followed last.
    pub seed_incarnation: u64,
    /// View of the member.
    pub view: View,
}

/// A message between a member and the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Member to coordinator, first message: request to join.
    Hello {
        /// Incarnation of the member.
        incarnation: u64,
        /// The member's kernel.
        kernel: KernelInfo,
        /// Prior membership, if this incarnation joined before.
        prior: Option<PriorMembership>,
    },
    /// Coordinator to member: the member is admitted.
    Welcome {
        /// Number of the member.
        node: u32,
        /// Secret for the member's kernel.
        secret: Secret,
        /// View that includes the member.
        view: View,
    },
    /// Coordinator to member: this incarnation has ended. The node must join with a new incarnation.
    Evicted,
    /// Coordinator to member: the node cannot join, for this reason.
    Rejected(String),
    /// Coordinator to member: new view.
    View(View),
    /// Both directions: the sender is alive.
    Heartbeat {
        /// Epoch of the view that the sender's kernel has applied.
        epoch: u64,
        /// The receiver must reply with a heartbeat at once.
        probe: bool,
    },
    /// Member to coordinator: this node does not respond to the sender's kernel.
    Suspect(u32),
    /// Coordinator to member: the member's kernel must send a request to this node over RDMA.
    Probe(Instance),
    /// Member to coordinator: result of a probe that is evidence.
    Probed {
        /// Node that was probed.
        instance: Instance,
        /// `true` if the kernel of the node replied, `false` if no reply arrived in time.
        answered: bool,
    },
    /// Both directions: the sender leaves.
    Goodbye,
    /// Coordinator to member: hosts of the members, without that of a seed.
    Hosts(Hosts),
    /// Member to coordinator: an operator evicts this node.
    Evict(Instance),
}

/// Arbitrary nodes for tests.
#[cfg(test)]
pub(crate) mod example {
    use super::*;

    /// Returns the kernel of a node. The GID and the features are the number of the node.
    pub(crate) fn kernel(node: u32) -> KernelInfo {
        KernelInfo {
            address: FabricAddress {
                gid: u128::from(node).into(),
                qpn: 1,
                lid: 0,
                link_layer: 2,
                mtu: 4096,
            },
            wire_version: 2,
            features: node.into(),
        }
    }

    /// Returns a reachable member that was admitted before all epochs.
    pub(crate) fn member(node: u32, incarnation: u64) -> Member {
        kernel(node).new_member(Instance { node, incarnation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(node: u32, admitted_epoch: u64, unreachable_since: u64) -> Member {
        Member {
            admitted_epoch,
            unreachable_since,
            ..example::member(node, 7)
        }
    }

    fn view(epoch: u64, members: &[Member]) -> View {
        View {
            epoch,
            members: members.to_vec(),
        }
    }

    #[test]
    fn derived_epochs_are_between_two_epochs_of_the_seed() {
        let seed = view(5, &[member(1, 5, 0), member(2, 5, 0)]);
        let (marked, removed) = (seed.with_unreachable_seed(), seed.without_seed());
        assert_eq!((marked.epoch, removed.epoch), (6, 7));
        assert_eq!(marked.without_seed().epoch, 7);
        assert_eq!(next_seed_epoch(5), 9);
    }

    #[test]
    fn view_for_unreachable_node_is_valid_and_isolates_it() {
        let all = view(9, &[member(1, 5, 0), member(2, 9, 0), member(3, 1, 9)]);
        assert_eq!(all.for_node(2), all);
        let isolated = all.for_node(3);
        assert!(isolated.is_valid(), "{isolated:?}");
        let reachable = isolated.members.iter().filter(|m| m.is_reachable());
        assert_eq!(reachable.map(|m| m.node).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn epochs_of_members_are_checked() {
        for (admitted, unreachable, expected) in [
            (9, 0, true),
            (10, 0, false),
            (8, 9, true),
            (3, 10, false),
            (4, 4, false),
            (5, 4, false),
        ] {
            let valid = view(9, &[member(1, admitted, unreachable)]).is_valid();
            assert_eq!(valid, expected, "{admitted} {unreachable}");
        }
    }
}
