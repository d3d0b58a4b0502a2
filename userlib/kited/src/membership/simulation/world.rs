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
    change_snapshot, Action, Follower, Identity, Input, Link, Machine, Seed, Snapshot, Timing,
};
use crate::protocol::{Message, View, SEED};
use kite::Address;

const TIMING: Timing = Timing {
    heartbeat: Duration::from_millis(500),
    dead: Duration::from_millis(3000),
};
const STEP: Duration = Duration::from_millis(250);
/// Steps between two complaints of a kernel of the same node.
const COMPLAINT: u32 = 4;

/// What can happen; numbers are indices of nodes, of which 0 is the seed.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    Pass(u8),
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
    Cut(usize),
    Mute(usize),
    Suspect(usize, u32),
    /// Breaks the RDMA between two nodes; that of one to itself is that to all.
    Break(usize, usize),
    /// Repairs all RDMA.
    Repair,
}

#[derive(Default)]
pub(super) struct Node {
    machine: Option<Box<dyn Machine>>,
    pub(super) paused: bool,
    inbox: VecDeque<Input>,
    pub(super) session: Option<Session>,
    snapshot: Option<Snapshot>,
    /// Actions until it is restarted.
    interrupt: Option<u8>,
    /// Epoch of the view that the kernel acted on when the process began to continue its life, else 0.
    resumed: u64,
}

/// What a kernel knows between joining and leaving.
pub(super) struct Session {
    pub(super) identity: Identity,
    view: View,
    dropped: HashSet<u64>,
    /// Incarnation of the seed followed last.
    seed: u64,
}

impl Session {
    fn apply(&mut self, view: View) {
        assert!(view.is_valid(), "{view:?}");
        assert!(
            view.epoch > self.view.epoch,
            "epochs rise: {view:?} after {:?}",
            self.view
        );
        assert!(
            view.has(self.identity.node, self.identity.incarnation),
            "holds itself"
        );
        let back = view
            .members
            .iter()
            .find(|m| self.dropped.contains(&m.incarnation));
        assert_eq!(back, None, "a dropped life came back");
        let former = self
            .view
            .members
            .iter()
            .filter(|m| !view.has(m.node, m.incarnation));
        self.dropped.extend(former.map(|m| m.incarnation));
        self.seed = view.member(SEED).map_or(self.seed, |seed| seed.incarnation);
        self.view = view;
    }
}

pub(super) struct World {
    now: Instant,
    pub(super) nodes: Vec<Node>,
    /// The follower at the other end, and whether messages vanish.
    links: BTreeMap<Link, (usize, bool)>,
    /// Nodes without RDMA between them.
    broken: BTreeSet<(usize, usize)>,
    steps: u32,
    counter: u64,
    /// All views, by the seed that they come from, and their epoch.
    views: HashMap<(u64, u64), View>,
}

fn address(node: usize) -> Address {
    Address {
        gid: Ipv6Addr::from(node as u128 + 1),
        qpn: 1,
        lid: 0,
        link_layer: 2,
        mtu: 4096,
    }
}

impl World {
    pub(super) fn new(count: usize) -> Self {
        let nodes = (0..count).map(|_| Node::default()).collect();
        let mut world = Self {
            now: Instant::now(),
            nodes,
            links: BTreeMap::new(),
            broken: BTreeSet::new(),
            steps: 0,
            counter: 0,
            views: HashMap::new(),
        };
        (0..count).for_each(|node| world.start(node));
        world
    }

