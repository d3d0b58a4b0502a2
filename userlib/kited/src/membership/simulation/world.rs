// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A whole cluster of machines in one thread, and what can happen to it.
//!
//! The simulated kernel of each node checks what the real one relies on: epochs rise, views are
//! well formed and hold the node itself, a life that was dropped never comes back, and an epoch of
//! one seed names one view.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use crate::host::Host;
use crate::membership::{
    needs_snapshot, Action, Follower, Identity, Input, LinkId, MembershipMachine, Seed, Snapshot,
    Timing,
};
use crate::protocol::{Message, View, SEED_NODE};
use kite::FabricAddress;

const TIMING: Timing = Timing {
    heartbeat_interval: Duration::from_millis(500),
    dead_after: Duration::from_millis(3000),
};
const TICK: Duration = Duration::from_millis(250);
/// Steps between two complaints of a kernel of the same node.
const STEPS_PER_SUSPICION: u32 = 4;

/// What can happen; numbers are indices of nodes, of which 0 is the seed.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    Tick(u8),
    Deliver(usize, u8),
    Crash(usize),
    Start(usize),
    Leave(usize),
    /// Ends the process of a node and starts the next, which continues its life.
    Restart(usize),
    /// Restarts a node in its next step, after so many actions.
    Interrupt(usize, u8),
    Pause(usize),
    Resume(usize),
    Disconnect(usize),
    DropMessages(usize),
    Suspect(usize, u32),
    /// Breaks the RDMA between two nodes; that of one to itself is that to all.
    BreakRdma(usize, usize),
    /// Repairs all RDMA.
    RepairRdma,
}

#[derive(Default)]
pub(super) struct SimNode {
    machine: Option<Box<dyn MembershipMachine>>,
    pub(super) paused: bool,
    inputs: VecDeque<Input>,
    pub(super) session: Option<SimSession>,
    snapshot: Option<Snapshot>,
    /// Actions until it is restarted.
    actions_until_restart: Option<u8>,
    /// Epoch of the view that the kernel acted on when the process began to continue its life, else 0.
    resumed_epoch: u64,
}

/// What a kernel knows between joining and leaving.
pub(super) struct SimSession {
    pub(super) identity: Identity,
    view: View,
    dropped_incarnations: HashSet<u64>,
    /// Incarnation of the seed followed last.
    seed_incarnation: u64,
}

impl SimSession {
    fn apply(&mut self, view: View) {
        assert!(view.is_valid(), "{view:?}");
        assert!(
            view.epoch > self.view.epoch,
            "epochs rise: {view:?} after {:?}",
            self.view
        );
        assert!(
            view.has_member(self.identity.node, self.identity.incarnation),
            "holds itself"
        );
        let returned = view
            .members
            .iter()
            .find(|m| self.dropped_incarnations.contains(&m.incarnation));
        assert_eq!(returned, None, "a dropped life came back");
        let former = self
            .view
            .members
            .iter()
            .filter(|m| !view.has_member(m.node, m.incarnation));
        self.dropped_incarnations
            .extend(former.map(|m| m.incarnation));
        self.seed_incarnation = view
            .find_member(SEED_NODE)
            .map_or(self.seed_incarnation, |seed| seed.incarnation);
        self.view = view;
    }
}

