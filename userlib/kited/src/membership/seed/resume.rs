// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Continuation of a seed in another process.
//!
//! A resumed seed has the members of the previous process. Their dead timeouts start when it starts, and they
//! reconnect. One assumption may fail: after a long absence of the seed, the members have continued without it. The
//! first member that reconnects reveals this. The seed then starts a new incarnation, with the view of that member.

use std::time::Instant;

use super::{Peer, Seed};
use crate::membership::snapshot::SeedSnapshot;
use crate::membership::{next_incarnation, Action, Timing};
use crate::protocol::{PriorMembership, SEED_NODE};

impl Seed {
    /// Creates a seed from a snapshot.
    pub fn resume(timing: Timing, snapshot: SeedSnapshot) -> Self {
        let SeedSnapshot {
            self_member: own,
            secret,
            epoch,
            peers,
            node_numbers: numbers,
            ended_incarnations: ended,
            inherited_epoch: inherited,
        } = snapshot;
        let now = Instant::now();
        let peer = |(member, admitted)| Peer {
            member,
            admitted_epoch: admitted,
            applied_epoch: 0,
            link: None,
            // Set by the first step.
            deadline: now,
            is_inherited: true,
        };
        let peers = peers.into_iter().map(peer);
        Self {
            epoch,
            peers: peers.map(|peer| (peer.member.node, peer)).collect(),
            node_numbers: numbers,
            ended_incarnations: ended,
            inherited_epoch: inherited,
            ..Self::new(timing, own.address, own.incarnation, secret)
        }
    }

    pub(super) fn to_snapshot(&self) -> SeedSnapshot {
        let peers = self.peers.values();
        SeedSnapshot {
            self_member: self.self_member,
            secret: self.secret,
            epoch: self.epoch,
            peers: peers
                .map(|peer| (peer.member, peer.admitted_epoch))
                .collect(),
            node_numbers: self.node_numbers.clone(),
            ended_incarnations: self.ended_incarnations.clone(),
            inherited_epoch: self.inherited_epoch,
        }
    }

    /// Starts with the view of the previous process, which the kernel may not have applied yet.
    pub(super) fn start_resumed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for peer in self.peers.values_mut() {
            peer.deadline = now + self.timing.dead_after;
        }
        actions.push(Action::ApplyView(self.view()));
    }

    /// Starts a new incarnation if a member dropped this one, and no other member is connected. The kernels of members
    /// must not meet an incarnation again that they dropped.
    pub(super) fn rejoin_if_dropped(&mut self, prior: &PriorMembership, actions: &mut Vec<Action>) {
        let is_dropped = prior.seed_incarnation == self.self_member.incarnation
            && prior.view.find_member(SEED_NODE).is_none();
        if is_dropped && self.links.is_empty() {
            tracing::warn!(from = prior.node, "members continued without this node");
            self.self_member.incarnation = next_incarnation(self.self_member.incarnation);
            actions.push(self.join_action());
        }
    }
}
