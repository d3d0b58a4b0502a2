// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State machine of the coordinator: admits nodes, marks members as unreachable, and creates all views.
//!
//! # Operation
//!
//! A *seed* is the coordinator and a member: its kernel is node 1, and its evidence counts. The coordinator of a *store*
//! has no kernel. All members, the one on its host included, connect to it.
//!
//! Each step may change members. At the end of such a step, the seed publishes one view. A reachable member receives
//! the view itself. An unreachable member receives [`View::isolated`], so that its local users fail at once with
//! `EHOSTDOWN` instead of at their deadlines.
//!
//! # Recovery
//!
//! A seed can continue in another process ([`Coordinator::resume`]), or with another incarnation from its saved state
//! ([`Coordinator::restore`]). Without either, the seed recovers the cluster from the members that reconnect. The first one
//! brings a secret and a view. Of two such views, the one with the higher epoch prevails.

mod admission;
mod expiry;
mod quarantine;
mod reachability;
mod recover;
mod resume;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use kite::Member;

use admission::PendingConn;
use quarantine::{Quarantine, Suspicions};
use reachability::{Lag, ProberCheck};

use super::{Action, Identity, Input, LinkId, MembershipMachine, Snapshot, Timing};
use crate::host::Host;
use crate::protocol::{
    next_seed_epoch, Hosts, Instance, KernelInfo, Message, Secret, View, SEED_NODE,
};

/// Time for which a seed without saved state waits for members of a former seed, before a new node may join.
const SURVIVOR_WAIT: Duration = Duration::from_secs(2);

/// State machine of the seed.
#[derive(Debug)]
pub struct Coordinator {
    timing: Timing,
    /// Time after which an unreachable member is evicted.
    forget_after: Option<Duration>,
    origin: Origin,
    /// Member of this host, if this is a seed.
    own: Option<Member>,
    /// Version of the messages between the kernels.
    wire_version: u32,
    /// Number that no earlier coordinator of the cluster had, with high probability.
    unique: u64,
    secret: Secret,
    epoch: u64,
    applied_epoch: u64,
    peers: BTreeMap<u32, Peer>,
    /// Node number of each admitted connection.
    links: HashMap<LinkId, u32>,
    /// Remote host of each connection.
    hosts: HashMap<LinkId, Host>,
    pending_conns: HashMap<LinkId, PendingConn>,
    /// Number of each node that was ever a member, by GID.
    node_numbers: HashMap<Ipv6Addr, u32>,
    /// Last incarnation of each node that has ended. It must not be admitted again.
    ended_incarnations: HashMap<u32, u64>,
    /// Highest epoch of a view that was inherited from a previous seed.
    inherited_epoch: u64,
    /// Time until which new nodes wait for members of a former seed.
    survivors_until: Option<Instant>,
    suspicions: Suspicions,
    /// Quarantine of nodes, by number.
    quarantines: HashMap<u32, Quarantine>,
    next_heartbeat: Option<Instant>,
    /// `true` if the members differ from the last view.
    is_changed: bool,
    /// Connections that receive a welcome at the end of the step.
    welcomes: Vec<(LinkId, u32)>,
    has_left: bool,
    /// Nodes whose rejection was logged. They connect again several times per second.
    rejected: BTreeSet<u32>,
}

/// Origin of the state of a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// A new cluster, or one whose state is lost.
    New,
    /// The saved state of an earlier incarnation.
    Restored,
    /// An earlier process of the same incarnation.
    Resumed,
}

#[derive(Debug)]
struct Peer {
    member: Member,
    /// Epoch of the view that the member's kernel has applied.
    applied_epoch: u64,
    link: Option<LinkId>,
    /// Time at which the member is checked over RDMA, unless it sends a message before.
    deadline: Instant,
    /// Check over RDMA, while the member is silent on TCP.
    check: Option<ProberCheck>,
    /// `true` after a check of this silence had the result that the kernel replies.
    is_known_silent: bool,
    /// View that the member's kernel has not applied yet.
    lag: Option<Lag>,
    /// Time at which a node with the same GID requested to join.
    challenged_at: Option<Instant>,
    /// Time at which this process found the member unreachable.
    unreachable_at: Option<Instant>,
    /// Taken over from a previous seed or process, not admitted by this one.
    is_inherited: bool,
}

impl Peer {
    fn new(member: Member, deadline: Instant, is_inherited: bool) -> Self {
        Self {
            member,
            applied_epoch: 0,
            link: None,
            deadline,
            check: None,
            is_known_silent: false,
            lag: None,
            challenged_at: None,
            unreachable_at: None,
            is_inherited,
        }
    }
}

