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

use kite::{Address, Member, NODES_MAX, NODE_MAX};

use broken::{Bar, Complaints};

use super::{Action, Identity, Input, Link, Machine, Snapshot, Timing};
use crate::host::Host;
use crate::protocol::{Hosts, Message, Past, Secret, View, SEED};

/// The machine of the seed.
#[derive(Debug)]
pub struct Seed {
    timing: Timing,
    own: Member,
    secret: Secret,
    epoch: u64,
    applied: u64,
    peers: BTreeMap<u32, Peer>,
    /// Connections of peers.
    links: HashMap<Link, u32>,
    /// Hosts at the other ends of connections.
    hosts: HashMap<Link, Host>,
    strangers: HashMap<Link, Stranger>,
    /// The number of each node that was ever a member, by its GID.
    numbers: HashMap<Ipv6Addr, u32>,
    /// The last life of each node that ended after it was inherited, and must not be so again.
    ended: HashMap<u32, u64>,
    /// The highest epoch that members of a former seed brought.
    inherited: u64,
    complaints: Complaints,
    /// Who was put out, by number.
    bars: HashMap<u32, Bar>,
    next_beat: Option<Instant>,
}

/// A connection that is nobody's yet.
#[derive(Debug)]
struct Stranger {
    /// When it is given up, or its hello is heard.
    until: Instant,
    /// What it said, if it has to wait.
    hello: Option<Message>,
}

#[derive(Debug)]
struct Peer {
    member: Member,
    /// The epoch of the first view with it.
    admitted: u64,
    /// The epoch that its kernel acts on.
    applied: u64,
    link: Option<Link>,
    /// When it is dead, unless it is heard of.
    deadline: Instant,
    /// Taken over from a former seed, not admitted by this one.
    inherited: bool,
}

impl Seed {
    /// A seed whose kernel is reached at `address`, in the life `incarnation`, which is not 0.
    pub fn new(timing: Timing, address: Address, incarnation: u64, secret: Secret) -> Self {
        Self {
            timing,
            own: Member {
                node: SEED,
                incarnation,
                address,
            },
            secret,
            epoch: 0,
            applied: 0,
            peers: BTreeMap::new(),
            links: HashMap::new(),
            hosts: HashMap::new(),
            strangers: HashMap::new(),
            numbers: HashMap::new(),
            ended: HashMap::new(),
            inherited: 0,
            complaints: Complaints::default(),
            bars: HashMap::new(),
            next_beat: None,
        }
    }

