// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A seed that goes on in another process.
//!
//! It has the members that it had, and treats them as heard from when it starts. They come back by connections of their
//! own. Only one thing may be wrong: it was away for so long that the members go on without it. The first that comes
//! back shows this, and the seed then begins a new life, with their view.

use std::time::Instant;

use super::{Peer, Seed};
use crate::membership::snapshot::SeedSnapshot;
use crate::membership::{next_life, Action, Timing};
use crate::protocol::{Past, SEED};

impl Seed {
    /// The seed of a snapshot.
    pub fn resume(timing: Timing, snapshot: SeedSnapshot) -> Self {
        let SeedSnapshot {
            own,
            secret,
            epoch,
            peers,
            numbers,
            ended,
            inherited,
        } = snapshot;
        let now = Instant::now();
        let peer = |(member, admitted)| Peer {
            member,
            admitted,
            applied: 0,
            link: None,
            // The first step sets it.
            deadline: now,
            inherited: true,
        };
        let peers = peers.into_iter().map(peer);
        Self {
            epoch,
            peers: peers.map(|peer| (peer.member.node, peer)).collect(),
            numbers,
            ended,
            inherited,
            ..Self::new(timing, own.address, own.incarnation, secret)
        }
    }

    pub(super) fn to_snapshot(&self) -> SeedSnapshot {
        let peers = self.peers.values();
        SeedSnapshot {
            own: self.own,
            secret: self.secret,
            epoch: self.epoch,
            peers: peers.map(|peer| (peer.member, peer.admitted)).collect(),
            numbers: self.numbers.clone(),
            ended: self.ended.clone(),
            inherited: self.inherited,
        }
    }

    /// Starts with the view of the former process, which the kernel may not know yet.
    pub(super) fn go_on(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for peer in self.peers.values_mut() {
            peer.deadline = now + self.timing.dead;
        }
        actions.push(Action::Apply(self.view()));
    }

    /// Begins a new life if a member dropped this one, and no other member is connected. The kernels of members must
    /// not meet a life again that they dropped.
    pub(super) fn yield_to(&mut self, past: &Past, actions: &mut Vec<Action>) {
        let is_dropped = past.seed == self.own.incarnation && past.view.member(SEED).is_none();
        if is_dropped && self.links.is_empty() {
            tracing::warn!(from = past.node, "the members went on without this node");
            self.own.incarnation = next_life(self.own.incarnation);
            actions.push(self.join());
        }
    }
}
