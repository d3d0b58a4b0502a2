// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What daemons tell each other.
//!
//! A member opens a connection to the seed and says [`Message::Hello`]; the seed answers `Welcome`,
//! `Out` or `Refused`, and from then on sends each new view. Both sides send heartbeats. A message
//! is encoded by postcard; `wire` carries it.

use kite::daemon::SECRET_BYTES;
use kite::{FabricAddress, Member, MEMBERS_MAX, NODE_ID_MAX};
use serde::{Deserialize, Serialize};

use crate::host::Host;

/// What the kernels of a cluster know each other by.
pub type Secret = [u8; SECRET_BYTES];

/// Hosts of nodes, by the numbers of the nodes. The IP addresses are those of their connections with the seed.
pub type Hosts = Vec<(u32, Host)>;

/// The number of the seed.
pub const SEED_NODE: u32 = 1;

/// Epochs stop far below the end of the number range, so that counting on from one that a peer
/// named cannot overflow.
const EPOCH_MAX: u64 = 1 << 62;

/// The nodes of the cluster as of an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Number of the view. The seed makes odd ones; without it, its survivors make the even one
    /// that follows. So a view of the survivors is never mistaken for one of the seed.
    pub epoch: u64,
    /// The nodes, in ascending order of their numbers.
    pub members: Vec<Member>,
}

impl View {
    /// The member of this number.
    pub fn find_member(&self, node: u32) -> Option<&Member> {
        let index = self.members.binary_search_by_key(&node, |m| m.node);
        index.ok().map(|index| &self.members[index])
    }

    /// Whether this life of this node is a member.
    pub fn has_member(&self, node: u32, incarnation: u64) -> bool {
        self.find_member(node)
            .is_some_and(|m| m.incarnation == incarnation)
    }

    /// The view that survivors of the seed compute, each for itself.
    pub fn without_seed(&self) -> Self {
        let members = self.members.iter().filter(|m| m.node != SEED_NODE);
        Self {
            epoch: self.epoch + 1,
            members: members.copied().collect(),
        }
    }

    /// Whether the kernel would take it: a view that came from outside is checked first.
    pub fn is_valid(&self) -> bool {
        (1..EPOCH_MAX).contains(&self.epoch)
            && (1..=MEMBERS_MAX).contains(&self.members.len())
            && self
                .members
                .iter()
                .all(|m| (1..=NODE_ID_MAX).contains(&m.node) && m.incarnation != 0)
            && self
                .members
                .windows(2)
                .all(|pair| pair[0].node < pair[1].node)
    }
}

/// What a member that joined before remembers, for a seed that may not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriorMembership {
    /// Its number.
    pub node: u32,
    /// The secret that its kernel uses.
    pub secret: Secret,
    /// Incarnation of the seed that it followed last.
    pub seed_incarnation: u64,
    /// The view that it acts on.
    pub view: View,
}

/// A message between a member and the seed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Member to seed, first of all: let me in.
    Hello {
        /// Of this life of the member.
        incarnation: u64,
        /// Where its kernel is reached; the GID in it is its identity from life to life.
        address: FabricAddress,
        /// What it remembers, if this life joined before.
        prior: Option<PriorMembership>,
    },
    /// Seed to member: you are in.
    Welcome {
        /// The member's number.
        node: u32,
        /// For its kernel.
        secret: Secret,
        /// The view, with the member.
        view: View,
    },
    /// Seed to member: this life of yours is over. Begin another.
    Evicted,
    /// Seed to member: you cannot join, for this reason.
    Rejected(String),
    /// Seed to member: the new view.
    View(View),
    /// Both ways: I am alive.
    Heartbeat {
        /// The epoch that the sender's kernel acts on, for the log.
        epoch: u64,
        /// The sender wants a heartbeat back at once.
        probe: bool,
    },
    /// Member to seed: my kernel gets no answer from this node.
    Suspect(u32),
    /// Both ways: I leave.
    Goodbye,
    /// Seed to member: where the other members are.
    Hosts(Hosts),
}
