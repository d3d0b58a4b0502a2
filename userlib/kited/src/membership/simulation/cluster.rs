// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulated cluster: all state machines in one thread, and their connections.
//!
//! The simulated kernel of each node checks what the real one relies on: epochs increase, views are valid and contain
//! the node itself, and a fenced node is admitted before it is reachable. The cluster checks that an epoch of one seed
//! identifies one view, and that an incarnation ends only with its kernel.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use crate::host::Host;
use crate::membership::{
    needs_snapshot, Action, Follower, Input, LinkId, MembershipMachine, Seed, Snapshot, Timing,
};
use crate::protocol::{Message, View};
use kite::FabricAddress;

use super::node::{SimNode, SimSession};

const TIMING: Timing = Timing {
    heartbeat_interval: Duration::from_millis(500),
    dead_after: Duration::from_millis(3000),
};
const TICK: Duration = Duration::from_millis(250);
/// Ticks between two reports of a kernel about the same node.
const STEPS_PER_SUSPICION: u32 = 4;

pub(super) struct SimCluster {
    now: Instant,
    pub(super) nodes: Vec<SimNode>,
    /// Follower of each connection, and `true` if its messages are dropped.
    pub(super) links: BTreeMap<LinkId, (usize, bool)>,
    /// Pairs of nodes without RDMA between them.
    pub(super) broken_rdma: BTreeSet<(usize, usize)>,
    steps: u32,
    last_unique: u64,
    /// All views, by the incarnation of their seed and their epoch.
    views: HashMap<(u64, u64), View>,
}

fn address(node: usize) -> FabricAddress {
    FabricAddress {
        gid: Ipv6Addr::from(node as u128 + 1),
        qpn: 1,
        lid: 0,
        link_layer: 2,
        mtu: 4096,
    }
}

impl SimCluster {
    pub(super) fn new(count: usize) -> Self {
        let nodes = (0..count).map(|_| SimNode::default()).collect();
        let mut cluster = Self {
            now: Instant::now(),
            nodes,
            links: BTreeMap::new(),
            broken_rdma: BTreeSet::new(),
            steps: 0,
            last_unique: 0,
            views: HashMap::new(),
        };
        (0..count).for_each(|node| cluster.start(node));
        cluster
    }

    fn next_unique(&mut self) -> u64 {
        self.last_unique += 1;
        self.last_unique
    }

    pub(super) fn start(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() {
            return;
        }
        let incarnation = self.next_unique() << 32;
        let address = address(node);
        let secret = [incarnation.to_be_bytes()[3]; 16];
        let state = self.nodes[node].state_file.clone();
        self.nodes[node].machine = Some(match (node, state) {
            (0, Some(state)) => Box::new(Seed::restart(TIMING, address, incarnation, state)),
            (0, None) => Box::new(Seed::new(TIMING, address, incarnation, secret)),
            _ => Box::new(Follower::new(TIMING, address, incarnation)),
        });
        self.step(node, Input::Start);
    }

    /// Ends the kernel and the daemon of a node.
    pub(super) fn crash(&mut self, node: usize) {
        self.nodes[node] = SimNode {
            is_cut: self.nodes[node].is_cut,
            state_file: self.nodes[node].state_file.take(),
            ..SimNode::default()
        };
        self.disconnect(node);
    }

    /// Starts the next process of a node, which continues the membership if the kernel has the incarnation of the
    /// snapshot.
    pub(super) fn restart(&mut self, node: usize) {
        let SimNode {
            session,
            snapshot,
            machine,
            is_cut,
            state_file,
            ..
        } = std::mem::take(&mut self.nodes[node]);
        self.nodes[node].is_cut = is_cut;
        self.nodes[node].state_file = state_file.clone();
        self.disconnect(node);
        if machine.is_none() {
            return;
        }
        let session = session
            .zip(snapshot)
            .filter(|(session, snapshot)| session.identity.incarnation == snapshot.incarnation());
        let Some((session, snapshot)) = session else {
            return self.start(node);
        };
        assert!(
            session.view.epoch <= snapshot.epoch(),
            "snapshot saved too late"
        );
        let machine: Box<dyn MembershipMachine> = match snapshot.clone() {
            Snapshot::Seed(seed) => Box::new(Seed::resume(TIMING, seed)),
            Snapshot::Follower(follower) => {
                Box::new(Follower::resume(TIMING, address(node), follower))
            }
        };
        self.nodes[node] = SimNode {
            machine: Some(machine),
            resumed_epoch: session.view.epoch,
            session: Some(session),
            snapshot: Some(snapshot),
            is_cut,
            state_file,
            ..SimNode::default()
        };
        self.step(node, Input::Start);
    }

