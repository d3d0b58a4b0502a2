// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Loss of the seed: check of the seed's kernel over RDMA, and the view without the seed.
//!
//! # Operation
//!
//! When the seed has been silent on TCP for the dead timeout, the kernel of this node probes the kernel of the seed and
//! of further members. If the seed's kernel replies, the view is kept, and the check is repeated after the dead timeout.
//!
//! If the seed's kernel does not reply, each survivor derives the same view from the last view of the seed. If no other
//! probed member replies either, this node is the isolated one. All other members are then unreachable for its kernel.

use std::time::Instant;

use super::Follower;
use crate::membership::check::{RdmaCheck, Verdict};
use crate::membership::{Action, ProbeResult, MAX_PROBERS};
use crate::protocol::{Instance, Message, PriorMembership, SEED_NODE};

/// Check of the seed's kernel and of further members, by requests of the kernel of this node.
#[derive(Debug)]
pub(super) struct SeedCheck {
    seed: Instance,
    probes: RdmaCheck<Instance>,
}

impl Follower {
    /// Schedules the check of the seed's kernel, and ends the current one: the seed has sent a message.
    pub(super) fn schedule_check(&mut self, now: Instant) {
        self.check = None;
        let view = self.prior.as_ref().map(|prior| &prior.view);
        let seed = view
            .zip(self.seed)
            .and_then(|(view, seed)| view.find_reachable(seed));
        self.check_at = seed.map(|_| now + self.timing.dead_after);
    }

    pub(super) fn start_check(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.check_at = None;
        let Some((seed, others)) = self.prior.as_ref().and_then(check_targets) else {
            return;
        };
        if !std::mem::replace(&mut self.is_seed_known_silent, true) {
            tracing::warn!("seed silent on TCP, checking its kernel over RDMA");
        }
        let deadline = now + self.timing.check_timeout();
        let targets: Vec<Instance> = std::iter::once(seed).chain(others).collect();
        actions.extend(targets.iter().map(|&target| Action::Probe(target)));
        self.check = Some(SeedCheck {
            seed,
            probes: RdmaCheck::new(deadline, targets),
        });
    }

    /// Processes the end of a probe, which this node or the seed has requested.
    pub(super) fn on_probed(
        &mut self,
        now: Instant,
        instance: Instance,
        result: ProbeResult,
        actions: &mut Vec<Action>,
    ) {
        let evidence = result.to_evidence();
        let is_requested = self.requested_probes.remove(&instance);
        if let (true, Some(link), Some(answered)) = (is_requested, self.welcomed_link(), evidence) {
            let probed = Message::Probed { instance, answered };
            actions.push(Action::Send(link, probed));
        }
        if let Some(check) = &mut self.check {
            check.probes.record(instance, evidence);
            self.conclude_check(now, actions);
        }
    }

    /// Ends the check if its result is known.
    pub(super) fn conclude_check(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let Some(check) = &self.check else {
            return;
        };
        let seed = check.seed;
        let evidence = check.probes.evidence(seed);
        if evidence != Some(true) && !check.probes.has_ended(now) {
            return;
        }
        let others = check.probes.verdict(|target| target != seed);
        self.schedule_check(now);
        if evidence == Some(false) {
            self.leave_seed_behind(now, others == Verdict::Silent, actions);
        }
    }

    /// Continues without the seed. All survivors derive the same view from the same view. A survivor that missed the
    /// last view has another view until the seed returns.
    fn leave_seed_behind(&mut self, now: Instant, is_isolated: bool, actions: &mut Vec<Action>) {
        let Some(prior) = &self.prior else {
            return;
        };
        let mut view = prior.view.with_unreachable_seed();
        let epoch = view.epoch;
        if is_isolated {
            tracing::error!(epoch, "no member replies: this node is isolated");
            view = view.isolated(prior.node);
        } else {
            tracing::error!(epoch, "seed unreachable, continuing without it");
        }
        self.close_connection(actions);
        self.apply_view(now, view, actions);
    }

    /// Continues without the seed, which has left the cluster.
    pub(super) fn on_seed_left(&mut self, now: Instant, actions: &mut Vec<Action>) {
        tracing::warn!("seed has left the cluster, continuing without it");
        self.close_connection(actions);
        let view = self.prior.as_ref().map(|prior| &prior.view);
        let view = view.filter(|view| view.find_member(SEED_NODE).is_some());
        if let Some(view) = view.map(|view| view.without_seed()) {
            self.apply_view(now, view, actions);
        }
    }
}

/// Returns the seed, and the members that a node probes with it: those with the next higher numbers, cyclically.
fn check_targets(prior: &PriorMembership) -> Option<(Instance, Vec<Instance>)> {
    let seed = prior.view.find_reachable(SEED_NODE)?;
    let members = prior.view.members.iter().filter(|m| m.is_reachable());
    let others = members.filter(|m| m.node != SEED_NODE && m.node != prior.node);
    let mut others: Vec<Instance> = others.map(Instance::from).collect();
    let first = others.partition_point(|other| other.node < prior.node);
    others.rotate_left(first);
    others.truncate(MAX_PROBERS);
    Some((seed.into(), others))
}
