// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Continuation of a seed in another process, or in another incarnation.
//!
//! The seed has the members of the previous process. Their dead timeouts start when it starts, and they reconnect. A
//! member that does not is checked like any silent member.

use std::time::Instant;

use kite::FabricAddress;

use super::{Peer, Seed};
use crate::membership::snapshot::SeedSnapshot;
use crate::membership::{Action, Timing};

impl Seed {
    /// Creates a seed from a snapshot, whose kernel still has the incarnation of the snapshot.
    pub fn resume(timing: Timing, snapshot: SeedSnapshot) -> Self {
        let SeedSnapshot {
            self_member,
            secret,
            epoch,
            peers,
            node_numbers,
            ended_incarnations,
            inherited_epoch,
        } = snapshot;
        // The first step sets the deadlines.
        let now = Instant::now();
        let peers = peers
            .into_iter()
            .map(|member| (member.node, Peer::new(member, now, true)));
        Self {
            self_member,
            epoch,
            peers: peers.collect(),
            node_numbers,
            ended_incarnations,
            inherited_epoch,
            ..Self::new(timing, self_member.address, self_member.incarnation, secret)
        }
    }

    /// Creates a seed from the snapshot of a previous incarnation, which has ended. `incarnation` is the new one.
    pub fn restart(
        timing: Timing,
        address: FabricAddress,
        incarnation: u64,
        snapshot: SeedSnapshot,
    ) -> Self {
        let mut seed = Self::resume(timing, snapshot);
        seed.self_member.address = address;
        seed.self_member.incarnation = incarnation;
        seed.self_member.admitted_epoch = seed.next_epoch();
        seed.self_member.unreachable_since = 0;
        seed.is_restarted = true;
        seed
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

    /// Starts with the view of the previous process, which the kernel may not have applied yet. A new incarnation joins,
    /// and starts with the next view.
    pub(super) fn start_with_state(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for peer in self.peers.values_mut() {
            peer.deadline = now + self.timing.dead_after;
        }
        if self.is_restarted {
            actions.push(self.join_action());
            self.publish_view(actions);
        } else {
            actions.push(Action::ApplyView(self.own_view()));
        }
    }
}
