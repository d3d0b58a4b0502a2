// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reachability of members: silence on TCP, checks over RDMA, views that are not applied, and admission again.
//!
//! # Operation
//!
//! A member that is silent on TCP for the dead timeout is checked: the kernel of the seed and those of further connected
//! members probe its kernel over RDMA. The member becomes unreachable if no kernel receives a reply and at least one
//! receives none in time. If a kernel receives a reply, the check is repeated after the dead timeout.
//!
//! If more than half of the members are silent, the seed itself may be isolated. Evidence of other members then does not
//! suffice: the probe of the seed's kernel must have failed, too. The coordinator of a store is not isolated, since the
//! store accepts its views.
//!
//! A member whose kernel does not apply a view blocks the synchronization of names of all others. It becomes unreachable
//! after [`Timing::apply_timeout`](crate::membership::Timing).
//!
//! # Recovery
//!
//! An unreachable member is admitted again when its daemon connects, or when its kernel has applied the isolated view
//! and its daemon sends messages, but not before the end of its quarantine.

use std::time::Instant;

use kite::Member;

use super::{Coordinator, Peer};
use crate::membership::check::{RdmaCheck, Verdict};
use crate::membership::{Action, MAX_PROBERS};
use crate::protocol::{Instance, Message};

/// Check of a member over RDMA. The nodes that probe it identify the probes.
pub(super) type ProberCheck = RdmaCheck<u32>;

/// View that the kernel of a member has not applied yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lag {
    since: Instant,
    epoch: u64,
}

impl Lag {
    pub(super) fn new(since: Instant, epoch: u64) -> Self {
        Self { since, epoch }
    }
}

impl Coordinator {
    /// Returns the member with this number, the seed included.
    pub(super) fn member(&self, node: u32) -> Option<&Member> {
        match &self.own {
            Some(own) if own.node == node => Some(own),
            _ => self.peers.get(&node).map(|peer| &peer.member),
        }
    }

    fn member_mut(&mut self, node: u32) -> Option<&mut Member> {
        match &mut self.own {
            Some(own) if own.node == node => Some(own),
            _ => self.peers.get_mut(&node).map(|peer| &mut peer.member),
        }
    }

    /// Returns `true` if the node is a reachable member.
    pub(super) fn is_reachable(&self, node: u32) -> bool {
        self.member(node).is_some_and(Member::is_reachable)
    }

    /// Admits a member in the next view, so that all its connections are new.
    pub(super) fn admit(&mut self, node: u32) {
        let epoch = self.next_epoch();
        if let Some(member) = self.member_mut(node) {
            member.admitted_epoch = epoch;
            member.unreachable_since = 0;
            self.is_changed = true;
        }
        if let Some(peer) = self.peers.get_mut(&node) {
            (peer.lag, peer.check) = (None, None);
        }
    }

    /// Admits the seed itself in the next view.
    pub(super) fn admit_own(&mut self) {
        self.own.into_iter().for_each(|own| self.admit(own.node));
    }

    /// Marks a member as unreachable in the next view.
    pub(super) fn mark_unreachable(&mut self, node: u32) {
        let epoch = self.next_epoch();
        let member = self.member_mut(node);
        // A node is unreachable only after its admission.
        let Some(member) = member.filter(|m| m.is_reachable() && m.admitted_epoch < epoch) else {
            return;
        };
        member.unreachable_since = epoch;
        self.is_changed = true;
        self.suspicions.remove_node(node);
        if let Some(peer) = self.peers.get_mut(&node) {
            (peer.lag, peer.check) = (None, None);
        }
    }

    /// Records that a member has sent a message.
    pub(super) fn on_peer_heard(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        peer.deadline = now + self.timing.dead_after;
        (peer.check, peer.is_known_silent) = (None, false);
        if peer.challenged_at.take().is_some() {
            self.reject_duplicates_of(node, actions);
        }
    }