    fn join(&self) -> Action {
        let Member {
            node, incarnation, ..
        } = self.own;
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
            members: std::iter::once(self.own).chain(peers).collect(),
        }
    }

    /// An odd epoch above all that were heard of.
    fn next_epoch(&self) -> u64 {
        (self.epoch + 1) | 1
    }

    /// Makes the next view.
    fn publish(&mut self, actions: &mut Vec<Action>) {
        self.epoch = self.next_epoch();
        let view = self.view();
        actions.push(Action::Apply(view.clone()));
        let links = self.peers.values().filter_map(|peer| peer.link);
        actions.extend(links.map(|link| Action::Send(link, Message::View(view.clone()))));
    }

    fn message(&mut self, now: Instant, link: Link, message: Message, actions: &mut Vec<Action>) {
        if self.strangers.remove(&link).is_some() {
            return self.first_message(now, link, message, actions);
        }
        let Some((&node, peer)) = self
            .links
            .get(&link)
            .and_then(|node| Some((node, self.peers.get_mut(node)?)))
        else {
            return;
        };
        peer.deadline = now + self.timing.dead;
        match message {
            Message::Heartbeat { epoch, probe } => {
                peer.applied = epoch;
                if probe {
                    actions.push(self.beat(link, false));
                }
            }
            Message::Suspect(other) => self.suspect(now, node, other, actions),
            Message::Goodbye => {
                tracing::info!(node, "leaves");
                self.remove(node, None, actions);
                self.publish(actions);
            }
            _ => actions.push(Action::Close(link)),
        }
    }

    /// Hears a hello, unless who says it has to wait.
    fn first_message(
        &mut self,
        now: Instant,
        link: Link,
        message: Message,
        actions: &mut Vec<Action>,
    ) {
        let Message::Hello {
            incarnation: incarnation @ 1..,
            address,
            past,
        } = message
        else {
            return actions.push(Action::Close(link));
        };
        if let Some(until) = self.barred(now, &address, past.is_some()) {
            tracing::info!(%address, "waits {:?} to be let in", until - now);
            let hello = Some(Message::Hello {
                incarnation,
                address,
                past,
            });
            self.strangers.insert(link, Stranger { until, hello });
            return;
        }
        self.hello(now, link, (incarnation, address), past, actions);
    }

    fn hello(
        &mut self,
        now: Instant,
        link: Link,
        (incarnation, address): (u64, Address),
        past: Option<Past>,
        actions: &mut Vec<Action>,
    ) {
        if let Some(past) = past {
            return self.readmit(now, link, incarnation, past, actions);
        }
        match self.number(&address) {
            Ok(node) => {
                tracing::info!(node, %address, "joins");
                if self
                    .peers
                    .get(&node)
                    .is_some_and(|p| p.member.incarnation != incarnation)
                {
                    self.remove(node, Some(Message::Out), actions);
                }
                let member = Member {
                    node,
                    incarnation,
                    address,
                };
                self.insert(now, member, false);
                self.publish(actions);
                self.welcome(now, link, node, actions);
            }
            Err(reason) => dismiss(link, Message::Refused(reason.into()), actions),
        }
    }

    /// The number of the node with this address: its former one, or the smallest never used.
    fn number(&self, address: &Address) -> Result<u32, &'static str> {
        if address.gid == self.own.address.gid {
            return Err("this RNIC has the GID of the seed's");
        }
        let former = self.numbers.get(&address.gid).copied();
        let replaces = former.is_some_and(|node| self.peers.contains_key(&node));
        let room = replaces || self.peers.len() + 1 < NODES_MAX;
        former
            .or_else(|| self.unused())
            .filter(|_| room)
            .ok_or("the cluster is full")
    }

    fn unused(&self) -> Option<u32> {
        let used: HashSet<u32> = self.numbers.values().copied().collect();
        (SEED + 1..=NODE_MAX).find(|node| !used.contains(node))
    }

    fn insert(&mut self, now: Instant, member: Member, inherited: bool) {
        self.numbers.insert(member.address.gid, member.node);
        let deadline = now + self.timing.dead;
        let admitted = self.next_epoch();
        let link = self
            .peers
            .remove(&member.node)
            .and_then(|former| former.link);
        self.peers.insert(
            member.node,
            Peer {
                member,
                admitted,
                applied: 0,
                link,
                deadline,
                inherited,
            },
        );
    }

    /// Makes `link` the connection of a peer, in place of any it had.
    fn welcome(&mut self, now: Instant, link: Link, node: u32, actions: &mut Vec<Action>) {
        let view = self.view();
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        peer.deadline = now + self.timing.dead;
        if let Some(former) = peer.link.replace(link) {
            self.links.remove(&former);
            actions.push(Action::Close(former));
        }
        self.links.insert(link, node);
        let secret = self.secret;
        actions.push(Action::Send(link, Message::Welcome { node, secret, view }));
        self.tell_hosts(actions);
    }

    /// Sends the hosts of all members to all members.
    fn tell_hosts(&self, actions: &mut Vec<Action>) {
        let host = |(link, node): (&Link, &u32)| Some((*node, self.hosts.get(link)?.clone()));
        let hosts: Hosts = self.links.iter().filter_map(host).collect();
        let links = self.links.keys();
        actions.extend(links.map(|&link| Action::Send(link, Message::Hosts(hosts.clone()))));
        actions.push(Action::Tell(hosts));
    }

    /// Ends the life of a peer, with a last word to it. The caller publishes.
    fn remove(&mut self, node: u32, last: Option<Message>, actions: &mut Vec<Action>) {
        let Some(peer) = self.peers.remove(&node) else {
            return;
        };
        self.complaints.forget(node);
        if peer.inherited {
            self.ended.insert(node, peer.member.incarnation);
        }
        if let Some(link) = peer.link {
            self.links.remove(&link);
            actions.extend(last.map(|message| Action::Send(link, message)));
            actions.push(Action::Close(link));
        }
    }

    /// A node that a kernel gets no answer from is asked at once, and has less time to answer.
    fn probe(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let probe = Message::Heartbeat {
            epoch: self.applied,
            probe: true,
        };
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.deadline = peer.deadline.min(now + self.timing.grace());
            actions.extend(peer.link.map(|link| Action::Send(link, probe)));
        }
    }

    /// Tells all members that they have to go on without the seed.
    fn farewell(&self, actions: &mut Vec<Action>) {
        for &link in self.links.keys() {
            dismiss(link, Message::Goodbye, actions);
        }
    }

    fn tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_beat.is_none_or(|at| at <= now) {
            self.next_beat = Some(now + self.timing.heartbeat);
            let waiting = self.strangers.iter().filter(|(_, s)| s.hello.is_some());
            let links = self.links.keys().chain(waiting.map(|(link, _)| link));
            actions.extend(links.map(|&link| self.beat(link, false)));
        }
        let late = self.strangers.iter().filter(|(_, s)| s.until <= now);
        let late: Vec<Link> = late.map(|(&link, _)| link).collect();
        for link in late {
            let stranger = self.strangers.get_mut(&link);
            match stranger.and_then(|stranger| stranger.hello.take()) {
                Some(hello) => self.message(now, link, hello, actions),
                None => {
                    self.strangers.remove(&link);
                    actions.push(Action::Close(link));
                }
            }
        }
        let silent = self.peers.values().filter(|peer| peer.deadline <= now);
        let silent: Vec<u32> = silent.map(|peer| peer.member.node).collect();
        for &node in &silent {
            tracing::warn!(node, "is silent and thus dead");
            self.remove(node, Some(Message::Out), actions);
        }
        if !silent.is_empty() {
            self.publish(actions);
        }
    }

    fn beat(&self, link: Link, probe: bool) -> Action {
        Action::Send(
            link,
            Message::Heartbeat {
                epoch: self.applied,
                probe,
            },
        )
    }

    fn closed(&mut self, link: Link) {
        self.strangers.remove(&link);
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

impl Machine for Seed {
    fn step(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Start if self.epoch != 0 => self.go_on(now, actions),
            Input::Start => {
                actions.push(self.join());
                self.publish(actions);
            }
            Input::Opened(link, host) => {
                self.hosts.insert(link, host);
                let (until, hello) = (now + self.timing.dead, None);
                self.strangers.insert(link, Stranger { until, hello });
            }
            Input::Message(link, message) => self.message(now, link, message, actions),
            Input::Closed(link) => self.closed(link),
            Input::Applied(epoch) => self.applied = epoch,
            Input::Suspect(node) => self.suspect(now, SEED, node, actions),
            Input::Tick => self.tick(now, actions),
            Input::Leave => self.farewell(actions),
        }
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(Snapshot::Seed(self.to_snapshot()))
    }
}