impl Coordinator {
    /// Creates a seed with this kernel. `incarnation` is not 0.
    pub fn new(timing: Timing, kernel: KernelInfo, incarnation: u64, secret: Secret) -> Self {
        let node = SEED_NODE;
        Self {
            own: Some(kernel.new_member(Instance { node, incarnation })),
            ..Self::of_new_cluster(timing, kernel.wire_version, incarnation, secret)
        }
    }

    /// Creates the coordinator of a store without a cluster, for kernels with messages of this version. `unique` is a
    /// random number.
    pub fn of_new_cluster(timing: Timing, wire_version: u32, unique: u64, secret: Secret) -> Self {
        Self {
            timing,
            forget_after: None,
            origin: Origin::New,
            own: None,
            wire_version,
            unique,
            secret,
            epoch: 0,
            applied_epoch: 0,
            peers: BTreeMap::new(),
            links: HashMap::new(),
            hosts: HashMap::new(),
            pending_conns: HashMap::new(),
            node_numbers: HashMap::new(),
            ended_incarnations: HashMap::new(),
            inherited_epoch: 0,
            survivors_until: None,
            suspicions: Suspicions::default(),
            quarantines: HashMap::new(),
            next_heartbeat: None,
            is_changed: false,
            welcomes: Vec::new(),
            has_left: false,
            rejected: BTreeSet::new(),
        }
    }

    /// Returns the action by which the kernel of a seed joins.
    fn join_action(&self) -> Option<Action> {
        let own = self.own?;
        Some(Action::Join(Identity {
            node: own.node,
            incarnation: own.incarnation,
            secret: self.secret,
        }))
    }

    /// Returns `true` if the node is the seed itself.
    fn is_own(&self, node: u32) -> bool {
        self.own.is_some_and(|own| own.node == node)
    }

    fn view(&self) -> View {
        let peers = self.peers.values().map(|peer| peer.member);
        View {
            epoch: self.epoch,
            members: self.own.into_iter().chain(peers).collect(),
        }
    }

    /// Returns the action by which the kernel of a seed applies the current view.
    fn apply_action(&self) -> Option<Action> {
        let own = self.own?;
        Some(Action::ApplyView(self.view().for_node(own.node)))
    }

    /// Returns the epoch of the next view.
    fn next_epoch(&self) -> u64 {
        next_seed_epoch(self.epoch)
    }

    fn on_start(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for peer in self.peers.values_mut() {
            peer.deadline = now + self.timing.dead_after;
        }
        match self.origin {
            Origin::Resumed => actions.extend(self.apply_action()),
            Origin::New | Origin::Restored => {
                actions.extend(self.join_action());
                self.admit_own();
            }
        }
        let is_new = self.origin == Origin::New;
        self.survivors_until = is_new.then_some(now + SURVIVOR_WAIT);
    }

    fn on_message(
        &mut self,
        now: Instant,
        link: LinkId,
        message: Message,
        actions: &mut Vec<Action>,
    ) {
        if self.pending_conns.remove(&link).is_some() {
            return self.on_first_message(now, link, message, actions);
        }
        let Some(&node) = self.links.get(&link) else {
            return;
        };
        self.on_peer_heard(now, node, actions);
        match message {
            Message::Heartbeat { epoch, probe } => {
                self.on_applied(now, node, epoch);
                if probe {
                    actions.push(self.heartbeat_action(link, false));
                }
            }
            Message::Suspect(other) => self.on_suspect(now, node, other, actions),
            Message::Probed { instance, answered } => {
                self.on_probed(now, node, instance, Some(answered));
            }
            Message::Evict(instance) => self.on_evict(instance, actions),
            Message::Goodbye => {
                tracing::info!(node, "node leaves the cluster");
                self.remove_peer(node, None, actions);
            }
            _ => actions.push(Action::Close(link)),
        }
    }

    /// Sends the hosts of all members to all members, and publishes them on this node.
    fn send_hosts(&self, actions: &mut Vec<Action>) {
        let host = |(link, node): (&LinkId, &u32)| Some((*node, self.hosts.get(link)?.clone()));
        let hosts: Hosts = self.links.iter().filter_map(host).collect();
        let links = self.links.keys();
        actions.extend(links.map(|&link| Action::Send(link, Message::Hosts(hosts.clone()))));
        actions.extend(self.own.map(|_| Action::PublishHosts(hosts)));
    }

    /// Removes a peer whose incarnation has ended, and sends it a final message before its connection is closed.
    fn remove_peer(
        &mut self,
        node: u32,
        final_message: Option<Message>,
        actions: &mut Vec<Action>,
    ) {
        let Some(peer) = self.peers.remove(&node) else {
            return;
        };
        self.is_changed = true;
        self.suspicions.remove_node(node);
        self.ended_incarnations
            .insert(node, peer.member.incarnation);
        if let Some(link) = peer.link {
            self.links.remove(&link);
            actions.extend(final_message.map(|message| Action::Send(link, message)));
            actions.push(Action::Close(link));
        }
    }