    /// Records the epoch of the view that the kernel of a member has applied.
    pub(super) fn on_applied(&mut self, now: Instant, node: u32, epoch: u64) {
        let newest = self.epoch;
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.applied_epoch = epoch;
            if peer.lag.is_none_or(|lag| lag.epoch <= epoch) {
                peer.lag = (epoch < newest).then(|| Lag::new(now, newest));
            }
        }
    }

    /// Marks members whose kernels have not applied a view in time.
    pub(super) fn fence_lagging_peers(&mut self, now: Instant) {
        let timeout = self.timing.apply_timeout();
        let is_late = |peer: &&Peer| {
            let lag = peer.lag.filter(|_| peer.member.is_reachable());
            lag.is_some_and(|lag| lag.since + timeout <= now)
        };
        let late = self.peers.values().filter(is_late);
        let late: Vec<u32> = late.map(|peer| peer.member.node).collect();
        for node in late {
            tracing::error!(
                node,
                "unreachable: kernel has applied no view for {timeout:?}"
            );
            self.mark_unreachable(node);
        }
    }

    /// Starts a check of each reachable member that is silent on TCP.
    pub(super) fn start_checks(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let needs_check = |peer: &&Peer| {
            peer.member.is_reachable() && peer.deadline <= now && peer.check.is_none()
        };
        let silent = self.peers.values().filter(needs_check);
        let silent: Vec<Instance> = silent.map(|peer| (&peer.member).into()).collect();
        for instance in silent {
            self.start_check(now, instance, actions);
        }
    }

    fn start_check(&mut self, now: Instant, instance: Instance, actions: &mut Vec<Action>) {
        let deadline = now + self.timing.check_timeout();
        let probers = self.select_probers(now, instance.node);
        let peers = probers.iter().filter_map(|node| self.peers.get(node));
        let links = peers.filter_map(|peer| peer.link);
        actions.extend(self.own.map(|_| Action::Probe(instance)));
        actions.extend(links.map(|link| Action::Send(link, Message::Probe(instance))));
        if let Some(peer) = self.peers.get_mut(&instance.node) {
            if !peer.is_known_silent {
                let node = instance.node;
                tracing::warn!(node, "silent on TCP, checking its kernel over RDMA");
            }
            let own = self.own.map(|own| own.node);
            let probers = probers.into_iter().chain(own);
            peer.check = Some(ProberCheck::new(deadline, probers));
        }
    }

    /// Returns connected members that probe a node.
    fn select_probers(&self, now: Instant, node: u32) -> Vec<u32> {
        let mut probers = self.connected_after(now, node);
        probers.truncate(MAX_PROBERS);
        probers
    }

    /// Returns the other members that can probe: first those with the next higher numbers, cyclically.
    pub(super) fn connected_after(&self, now: Instant, node: u32) -> Vec<u32> {
        let after = self.peers.range(node + 1..);
        let others = after.chain(self.peers.range(..node));
        let can_probe =
            |peer: &Peer| peer.member.is_reachable() && peer.link.is_some() && now < peer.deadline;
        let probers = others.filter(|(_, peer)| can_probe(peer));
        probers.map(|(&node, _)| node).collect()
    }

    /// Processes the result of a probe that a member or the seed itself has sent.
    pub(super) fn on_probed(
        &mut self,
        now: Instant,
        prober: u32,
        instance: Instance,
        evidence: Option<bool>,
    ) {
        let is_current = self.member(instance.node).map(Instance::from) == Some(instance);
        if !is_current {
            return;
        }
        self.on_pair_probed(now, prober, instance.node, evidence);
        let peer = self.peers.get_mut(&instance.node);
        if let Some(check) = peer.and_then(|peer| peer.check.as_mut()) {
            check.record(prober, evidence);
            self.conclude_checks(now);
        }
    }

    /// Ends the checks whose result is known.
    pub(super) fn conclude_checks(&mut self, now: Instant) {
        let isolated = self.own.filter(|_| self.is_perhaps_isolated(now));
        let can_trust = |prober| isolated.is_none_or(|own| prober == own.node);
        let mut silent = Vec::new();
        for (&node, peer) in &mut self.peers {
            let Some(check) = &peer.check else {
                continue;
            };
            let responds = check.verdict(|_| true) == Verdict::Responds;
            if !responds && !check.has_ended(now) {
                continue;
            }
            let is_silent = !responds && check.verdict(can_trust) == Verdict::Silent;
            if responds && !peer.is_known_silent {
                tracing::warn!(
                    node,
                    "silent on TCP, but its kernel replies over RDMA: kept reachable"
                );
            }
            peer.is_known_silent = responds;
            peer.check = None;
            peer.deadline = now + self.timing.dead_after;
            silent.extend(is_silent.then_some(node));
        }
        for node in silent {
            tracing::error!(
                node,
                "unreachable: silent on TCP, and its kernel does not reply over RDMA"
            );
            self.mark_unreachable(node);
        }
    }

    /// Returns `true` if more than half of the reachable members are silent: the seed may be the isolated node.
    fn is_perhaps_isolated(&self, now: Instant) -> bool {
        let is_silent = |peer: &Peer| peer.check.is_some() || peer.deadline <= now;
        let reachable = self.peers.values().filter(|p| p.member.is_reachable());
        let (silent, responding): (Vec<_>, Vec<_>) = reachable.partition(|peer| is_silent(peer));
        silent.len() > responding.len() && self.own.is_some_and(|own| own.is_reachable())
    }

    /// Admits unreachable members that respond again.
    pub(super) fn readmit_recovered_nodes(&mut self, now: Instant) {
        let responds = |peer: &Peer| {
            let member = &peer.member;
            let has_isolated_view = peer.applied_epoch >= member.unreachable_since;
            !member.is_reachable()
                && has_isolated_view
                && peer.link.is_some()
                && now < peer.deadline
        };
        let peers = self.peers.iter().filter(|(_, peer)| responds(peer));
        let mut recovered: Vec<u32> = peers.map(|(&node, _)| node).collect();
        let own = self.own.filter(|own| !own.is_reachable());
        let own = own.filter(|own| self.applied_epoch >= own.unreachable_since);
        recovered.extend(own.map(|own| own.node));
        recovered.retain(|&node| self.quarantined_until(now, node).is_none());
        for node in recovered {
            tracing::info!(node, "node admitted again");
            self.admit(node);
        }
    }
}
