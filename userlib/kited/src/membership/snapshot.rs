// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State by which another process continues the membership of a node.

use std::collections::HashMap;
use std::net::Ipv6Addr;

use kite::Member;
use serde::{Deserialize, Serialize};

#[cfg(test)]
use crate::protocol::example;
use crate::protocol::{PriorMembership, Secret, SEED_NODE};

/// State of a machine in a cluster, without timers and connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Snapshot {
    /// State of a seed.
    Seed(ClusterState),
    /// State of a [`Follower`](super::Follower).
    Follower(FollowerSnapshot),
}

/// State of a [`Coordinator`](super::Coordinator).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterState {
    /// Member of the coordinator's host: of a seed. The coordinator of a store has none.
    pub(super) own: Option<Member>,
    /// Version of the messages between the kernels.
    pub(super) wire_version: u32,
    pub(super) secret: Secret,
    pub(super) epoch: u64,
    /// Other members.
    pub(super) peers: Vec<Member>,
    pub(super) node_numbers: HashMap<Ipv6Addr, u32>,
    pub(super) ended_incarnations: HashMap<u32, u64>,
    pub(super) inherited_epoch: u64,
}

/// State of a follower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowerSnapshot {
    pub(super) incarnation: u64,
    pub(super) prior: PriorMembership,
    pub(super) removed_incarnations: HashMap<u32, u64>,
}

impl ClusterState {
    /// Returns the epoch of the newest view.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the version of the messages between the kernels.
    pub fn wire_version(&self) -> u32 {
        self.wire_version
    }
}

impl Snapshot {
    /// Returns the number of the node.
    pub fn node(&self) -> u32 {
        match self {
            Self::Seed(_) => SEED_NODE,
            Self::Follower(follower) => follower.prior.node,
        }
    }

    /// Returns the incarnation of the node.
    pub fn incarnation(&self) -> u64 {
        match self {
            Self::Seed(seed) => seed.own.map_or(0, |own| own.incarnation),
            Self::Follower(follower) => follower.incarnation,
        }
    }

    /// Returns the epoch of the newest view.
    pub fn epoch(&self) -> u64 {
        match self {
            Self::Seed(seed) => seed.epoch,
            Self::Follower(follower) => follower.prior.view.epoch,
        }
    }
}

#[cfg(test)]
impl FollowerSnapshot {
    /// Returns an arbitrary snapshot of this incarnation.
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
            removed_incarnations: HashMap::from([(3, 4)]),
        }
    }
}

#[cfg(test)]
impl ClusterState {
    /// Returns an arbitrary snapshot of this epoch.
    pub(crate) fn example(epoch: u64) -> Self {
        Self {
            own: Some(example::member(SEED_NODE, 3)),
            wire_version: 2,
            secret: [7; 16],
            epoch,
            peers: Vec::new(),
            node_numbers: HashMap::from([(Ipv6Addr::from(2), 2)]),
            ended_incarnations: HashMap::new(),
            inherited_epoch: 0,
        }
    }
}
