// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Quarantine of nodes that respond by TCP but not by RDMA.
//!
//! # Operation
//!
//! A kernel reports a node that does not respond once per second while it retries. If the daemon of that node responds,
//! both nodes are alive. Yet every kernel waits for every other kernel before it grants a name or reports that a name
//! does not exist. So one of the two nodes must be marked as unreachable: the one with more unreachable members, or
//! among equals the one that was admitted last. Before that the seed publishes a view, whatever its members, so that
//! each kernel contacts all others and can detect the failure.
//!
//! The node is in quarantine before it is admitted again. Each quarantine is longer than the previous one, since the
//! admission is useless before a repair. If the seed is the node, the others fence it, and it fences all others. It
//! still coordinates them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kite::FabricAddress;

use super::Seed;
use crate::membership::{Action, SUSPICION_GAP};
use crate::protocol::SEED_NODE;

/// Maximum length of a quarantine, in dead timeouts.
const MAX_QUARANTINE_FACTOR: u32 = 100;

/// Failure of one node to respond to one kernel.
#[derive(Debug)]
struct Suspicion {
    first_report: Instant,
    last_report: Instant,
    /// Time at which a view was published to test all kernels.
    tested_at: Option<Instant>,
}

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
        };
        let is_new = !self.0.contains_key(&(reporter, suspect));
        self.0
            .entry((reporter, suspect))
            .or_insert(new_suspicion)
            .last_report = now;
        is_new
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

impl Seed {
    /// Processes the report that a node does not respond to a kernel.
    pub(super) fn on_suspect(
        &mut self,
        now: Instant,
        reporter: u32,
        suspect: u32,
        actions: &mut Vec<Action>,
    ) {
        if self.suspicions.record(now, reporter, suspect) {
            self.probe(now, suspect, actions);
        }
        let has_common_view = self.has_common_view(reporter, suspect);
        let Some(suspicion) = self.suspicions.0.get_mut(&(reporter, suspect)) else {
            return;
        };
        if !has_common_view {
            suspicion.first_report = now;
            suspicion.tested_at = None;
            return;
        }
        if let Some(tested_at) = suspicion.tested_at {
            if tested_at + self.timing.dead_after <= now {
                self.isolate_one_of(now, reporter, suspect, actions);
            }
        } else if suspicion.first_report + 2 * self.timing.probe_grace() <= now {
            // A silent node would be unreachable by now.
            self.publish_test_view(now, actions);
        }
    }

    /// Publishes a view, upon which each kernel contacts each other kernel, if only by datagrams.
    fn publish_test_view(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for suspicion in self.suspicions.0.values_mut() {
            suspicion.tested_at.get_or_insert(now);
        }
        self.publish_view(actions);
    }

    /// Returns the epoch at which a reachable node was admitted last, and the epoch that its kernel has applied.
    fn admitted_and_applied(&self, node: u32) -> Option<(u64, u64)> {
        let (member, applied_epoch) = match node {
            SEED_NODE => (&self.self_member, self.applied_epoch),
            _ => {
                let peer = self.peers.get(&node)?;
                (&peer.member, peer.applied_epoch)
            }
        };
        member
            .is_reachable()
            .then_some((member.admitted_epoch, applied_epoch))
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

    /// Returns the number of members that do not respond to a node, or to which the node does not respond.
    fn unreachable_count(&self, node: u32) -> usize {
        let pairs = self.suspicions.0.keys();
        let confirmed =
            pairs.filter(|&&(reporter, suspect)| self.has_common_view(reporter, suspect));
        let others = confirmed.filter_map(|&pair| match pair {
            (reporter, suspect) if reporter == node => Some(suspect),
            (reporter, suspect) if suspect == node => Some(reporter),
            _ => None,
        });
        others.collect::<BTreeSet<u32>>().len()
    }

    /// Marks one of two nodes without RDMA between them as unreachable.
    fn isolate_one_of(
        &mut self,
        now: Instant,
        reporter: u32,
        suspect: u32,
        actions: &mut Vec<Action>,
    ) {
        let admitted_epoch = |node| {
            self.admitted_and_applied(node)
                .map(|(admitted, _)| admitted)
        };
        let blame_rank = |node: u32| (self.unreachable_count(node), admitted_epoch(node), node);
        let node = if blame_rank(reporter) > blame_rank(suspect) {
            reporter
        } else {
            suspect
        };
        let unreachable = self.unreachable_count(node);
        let wait = self.quarantine(now, node);
        tracing::error!(
            node,
            "unreachable: responds by TCP, but has no RDMA with {unreachable} members (node {suspect} does not respond \
             to node {reporter}); admission in {wait:?}"
        );
        if node == SEED_NODE {
            self.self_member.unreachable_since = self.next_epoch();
            self.suspicions = Suspicions::default();
        } else {
            self.mark_unreachable(node, actions);
        }
        self.publish_view(actions);
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

    /// Returns `true` if a node is in quarantine.
    pub(super) fn is_in_quarantine(&self, now: Instant, node: u32) -> bool {
        let quarantine = self.quarantines.get(&node);
        quarantine.is_some_and(|quarantine| now < quarantine.until)
    }

    /// Returns the end of the quarantine of the node at this address, unless the node is a reachable member.
    pub(super) fn quarantined_until(
        &self,
        now: Instant,
        address: &FabricAddress,
    ) -> Option<Instant> {
        let node = self.node_numbers.get(&address.gid)?;
        let peer = self.peers.get(node);
        let is_reachable = peer.is_some_and(|peer| peer.member.is_reachable());
        let until = self.quarantines.get(node)?.until;
        (!is_reachable && now < until).then_some(until)
    }
}
