// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A member that is not the seed: joins it, obeys its views, and goes on without it.
//!
//! The kernel must never meet again a life of a node that it dropped: each side would hold other
//! beliefs of the same connection. Such a view, whichever way it came about, ends the life of this
//! node: it leaves and joins anew, as it does when the seed tells it that it is out.

use std::collections::HashMap;
use std::time::Instant;

use kite::{Address, Member};

use super::snapshot::FollowerSnapshot;
use super::{next_life, Action, Identity, Input, Link, Machine, Snapshot, Timing, GAP};
use crate::host::Host;
use crate::protocol::{Message, Past, View, SEED};

/// The machine of a member that is not the seed.
#[derive(Debug)]
pub struct Follower {
    timing: Timing,
    address: Address,
    incarnation: u64,
    link: Option<Connection>,
    /// Since the first welcome of this incarnation.
    past: Option<Past>,
    /// The last life of each node that the kernel dropped in this life.
    dropped: HashMap<u32, u64>,
    applied: u64,
    /// When the seed, or a connection that has not been welcomed, is given up.
    deadline: Option<Instant>,
    next_beat: Option<Instant>,
    /// When the kernel got no answer from the seed's.
    suspected: Option<Instant>,
}

#[derive(Debug)]
struct Connection {
    link: Link,
    seed: Host,
    welcomed: bool,
}

impl Follower {
    /// A member whose kernel is reached at `address`, in the life `incarnation`, which is not 0.
    pub fn new(timing: Timing, address: Address, incarnation: u64) -> Self {
        Self {
            timing,
            address,
            incarnation,
            link: None,
            past: None,
            dropped: HashMap::new(),
            applied: 0,
            deadline: None,
            next_beat: None,
            suspected: None,
        }
    }

    /// The member of a snapshot. Its next lives are reached at `address`.
    pub fn resume(timing: Timing, address: Address, snapshot: FollowerSnapshot) -> Self {
        Self {
            past: Some(snapshot.past),
            dropped: snapshot.dropped,
            ..Self::new(timing, address, snapshot.incarnation)
        }
    }

    /// Starts with the view of the former process, which the kernel may not know yet. The seed counts as heard from.
    fn start(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.follows_seed() {
            self.deadline = Some(now + self.timing.dead);
        }
        let view = self.past.as_ref().map(|past| past.view.clone());
        actions.extend(view.map(Action::Apply));
    }

    /// Whether the seed is in this node's view.
    fn follows_seed(&self) -> bool {
        self.past
            .as_ref()
            .is_some_and(|past| past.view.member(SEED).is_some())
    }

    fn opened(&mut self, now: Instant, (link, seed): (Link, Host), actions: &mut Vec<Action>) {
        self.close(actions);
        self.link = Some(Connection {
            link,
            seed,
            welcomed: false,
        });
        // One that was not welcomed may have been in the views of others. They must not meet it
        // again.
        if self.past.is_none() {
            self.incarnation = next_life(self.incarnation);
        }
        // A seed that accepts connections but says nothing is as dead as one that does not.
        if !self.follows_seed() {
            self.deadline = Some(now + self.timing.dead);
        }
        let hello = Message::Hello {
            incarnation: self.incarnation,
            address: self.address,
            past: self.past.clone(),
        };
        actions.push(Action::Send(link, hello));
    }

    fn message(&mut self, now: Instant, link: Link, message: Message, actions: &mut Vec<Action>) {
        let follows = self.follows_seed();
        let Some(connection) = self.link.as_mut().filter(|c| c.link == link) else {
            return;
        };
        let welcomed = connection.welcomed;
        // A seed that has a node wait, before its welcome, is not the one that the node follows.
        if welcomed || !follows || !matches!(message, Message::Heartbeat { .. }) {
            self.deadline = Some(now + self.timing.dead);
        }
        match message {
            Message::Welcome { node, secret, view } if !welcomed => {
                connection.welcomed = true;
                self.next_beat = Some(now);
                self.welcome(
                    Identity {
                        node,
                        incarnation: self.incarnation,
                        secret,
                    },
                    view,
                    actions,
                );
            }
            Message::View(view) if welcomed => self.follow(view, actions),
            Message::Hosts(mut hosts) if welcomed => {
                hosts.push((SEED, connection.seed.clone()));
                actions.push(Action::Tell(hosts));
            }
            Message::Heartbeat { probe, .. } => {
                if probe {
                    self.beat(false, actions);
                }
            }
            Message::Out => {
                tracing::warn!("was put out of the cluster, for which the seed has the reason");
                self.new_life(actions);
            }
            Message::Goodbye => self.lose_seed(actions),
            Message::Refused(reason) if self.past.is_none() => actions.push(Action::Fail(reason)),
            _ => self.close(actions),
        }
    }