pub(super) struct SimCluster {
    now: Instant,
    pub(super) nodes: Vec<SimNode>,
    /// The follower at the other end, and whether messages vanish.
    links: BTreeMap<LinkId, (usize, bool)>,
    /// Nodes without RDMA between them.
    broken_rdma: BTreeSet<(usize, usize)>,
    steps: u32,
    last_unique: u64,
    /// All views, by the seed that they come from, and their epoch.
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
        let mut world = Self {
            now: Instant::now(),
            nodes,
            links: BTreeMap::new(),
            broken_rdma: BTreeSet::new(),
            steps: 0,
            last_unique: 0,
            views: HashMap::new(),
        };
        (0..count).for_each(|node| world.start(node));
        world
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
        self.nodes[node].machine = Some(match node {
            0 => Box::new(Seed::new(TIMING, address, incarnation, secret)),
            _ => Box::new(Follower::new(TIMING, address, incarnation)),
        });
        self.step(node, Input::Start);
    }

    pub(super) fn crash(&mut self, node: usize) {
        self.nodes[node] = SimNode::default();
        self.disconnect(node);
    }

    /// Starts the next process of a node, which continues its life if the kernel is in that of the snapshot.
    pub(super) fn restart(&mut self, node: usize) {
        let SimNode {
            session,
            snapshot,
            machine,
            ..
        } = std::mem::take(&mut self.nodes[node]);
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
        assert!(session.view.epoch <= snapshot.epoch(), "saved too late");
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

    fn close(&mut self, link: LinkId) {
        if let Some((end, _)) = self.links.remove(&link) {
            self.nodes[0].inputs.push_back(Input::Closed(link));
            self.nodes[end].inputs.push_back(Input::Closed(link));
        }
    }

    fn link_of(&self, node: usize) -> Option<LinkId> {
        self.links
            .iter()
            .find(|(_, &(end, _))| end == node)
            .map(|(&link, _)| link)
    }

    fn step(&mut self, node: usize, input: Input) {
        let mut actions = Vec::new();
        if let Some(machine) = &mut self.nodes[node].machine {
            machine.step(self.now, input, &mut actions);
            if needs_snapshot(&actions) {
                self.nodes[node].snapshot = machine.snapshot();
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
            Action::Leave => self.nodes[node].session = None,
            // It does not matter to anybody here.
            Action::PublishHosts(_) => {}
            Action::Fail(reason) => panic!("{reason}"),
            Action::Join(identity) => {
                let view = View {
                    epoch: 0,
                    members: Vec::new(),
                };
                let session = SimSession {
                    identity,
                    view,
                    dropped_incarnations: HashSet::new(),
                    seed_incarnation: 0,
                };
                self.nodes[node].session = Some(session);
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
                let same = self
                    .views
                    .entry((session.seed_incarnation, epoch))
                    .or_insert(view);
                assert_eq!(*same, session.view, "one epoch names one view");
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

    fn deliver_one(&mut self, node: usize) -> bool {
        if self.nodes[node].paused {
            return false;
        }
        let input = self.nodes[node].inputs.pop_front();
        input.map(|input| self.step(node, input)).is_some()
    }

    /// Time passes for all that run; followers without a connection dial.
    fn tick(&mut self) {
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
            let up = |node: &SimNode| node.machine.is_some() && !node.paused;
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

    /// Each kernel says of whom it gets no answer.
    fn report_suspects(&mut self) {
        for node in 0..self.nodes.len() {
            let silent: Vec<u32> = self.unreachable_from(node).collect();
            for other in silent {
                self.step(node, Input::Suspect(other));
            }
        }
    }

    /// The numbers of the members of whom a kernel gets no answer.
    fn unreachable_from(&self, node: usize) -> impl Iterator<Item = u32> + '_ {
        let session = self.nodes[node].session.as_ref();
        let members = session
            .into_iter()
            .flat_map(|session| &session.view.members);
        let silent = members.filter(move |member| {
            let other = u128::from(member.address.gid) as usize - 1;
            self.broken_rdma.contains(&(node, other)) || self.broken_rdma.contains(&(other, node))
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

    /// Lets time pass until the cluster is whole.
    pub(super) fn run_until_whole(&mut self, limit: Duration) {
        let deadline = self.now + limit;
        while self.now < deadline && !self.is_whole() {
            self.run(TICK);
        }
        self.assert_whole();
    }

    pub(super) fn inject(&mut self, fault: &Fault) {
        match *fault {
            Fault::Tick(steps) => (0..steps).for_each(|_| self.tick()),
            Fault::Deliver(node, count) => {
                (0..count)
                    .take_while(|_| self.deliver_one(node))
                    .for_each(drop);
            }
            Fault::Crash(node) => self.crash(node),
            Fault::Start(node) => self.start(node),
            Fault::Leave(node) => {
                self.step(node, Input::Leave);
                self.crash(node);
            }
            Fault::Restart(node) => self.restart(node),
            Fault::Interrupt(node, actions) => {
                self.nodes[node].actions_until_restart = Some(actions)
            }
            Fault::Pause(node) => self.nodes[node].paused = true,
            Fault::Resume(node) => self.nodes[node].paused = false,
            Fault::Disconnect(node) => {
                let link = self.link_of(node);
                link.into_iter().for_each(|link| self.close(link));
            }
            Fault::DropMessages(node) => {
                let link = self
                    .link_of(node)
                    .and_then(|link| self.links.get_mut(&link));
                link.into_iter().for_each(|link| link.1 = true);
            }
            Fault::Suspect(node, other) => self.step(node, Input::Suspect(other)),
            Fault::BreakRdma(node, other) if node == other => {
                let all = (0..self.nodes.len()).filter(|&other| other != node);
                self.broken_rdma.extend(all.map(|other| (node, other)));
            }
            Fault::BreakRdma(node, other) => drop(self.broken_rdma.insert((node, other))),
            Fault::RepairRdma => self.broken_rdma.clear(),
        }
    }

    pub(super) fn view(&self, node: usize) -> &View {
        &self.nodes[node]
            .session
            .as_ref()
            .expect("in the cluster")
            .view
    }

    /// The numbers of the members that `node` sees.
    pub(super) fn members(&self, node: usize) -> Vec<u32> {
        self.view(node).members.iter().map(|m| m.node).collect()
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

    /// Whether all nodes act on a view of all nodes.
    fn is_whole(&self) -> bool {
        let view = |node: &SimNode| node.session.as_ref().map(|session| session.view.clone());
        let first = view(&self.nodes[0]);
        let all = first.as_ref().map(|view| view.members.len()) == Some(self.nodes.len());
        all && self.nodes.iter().all(|node| view(node) == first)
    }

    /// All nodes act on the same view, which holds this life of each of them and nothing else.
    pub(super) fn assert_whole(&self) {
        let view = self.view(0);
        assert_eq!(view.members.len(), self.nodes.len());
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