    fn disconnect(&mut self, node: usize) {
        let ended: Vec<LinkId> = self
            .links
            .iter()
            .filter(|(_, &(end, _))| node == 0 || end == node)
            .map(|(&link, _)| link)
            .collect();
        ended.into_iter().for_each(|link| self.close(link));
        self.nodes[node].inputs.clear();
    }

    pub(super) fn close(&mut self, link: LinkId) {
        if let Some((end, _)) = self.links.remove(&link) {
            self.nodes[0].inputs.push_back(Input::Closed(link));
            self.nodes[end].inputs.push_back(Input::Closed(link));
        }
    }

    pub(super) fn link_of(&self, node: usize) -> Option<LinkId> {
        self.links
            .iter()
            .find(|(_, &(end, _))| end == node)
            .map(|(&link, _)| link)
    }

    pub(super) fn step(&mut self, node: usize, input: Input) {
        let mut actions = Vec::new();
        if let Some(machine) = &mut self.nodes[node].machine {
            machine.step(self.now, input, &mut actions);
            if needs_snapshot(&actions) {
                let snapshot = machine.snapshot();
                if let Some(Snapshot::Seed(seed)) = &snapshot {
                    self.nodes[node].state_file = Some(seed.clone());
                }
                self.nodes[node].snapshot = snapshot;
            }
        }
        for action in actions {
            let remaining = self.nodes[node].actions_until_restart;
            if remaining == Some(0) {
                return self.restart(node);
            }
            self.nodes[node].actions_until_restart = remaining.map(|remaining| remaining - 1);
            self.perform(node, action);
        }
    }

    fn perform(&mut self, node: usize, action: Action) {
        match action {
            Action::Send(link, message) => self.send(node, link, message),
            Action::Close(link) => self.close(link),
            Action::Leave => {
                panic!("the incarnation of node {node} ends, although its kernel runs")
            }
            Action::Probe(number, incarnation) => {
                if self.replies(node, number, incarnation) {
                    let alive = Input::Alive(number, incarnation);
                    self.nodes[node].inputs.push_back(alive);
                }
            }
            // No node of the simulation uses hosts.
            Action::PublishHosts(_) => {}
            Action::Fail(reason) => panic!("{reason}"),
            Action::Join(identity) => {
                // A seed without state takes the secret of the first member that connects. It owns nothing yet.
                let former = self.nodes[node].session.as_ref();
                let is_alone = former.is_none_or(|session| session.view.members.len() <= 1);
                assert!(
                    is_alone,
                    "the incarnation of node {node} ends, although its kernel runs"
                );
                self.nodes[node].session = Some(SimSession::new(identity));
                self.nodes[node].resumed_epoch = 0;
            }
            Action::ApplyView(view) => {
                let epoch = view.epoch;
                self.nodes[node].inputs.push_back(Input::Applied(epoch));
                if epoch == self.nodes[node].resumed_epoch {
                    return;
                }
                let session = self.nodes[node].session.as_mut().expect("joined before");
                session.apply(view.clone());
                // A seed that is unreachable for others has a view of its own.
                let is_isolated_seed = node == 0
                    && session.view.members.len() > 1
                    && session.view.members[1..].iter().all(|m| !m.is_reachable());
                if !is_isolated_seed {
                    let same = self
                        .views
                        .entry((session.seed_incarnation, epoch))
                        .or_insert(view);
                    assert_eq!(*same, session.view, "one epoch has two views");
                }
            }
        }
    }

    fn send(&mut self, sender: usize, link: LinkId, message: Message) {
        if let Some(&(end, false)) = self.links.get(&link) {
            let receiver = if sender == 0 { end } else { 0 };
            self.nodes[receiver]
                .inputs
                .push_back(Input::Message(link, message));
        }
    }

    /// Returns `true` if the kernel of a member replies by RDMA to that of `node`.
    fn replies(&self, node: usize, number: u32, incarnation: u64) -> bool {
        let Some(session) = &self.nodes[node].session else {
            return false;
        };
        let identity = session.identity;
        let is_member = |other: &SimNode| {
            other.session.as_ref().is_some_and(|session| {
                (session.identity.node, session.identity.incarnation) == (number, incarnation)
                    && session.can_reach(identity.node, identity.incarnation)
            })
        };
        let other = self.nodes.iter().position(is_member);
        session.can_reach(number, incarnation)
            && other.is_some_and(|other| self.has_rdma(node, other))
    }

    fn has_rdma(&self, node: usize, other: usize) -> bool {
        let pairs = [(node, other), (other, node)];
        !pairs.iter().any(|pair| self.broken_rdma.contains(pair))
    }

