// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Readmission of members that joined before: of those that only lost the connection, and of those from which a seed
//! without state recovers the cluster.

use std::time::Instant;

use kite::{Member, MEMBERS_MAX};

use super::{send_and_close, Peer, Seed};
use crate::membership::{next_incarnation, Action, LinkId};
use crate::protocol::{Message, PriorMembership, SEED_NODE};

impl Seed {
    /// Readmits a member in the incarnation in which it joined before, unless that incarnation has ended.
    pub(super) fn readmit(
        &mut self,
        now: Instant,
        link: LinkId,
        incarnation: u64,
        prior: PriorMembership,
        actions: &mut Vec<Action>,
    ) {
        if !prior.view.is_valid() || !prior.view.has_member(prior.node, incarnation) {
            return send_and_close(link, Message::Evicted, actions);
        }
        if self.has_peer(prior.node, incarnation) {
            self.rejoin_if_dropped(&prior, actions);
        }
        let changed = self.inherit_view(now, incarnation, &prior, actions);
        let accepted = self.has_peer(prior.node, incarnation) && prior.secret == self.secret;
        if changed || (accepted && prior.view.epoch > self.epoch) {
            self.epoch = self.epoch.max(prior.view.epoch);
            self.publish_view(actions);
        }
        if accepted {
            tracing::info!(node = prior.node, "node reconnected");
            self.send_welcome(now, link, prior.node, actions);
        } else {
            send_and_close(link, Message::Evicted, actions);
        }
    }

    /// Returns `true` if this incarnation of another node is a member.
    fn has_peer(&self, node: u32, incarnation: u64) -> bool {
        let peer = self.peers.get(&node);
        peer.is_some_and(|peer| peer.member.incarnation == incarnation)
    }

    /// Inherits the view that a member has from a previous seed, if it is the newest. Returns `true` if the view of
    /// this seed changed.
    fn inherit_view(
        &mut self,
        now: Instant,
        incarnation: u64,
        prior: &PriorMembership,
        actions: &mut Vec<Action>,
    ) -> bool {
        if prior.seed_incarnation == self.self_member.incarnation
            || prior.view.epoch <= self.inherited_epoch
        {
            return false;
        }
        if prior.secret != self.secret {
            // Two secrets cannot be in use. A seed without members can drop its own.
            if !self.peers.is_empty() {
                return false;
            }
            self.secret = prior.secret;
            self.self_member.incarnation = next_incarnation(self.self_member.incarnation);
            actions.push(self.join_action());
        }
        tracing::info!(
            from = prior.node,
            incarnation,
            epoch = prior.view.epoch,
            "view inherited"
        );
        self.inherited_epoch = prior.view.epoch;
        self.epoch = self.epoch.max(prior.view.epoch);
        let stale = |p: &&Peer| {
            p.is_inherited && !prior.view.has_member(p.member.node, p.member.incarnation)
        };
        let stale: Vec<u32> = self
            .peers
            .values()
            .filter(stale)
            .map(|p| p.member.node)
            .collect();
        stale
            .iter()
            .for_each(|&node| self.remove_peer(node, Some(Message::Evicted), actions));
        for &member in &prior.view.members {
            if self.can_inherit(&member) {
                self.insert_peer(now, member, true);
            }
        }
        true
    }

    fn can_inherit(&self, member: &Member) -> bool {
        let number = self.node_numbers.get(&member.address.gid);
        member.node != SEED_NODE
            && member.address.gid != self.self_member.address.gid
            && self.ended_incarnations.get(&member.node) != Some(&member.incarnation)
            && !self.peers.contains_key(&member.node)
            && number.is_none_or(|&node| node == member.node)
            && (number.is_some() || self.node_numbers.values().all(|&node| node != member.node))
            && self.peers.len() + 1 < MEMBERS_MAX
    }
}
