// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State machine of a follower: joins the seed, applies its views, and continues without it.
//!
//! A kernel must not meet an incarnation of a node again that it dropped, since the two sides would disagree on the
//! state of the same connection. A view with such a member ends the incarnation of this node, whatever its origin: the
//! node leaves and joins with a new incarnation. An eviction by the seed has the same effect.

use std::collections::HashMap;
use std::time::Instant;

use kite::{FabricAddress, Member};

use super::snapshot::FollowerSnapshot;
use super::{
    next_incarnation, Action, Identity, Input, LinkId, MembershipMachine, Snapshot, Timing,
    SUSPICION_GAP,
};
use crate::host::Host;
use crate::protocol::{Message, PriorMembership, View, SEED_NODE};

/// State machine of a member other than the seed.
#[derive(Debug)]
pub struct Follower {
    timing: Timing,
    address: FabricAddress,
    incarnation: u64,
    connection: Option<Connection>,
    /// Set by the first welcome of this incarnation.
    prior: Option<PriorMembership>,
    /// Last incarnation of each node that the kernel dropped during this incarnation.
    dropped_incarnations: HashMap<u32, u64>,
    applied_epoch: u64,
    /// Time at which the seed, or a connection without a welcome, is given up.
    deadline: Option<Instant>,
    next_heartbeat: Option<Instant>,
    /// Time of the last report that the seed does not respond to the kernel.
    seed_suspected_at: Option<Instant>,
}

#[derive(Debug)]
struct Connection {
    link: LinkId,
    seed: Host,
    welcomed: bool,
}

impl Follower {
    /// Creates a follower whose kernel has this address. `incarnation` is not 0.
    pub fn new(timing: Timing, address: FabricAddress, incarnation: u64) -> Self {
        Self {
            timing,
            address,
            incarnation,
            connection: None,
            prior: None,
            dropped_incarnations: HashMap::new(),
            applied_epoch: 0,
            deadline: None,
            next_heartbeat: None,
            seed_suspected_at: None,
        }
    }

    /// Creates a follower from a snapshot. Its next incarnations have this address.
    pub fn resume(timing: Timing, address: FabricAddress, snapshot: FollowerSnapshot) -> Self {
        Self {
            prior: Some(snapshot.prior),
            dropped_incarnations: snapshot.dropped_incarnations,
            ..Self::new(timing, address, snapshot.incarnation)
        }
    }

    /// Starts with the view of the previous process, which the kernel may not have applied yet. The dead timeout of the
    /// seed starts now.
    fn on_start(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.has_seed_in_view() {
            self.deadline = Some(now + self.timing.dead_after);
        }
        let view = self.prior.as_ref().map(|prior| prior.view.clone());
        actions.extend(view.map(Action::ApplyView));
    }

    /// Returns `true` if the seed is in the view of this node.
    fn has_seed_in_view(&self) -> bool {
        self.prior
            .as_ref()
            .is_some_and(|prior| prior.view.find_member(SEED_NODE).is_some())
    }

    fn on_opened(&mut self, now: Instant, (link, seed): (LinkId, Host), actions: &mut Vec<Action>) {
        self.close_connection(actions);
        self.connection = Some(Connection {
            link,
            seed,
            welcomed: false,
        });
        // An incarnation without a welcome may have been in views of other nodes. Their kernels must not meet it again.
        if self.prior.is_none() {
            self.incarnation = next_incarnation(self.incarnation);
        }
        // A seed that accepts connections but sends nothing is as dead as one that accepts none.
        if !self.has_seed_in_view() {
            self.deadline = Some(now + self.timing.dead_after);
        }
        let hello = Message::Hello {
            incarnation: self.incarnation,
            address: self.address,
            prior: self.prior.clone(),
        };
        actions.push(Action::Send(link, hello));
    }

    fn on_message(
        &mut self,
        now: Instant,
        link: LinkId,
        message: Message,
        actions: &mut Vec<Action>,
    ) {
        let has_seed = self.has_seed_in_view();
        let Some(connection) = self.connection.as_mut().filter(|c| c.link == link) else {
            return;
        };
        let welcomed = connection.welcomed;
        // A seed that defers the hello sends heartbeats before the welcome. It is not the seed that this node follows.
        if welcomed || !has_seed || !matches!(message, Message::Heartbeat { .. }) {
            self.deadline = Some(now + self.timing.dead_after);
        }
        match message {
            Message::Welcome { node, secret, view } if !welcomed => {
                connection.welcomed = true;
                self.next_heartbeat = Some(now);
                self.on_welcome(
                    Identity {
                        node,
                        incarnation: self.incarnation,
                        secret,
                    },
                    view,
                    actions,
                );
            }
            Message::View(view) if welcomed => self.adopt_view(view, actions),
            Message::Hosts(mut hosts) if welcomed => {
                hosts.push((SEED_NODE, connection.seed.clone()));
                actions.push(Action::PublishHosts(hosts));
            }
            Message::Heartbeat { probe, .. } => {
                if probe {
                    self.send_heartbeat(false, actions);
                }
            }
            Message::Evicted => {
                tracing::warn!("evicted from the cluster; the log of the seed has the reason");
                self.start_new_incarnation(actions);
            }
            Message::Goodbye => self.drop_seed(actions),
            Message::Rejected(reason) if self.prior.is_none() => actions.push(Action::Fail(reason)),
            _ => self.close_connection(actions),
        }
    }

