// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Continuation of a seed in another process, or with another incarnation.
//!
//! The members of the snapshot keep their incarnations and their reachability. Their dead timeouts start when the seed
//! starts, and they reconnect. A member that the former seed had removed cannot return, since its incarnation is among
//! the ended ones.

use std::time::Instant;

use super::{Origin, Peer, Seed};
use crate::membership::snapshot::SeedSnapshot;
use crate::membership::Timing;
use crate::protocol::{last_derived_epoch, KernelInfo};

impl Seed {
    /// Creates a seed that continues the incarnation of a snapshot.
    pub fn resume(timing: Timing, kernel: KernelInfo, snapshot: SeedSnapshot) -> Self {
        let own = snapshot.self_member;
        let mut seed = Self::restore(timing, kernel, own.incarnation, snapshot);
        seed.origin = Origin::Resumed;
        seed.self_member = own;
        seed
    }

    /// Creates a seed that continues the cluster of a snapshot with another incarnation of its node.
    pub fn restore(
        timing: Timing,
        kernel: KernelInfo,
        incarnation: u64,
        snapshot: SeedSnapshot,
    ) -> Self {
        // Set by the first step.
        let deadline = Instant::now();
        let peers = snapshot.peers.into_iter();
        let peers = peers.map(|member| (member.node, Peer::new(member, deadline, true)));
        let inherited = last_derived_epoch(snapshot.epoch).max(snapshot.inherited_epoch);
        Self {
            origin: Origin::Restored,
            epoch: snapshot.epoch,
            peers: peers.collect(),
            node_numbers: snapshot.node_numbers,
            ended_incarnations: snapshot.ended_incarnations,
            inherited_epoch: inherited,
            ..Self::new(timing, kernel, incarnation, snapshot.secret)
        }
    }

    pub(super) fn to_snapshot(&self) -> SeedSnapshot {
        SeedSnapshot {
            self_member: self.self_member,
            secret: self.secret,
            epoch: self.epoch,
            peers: self.peers.values().map(|peer| peer.member).collect(),
            node_numbers: self.node_numbers.clone(),
            ended_incarnations: self.ended_incarnations.clone(),
            inherited_epoch: self.inherited_epoch,
        }
    }
}
