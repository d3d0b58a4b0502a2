// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reachable and unreachable members.
//!
//! # Operation
//!
//! A member is silent if it sends no message for the dead timeout. It is then checked by RDMA: the kernels of this node
//! and of up to [`PROBERS_MAX`] other members send a request to its kernel. If a reply arrives, the member stays
//! reachable, and the check repeats while the member is silent. If not, the next view marks it as unreachable.
//!
//! A member whose kernel does not apply a view delays all others, since names and memory are granted only after all
//! reachable members have applied it. After [`BEHIND_FACTOR`] dead timeouts the member is marked as unreachable, too.
//!
//! An unreachable member is admitted again when it connects (`recover`).

use std::time::Instant;

use kite::Member;

use super::Seed;
use crate::membership::Action;
use crate::protocol::{Message, View, SEED_NODE};

/// Maximum number of other members that check a silent member.
const PROBERS_MAX: usize = 15;

/// Dead timeouts after which a member that has not applied the current view is marked as unreachable.
const BEHIND_FACTOR: u32 = 5;

impl Seed {
    /// Returns the view for the kernel of this node. If this node is unreachable for the others, all others are
    /// unreachable in its own view.
    pub(super) fn own_view(&self) -> View {
        let mut view = self.view();
        if self.self_member.is_reachable() {
            return view;
        }
        for member in &mut view.members {
            if member.node == SEED_NODE {
                member.unreachable_since = 0;
            } else if member.is_reachable() {
                member.unreachable_since = view.epoch;
                member.admitted_epoch = member.admitted_epoch.min(view.epoch - 1);
            }
        }
        view
    }

    /// Records the epoch that the kernel of a member has applied.
    pub(super) fn on_applied(&mut self, node: u32, epoch: u64) {
        if let Some(peer) = self.peers.get_mut(&node) {
            if epoch != peer.applied_epoch {
                peer.behind_since = None;
            }
            peer.applied_epoch = epoch;
        }
    }

    /// Processes a reply by RDMA of the kernel of a silent member.
    pub(super) fn on_alive(&mut self, now: Instant, node: u32, incarnation: u64) {
        let peer = self.peers.get_mut(&node);
        let Some(peer) = peer.filter(|peer| peer.member.incarnation == incarnation) else {
            return;
        };
        if peer.check_ends.take().is_some() {
            tracing::debug!(node, "silent by TCP, replies by RDMA");
            peer.deadline = now + self.timing.dead_after;
        }
    }

    /// Checks silent members by RDMA, marks members as unreachable, and admits this node again after a quarantine.
    pub(super) fn check_members(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let mut lost = Vec::new();
        for node in self.silent_members(now) {
            match self.peers.get(&node).and_then(|peer| peer.check_ends) {
                None => self.start_check(now, node, actions),
                Some(ends) if ends <= now => {
                    tracing::warn!(node, "unreachable: replies neither by TCP nor by RDMA");
                    lost.push(node);
                }
                Some(_) => {}
            }
        }
        for node in self.members_behind(now) {
            tracing::warn!(node, "unreachable: its kernel does not apply the view");
            lost.push(node);
        }
        for &node in &lost {
            self.mark_unreachable(node, actions);
        }
        let is_readmitted = self.readmit_self(now);
        if is_readmitted || !lost.is_empty() {
            self.publish_view(actions);
        }
    }

    /// Returns the reachable members that have sent no message for the dead timeout.
    fn silent_members(&self, now: Instant) -> Vec<u32> {
        let peers = self.peers.values();
        let silent = peers.filter(|p| p.member.is_reachable() && p.deadline <= now);
        silent.map(|peer| peer.member.node).collect()
    }

    fn start_check(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        peer.check_ends = Some(now + self.timing.check_time());
        let incarnation = peer.member.incarnation;
        actions.push(Action::Probe(node, incarnation));
        let others = self.peers.values().filter(|other| {
            other.member.node != node && other.member.is_reachable() && other.deadline > now
        });
        let links = others.filter_map(|other| other.link).take(PROBERS_MAX);
        actions.extend(links.map(|link| Action::Send(link, Message::Probe(node, incarnation))));
    }

    /// Returns the reachable members whose kernels have not applied the current view for too long.
    fn members_behind(&mut self, now: Instant) -> Vec<u32> {
        let (epoch, limit) = (self.epoch, BEHIND_FACTOR * self.timing.dead_after);
        let mut behind = Vec::new();
        for peer in self.peers.values_mut() {
            if !peer.member.is_reachable() || peer.applied_epoch >= epoch {
                peer.behind_since = None;
            } else if *peer.behind_since.get_or_insert(now) + limit <= now {
                behind.push(peer.member.node);
            }
        }
        behind
    }

    /// Marks a member as unreachable, and closes its connection. The caller publishes the view.
    pub(super) fn mark_unreachable(&mut self, node: u32, actions: &mut Vec<Action>) {
        let epoch = self.next_epoch();
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        if peer.member.is_reachable() {
            peer.member.unreachable_since = epoch;
        }
        peer.check_ends = None;
        peer.behind_since = None;
        if let Some(link) = peer.link.take() {
            self.links.remove(&link);
            actions.push(Action::Close(link));
        }
        self.suspicions.remove_node(node);
    }

    /// Admits again the nodes that a member's kernel has fenced, in its view `prior`, and that have not been admitted
    /// since, and the member itself. Returns `true` if the caller must publish a view.
    pub(super) fn admit_fenced(&mut self, node: u32, prior: &View) -> bool {
        let epoch = self.next_epoch();
        let own = self.peers.get(&node).map(|peer| peer.member);
        let fenced = prior.members.iter().filter(|m| !m.is_reachable());
        let mut is_changed = own.is_some_and(|own| !own.is_reachable());
        if let Some(own) = is_changed.then(|| self.peers.get_mut(&node)).flatten() {
            admit(&mut own.member, epoch);
        }
        for fenced in fenced {
            let member = match fenced.node {
                SEED_NODE => Some(&mut self.self_member),
                other => self.peers.get_mut(&other).map(|peer| &mut peer.member),
            };
            let is_stale = |member: &&mut Member| {
                member.incarnation == fenced.incarnation
                    && member.is_reachable()
                    && member.admitted_epoch <= fenced.unreachable_since
            };
            if let Some(member) = member.filter(is_stale) {
                admit(member, epoch);
                is_changed = true;
            }
        }
        is_changed
    }

    /// Admits this node again at the end of its quarantine. Returns `true` if the caller must publish a view.
    fn readmit_self(&mut self, now: Instant) -> bool {
        let is_over = !self.self_member.is_reachable() && !self.is_in_quarantine(now, SEED_NODE);
        if is_over {
            let epoch = self.next_epoch();
            admit(&mut self.self_member, epoch);
        }
        is_over
    }
}

/// Admits a member in the view of `epoch`.
fn admit(member: &mut Member, epoch: u64) {
    member.admitted_epoch = epoch;
    member.unreachable_since = 0;
}
