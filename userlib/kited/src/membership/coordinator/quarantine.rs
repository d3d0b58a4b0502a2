// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Quarantine of nodes that respond by TCP but not by RDMA.
//!
//! # Operation
//!
//! A kernel reports a node that does not respond once per second while it retries. If the daemon of that node responds,
//! both nodes are alive. Yet every kernel waits for every other kernel before it grants a name or reports that a name
//! does not exist. So one of the two nodes must be fenced. Before that, the seed publishes a view, whatever its members,
//! so that each kernel contacts all others and can detect the failure. Then the kernel that reported the node probes it
//! over RC. A reply ends the suspicion: only datagrams were lost.
//!
//! Meanwhile the kernels of further members, the *witnesses*, probe both nodes. The node that is silent for more of them is
//! fenced. Reports alone are no evidence: the kernel of a broken node reports its peers, and a loss of datagrams lets
//! many kernels report a node that replies over RC. If both nodes are silent for as many witnesses, only the path between
//! the two is broken. Then the node that was admitted last is fenced, but not the seed.
//!
//! A fenced node is in quarantine before it is admitted again. Each quarantine is longer than the previous one, since
//! admission is useless before a repair. The seed can be in quarantine, too. It continues to coordinate the others by
//! TCP.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Coordinator;
use crate::membership::check::RdmaCheck;
use crate::membership::{Action, MAX_PROBERS, SUSPICION_GAP};
use crate::protocol::{Instance, Message};

/// Maximum length of a quarantine, in dead timeouts.
const MAX_QUARANTINE_FACTOR: u32 = 100;

/// Failure of one node to respond to one kernel.
#[derive(Debug)]
struct Suspicion {
    first_report: Instant,
    last_report: Instant,
    /// Time at which a view was published to test all kernels.
    tested_at: Option<Instant>,
    /// Probes of the suspect by the reporter, and of both by witnesses, while they run.
    check: Option<PairCheck>,
}

/// Check of a pair of nodes. The probes are identified by prober and target.
type PairCheck = RdmaCheck<(u32, u32)>;

/// Suspicions, by reporter and suspect.
#[derive(Debug, Default)]
pub(super) struct Suspicions(BTreeMap<(u32, u32), Suspicion>);

impl Suspicions {
    /// Records a report. Returns `true` if it starts a new suspicion.
    fn record(&mut self, now: Instant, reporter: u32, suspect: u32) -> bool {
        self.0
            .retain(|_, suspicion| now < suspicion.last_report + SUSPICION_GAP);
        let new_suspicion = Suspicion {
            first_report: now,
            last_report: now,
            tested_at: None,
            check: None,
        };
        let is_new = !self.0.contains_key(&(reporter, suspect));
        self.0
            .entry((reporter, suspect))
            .or_insert(new_suspicion)
            .last_report = now;
        is_new
    }

    /// Returns `true` if one of two nodes does not respond to the other.
    fn has_pair(&self, one: u32, other: u32) -> bool {
        self.0.contains_key(&(one, other)) || self.0.contains_key(&(other, one))
    }

    /// Removes the suspicions by and of a node.
    pub(super) fn remove_node(&mut self, node: u32) {
        self.0
            .retain(|&(reporter, suspect), _| reporter != node && suspect != node);
    }
}

/// End and length of a quarantine.
#[derive(Debug)]
pub(super) struct Quarantine {
    until: Instant,
    wait: Duration,
}

impl Coordinator {
    /// Processes the report that a node does not respond to a kernel.
    pub(super) fn on_suspect(
        &mut self,
        now: Instant,
        reporter: u32,
        suspect: u32,
        actions: &mut Vec<Action>,
    ) {
        if !self.is_reachable(reporter) || !self.is_reachable(suspect) {
            return;
        }
        if self.suspicions.record(now, reporter, suspect) {
            self.request_heartbeat(now, suspect, actions);
        }
        let has_common_view = self.has_common_view(reporter, suspect);
        let Some(suspicion) = self.suspicions.0.get_mut(&(reporter, suspect)) else {
            return;
        };
        if !has_common_view {
            suspicion.first_report = now;
            (suspicion.tested_at, suspicion.check) = (None, None);
            return;
        }
        if let Some(tested_at) = suspicion.tested_at {
            if tested_at + self.timing.dead_after <= now && suspicion.check.is_none() {
                self.start_pair_check(now, reporter, suspect, actions);
            }
        } else if suspicion.first_report + 2 * self.timing.probe_grace() <= now {
            // A dead node would be unreachable by now.
            self.publish_test_view(now);
        }
    }

    /// Requests the probes of a suspicion.
    fn start_pair_check(
        &mut self,
        now: Instant,
        reporter: u32,
        suspect: u32,
        actions: &mut Vec<Action>,
    ) {
        let witnesses = self.select_witnesses(now, reporter, suspect).into_iter();
        let pairs = witnesses.flat_map(|witness| [(witness, reporter), (witness, suspect)]);
        let probes: Vec<(u32, u32)> = pairs.chain([(reporter, suspect)]).collect();
        for &(prober, target) in &probes {
            self.request_probe(prober, target, actions);
        }
        let deadline = now + self.timing.check_timeout();
        if let Some(suspicion) = self.suspicions.0.get_mut(&(reporter, suspect)) {
            suspicion.check = Some(PairCheck::new(deadline, probes));
        }
    }

