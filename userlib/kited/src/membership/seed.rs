// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The seed: admits members, removes the dead, and makes every view while it lives.
//!
//! A seed whose process ended may go on in another one ([`Seed::resume`]). Else it remembers nothing. It learns the cluster from the members that come back to
//! it: the first brings a secret and a view, whose other members are taken on trust for as long as
//! a silent member would be. Of two such views the one with the higher epoch is right.

mod broken;
mod inherit;
mod resume;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::Ipv6Addr;
use std::time::Instant;

use kite::{FabricAddress, Member, MEMBERS_MAX, NODE_ID_MAX};

use broken::{Quarantine, Suspicions};

use super::{Action, Identity, Input, LinkId, MembershipMachine, Snapshot, Timing};
use crate::host::Host;
use crate::protocol::{Hosts, Message, PriorMembership, Secret, View, SEED_NODE};

/// The machine of the seed.
#[derive(Debug)]
pub struct Seed {
    timing: Timing,
    self_member: Member,
    secret: Secret,
    epoch: u64,
    applied_epoch: u64,
    peers: BTreeMap<u32, Peer>,
    /// Connections of peers.
    links: HashMap<LinkId, u32>,
    /// Hosts at the other ends of connections.
    hosts: HashMap<LinkId, Host>,
    pending_conns: HashMap<LinkId, PendingConn>,
    /// The number of each node that was ever a member, by its GID.
    node_numbers: HashMap<Ipv6Addr, u32>,
    /// The last life of each node that ended after it was inherited, and must not be so again.
    ended_incarnations: HashMap<u32, u64>,
    /// The highest epoch that members of a former seed brought.
    inherited_epoch: u64,
    suspicions: Suspicions,
    /// Who was put out, by number.
    quarantines: HashMap<u32, Quarantine>,
    next_heartbeat: Option<Instant>,
}

/// A connection that is nobody's yet.
#[derive(Debug)]
struct PendingConn {
    /// When it is given up, or its hello is heard.
    deadline: Instant,
    /// What it said, if it has to wait.
    hello: Option<Message>,
}

#[derive(Debug)]
struct Peer {
    member: Member,
    /// The epoch of the first view with it.
    admitted_epoch: u64,
    /// The epoch that its kernel acts on.
    applied_epoch: u64,
    link: Option<LinkId>,
    /// When it is dead, unless it is heard of.
    deadline: Instant,
    /// Taken over from a former seed, not admitted by this one.
    is_inherited: bool,
}