    fn welcome(&mut self, identity: Identity, view: View, actions: &mut Vec<Action>) {
        let Identity { node, secret, .. } = identity;
        match &self.past {
            Some(past) if (past.node, past.secret) != (node, secret) => self.new_life(actions),
            Some(_) => self.follow(view, actions),
            None => {
                let none = View {
                    epoch: 0,
                    members: Vec::new(),
                };
                self.past = Some(Past {
                    node,
                    secret,
                    seed: 0,
                    view: none,
                });
                actions.push(Action::Join(identity));
                self.follow(view, actions);
            }
        }
    }

    /// Acts on a view of the seed.
    fn follow(&mut self, view: View, actions: &mut Vec<Action>) {
        let Some(past) = &mut self.past else {
            return;
        };
        let seed = view.member(SEED).map(|seed| seed.incarnation);
        let dropped = |m: &Member| self.dropped.get(&m.node) == Some(&m.incarnation);
        let returns = view.members.iter().any(dropped);
        let (Some(seed), true, false) = (seed, view.is_valid(), returns) else {
            return self.new_life(actions);
        };
        if !view.has(past.node, self.incarnation) {
            return self.new_life(actions);
        }
        past.seed = seed;
        if view.epoch > past.view.epoch {
            self.apply(view, actions);
        }
    }

    fn apply(&mut self, view: View, actions: &mut Vec<Action>) {
        let Some(past) = &mut self.past else {
            return;
        };
        let gone = past
            .view
            .members
            .iter()
            .filter(|m| !view.has(m.node, m.incarnation));
        self.dropped.extend(gone.map(|m| (m.node, m.incarnation)));
        past.view = view.clone();
        actions.push(Action::Apply(view));
    }

    /// Goes on without the seed. All survivors compute the same view from the same view; those who
    /// did not get the last one have another until the seed returns.
    fn lose_seed(&mut self, actions: &mut Vec<Action>) {
        self.close(actions);
        self.deadline = None;
        if self.follows_seed() {
            if let Some(view) = self.past.as_ref().map(|past| past.view.without_seed()) {
                self.apply(view, actions);
            }
        }
    }

    /// Ends this life; the next one joins when the seed is connected again.
    fn new_life(&mut self, actions: &mut Vec<Action>) {
        self.close(actions);
        self.deadline = None;
        self.incarnation = next_life(self.incarnation);
        self.dropped.clear();
        self.applied = 0;
        if self.past.take().is_some() {
            actions.push(Action::Leave);
        }
    }

    fn suspect(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let Some(link) = self.link.as_ref().filter(|c| c.welcomed).map(|c| c.link) else {
            return;
        };
        if node == SEED && self.suspected.replace(now).is_none_or(|at| now >= at + GAP) {
            let soon = now + self.timing.grace();
            self.deadline = self.deadline.map(|deadline| deadline.min(soon));
            self.beat(true, actions);
        }
        actions.push(Action::Send(link, Message::Suspect(node)));
    }

    fn tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_beat.is_some_and(|at| at <= now) {
            self.next_beat = Some(now + self.timing.heartbeat);
            self.beat(false, actions);
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.lose_seed(actions);
        }
    }

    fn beat(&self, probe: bool, actions: &mut Vec<Action>) {
        if let Some(connection) = self.link.as_ref().filter(|c| c.welcomed) {
            let beat = Message::Heartbeat {
                epoch: self.applied,
                probe,
            };
            actions.push(Action::Send(connection.link, beat));
        }
    }

    fn close(&mut self, actions: &mut Vec<Action>) {
        if let Some(connection) = self.link.take() {
            actions.push(Action::Close(connection.link));
        }
    }
}

impl Machine for Follower {
    fn step(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Start => self.start(now, actions),
            Input::Opened(link, seed) => self.opened(now, (link, seed), actions),
            Input::Message(link, message) => self.message(now, link, message, actions),
            Input::Closed(link) => {
                self.link.take_if(|connection| connection.link == link);
            }
            Input::Applied(epoch) => {
                self.applied = epoch;
                self.beat(false, actions);
            }
            Input::Suspect(node) => self.suspect(now, node, actions),
            Input::Tick => self.tick(now, actions),
            Input::Leave => {
                if let Some(connection) = &self.link {
                    actions.push(Action::Send(connection.link, Message::Goodbye));
                }
                self.close(actions);
            }
        }
    }

    fn snapshot(&self) -> Option<Snapshot> {
        let past = self.past.clone()?;
        Some(Snapshot::Follower(FollowerSnapshot {
            incarnation: self.incarnation,
            past,
            dropped: self.dropped.clone(),
        }))
    }
}
