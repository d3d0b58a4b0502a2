// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages between daemons.
//!
//! A member connects to the seed and sends [`Message::Hello`]. The seed replies with `Welcome`, `Evicted` or
//! `Rejected`, and then sends each new view. Both sides send heartbeats. postcard encodes messages, and `wire`
//! transfers them.

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

/// Members of the cluster in an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Number of the view. The seed assigns epochs of the form 4n + 1. Followers assign the next one to the view with the
    /// unreachable seed, and 4n + 3 to the view that the seed has left. So one epoch of a seed identifies one view.
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

    /// Returns `true` if this incarnation of the node is a member.
    pub fn has_member(&self, node: u32, incarnation: u64) -> bool {
        self.find_member(node)
            .is_some_and(|m| m.incarnation == incarnation)
    }

    /// Returns the next epoch that the seed assigns, of the form 4n + 1.
    pub fn next_seed_epoch(epoch: u64) -> u64 {
        epoch.div_ceil(4) * 4 + 1
    }

    /// Returns the view that each follower computes when the seed has left.
    pub fn without_seed(&self) -> Self {
        let members = self.members.iter().filter(|m| m.node != SEED_NODE);
        Self {
            epoch: self.epoch | 3,
            members: members.copied().collect(),
        }
    }

    /// Returns the view that each follower computes when the seed is unreachable.
    pub fn with_unreachable_seed(&self) -> Self {
        let epoch = self.epoch + 1;
        let mark = |mut member: Member| {
            if member.node == SEED_NODE && member.is_reachable() {
                member.unreachable_since = epoch;
            }
            member
        };
        Self {
            epoch,
            members: self.members.iter().copied().map(mark).collect(),
        }
    }

    /// Returns `true` if the kernel of node `own`, which has fenced the members that are unreachable in `former`, can
    /// apply this view: such a member, or this node, was admitted since, or the member is not reachable.
    pub fn keeps_fences_of(&self, former: &Self, own: u32) -> bool {
        let own_admission = self.find_member(own).map_or(0, |own| own.admitted_epoch);
        let mut fenced = former.members.iter().filter(|m| !m.is_reachable());
        fenced.all(|fenced| {
            let is_admitted = |now: &Member| {
                now.incarnation != fenced.incarnation
                    || !now.is_reachable()
                    || now.admitted_epoch.max(own_admission) > fenced.unreachable_since
            };
            self.find_member(fenced.node).is_none_or(is_admitted)
        })
    }

    fn is_valid_member(&self, member: &Member) -> bool {
        let (admitted, unreachable) = (member.admitted_epoch, member.unreachable_since);
        let has_valid_epochs = match unreachable {
            0 => admitted <= self.epoch,
            _ => admitted < unreachable && unreachable <= self.epoch,
        };
        has_valid_epochs && (1..=NODE_ID_MAX).contains(&member.node) && member.incarnation != 0
    }

    /// Returns `true` if the kernel accepts the view. A view from a peer is checked before use.
    pub fn is_valid(&self) -> bool {
        (1..EPOCH_MAX).contains(&self.epoch)
            && (1..=MEMBERS_MAX).contains(&self.members.len())
            && self.members.iter().all(|m| self.is_valid_member(m))
            && self
                .members
                .windows(2)
                .all(|pair| pair[0].node < pair[1].node)
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

/// A message between a member and the seed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Member to seed, first message: request to join.
    Hello {
        /// Incarnation of the member.
        incarnation: u64,
        /// Address of the member's kernel. The GID identifies the node across incarnations.
        address: FabricAddress,
        /// Prior membership, if this incarnation joined before.
        prior: Option<PriorMembership>,
    },
    /// Seed to member: the member is admitted.
    Welcome {
        /// Number of the member.
        node: u32,
        /// Secret for the member's kernel.
        secret: Secret,
        /// View that includes the member.
        view: View,
    },
    /// Seed to member: this incarnation has ended. The node must join with a new incarnation.
    Evicted,
    /// Seed to member: the node cannot join, for this reason. A node that joined before keeps its incarnation.
    Rejected(String),
    /// Seed to member: new view.
    View(View),
    /// Both directions: the sender is alive.
    Heartbeat {
        /// Epoch of the view that the sender's kernel has applied.
        epoch: u64,
        /// The receiver must reply with a heartbeat at once.
        probe: bool,
    },
    /// Member to seed: this node does not respond to the sender's kernel.
    Suspect(u32),
    /// Seed to member: check by RDMA whether the kernel of this node runs.
    Probe(u32, u64),
    /// Member to seed: the kernel of this node, in this incarnation, has replied by RDMA.
    Alive(u32, u64),
    /// Both directions: the sender leaves.
    Goodbye,
    /// Seed to member: hosts of the members, without the seed.
    Hosts(Hosts),
}