impl Seed {
    /// A seed whose kernel is reached at `address`, in the life `incarnation`, which is not 0.
    pub fn new(timing: Timing, address: FabricAddress, incarnation: u64, secret: Secret) -> Self {
        Self {
            timing,
            self_member: Member {
                node: SEED_NODE,
                incarnation,
                address,
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
            next_heartbeat: None,
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

    /// An odd epoch above all that were heard of.
    fn next_epoch(&self) -> u64 {
        (self.epoch + 1) | 1
    }

    /// Makes the next view.
    fn publish_view(&mut self, actions: &mut Vec<Action>) {
        self.epoch = self.next_epoch();
        let view = self.view();
        actions.push(Action::ApplyView(view.clone()));
        let links = self.peers.values().filter_map(|peer| peer.link);
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
        let Some((&node, peer)) = self
            .links
            .get(&link)
            .and_then(|node| Some((node, self.peers.get_mut(node)?)))
        else {
            return;
        };
        peer.deadline = now + self.timing.dead_after;
        match message {
            Message::Heartbeat { epoch, probe } => {
                peer.applied_epoch = epoch;
                if probe {
                    actions.push(self.heartbeat_action(link, false));
                }
            }
            Message::Suspect(other) => self.on_suspect(now, node, other, actions),
            Message::Goodbye => {
                tracing::info!(node, "leaves");
                self.remove_peer(node, None, actions);
                self.publish_view(actions);
            }
            _ => actions.push(Action::Close(link)),
        }
    }

    /// Hears a hello, unless who says it has to wait.
    fn on_first_message(
        &mut self,
        now: Instant,
        link: LinkId,
        message: Message,
        actions: &mut Vec<Action>,
    ) {
        let Message::Hello {
            incarnation: incarnation @ 1..,
            address,
            prior,
        } = message
        else {
            return actions.push(Action::Close(link));
        };
        if let Some(until) = self.quarantined_until(now, &address, prior.is_some()) {
            tracing::info!(%address, "waits {:?} to be let in", until - now);
            let hello = Some(Message::Hello {
                incarnation,
                address,
                prior,
            });
            self.pending_conns.insert(
                link,
                PendingConn {
                    deadline: until,
                    hello,
                },
            );
            return;
        }
        self.on_hello(now, link, (incarnation, address), prior, actions);
    }

    fn on_hello(
        &mut self,
        now: Instant,
        link: LinkId,
        (incarnation, address): (u64, FabricAddress),
        prior: Option<PriorMembership>,
        actions: &mut Vec<Action>,
    ) {
        if let Some(prior) = prior {
            return self.readmit(now, link, incarnation, prior, actions);
        }
        match self.assign_number(&address) {
            Ok(node) => {
                tracing::info!(node, %address, "joins");
                if self
                    .peers
                    .get(&node)
                    .is_some_and(|p| p.member.incarnation != incarnation)
                {
                    self.remove_peer(node, Some(Message::Evicted), actions);
                }
                let member = Member {
                    node,
                    incarnation,
                    address,
                };
                self.insert_peer(now, member, false);
                self.publish_view(actions);
                self.send_welcome(now, link, node, actions);
            }
            Err(reason) => send_and_close(link, Message::Rejected(reason.into()), actions),
        }
    }

    /// The number of the node with this address: its former one, or the smallest never used.
    fn assign_number(&self, address: &FabricAddress) -> Result<u32, &'static str> {
        if address.gid == self.self_member.address.gid {
            return Err("this RNIC has the GID of the seed's");
        }
        let former = self.node_numbers.get(&address.gid).copied();
        let replaces = former.is_some_and(|node| self.peers.contains_key(&node));
        let has_capacity = replaces || self.peers.len() + 1 < MEMBERS_MAX;
        former
            .or_else(|| self.unused_number())
            .filter(|_| has_capacity)
            .ok_or("the cluster is full")
    }

    fn unused_number(&self) -> Option<u32> {
        let used: HashSet<u32> = self.node_numbers.values().copied().collect();
        (SEED_NODE + 1..=NODE_ID_MAX).find(|node| !used.contains(node))
    }

    fn insert_peer(&mut self, now: Instant, member: Member, is_inherited: bool) {
        self.node_numbers.insert(member.address.gid, member.node);
        let deadline = now + self.timing.dead_after;
        let admitted_epoch = self.next_epoch();
        let link = self
            .peers
            .remove(&member.node)
            .and_then(|former| former.link);
        self.peers.insert(
            member.node,
            Peer {
                member,
                admitted_epoch,
                applied_epoch: 0,
                link,
                deadline,
                is_inherited,
            },
        );
    }

    /// Makes `link` the connection of a peer, in place of any it had.
    fn send_welcome(&mut self, now: Instant, link: LinkId, node: u32, actions: &mut Vec<Action>) {
        let view = self.view();
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        peer.deadline = now + self.timing.dead_after;
        if let Some(former) = peer.link.replace(link) {
            self.links.remove(&former);
            actions.push(Action::Close(former));
        }
        self.links.insert(link, node);
        let secret = self.secret;
        actions.push(Action::Send(link, Message::Welcome { node, secret, view }));
        self.send_hosts(actions);
    }

    /// Sends the hosts of all members to all members.
    fn send_hosts(&self, actions: &mut Vec<Action>) {
        let host = |(link, node): (&LinkId, &u32)| Some((*node, self.hosts.get(link)?.clone()));
        let hosts: Hosts = self.links.iter().filter_map(host).collect();
        let links = self.links.keys();
        actions.extend(links.map(|&link| Action::Send(link, Message::Hosts(hosts.clone()))));
        actions.push(Action::PublishHosts(hosts));
    }

    /// Ends the life of a peer, with a last word to it. The caller publishes.
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
        if peer.is_inherited {
            self.ended_incarnations
                .insert(node, peer.member.incarnation);
        }
        if let Some(link) = peer.link {
            self.links.remove(&link);
            actions.extend(final_message.map(|message| Action::Send(link, message)));
            actions.push(Action::Close(link));
        }
    }

    /// A node that a kernel gets no answer from is asked at once, and has less time to answer.
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

    /// Tells all members that they have to go on without the seed.
    fn send_goodbyes(&self, actions: &mut Vec<Action>) {
        for &link in self.links.keys() {
            send_and_close(link, Message::Goodbye, actions);
        }
    }

    fn on_tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
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
            match pending.and_then(|stranger| stranger.hello.take()) {
                Some(hello) => self.on_message(now, link, hello, actions),
                None => {
                    self.pending_conns.remove(&link);
                    actions.push(Action::Close(link));
                }
            }
        }
        let silent = self.peers.values().filter(|peer| peer.deadline <= now);
        let silent: Vec<u32> = silent.map(|peer| peer.member.node).collect();
        for &node in &silent {
            tracing::warn!(node, "is silent and thus dead");
            self.remove_peer(node, Some(Message::Evicted), actions);
        }
        if !silent.is_empty() {
            self.publish_view(actions);
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
            Input::Start if self.epoch != 0 => self.start_resumed(now, actions),
            Input::Start => {
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
            Input::Tick => self.on_tick(now, actions),
            Input::Leave => self.send_goodbyes(actions),
        }
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(Snapshot::Seed(self.to_snapshot()))
    }
}