    fn on_welcome(&mut self, identity: Identity, view: View, actions: &mut Vec<Action>) {
        let Identity { node, secret, .. } = identity;
        match &self.prior {
            Some(prior) if (prior.node, prior.secret) != (node, secret) => {
                self.start_new_incarnation(actions)
            }
            Some(_) => self.adopt_view(view, actions),
            None => {
                let none = View {
                    epoch: 0,
                    members: Vec::new(),
                };
                self.prior = Some(PriorMembership {
                    node,
                    secret,
                    seed_incarnation: 0,
                    view: none,
                });
                actions.push(Action::Join(identity));
                self.adopt_view(view, actions);
            }
        }
    }

    /// Applies a view of the seed.
    fn adopt_view(&mut self, view: View, actions: &mut Vec<Action>) {
        let Some(prior) = &mut self.prior else {
            return;
        };
        let seed = view.find_member(SEED_NODE).map(|seed| seed.incarnation);
        let is_dropped =
            |m: &Member| self.dropped_incarnations.get(&m.node) == Some(&m.incarnation);
        let has_dropped_member = view.members.iter().any(is_dropped);
        let (Some(seed), true, false) = (seed, view.is_valid(), has_dropped_member) else {
            return self.start_new_incarnation(actions);
        };
        if !view.has_member(prior.node, self.incarnation) {
            return self.start_new_incarnation(actions);
        }
        prior.seed_incarnation = seed;
        if view.epoch > prior.view.epoch {
            self.apply_view(view, actions);
        }
    }

    fn apply_view(&mut self, view: View, actions: &mut Vec<Action>) {
        let Some(prior) = &mut self.prior else {
            return;
        };
        let removed = prior
            .view
            .members
            .iter()
            .filter(|m| !view.has_member(m.node, m.incarnation));
        self.dropped_incarnations
            .extend(removed.map(|m| (m.node, m.incarnation)));
        prior.view = view.clone();
        actions.push(Action::ApplyView(view));
    }

    /// Continues without the seed. All survivors compute the same view from the same view. A survivor that missed the
    /// last view has another view until the seed returns.
    fn drop_seed(&mut self, actions: &mut Vec<Action>) {
        self.close_connection(actions);
        self.deadline = None;
        if self.has_seed_in_view() {
            if let Some(view) = self.prior.as_ref().map(|prior| prior.view.without_seed()) {
                self.apply_view(view, actions);
            }
        }
    }

    /// Ends this incarnation. The next one joins when the seed is connected again.
    fn start_new_incarnation(&mut self, actions: &mut Vec<Action>) {
        self.close_connection(actions);
        self.deadline = None;
        self.incarnation = next_incarnation(self.incarnation);
        self.dropped_incarnations.clear();
        self.applied_epoch = 0;
        if self.prior.take().is_some() {
            actions.push(Action::Leave);
        }
    }

    fn on_suspect(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let Some(link) = self
            .connection
            .as_ref()
            .filter(|c| c.welcomed)
            .map(|c| c.link)
        else {
            return;
        };
        if node == SEED_NODE
            && self
                .seed_suspected_at
                .replace(now)
                .is_none_or(|at| now >= at + SUSPICION_GAP)
        {
            let probe_deadline = now + self.timing.probe_grace();
            self.deadline = self.deadline.map(|deadline| deadline.min(probe_deadline));
            self.send_heartbeat(true, actions);
        }
        actions.push(Action::Send(link, Message::Suspect(node)));
    }

    fn on_tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_heartbeat.is_some_and(|at| at <= now) {
            self.next_heartbeat = Some(now + self.timing.heartbeat_interval);
            self.send_heartbeat(false, actions);
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.drop_seed(actions);
        }
    }

    fn send_heartbeat(&self, probe: bool, actions: &mut Vec<Action>) {
        if let Some(connection) = self.connection.as_ref().filter(|c| c.welcomed) {
            let heartbeat = Message::Heartbeat {
                epoch: self.applied_epoch,
                probe,
            };
            actions.push(Action::Send(connection.link, heartbeat));
        }
    }

    fn close_connection(&mut self, actions: &mut Vec<Action>) {
        if let Some(connection) = self.connection.take() {
            actions.push(Action::Close(connection.link));
        }
    }
}

impl MembershipMachine for Follower {
    fn step(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Start => self.on_start(now, actions),
            Input::Opened(link, seed) => self.on_opened(now, (link, seed), actions),
            Input::Message(link, message) => self.on_message(now, link, message, actions),
            Input::Closed(link) => {
                self.connection
                    .take_if(|connection| connection.link == link);
            }
            Input::Applied(epoch) => {
                self.applied_epoch = epoch;
                self.send_heartbeat(false, actions);
            }
            Input::Suspect(node) => self.on_suspect(now, node, actions),
            Input::Tick => self.on_tick(now, actions),
            Input::Leave => {
                if let Some(connection) = &self.connection {
                    actions.push(Action::Send(connection.link, Message::Goodbye));
                }
                self.close_connection(actions);
            }
        }
    }

    fn snapshot(&self) -> Option<Snapshot> {
        let prior = self.prior.clone()?;
        Some(Snapshot::Follower(FollowerSnapshot {
            incarnation: self.incarnation,
            prior,
            dropped_incarnations: self.dropped_incarnations.clone(),
        }))
    }
}
