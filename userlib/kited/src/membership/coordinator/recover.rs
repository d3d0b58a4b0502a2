// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Return of members that joined before: of those that lost the connection, and of those from which a seed without
//! state recovers the cluster.
//!
//! # Operation
//!
//! A member that returns sends the view of its kernel. If its kernel has fenced another member, or another kernel has
//! fenced the member, the pair needs a later admission: of the seed, if the seed was fenced, else of the member.
//!
//! # Recovery
//!
//! A coordinator that has lost its state does not know which epochs the former one has used. It skips a random number of
//! epochs, so that no epoch identifies two views ([`epoch_after_loss`]).

use std::time::Instant;

use kite::{Member, MEMBERS_MAX};

use super::{send_and_close, Coordinator};
use crate::membership::{next_incarnation, Action, LinkId};
use crate::protocol::{Instance, Message, PriorMembership};

/// Number of epochs of which a coordinator without saved state skips a multiple. The former one has published fewer views
/// while the member that hands over its view was disconnected.
const LOST_EPOCHS: u64 = 1 << 20;

/// Bound of the multiple of [`LOST_EPOCHS`].
const LOST_EPOCHS_FACTOR: u64 = 1 << 16;

/// Returns an epoch above all epochs of a former coordinator, given the epoch of one of its views.
fn epoch_after_loss(inherited: u64, unique: u64) -> u64 {
    (inherited / LOST_EPOCHS + 1 + unique % LOST_EPOCHS_FACTOR) * LOST_EPOCHS
}

impl Coordinator {
    /// Accepts a member in the incarnation in which it joined before, unless that incarnation has ended.
    pub(super) fn on_return(
        &mut self,
        now: Instant,
        link: LinkId,
        incarnation: u64,
        prior: &PriorMembership,
        actions: &mut Vec<Action>,
    ) {
        let node = prior.node;
        let own = prior.view.find_reachable(node).copied();
        let own = own.filter(|own| own.incarnation == incarnation && !self.is_own(node));
        let Some(own) = own.filter(|_| prior.view.is_valid()) else {
            tracing::warn!(node, "malformed hello");
            return actions.push(Action::Close(link));
        };
        self.inherit_view(now, prior, actions);
        if let Err(refusal) = self.check_return(now, prior, own) {
            return send_and_close(link, refusal, actions);
        }
        tracing::info!(node, "node reconnected");
        self.rejected.remove(&node);
        if prior.view.epoch > self.epoch {
            self.epoch = prior.view.epoch;
            self.is_changed = true;
        }
        self.renew_pairs(now, prior);
        self.welcome(now, link, node, actions);
    }

    /// Checks that the incarnation is a member, or makes it one if this coordinator does not know that it has ended.
    fn check_return(
        &mut self,
        now: Instant,
        prior: &PriorMembership,
        own: Member,
    ) -> Result<(), Message> {
        let node = own.node;
        if prior.secret != self.secret {
            if self.rejected.insert(node) {
                let reason = "member of a former cluster";
                tracing::error!(node, "node rejected: {reason}");
            }
            return Err(Message::Rejected(self.former_cluster_reason().into()));
        }
        let current = self.peers.get(&node).map(|peer| peer.member.incarnation);
        if current == Some(own.incarnation) {
            return Ok(());
        }
        let has_ended = self.ended_incarnations.get(&node) == Some(&own.incarnation);
        let is_of_node = self.node_numbers.get(&own.address.gid) == Some(&node);
        if has_ended || (current.is_some() && is_of_node) {
            tracing::error!(node, "node rejected: its incarnation has ended");
            return Err(Message::Evicted);
        }
        if !self.can_inherit(&own) {
            if self.rejected.insert(node) {
                let reason = "its number belongs to another node";
                tracing::error!(node, "node rejected: {reason}");
            }
            let reason = "number of the node belongs to another node of the cluster; leave the cluster on this node: \
                          kite leave";
            return Err(Message::Rejected(reason.into()));
        }
        self.insert_peer(now, own, true);
        Ok(())
    }