/// Says a last word to a connection.
fn dismiss(link: Link, message: Message, actions: &mut Vec<Action>) {
    actions.push(Action::Send(link, message));
    actions.push(Action::Close(link));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const TIMING: Timing = Timing {
        heartbeat: Duration::from_millis(500),
        dead: Duration::from_millis(3000),
    };
    const SECRET: Secret = [1; 16];

    fn member(node: u32, incarnation: u64) -> Member {
        let address = Address {
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
    fn admits(seed: &mut Seed, link: Link, member: Member, past: Option<Past>) -> bool {
        let (now, mut actions) = (Instant::now(), Vec::new());
        let hello = Message::Hello {
            incarnation: member.incarnation,
            address: member.address,
            past,
        };
        let host = Host {
            ip: [127, 0, 0, 1].into(),
            name: None,
        };
        seed.step(now, Input::Opened(link, host), &mut actions);
        seed.step(now, Input::Message(link, hello), &mut actions);
        assert!(seed.view().members.len() <= NODES_MAX);
        let welcome = |a: &Action| matches!(a, Action::Send(_, Message::Welcome { .. }));
        actions.iter().any(welcome)
    }

    /// A cluster with as many members as there may be, of which one is connected: 2, by link 2.
    fn full() -> Seed {
        let mut seed = Seed::new(TIMING, member(SEED, 1).address, 1, SECRET);
        let view = View {
            epoch: 2,
            members: (2..=NODES_MAX as u32).map(|node| member(node, 1)).collect(),
        };
        let past = Past {
            node: 2,
            secret: SECRET,
            seed: 2,
            view,
        };
        assert!(admits(&mut seed, 2, member(2, 1), Some(past)));
        assert_eq!(seed.view().members.len(), NODES_MAX);
        seed
    }

    #[test]
    fn who_returns_to_a_full_cluster_is_refused_like_any_other() {
        let mut seed = full();
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
    fn a_member_of_a_full_cluster_may_begin_a_new_life() {
        assert!(admits(&mut full(), 3, member(2, 2), None));
    }

    /// Who is left after node 2 said at these times, in seconds, that it gets no answer from node 3. Both
    /// answer the seed, and their kernels act on these of its views.
    fn after_complaints(times: impl Iterator<Item = u64>, epochs: fn(u64) -> u64) -> Vec<u32> {
        let mut seed = Seed::new(TIMING, member(SEED, 1).address, 1, SECRET);
        assert!(admits(&mut seed, 2, member(2, 1), None));
        assert!(admits(&mut seed, 3, member(3, 1), None));
        let start = Instant::now();
        for seconds in times {
            let now = start + Duration::from_secs(seconds);
            let (epoch, probe) = (epochs(seed.epoch), false);
            for link in [2, 3] {
                let beat = Message::Heartbeat { epoch, probe };
                seed.step(now, Input::Message(link, beat), &mut Vec::new());
            }
            let suspect = Message::Suspect(3);
            seed.step(now, Input::Message(2, suspect), &mut Vec::new());
        }
        seed.view().members.iter().map(|m| m.node).collect()
    }

    #[test]
    fn complaints_that_go_on_part_two_nodes() {
        assert_eq!(after_complaints(0..5, |newest| newest), [1, 2, 3]);
        assert_eq!(after_complaints(0..6, |newest| newest), [1, 2]);
    }

    #[test]
    fn complaints_now_and_then_do_not() {
        let rare = (0..100).map(|i| 6 * i);
        assert_eq!(after_complaints(rare, |newest| newest), [1, 2, 3]);
    }

    #[test]
    fn a_kernel_that_does_not_know_the_other_yet_need_not_answer_it() {
        assert_eq!(after_complaints(0..100, |_| 1), [1, 2, 3]);
    }
}