    fn unique(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    pub(super) fn start(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() {
            return;
        }
        let life = self.unique() << 32;
        let address = address(node);
        let secret = [life.to_be_bytes()[3]; 16];
        self.nodes[node].machine = Some(match node {
            0 => Box::new(Seed::new(TIMING, address, life, secret)),
            _ => Box::new(Follower::new(TIMING, address, life)),
        });
        self.step(node, Input::Start);
    }

    pub(super) fn crash(&mut self, node: usize) {
        self.nodes[node] = Node::default();
        self.disconnect(node);
    }

    /// Starts the next process of a node, which continues its life if the kernel is in that of the snapshot.
    pub(super) fn restart(&mut self, node: usize) {
        let Node {
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
        let machine: Box<dyn Machine> = match snapshot.clone() {
            Snapshot::Seed(seed) => Box::new(Seed::resume(TIMING, seed)),
            Snapshot::Follower(past) => Box::new(Follower::resume(TIMING, address(node), past)),
        };
        self.nodes[node] = Node {
            machine: Some(machine),
            resumed: session.view.epoch,
            session: Some(session),
            snapshot: Some(snapshot),
            ..Node::default()
        };
        self.step(node, Input::Start);
    }

    fn disconnect(&mut self, node: usize) {
        let ended: Vec<Link> = self
            .links
            .iter()
            .filter(|(_, &(end, _))| node == 0 || end == node)
            .map(|(&link, _)| link)
            .collect();
        ended.into_iter().for_each(|link| self.close(link));
        self.nodes[node].inbox.clear();
    }

    fn close(&mut self, link: Link) {
        if let Some((end, _)) = self.links.remove(&link) {
            self.nodes[0].inbox.push_back(Input::Closed(link));
            self.nodes[end].inbox.push_back(Input::Closed(link));
        }
    }

    fn link_of(&self, node: usize) -> Option<Link> {
        self.links
            .iter()
            .find(|(_, &(end, _))| end == node)
            .map(|(&link, _)| link)
    }

    fn step(&mut self, node: usize, input: Input) {
        let mut actions = Vec::new();
        if let Some(machine) = &mut self.nodes[node].machine {
            machine.step(self.now, input, &mut actions);
            if change_snapshot(&actions) {
                self.nodes[node].snapshot = machine.snapshot();
            }
        }
        for action in actions {
            let left = self.nodes[node].interrupt;
            if left == Some(0) {
                return self.restart(node);
            }
            self.nodes[node].interrupt = left.map(|left| left - 1);
            self.act(node, action);
        }
    }

    fn act(&mut self, node: usize, action: Action) {
        match action {
            Action::Send(link, message) => self.send(node, link, message),
            Action::Close(link) => self.close(link),
            Action::Leave => self.nodes[node].session = None,
            // It does not matter to anybody here.
            Action::Tell(_) => {}
            Action::Fail(reason) => panic!("{reason}"),
            Action::Join(identity) => {
                let view = View {
                    epoch: 0,
                    members: Vec::new(),
                };
                let session = Session {
                    identity,
                    view,
                    dropped: HashSet::new(),
                    seed: 0,
                };
                self.nodes[node].session = Some(session);
                self.nodes[node].resumed = 0;
            }
            Action::Apply(view) => {
                let epoch = view.epoch;
                self.nodes[node].inbox.push_back(Input::Applied(epoch));
                if epoch == self.nodes[node].resumed {
                    return;
                }
                let session = self.nodes[node].session.as_mut().expect("joined before");
                session.apply(view.clone());
                let same = self.views.entry((session.seed, epoch)).or_insert(view);
                assert_eq!(*same, session.view, "one epoch names one view");
            }
        }
    }

    fn send(&mut self, from: usize, link: Link, message: Message) {
        if let Some(&(end, false)) = self.links.get(&link) {
            let to = if from == 0 { end } else { 0 };
            self.nodes[to]
                .inbox
                .push_back(Input::Message(link, message));
        }
    }

    fn deliver(&mut self, node: usize) -> bool {
        if self.nodes[node].paused {
            return false;
        }
        let input = self.nodes[node].inbox.pop_front();
        input.map(|input| self.step(node, input)).is_some()
    }

    /// Time passes for all that run; followers without a connection dial.
    fn pass(&mut self) {
        self.now += STEP;
        self.steps += 1;
        if self.steps % COMPLAINT == 0 {
            self.complain();
        }
        for node in 0..self.nodes.len() {
            if !self.nodes[node].paused {
                self.step(node, Input::Tick);
            }
        }
        for node in 1..self.nodes.len() {
            let up = |node: &Node| node.machine.is_some() && !node.paused;
            if up(&self.nodes[0]) && up(&self.nodes[node]) && self.link_of(node).is_none() {
                let link = self.unique();
                self.links.insert(link, (node, false));
                let host = Host {
                    ip: [127, 0, 0, 1].into(),
                    name: None,
                };
                for end in [0, node] {
                    let opened = Input::Opened(link, host.clone());
                    self.nodes[end].inbox.push_back(opened);
                }
            }
        }
    }

    /// Each kernel says of whom it gets no answer.
    fn complain(&mut self) {
        for node in 0..self.nodes.len() {
            let silent: Vec<u32> = self.silent_to(node).collect();
            for other in silent {
                self.step(node, Input::Suspect(other));
            }
        }
    }

    /// The numbers of the members of whom a kernel gets no answer.
    fn silent_to(&self, node: usize) -> impl Iterator<Item = u32> + '_ {
        let session = self.nodes[node].session.as_ref();
        let members = session
            .into_iter()
            .flat_map(|session| &session.view.members);
        let silent = members.filter(move |member| {
            let other = u128::from(member.address.gid) as usize - 1;
            self.broken.contains(&(node, other)) || self.broken.contains(&(other, node))
        });
        silent.map(|member| member.node)
    }

    pub(super) fn settle(&mut self) {
        while (0..self.nodes.len()).any(|node| self.deliver(node)) {}
    }

    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.pass();
            self.settle();
        }
    }

    /// Lets time pass until the cluster is whole.
    pub(super) fn run_until_whole(&mut self, limit: Duration) {
        let end = self.now + limit;
        while self.now < end && !self.is_whole() {
            self.run(STEP);
        }
        self.assert_whole();
    }

    pub(super) fn fault(&mut self, fault: &Fault) {
        match *fault {
            Fault::Pass(steps) => (0..steps).for_each(|_| self.pass()),
            Fault::Deliver(node, count) => {
                (0..count).take_while(|_| self.deliver(node)).for_each(drop);
            }
            Fault::Crash(node) => self.crash(node),
            Fault::Start(node) => self.start(node),
            Fault::Leave(node) => {
                self.step(node, Input::Leave);
                self.crash(node);
            }
            Fault::Restart(node) => self.restart(node),
            Fault::Interrupt(node, actions) => self.nodes[node].interrupt = Some(actions),
            Fault::Pause(node) => self.nodes[node].paused = true,
            Fault::Resume(node) => self.nodes[node].paused = false,
            Fault::Cut(node) => {
                let link = self.link_of(node);
                link.into_iter().for_each(|link| self.close(link));
            }
            Fault::Mute(node) => {
                let link = self
                    .link_of(node)
                    .and_then(|link| self.links.get_mut(&link));
                link.into_iter().for_each(|link| link.1 = true);
            }
            Fault::Suspect(node, other) => self.step(node, Input::Suspect(other)),
            Fault::Break(node, other) if node == other => {
                let all = (0..self.nodes.len()).filter(|&other| other != node);
                self.broken.extend(all.map(|other| (node, other)));
            }
            Fault::Break(node, other) => drop(self.broken.insert((node, other))),
            Fault::Repair => self.broken.clear(),
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
        let view = |node: &Node| node.session.as_ref().map(|session| session.view.clone());
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
            assert!(view.has(session.identity.node, session.identity.incarnation));
            assert_eq!(
                session.identity.secret,
                self.nodes[0].session.as_ref().unwrap().identity.secret
            );
        }
    }
}
