// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Admission of members that joined before: of those that lost the connection, of those that were unreachable, and of
//! those from which a seed without state recovers the cluster.

use std::time::Instant;

use kite::{FabricAddress, Member, MEMBERS_MAX};

use super::{send_and_close, Peer, Seed};
use crate::membership::{next_incarnation, Action, LinkId};
use crate::protocol::{Message, PriorMembership, SEED_NODE};

impl Seed {
    /// Admits a member in the incarnation in which it joined before, unless that incarnation has ended.
    pub(super) fn readmit(
        &mut self,
        now: Instant,
        link: LinkId,
        (incarnation, address): (u64, FabricAddress),
        prior: PriorMembership,
        actions: &mut Vec<Action>,
    ) {
        let node = prior.node;
        if !prior.view.is_valid() || !prior.view.has_member(node, incarnation) {
            let reason = "the hello names a prior view without the node".into();
            return send_and_close(link, Message::Rejected(reason), actions);
        }
        let is_newer = prior.view.epoch > self.epoch;
        let is_inherited = self.inherit_view(now, incarnation, &prior, actions);
        if prior.secret != self.secret {
            let reason = "the node belongs to another cluster, with another secret; to join this one, restart its \
                          kited, which ends its regions";
            return send_and_close(link, Message::Rejected(reason.into()), actions);
        }
        self.epoch = self.epoch.max(prior.view.epoch);
        let member = self.next_member(node, incarnation, address);
        let is_added = !self.has_peer(node, incarnation) && self.can_inherit(&member);
        if is_added {
            self.insert_peer(now, member, true);
        }
        if !self.has_peer(node, incarnation) {
            send_and_close(link, Message::Evicted, actions);
        }
        let is_changed = self.admit_fenced(node, &prior.view) || is_added;
        if is_changed || is_inherited || is_newer {
            self.publish_view(actions);
        }
        if self.has_peer(node, incarnation) {
            tracing::info!(node, "node reconnected");
            self.send_welcome(now, link, node, actions);
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
        self.self_member.admitted_epoch = self.next_epoch();
        self.remove_stale(prior, actions);
        for &member in &prior.view.members {
            if self.can_inherit(&member) {
                self.insert_peer(now, member, true);
            }
        }
        true
    }

    /// Removes inherited members that have left according to a view of a later epoch than their admission.
    fn remove_stale(&mut self, prior: &PriorMembership, actions: &mut Vec<Action>) {
        let is_stale = |p: &&Peer| {
            let view = &prior.view;
            p.is_inherited
                && p.link.is_none()
                && p.member.admitted_epoch <= view.epoch
                && !view.has_member(p.member.node, p.member.incarnation)
        };
        let stale = self.peers.values().filter(is_stale);
        let stale: Vec<u32> = stale.map(|p| p.member.node).collect();
        for node in stale {
            self.remove_peer(node, Some(Message::Evicted), actions);
        }
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