    /// Requests a heartbeat of a node that does not respond to a kernel, and shortens its deadline.
    fn request_heartbeat(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let deadline = now + self.timing.probe_grace();
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.deadline = peer.deadline.min(deadline);
            let link = peer.link;
            actions.extend(link.map(|link| self.heartbeat_action(link, true)));
        }
    }

    /// Notifies all members that the seed leaves.
    fn on_leave(&mut self, actions: &mut Vec<Action>) {
        for &link in self.links.keys() {
            send_and_close(link, Message::Goodbye, actions);
        }
        // The incarnation has ended for the other nodes, so no later process may continue it.
        self.has_left = true;
    }

    fn on_tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_heartbeat.is_none_or(|at| at <= now) {
            self.next_heartbeat = Some(now + self.timing.heartbeat_interval);
            let waiting = self.pending_conns.iter().filter(|(_, c)| c.is_deferred());
            let links = self.links.keys().chain(waiting.map(|(link, _)| link));
            actions.extend(links.map(|&link| self.heartbeat_action(link, false)));
        }
        self.process_expired_conns(now, actions);
        self.start_checks(now, actions);
        self.conclude_checks(now);
        self.conclude_pair_checks(now);
        self.fence_lagging_peers(now);
        self.readmit_recovered_nodes(now);
        self.evict_expired_peers(now, actions);
    }

    fn heartbeat_action(&self, link: LinkId, probe: bool) -> Action {
        Action::Send(
            link,
            Message::Heartbeat {
                epoch: self.applied_epoch,
                probe,
            },
        )
    }

    fn on_closed(&mut self, now: Instant, link: LinkId) {
        self.pending_conns.remove(&link);
        self.hosts.remove(&link);
        let Some(node) = self.links.remove(&link) else {
            return;
        };
        let grace = now + self.timing.probe_grace();
        if let Some(peer) = self.peers.get_mut(&node) {
            let closed = peer.link.take_if(|current| *current == link);
            // The lease of a member of a store expires only after some silence.
            if closed.is_some() && self.own.is_none() {
                peer.deadline = peer.deadline.min(grace);
            }
        }
        self.expire_duplicates_of(now, node);
    }

    /// Publishes a view if members have changed, and sends the welcomes of the step.
    fn finish_step(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let welcomes = std::mem::take(&mut self.welcomes);
        if std::mem::take(&mut self.is_changed) && !self.has_left {
            self.epoch = self.next_epoch();
            let view = self.view();
            actions.extend(self.apply_action());
            for (&node, peer) in &mut self.peers {
                peer.lag.get_or_insert(Lag::new(now, view.epoch));
                let link = peer.link.filter(|&link| !welcomes.contains(&(link, node)));
                let message = || Message::View(view.for_node(node));
                actions.extend(link.map(|link| Action::Send(link, message())));
            }
        }
        for &(link, node) in &welcomes {
            let (secret, view) = (self.secret, self.view().for_node(node));
            actions.push(Action::Send(link, Message::Welcome { node, secret, view }));
        }
        if !welcomes.is_empty() {
            self.send_hosts(actions);
        }
    }
}

impl MembershipMachine for Coordinator {
    fn step(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Start => self.on_start(now, actions),
            Input::Opened(link, host) => {
                self.hosts.insert(link, host);
                let deadline = now + self.timing.dead_after;
                self.pending_conns.insert(link, PendingConn::new(deadline));
            }
            Input::Message(link, message) => self.on_message(now, link, message, actions),
            Input::Closed(link) => self.on_closed(now, link),
            Input::Applied(epoch) => self.applied_epoch = epoch,
            Input::Suspect(node) => self.on_suspect(now, SEED_NODE, node, actions),
            Input::Probed(instance, result) => {
                self.on_probed(now, SEED_NODE, instance, result.to_evidence());
            }
            Input::Tick => self.on_tick(now, actions),
            Input::Leave => self.on_leave(actions),
            Input::Evict(instance) => self.on_evict(instance, actions),
        }
        self.finish_step(now, actions);
    }

    fn snapshot(&self) -> Option<Snapshot> {
        (!self.has_left).then(|| Snapshot::Seed(self.to_state()))
    }
}

/// Sends a final message and closes the connection.
fn send_and_close(link: LinkId, message: Message, actions: &mut Vec<Action>) {
    actions.push(Action::Send(link, message));
    actions.push(Action::Close(link));
}
