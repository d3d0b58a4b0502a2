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

use kite::Address;

use super::Seed;
use crate::membership::{next_life, Action, GAP};
use crate::protocol::{Message, SEED};

/// The longest wait of one that was put out, in times that a node may be silent.
const LONGEST: u32 = 100;

/// That a kernel gets no answer.
#[derive(Debug)]
struct Complaint {
    since: Instant,
    latest: Instant,
    /// When all kernels were given a view to agree on.
    tested: Option<Instant>,
}

/// What kernels say of other nodes, by who says it and of whom.
#[derive(Debug, Default)]
pub(super) struct Complaints(BTreeMap<(u32, u32), Complaint>);

impl Complaints {
    /// Takes note of one, and says whether it is the first of a trouble.
    fn hear(&mut self, now: Instant, by: u32, of: u32) -> bool {
        self.0.retain(|_, known| now < known.latest + GAP);
        let fresh = Complaint {
            since: now,
            latest: now,
            tested: None,
        };
        let is_fresh = !self.0.contains_key(&(by, of));
        self.0.entry((by, of)).or_insert(fresh).latest = now;
        is_fresh
    }

    /// Forgets those by and of a node.
    pub(super) fn forget(&mut self, node: u32) {
        self.0.retain(|&(by, of), _| by != node && of != node);
    }
}

/// Until when a node has to wait, and how long that is.
#[derive(Debug)]
pub(super) struct Bar {
    until: Instant,
    wait: Duration,
}

impl Seed {
    /// A kernel gets no answer from a node.
    pub(super) fn suspect(&mut self, now: Instant, by: u32, of: u32, actions: &mut Vec<Action>) {
        if self.complaints.hear(now, by, of) {
            self.probe(now, of, actions);
        }
        let met = self.have_met(by, of);
        let Some(complaint) = self.complaints.0.get_mut(&(by, of)) else {
            return;
        };
        if !met {
            complaint.since = now;
            complaint.tested = None;
            return;
        }
        if let Some(tested) = complaint.tested {
            if tested + self.timing.dead <= now {
                self.part(now, by, of, actions);
            }
        } else if complaint.since + 2 * self.timing.grace() <= now {
            // A node that is dead would have been removed by now.
            self.test(now, actions);
        }
    }

    /// Has every kernel talk to every other, as each does on a new view, if only by datagrams.
    fn test(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for complaint in self.complaints.0.values_mut() {
            complaint.tested.get_or_insert(now);
        }
        self.publish(actions);
    }

    /// The epoch of the first view with this node, and that on which its kernel acts.
    fn epochs(&self, node: u32) -> Option<(u64, u64)> {
        if node == SEED {
            return Some((0, self.applied));
        }
        self.peers.get(&node).map(|p| (p.admitted, p.applied))
    }

    /// Whether two members' kernels have both been given a view with the two: no others talk.
    fn have_met(&self, one: u32, other: u32) -> bool {
        let (Some(one), Some(other)) = (self.epochs(one), self.epochs(other)) else {
            return false;
        };
        one.1.min(other.1) >= one.0.max(other.0)
    }

    /// The number of members of whom, or to whom, a node gets no answer.
    fn troubles(&self, node: u32) -> usize {
        let pairs = self.complaints.0.keys();
        let met = pairs.filter(|&&(by, of)| self.have_met(by, of));
        let others = met.filter_map(|&pair| match pair {
            (by, of) if by == node => Some(of),
            (by, of) if of == node => Some(by),
            _ => None,
        });
        others.collect::<BTreeSet<u32>>().len()
    }

    /// Puts out one of two between whom there is no RDMA.
    fn part(&mut self, now: Instant, by: u32, of: u32, actions: &mut Vec<Action>) {
        let came = |node| self.epochs(node).map(|(admitted, _)| admitted);
        let guilt = |node: u32| (self.troubles(node), came(node), node);
        let node = if guilt(by) > guilt(of) { by } else { of };
        let troubles = self.troubles(node);
        let wait = self.bar(now, node);
        tracing::error!(
            node,
            "answers by TCP, but has no RDMA with {troubles} of the members (node {by} gets no answer \
             from node {of}): it is put out, and may come back in {wait:?}"
        );
        if node == SEED {
            self.begin_anew(actions);
        } else {
            self.remove(node, Some(Message::Out), actions);
        }
        self.publish(actions);
    }

    /// Keeps a node out for a while, and says for how long.
    fn bar(&mut self, now: Instant, node: u32) -> Duration {
        let longest = self.timing.dead * LONGEST;
        let again = self.bars.get(&node).filter(|bar| now < bar.until + longest);
        let wait = again.map_or(self.timing.dead, |bar| (2 * bar.wait).min(longest));
        let until = now + wait;
        self.bars.insert(node, Bar { until, wait });
        wait
    }

    /// Until when the node at this address has to wait, if it has to. One that believes itself a member
    /// should soon hear that it is none.
    pub(super) fn barred(&self, now: Instant, address: &Address, member: bool) -> Option<Instant> {
        let node = self.numbers.get(&address.gid).filter(|_| !member);
        let bars = node.into_iter().chain([&SEED]);
        let until = bars.filter_map(|node| Some(self.bars.get(node)?.until));
        until.max().filter(|&until| now < until)
    }

    /// Leaves the others, who go on.
    fn begin_anew(&mut self, actions: &mut Vec<Action>) {
        self.farewell(actions);
        self.links.clear();
        self.peers.clear();
        self.complaints = Complaints::default();
        self.own.incarnation = next_life(self.own.incarnation);
        actions.push(self.join());
    }
}
