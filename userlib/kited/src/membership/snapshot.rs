// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a machine has to know to continue the life of its node in another process.

use std::collections::HashMap;
use std::net::Ipv6Addr;

use kite::Member;
use serde::{Deserialize, Serialize};

use super::Action;
use crate::protocol::{PriorMembership, Secret, SEED_NODE};

/// State of a machine whose node is in a cluster. What depends on time or on connections is not in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Snapshot {
    /// Of a [`Seed`](super::Seed).
    Seed(SeedSnapshot),
    /// Of a [`Follower`](super::Follower).
    Follower(FollowerSnapshot),
}

/// State of a seed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeedSnapshot {
    pub(super) self_member: Member,
    pub(super) secret: Secret,
    pub(super) epoch: u64,
    /// The other members, and the epoch of the first view with each.
    pub(super) peers: Vec<(Member, u64)>,
    pub(super) node_numbers: HashMap<Ipv6Addr, u32>,
    pub(super) ended_incarnations: HashMap<u32, u64>,
    pub(super) inherited_epoch: u64,
}

/// State of a follower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowerSnapshot {
    pub(super) incarnation: u64,
    pub(super) prior: PriorMembership,
    pub(super) dropped_incarnations: HashMap<u32, u64>,
}

impl Snapshot {
    /// Number of the node.
    pub fn node(&self) -> u32 {
        match self {
            Self::Seed(_) => SEED_NODE,
            Self::Follower(follower) => follower.prior.node,
        }
    }

    /// Incarnation of the node.
    pub fn incarnation(&self) -> u64 {
        match self {
            Self::Seed(seed) => seed.self_member.incarnation,
            Self::Follower(follower) => follower.incarnation,
        }
    }

    /// Epoch of the newest view.
    pub fn epoch(&self) -> u64 {
        match self {
            Self::Seed(seed) => seed.epoch,
            Self::Follower(follower) => follower.prior.view.epoch,
        }
    }
}

/// Returns `true` if the snapshot changed with these actions. It must be saved before they are done: peers and the
/// kernel must not know a view that the next process does not.
pub fn needs_snapshot(actions: &[Action]) -> bool {
    let is_change = |action: &Action| {
        matches!(
            action,
            Action::Join(_) | Action::Leave | Action::ApplyView(_)
        )
    };
    actions.iter().any(is_change)
}

#[cfg(test)]
impl FollowerSnapshot {
    /// Any, of this incarnation.
    pub(crate) fn example(incarnation: u64) -> Self {
        let view = crate::protocol::View {
            epoch: 1,
            members: Vec::new(),
        };
        let prior = PriorMembership {
            node: 2,
            secret: [7; 16],
            seed_incarnation: 1,
            view,
        };
        Self {
            incarnation,
            prior,
            dropped_incarnations: HashMap::from([(3, 4)]),
        }
    }
}
