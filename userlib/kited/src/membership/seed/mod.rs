// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State machine of the seed: admits members, marks silent members as unreachable, and creates all views.
//!
//! # Recovery
//!
//! A seed can continue in another process ([`Seed::resume`]), or in another incarnation from its state file
//! ([`Seed::restart`]). A seed without state recovers the cluster from the members that reconnect. The first one
//! brings a secret and a view. Of two such views, the one with the higher epoch prevails. New nodes are admitted
//! later ([`SURVIVOR_WAIT_MAX`]), so that members of an existing cluster come first.

mod admission;
mod quarantine;
mod reachability;
mod recover;
mod resume;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use kite::{FabricAddress, Member};

use quarantine::{Quarantine, Suspicions};

use super::{Action, Identity, Input, LinkId, MembershipMachine, PauseDetector, Snapshot, Timing};
use crate::host::Host;
use crate::protocol::{Hosts, Message, Secret, View, SEED_NODE};

/// Maximum time for which a seed without state defers new nodes: four heartbeat intervals, at most this time.
const SURVIVOR_WAIT_MAX: Duration = Duration::from_secs(2);

/// State machine of the seed.
#[derive(Debug)]
pub struct Seed {
    timing: Timing,
    self_member: Member,
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
    suspicions: Suspicions,
    /// Quarantine of nodes without RDMA, by number.
    quarantines: HashMap<u32, Quarantine>,
    /// This is another incarnation than that of the snapshot, and has not joined yet.
    is_restarted: bool,
    /// GIDs of members that new nodes with the same GID challenge, each with the end of the time for its reply.
    challenged: HashMap<Ipv6Addr, Instant>,
    /// Time before which new nodes are deferred.
    newcomers_after: Option<Instant>,
    next_heartbeat: Option<Instant>,
    pauses: PauseDetector,
}

/// Connection that belongs to no member yet.
#[derive(Debug)]
struct PendingConn {
    /// Time at which the connection is closed, or its deferred hello is processed.
    deadline: Instant,
    /// Hello that is deferred: in quarantine, before [`Seed::newcomers_after`], or while the node that has the GID is
    /// probed.
    hello: Option<Message>,
}

#[derive(Debug)]
struct Peer {
    member: Member,
    /// Epoch of the view that the member's kernel has applied.
    applied_epoch: u64,
    /// Time since which the kernel has not applied the current view.
    behind_since: Option<Instant>,
    link: Option<LinkId>,
    /// Time at which the member is silent, unless it sends a message before.
    deadline: Instant,
    /// End of the check by RDMA of a silent member.
    check_ends: Option<Instant>,
    /// Taken over from a previous seed or process, not admitted by this one.
    is_inherited: bool,
}

impl Peer {
    /// Creates a peer without a connection.
    fn new(member: Member, deadline: Instant, is_inherited: bool) -> Self {
        Self {
            member,
            applied_epoch: 0,
            behind_since: None,
            link: None,
            deadline,
            check_ends: None,
            is_inherited,
        }
    }
}

impl Seed {
    /// Creates a seed whose kernel has this address. `incarnation` is not 0.
    pub fn new(timing: Timing, address: FabricAddress, incarnation: u64, secret: Secret) -> Self {
        Self {
            timing,
            self_member: Member {
                node: SEED_NODE,
                incarnation,
                address,
                admitted_epoch: 0,
                unreachable_since: 0,
            },
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
            suspicions: Suspicions::default(),
            quarantines: HashMap::new(),
            is_restarted: false,
            challenged: HashMap::new(),
            newcomers_after: None,
            next_heartbeat: None,
            pauses: PauseDetector::default(),
        }
    }

    fn join_action(&self) -> Action {
        let Member {
            node, incarnation, ..
        } = self.self_member;
        Action::Join(Identity {
            node,
            incarnation,
            secret: self.secret,
        })
    }

    fn view(&self) -> View {
        let peers = self.peers.values().map(|peer| peer.member);
        View {
            epoch: self.epoch,
            members: std::iter::once(self.self_member).chain(peers).collect(),
        }
    }

    /// Returns the epoch of the next view, above all known epochs.
    fn next_epoch(&self) -> u64 {
        View::next_seed_epoch(self.epoch)
    }