    /// Returns the reason for which a member of a former cluster is rejected.
    fn former_cluster_reason(&self) -> &'static str {
        match self.own {
            Some(_) => {
                "seed has created a new cluster since; stop kited on the seed and restore its state file to continue \
                 the former cluster, or leave the former cluster on this node: kite leave"
            }
            None => {
                "store has a new cluster since; restore the backup of the store to continue the former cluster, or \
                 leave the former cluster on this node: kite leave"
            }
        }
    }

    /// Admits a member again if it is unreachable. Admits again, of each pair that was fenced, the seed or the member.
    fn renew_pairs(&mut self, now: Instant, prior: &PriorMembership) {
        let node = prior.node;
        if !self.is_reachable(node) {
            if self.quarantined_until(now, node).is_some() {
                return;
            }
            tracing::info!(node, "node admitted again");
            self.admit(node);
        }
        // At most two admissions: after that of the node itself, all its pairs are new.
        for _ in 0..2 {
            let view = self.view();
            let own = view.find_member(node);
            let stale = own.and_then(|own| view.find_stale_pair(own, &prior.view));
            match stale.map(|member| member.node) {
                Some(stale) if self.is_own(stale) => self.admit(stale),
                Some(_) => self.admit(node),
                None => return,
            }
        }
    }

    /// Inherits the view that a member has from a previous seed, if it is the newest.
    fn inherit_view(&mut self, now: Instant, prior: &PriorMembership, actions: &mut Vec<Action>) {
        if self.has_published(prior) || prior.view.epoch <= self.inherited_epoch {
            return;
        }
        if prior.secret != self.secret {
            // Two secrets cannot be in use. A seed that never had another member can drop its own.
            if !self.node_numbers.is_empty() {
                return;
            }
            self.secret = prior.secret;
            if let Some(own) = &mut self.own {
                own.incarnation = next_incarnation(own.incarnation);
            }
            actions.extend(self.join_action());
        }
        let (from, epoch) = (prior.node, prior.view.epoch);
        tracing::info!(from, epoch, "view inherited");
        self.inherited_epoch = epoch;
        self.epoch = self.epoch.max(epoch_after_loss(epoch, self.unique));
        self.admit_own();
        self.remove_unlisted_peers(prior, actions);
        for &member in &prior.view.members {
            if self.can_inherit(&member) {
                self.insert_peer(now, member, true);
            }
        }
    }

    /// Returns `true` if the view of a member is from this coordinator: of a seed, if the member followed the same
    /// incarnation; of a store, if the store has a view of that epoch or a later one.
    fn has_published(&self, prior: &PriorMembership) -> bool {
        match &self.own {
            Some(own) => prior.seed_incarnation == own.incarnation,
            None => prior.view.epoch <= self.epoch,
        }
    }

    /// Removes inherited members that have ended before the view of `prior`.
    fn remove_unlisted_peers(&mut self, prior: &PriorMembership, actions: &mut Vec<Action>) {
        let has_ended = |member: &Member| {
            let instance = Instance::from(member);
            !prior.view.has_member(instance.node, instance.incarnation)
        };
        let peers = self.peers.values();
        let ended = peers.filter(|p| p.is_inherited && p.link.is_none() && has_ended(&p.member));
        let ended: Vec<u32> = ended.map(|p| p.member.node).collect();
        ended
            .into_iter()
            .for_each(|node| self.remove_peer(node, None, actions));
    }

    fn can_inherit(&self, member: &Member) -> bool {
        let number = self.node_numbers.get(&member.address.gid);
        !self.is_own(member.node)
            && self.own_gid() != Some(member.address.gid)
            && self.ended_incarnations.get(&member.node) != Some(&member.incarnation)
            && !self.peers.contains_key(&member.node)
            && number.is_none_or(|&node| node == member.node)
            && (number.is_some() || self.node_numbers.values().all(|&node| node != member.node))
            && self.peers.len() + 1 < MEMBERS_MAX
    }
}
