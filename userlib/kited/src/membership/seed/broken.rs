// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Nodes that answer by TCP and not by RDMA.
//!
//! A kernel says each second that it gets no answer from a node, for as long as it tries. If the node's
//! daemon answers all the same, nobody is dead, and yet every kernel waits for word from every other
//! before it says of a name that it does not exist, or grants it. So one of the two has to go: the one
//! that has this trouble with more members, of those with as many the one that came last. That all may
//! have had the chance to notice, they first get a view to agree on anew, whatever its members.
//!
//! Who was put out waits before it is let in again, longer each time, since it is no use until somebody
//! has repaired something. The seed cannot put itself out. It begins a new life without the others, who
//! go on without it, and keeps them waiting instead.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kite::FabricAddress;

use super::Seed;
use crate::membership::{next_incarnation, Action, SUSPICION_GAP};
use crate::protocol::{Message, SEED_NODE};

/// The longest wait of one that was put out, in times that a node may be silent.
const MAX_QUARANTINE_FACTOR: u32 = 100;

/// That a kernel gets no answer.
#[derive(Debug)]
struct Suspicion {
    first_report: Instant,
    last_report: Instant,
    /// When all kernels were given a view to agree on.
    tested_at: Option<Instant>,
}

/// What kernels say of other nodes, by who says it and of whom.
#[derive(Debug, Default)]
pub(super) struct Suspicions(BTreeMap<(u32, u32), Suspicion>);

impl Suspicions {
    /// Takes note of one, and says whether it is the first of a trouble.
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

    /// Forgets those by and of a node.
    pub(super) fn remove_node(&mut self, node: u32) {
        self.0
            .retain(|&(reporter, suspect), _| reporter != node && suspect != node);
    }
}

/// Until when a node has to wait, and how long that is.
#[derive(Debug)]
pub(super) struct Quarantine {
    until: Instant,
    wait: Duration,
}

impl Seed {
    /// A kernel gets no answer from a node.
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
                self.evict_one_of(now, reporter, suspect, actions);
            }
        } else if suspicion.first_report + 2 * self.timing.probe_grace() <= now {
            // A node that is dead would have been removed by now.
            self.publish_test_view(now, actions);
        }
    }

    /// Has every kernel talk to every other, as each does on a new view, if only by datagrams.
    fn publish_test_view(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for suspicion in self.suspicions.0.values_mut() {
            suspicion.tested_at.get_or_insert(now);
        }
        self.publish_view(actions);
    }

    /// The epoch of the first view with this node, and that on which its kernel acts.
    fn admitted_and_applied(&self, node: u32) -> Option<(u64, u64)> {
        if node == SEED_NODE {
            return Some((0, self.applied_epoch));
        }
        self.peers
            .get(&node)
            .map(|p| (p.admitted_epoch, p.applied_epoch))
    }

    /// Whether two members' kernels have both been given a view with the two: no others talk.
    fn has_common_view(&self, one: u32, other: u32) -> bool {
        let (Some(one), Some(other)) = (
            self.admitted_and_applied(one),
            self.admitted_and_applied(other),
        ) else {
            return false;
        };
        one.1.min(other.1) >= one.0.max(other.0)
    }

    /// The number of members of whom, or to whom, a node gets no answer.
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

    /// Puts out one of two between whom there is no RDMA.
    fn evict_one_of(
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
        let troubles = self.unreachable_count(node);
        let wait = self.quarantine(now, node);
        tracing::error!(
            node,
            "answers by TCP, but has no RDMA with {troubles} of the members (node {reporter} gets no answer \
             from node {suspect}): it is put out, and may come back in {wait:?}"
        );
        if node == SEED_NODE {
            self.abandon_members(actions);
        } else {
            self.remove_peer(node, Some(Message::Evicted), actions);
        }
        self.publish_view(actions);
    }

    /// Keeps a node out for a while, and says for how long.
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

    /// Until when the node at this address has to wait, if it has to. One that believes itself a member
    /// should soon hear that it is none.
    pub(super) fn quarantined_until(
        &self,
        now: Instant,
        address: &FabricAddress,
        member: bool,
    ) -> Option<Instant> {
        let node = self.node_numbers.get(&address.gid).filter(|_| !member);
        let nodes = node.into_iter().chain([&SEED_NODE]);
        let until = nodes.filter_map(|node| Some(self.quarantines.get(node)?.until));
        until.max().filter(|&until| now < until)
    }

    /// Leaves the others, who go on.
    fn abandon_members(&mut self, actions: &mut Vec<Action>) {
        self.send_goodbyes(actions);
        self.links.clear();
        self.peers.clear();
        self.suspicions = Suspicions::default();
        self.self_member.incarnation = next_incarnation(self.self_member.incarnation);
        actions.push(self.join_action());
    }
}
