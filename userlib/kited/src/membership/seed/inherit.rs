// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a seed learns from members that joined before: that they only lost the connection, or all
//! that a seed which returns without memory can know.

use std::time::Instant;

use kite::{Member, NODES_MAX};

use super::{dismiss, Peer, Seed};
use crate::membership::{next_life, Action, Link};
use crate::protocol::{Message, Past, SEED};

impl Seed {
    /// Lets a member continue the life in which it joined before, if nobody believes it ended.
    pub(super) fn readmit(
        &mut self,
        now: Instant,
        link: Link,
        incarnation: u64,
        past: Past,
        actions: &mut Vec<Action>,
    ) {
        if !past.view.is_valid() || !past.view.has(past.node, incarnation) {
            return dismiss(link, Message::Out, actions);
        }
        if self.has(past.node, incarnation) {
            self.yield_to(&past, actions);
        }
        let changed = self.inherit(now, incarnation, &past, actions);
        let accepted = self.has(past.node, incarnation) && past.secret == self.secret;
        if changed || (accepted && past.view.epoch > self.epoch) {
            self.epoch = self.epoch.max(past.view.epoch);
            self.publish(actions);
        }
        if accepted {
            tracing::info!(node = past.node, "is back");
            self.welcome(now, link, past.node, actions);
        } else {
            dismiss(link, Message::Out, actions);
        }
    }

    /// Returns `true` if this life of another node is a member.
    fn has(&self, node: u32, incarnation: u64) -> bool {
        let peer = self.peers.get(&node);
        peer.is_some_and(|peer| peer.member.incarnation == incarnation)
    }

    /// Takes over the view that a member has from a former seed, if it is the newest; says whether
    /// that changed this seed's.
    fn inherit(
        &mut self,
        now: Instant,
        incarnation: u64,
        past: &Past,
        actions: &mut Vec<Action>,
    ) -> bool {
        if past.seed == self.own.incarnation || past.view.epoch <= self.inherited {
            return false;
        }
        if past.secret != self.secret {
            // Two secrets cannot be in use; the one of a seed that is alone can go.
            if !self.peers.is_empty() {
                return false;
            }
            self.secret = past.secret;
            self.own.incarnation = next_life(self.own.incarnation);
            actions.push(self.join());
        }
        tracing::info!(
            from = past.node,
            incarnation,
            epoch = past.view.epoch,
            "takes over a view"
        );
        self.inherited = past.view.epoch;
        self.epoch = self.epoch.max(past.view.epoch);
        let stale = |p: &&Peer| p.inherited && !past.view.has(p.member.node, p.member.incarnation);
        let stale: Vec<u32> = self
            .peers
            .values()
            .filter(stale)
            .map(|p| p.member.node)
            .collect();
        stale
            .iter()
            .for_each(|&node| self.remove(node, Some(Message::Out), actions));
        for &member in &past.view.members {
            if self.may_inherit(&member) {
                self.insert(now, member, true);
            }
        }
        true
    }

    fn may_inherit(&self, member: &Member) -> bool {
        let number = self.numbers.get(&member.address.gid);
        member.node != SEED
            && member.address.gid != self.own.address.gid
            && self.ended.get(&member.node) != Some(&member.incarnation)
            && !self.peers.contains_key(&member.node)
            && number.is_none_or(|&node| node == member.node)
            && (number.is_some() || self.numbers.values().all(|&node| node != member.node))
            && self.peers.len() + 1 < NODES_MAX
    }
}