    /// Returns the members that probe two nodes. Those that do not respond to one of the two, or to which one does not
    /// respond, are preferred.
    fn select_witnesses(&self, now: Instant, reporter: u32, suspect: u32) -> Vec<u32> {
        let is_witness = |node: u32| {
            let pair = [reporter, suspect];
            !pair.contains(&node) && pair.iter().all(|&other| self.has_common_view(node, other))
        };
        let has_suspicion = |node: u32| {
            self.suspicions.has_pair(node, reporter) || self.suspicions.has_pair(node, suspect)
        };
        let mut witnesses = self.connected_after(now, suspect);
        witnesses.retain(|&node| is_witness(node));
        witnesses.sort_by_key(|&node| !has_suspicion(node));
        witnesses.truncate(MAX_PROBERS);
        let own = self
            .own
            .filter(|own| own.is_reachable() && is_witness(own.node));
        witnesses.extend(own.map(|own| own.node));
        witnesses
    }

    fn request_probe(&self, prober: u32, target: u32, actions: &mut Vec<Action>) {
        let Some(instance) = self.member(target).map(Instance::from) else {
            return;
        };
        if self.is_own(prober) {
            return actions.push(Action::Probe(instance));
        }
        let link = self.peers.get(&prober).and_then(|peer| peer.link);
        actions.extend(link.map(|link| Action::Send(link, Message::Probe(instance))));
    }

    /// Processes the result of a probe, if it was requested because of a suspicion.
    pub(super) fn on_pair_probed(
        &mut self,
        now: Instant,
        prober: u32,
        target: u32,
        evidence: Option<bool>,
    ) {
        for suspicion in self.suspicions.0.values_mut() {
            if let Some(check) = &mut suspicion.check {
                check.record((prober, target), evidence);
            }
        }
        self.conclude_pair_checks(now);
    }

    /// Ends the checks of pairs whose result is known.
    pub(super) fn conclude_pair_checks(&mut self, now: Instant) {
        let pairs: Vec<(u32, u32)> = self.suspicions.0.keys().copied().collect();
        for (reporter, suspect) in pairs {
            self.conclude_pair_check(now, reporter, suspect);
        }
    }

    fn conclude_pair_check(&mut self, now: Instant, reporter: u32, suspect: u32) {
        let Some(suspicion) = self.suspicions.0.get_mut(&(reporter, suspect)) else {
            return;
        };
        let Some(check) = suspicion.check.take() else {
            return;
        };
        let is_recent = now < suspicion.last_report + SUSPICION_GAP;
        match check.evidence((reporter, suspect)) {
            Some(true) => {
                tracing::info!(
                    node = suspect,
                    "reported by node {reporter}, but replies to its kernel"
                );
                self.suspicions.0.remove(&(reporter, suspect));
            }
            _ if !check.has_ended(now) => suspicion.check = Some(check),
            Some(false) if is_recent => self.fence_one_of(now, &check, reporter, suspect),
            _ => {}
        }
    }

    /// Publishes a view, upon which each kernel contacts each other kernel, if only by datagrams.
    fn publish_test_view(&mut self, now: Instant) {
        for suspicion in self.suspicions.0.values_mut() {
            suspicion.tested_at.get_or_insert(now);
        }
        self.is_changed = true;
    }

    /// Returns the epoch of the view that admitted a node last, and the epoch that its kernel has applied.
    fn admitted_and_applied(&self, node: u32) -> Option<(u64, u64)> {
        let admitted = self.member(node)?.admitted_epoch;
        let applied = match self.is_own(node) {
            true => self.applied_epoch,
            false => self.peers.get(&node)?.applied_epoch,
        };
        Some((admitted, applied))
    }

    /// Returns `true` if the kernels of two members have both applied a view with the two. Other kernels do not
    /// communicate.
    fn has_common_view(&self, one: u32, other: u32) -> bool {
        let (Some(one), Some(other)) = (
            self.admitted_and_applied(one),
            self.admitted_and_applied(other),
        ) else {
            return false;
        };
        one.1.min(other.1) >= one.0.max(other.0)
    }

    /// Fences one of two nodes without RDMA between them, by the evidence of the witnesses.
    fn fence_one_of(&mut self, now: Instant, check: &PairCheck, reporter: u32, suspect: u32) {
        let silent_for =
            |node: u32| check.silent_count(|(prober, target)| target == node && prober != reporter);
        let admitted_epoch = |node| self.member(node).map(|member| member.admitted_epoch);
        let blame_rank = |node: u32| {
            let admitted = admitted_epoch(node).filter(|_| !self.is_own(node));
            (silent_for(node), admitted, node)
        };
        let node = if blame_rank(reporter) > blame_rank(suspect) {
            reporter
        } else {
            suspect
        };
        let unreachable = silent_for(node) + 1;
        let wait = self.quarantine(now, node);
        tracing::error!(
            node,
            "unreachable: responds by TCP, but has no RDMA with {unreachable} members (node {suspect} does not respond \
             to node {reporter}); admission in {wait:?}"
        );
        self.mark_unreachable(node);
    }

    /// Starts the quarantine of a node. Returns its length.
    fn quarantine(&mut self, now: Instant, node: u32) -> Duration {
        let max_wait = self.timing.dead_after * MAX_QUARANTINE_FACTOR;
        let previous = self
            .quarantines
            .get(&node)
            .filter(|quarantine| now < quarantine.until + max_wait);
        let wait = previous.map_or(self.timing.dead_after, |quarantine| {
            (2 * quarantine.wait).min(max_wait)
        });
        let until = now + wait;
        self.quarantines.insert(node, Quarantine { until, wait });
        wait
    }

    /// Returns the end of the quarantine of a node, if it is in quarantine.
    pub(super) fn quarantined_until(&self, now: Instant, node: u32) -> Option<Instant> {
        let quarantine = self.quarantines.get(&node);
        let until = quarantine.map(|quarantine| quarantine.until);
        until.filter(|&until| now < until)
    }
}