    pub(super) fn deliver_one(&mut self, node: usize) -> bool {
        if self.nodes[node].paused {
            return false;
        }
        let input = self.nodes[node].inputs.pop_front();
        input.map(|input| self.step(node, input)).is_some()
    }

    /// Advances the time. Running nodes tick, and followers without a connection connect.
    pub(super) fn tick(&mut self) {
        self.now += TICK;
        self.steps += 1;
        if self.steps % STEPS_PER_SUSPICION == 0 {
            self.report_suspects();
        }
        for node in 0..self.nodes.len() {
            if !self.nodes[node].paused {
                self.step(node, Input::Tick);
            }
        }
        for node in 1..self.nodes.len() {
            let up = |node: &SimNode| node.machine.is_some() && !node.paused && !node.is_cut;
            if up(&self.nodes[0]) && up(&self.nodes[node]) && self.link_of(node).is_none() {
                let link = self.next_unique();
                self.links.insert(link, (node, false));
                let host = Host {
                    ip: [127, 0, 0, 1].into(),
                    name: None,
                };
                for end in [0, node] {
                    let opened = Input::Opened(link, host.clone());
                    self.nodes[end].inputs.push_back(opened);
                }
            }
        }
    }

    /// Reports to each node the members that do not respond to its kernel.
    fn report_suspects(&mut self) {
        for node in (0..self.nodes.len())
            .filter(|&node| !self.nodes[node].paused)
            .collect::<Vec<_>>()
        {
            let silent: Vec<u32> = self.unreachable_from(node).collect();
            for other in silent {
                self.step(node, Input::Suspect(other));
            }
        }
    }

    /// Returns the numbers of the members that do not respond to a kernel.
    fn unreachable_from(&self, node: usize) -> impl Iterator<Item = u32> + '_ {
        let session = self.nodes[node].session.as_ref();
        let members = session
            .into_iter()
            .flat_map(|session| &session.view.members);
        let silent = members.filter(move |member| {
            let other = u128::from(member.address.gid) as usize - 1;
            member.is_reachable() && !self.has_rdma(node, other)
        });
        silent.map(|member| member.node)
    }

    pub(super) fn deliver_all(&mut self) {
        while (0..self.nodes.len()).any(|node| self.deliver_one(node)) {}
    }

    pub(super) fn run(&mut self, time: Duration) {
        let deadline = self.now + time;
        while self.now < deadline {
            self.tick();
            self.deliver_all();
        }
    }

    /// Advances the time until the cluster is whole, at most by `limit`.
    pub(super) fn run_until_whole(&mut self, limit: Duration) {
        let deadline = self.now + limit;
        while self.now < deadline && !self.is_whole() {
            self.run(TICK);
        }
        self.assert_whole();
    }

    pub(super) fn view(&self, node: usize) -> &View {
        &self.nodes[node]
            .session
            .as_ref()
            .expect("in the cluster")
            .view
    }

    /// Returns the numbers of the reachable members in the view of `node`.
    pub(super) fn members(&self, node: usize) -> Vec<u32> {
        let members = self.view(node).members.iter();
        members
            .filter(|m| m.is_reachable())
            .map(|m| m.node)
            .collect()
    }

    pub(super) fn number(&self, node: usize) -> u32 {
        let session = self.nodes[node].session.as_ref();
        session.expect("in the cluster").identity.node
    }

    pub(super) fn incarnation(&self, node: usize) -> u64 {
        self.nodes[node]
            .session
            .as_ref()
            .expect("in the cluster")
            .identity
            .incarnation
    }

    /// Returns `true` if all nodes have applied the same view of all nodes.
    fn is_whole(&self) -> bool {
        let view = |node: &SimNode| node.session.as_ref().map(|session| session.view.clone());
        let first = view(&self.nodes[0]);
        let has_all = |view: &View| {
            view.members.len() == self.nodes.len() && view.members.iter().all(|m| m.is_reachable())
        };
        first.as_ref().is_some_and(has_all) && self.nodes.iter().all(|node| view(node) == first)
    }

    /// Asserts that all nodes have applied the same view, which contains the current incarnation of each node, all of
    /// them reachable, and no other.
    pub(super) fn assert_whole(&self) {
        let view = self.view(0);
        assert_eq!(view.members.len(), self.nodes.len());
        assert!(view.members.iter().all(|m| m.is_reachable()), "{view:?}");
        for node in &self.nodes {
            let session = node.session.as_ref().expect("in the cluster");
            assert_eq!(&session.view, view);
            assert!(view.has_member(session.identity.node, session.identity.incarnation));
            assert_eq!(
                session.identity.secret,
                self.nodes[0].session.as_ref().unwrap().identity.secret
            );
        }
    }
}
