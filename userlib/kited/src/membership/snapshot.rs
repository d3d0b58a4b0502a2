// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a machine has to know to continue the life of its node in another process.

use std::collections::HashMap;
use std::net::Ipv6Addr;

use kite::Member;
use serde::{Deserialize, Serialize};

use super::Action;
use crate::protocol::{Past, Secret, SEED};

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
    pub(super) own: Member,
    pub(super) secret: Secret,
    pub(super) epoch: u64,
    /// The other members, and the epoch of the first view with each.
    pub(super) peers: Vec<(Member, u64)>,
    pub(super) numbers: HashMap<Ipv6Addr, u32>,
    pub(super) ended: HashMap<u32, u64>,
    pub(super) inherited: u64,
}

/// State of a follower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowerSnapshot {
    pub(super) incarnation: u64,
    pub(super) past: Past,
    pub(super) dropped: HashMap<u32, u64>,
}

impl Snapshot {
    /// Number of the node.
    pub fn node(&self) -> u32 {
        match self {
            Self::Seed(_) => SEED,
            Self::Follower(follower) => follower.past.node,
        }
    }

    /// Incarnation of the node.
    pub fn incarnation(&self) -> u64 {
        match self {
            Self::Seed(seed) => seed.own.incarnation,
            Self::Follower(follower) => follower.incarnation,
        }
    }

    /// Epoch of the newest view.
    pub fn epoch(&self) -> u64 {
        match self {
            Self::Seed(seed) => seed.epoch,
            Self::Follower(follower) => follower.past.view.epoch,
        }
    }
}

/// Returns `true` if the snapshot changed with these actions. It must be saved before they are done: peers and the
/// kernel must not know a view that the next process does not.
pub fn change_snapshot(actions: &[Action]) -> bool {
    let changes =
        |action: &Action| matches!(action, Action::Join(_) | Action::Leave | Action::Apply(_));
    actions.iter().any(changes)
}

#[cfg(test)]
impl FollowerSnapshot {
    /// Any, of this incarnation.
    pub(crate) fn example(incarnation: u64) -> Self {
        let view = crate::protocol::View {
            epoch: 1,
            members: Vec::new(),
        };
        let past = Past {
            node: 2,
            secret: [7; 16],
            seed: 1,
            view,
        };
        Self {
            incarnation,
            past,
            dropped: HashMap::from([(3, 4)]),
        }
    }
}