/// Says a last word to a connection.
fn send_and_close(link: LinkId, message: Message, actions: &mut Vec<Action>) {
    actions.push(Action::Send(link, message));
    actions.push(Action::Close(link));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const TIMING: Timing = Timing {
        heartbeat_interval: Duration::from_millis(500),
        dead_after: Duration::from_millis(3000),
    };
    const SECRET: Secret = [1; 16];

    fn member(node: u32, incarnation: u64) -> Member {
        let address = FabricAddress {
            gid: Ipv6Addr::from(u128::from(node)),
            qpn: 1,
            lid: 0,
            link_layer: 2,
            mtu: 4096,
        };
        Member {
            node,
            incarnation,
            address,
        }
    }

    /// Whether the seed lets in the node that says hello on this new connection.
    fn admits(
        seed: &mut Seed,
        link: LinkId,
        member: Member,
        prior: Option<PriorMembership>,
    ) -> bool {
        let (now, mut actions) = (Instant::now(), Vec::new());
        let hello = Message::Hello {
            incarnation: member.incarnation,
            address: member.address,
            prior,
        };
        let host = Host {
            ip: [127, 0, 0, 1].into(),
            name: None,
        };
        seed.step(now, Input::Opened(link, host), &mut actions);
        seed.step(now, Input::Message(link, hello), &mut actions);
        assert!(seed.view().members.len() <= MEMBERS_MAX);
        let welcome = |a: &Action| matches!(a, Action::Send(_, Message::Welcome { .. }));
        actions.iter().any(welcome)
    }

    /// A cluster with as many members as there may be, of which one is connected: 2, by link 2.
    fn full_cluster() -> Seed {
        let mut seed = Seed::new(TIMING, member(SEED_NODE, 1).address, 1, SECRET);
        let view = View {
            epoch: 2,
            members: (2..=MEMBERS_MAX as u32)
                .map(|node| member(node, 1))
                .collect(),
        };
        let prior = PriorMembership {
            node: 2,
            secret: SECRET,
            seed_incarnation: 2,
            view,
        };
        assert!(admits(&mut seed, 2, member(2, 1), Some(prior)));
        assert_eq!(seed.view().members.len(), MEMBERS_MAX);
        seed
    }

    #[test]
    fn node_returning_to_a_full_cluster_is_rejected() {
        let mut seed = full_cluster();
        seed.step(
            Instant::now(),
            Input::Message(2, Message::Goodbye),
            &mut Vec::new(),
        );
        assert!(admits(&mut seed, 3, member(5000, 1), None), "there is room");
        assert!(!admits(&mut seed, 4, member(2, 2), None));
        assert!(!admits(&mut seed, 5, member(5001, 1), None));
    }

    #[test]
    fn member_of_a_full_cluster_with_new_incarnation_is_admitted() {
        assert!(admits(&mut full_cluster(), 3, member(2, 2), None));
    }

    /// Who is left after node 2 said at these times, in seconds, that it gets no answer from node 3. Both
    /// answer the seed, and their kernels act on these of its views.
    fn members_after_suspicions(
        times: impl Iterator<Item = u64>,
        epochs: fn(u64) -> u64,
    ) -> Vec<u32> {
        let mut seed = Seed::new(TIMING, member(SEED_NODE, 1).address, 1, SECRET);
        assert!(admits(&mut seed, 2, member(2, 1), None));
        assert!(admits(&mut seed, 3, member(3, 1), None));
        let start = Instant::now();
        for seconds in times {
            let now = start + Duration::from_secs(seconds);
            let (epoch, probe) = (epochs(seed.epoch), false);
            for link in [2, 3] {
                let heartbeat = Message::Heartbeat { epoch, probe };
                seed.step(now, Input::Message(link, heartbeat), &mut Vec::new());
            }
            let suspect = Message::Suspect(3);
            seed.step(now, Input::Message(2, suspect), &mut Vec::new());
        }
        seed.view().members.iter().map(|m| m.node).collect()
    }

    #[test]
    fn continuous_suspicions_evict_one_of_two_nodes() {
        assert_eq!(members_after_suspicions(0..5, |newest| newest), [1, 2, 3]);
        assert_eq!(members_after_suspicions(0..6, |newest| newest), [1, 2]);
    }

    #[test]
    fn rare_suspicions_evict_no_node() {
        let rare = (0..100).map(|i| 6 * i);
        assert_eq!(members_after_suspicions(rare, |newest| newest), [1, 2, 3]);
    }

    #[test]
    fn suspicion_before_a_common_view_evicts_no_node() {
        assert_eq!(members_after_suspicions(0..100, |_| 1), [1, 2, 3]);
    }
}