    /// Creates the next view and sends it to all reachable members.
    fn publish_view(&mut self, actions: &mut Vec<Action>) {
        self.epoch = self.next_epoch();
        let view = self.view();
        actions.push(Action::ApplyView(self.own_view()));
        let reachable = self.peers.values().filter(|p| p.member.is_reachable());
        let links = reachable.filter_map(|peer| peer.link);
        actions.extend(links.map(|link| Action::Send(link, Message::View(view.clone()))));
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
        let Some((node, peer)) = self
            .links
            .get(&link)
            .and_then(|node| Some((*node, self.peers.get_mut(node)?)))
        else {
            return;
        };
        peer.deadline = now + self.timing.dead_after;
        peer.check_ends = None;
        self.reject_challengers(node, actions);
        match message {
            Message::Heartbeat { epoch, probe } => {
                self.on_applied(node, epoch);
                if probe {
                    actions.push(self.heartbeat_action(link, false));
                }
            }
            Message::Alive(other, incarnation) => self.on_alive(now, other, incarnation),
            Message::Suspect(other) => self.on_suspect(now, node, other, actions),
            Message::Goodbye => {
                tracing::info!(node, "node leaves the cluster");
                self.remove_peer(node, None, actions);
                self.publish_view(actions);
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
        actions.push(Action::PublishHosts(hosts));
    }

    /// Removes a peer, and sends it a final message before its connection is closed. The caller publishes the view.
    fn remove_peer(
        &mut self,
        node: u32,
        final_message: Option<Message>,
        actions: &mut Vec<Action>,
    ) {
        let Some(peer) = self.peers.remove(&node) else {
            return;
        };
        self.suspicions.remove_node(node);
        self.ended_incarnations
            .insert(node, peer.member.incarnation);
        if let Some(link) = peer.link {
            self.links.remove(&link);
            actions.extend(final_message.map(|message| Action::Send(link, message)));
            actions.push(Action::Close(link));
        }
    }

    /// Probes a node that does not respond to a kernel, and shortens its deadline.
    fn probe(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let probe = Message::Heartbeat {
            epoch: self.applied_epoch,
            probe: true,
        };
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.deadline = peer.deadline.min(now + self.timing.probe_grace());
            actions.extend(peer.link.map(|link| Action::Send(link, probe)));
        }
    }

    /// Notifies all members that the seed leaves.
    fn send_goodbyes(&self, actions: &mut Vec<Action>) {
        for &link in self.links.keys() {
            send_and_close(link, Message::Goodbye, actions);
        }
    }

    fn on_tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let pause = self.pauses.tick(now, &self.timing);
        self.delay_deadlines(pause);
        if self.next_heartbeat.is_none_or(|at| at <= now) {
            self.next_heartbeat = Some(now + self.timing.heartbeat_interval);
            let waiting = self.pending_conns.iter().filter(|(_, s)| s.hello.is_some());
            let links = self.links.keys().chain(waiting.map(|(link, _)| link));
            actions.extend(links.map(|&link| self.heartbeat_action(link, false)));
        }
        let expired = self.pending_conns.iter().filter(|(_, s)| s.deadline <= now);
        let expired: Vec<LinkId> = expired.map(|(&link, _)| link).collect();
        for link in expired {
            let pending = self.pending_conns.get_mut(&link);
            match pending.and_then(|pending| pending.hello.take()) {
                Some(hello) => self.on_message(now, link, hello, actions),
                None => {
                    self.pending_conns.remove(&link);
                    actions.push(Action::Close(link));
                }
            }
        }
        self.check_members(now, actions);
    }

    /// Delays the deadlines of others by the length of a pause of this process.
    fn delay_deadlines(&mut self, pause: Duration) {
        for peer in self.peers.values_mut() {
            peer.deadline += pause;
            peer.check_ends = peer.check_ends.map(|ends| ends + pause);
            peer.behind_since = peer.behind_since.map(|since| since + pause);
        }
        for pending in self.pending_conns.values_mut() {
            pending.deadline += pause;
        }
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

    fn on_closed(&mut self, link: LinkId) {
        self.pending_conns.remove(&link);
        self.hosts.remove(&link);
        if let Some(peer) = self
            .links
            .remove(&link)
            .and_then(|node| self.peers.get_mut(&node))
        {
            peer.link.take_if(|current| *current == link);
        }
    }
}

impl MembershipMachine for Seed {
    fn step(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Start if self.epoch != 0 => self.start_with_state(now, actions),
            Input::Start => {
                let wait = (4 * self.timing.heartbeat_interval).min(SURVIVOR_WAIT_MAX);
                self.newcomers_after = Some(now + wait);
                actions.push(self.join_action());
                self.publish_view(actions);
            }
            Input::Opened(link, host) => {
                self.hosts.insert(link, host);
                let (until, hello) = (now + self.timing.dead_after, None);
                self.pending_conns.insert(
                    link,
                    PendingConn {
                        deadline: until,
                        hello,
                    },
                );
            }
            Input::Message(link, message) => self.on_message(now, link, message, actions),
            Input::Closed(link) => self.on_closed(link),
            Input::Applied(epoch) => self.applied_epoch = epoch,
            Input::Suspect(node) => self.on_suspect(now, SEED_NODE, node, actions),
            Input::Alive(node, incarnation) => self.on_alive(now, node, incarnation),
            Input::Tick => self.on_tick(now, actions),
            Input::Leave => self.send_goodbyes(actions),
        }
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(Snapshot::Seed(self.to_snapshot()))
    }
}

/// Sends a final message and closes the connection.
fn send_and_close(link: LinkId, message: Message, actions: &mut Vec<Action>) {
    actions.push(Action::Send(link, message));
    actions.push(Action::Close(link));
}
