// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State machine of a follower: joins the seed, applies its views, and continues without it.
//!
//! # Recovery
//!
//! If the seed is silent, this node checks by RDMA whether the kernel of the seed runs. If so, nothing changes but the
//! connection, which is established again. If not, this node applies a view in which the seed is unreachable. The next
//! hello reports that view, so that the seed admits the nodes again which this kernel has fenced.
//!
//! The incarnation ends when the seed reports that it has ended, because this node left or another incarnation of it
//! joined.

use std::time::Instant;

use kite::{FabricAddress, Member};

use super::snapshot::FollowerSnapshot;
use super::{
    next_incarnation, Action, Identity, Input, LinkId, MembershipMachine, PauseDetector, Snapshot,
    Timing, SUSPICION_GAP,
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
    applied_epoch: u64,
    /// Time at which the seed is silent, or a connection without a welcome is given up.
    deadline: Option<Instant>,
    /// End of the check by RDMA of a silent seed.
    check_ends: Option<Instant>,
    next_heartbeat: Option<Instant>,
    /// Time of the last report that the seed does not respond to the kernel.
    seed_suspected_at: Option<Instant>,
    pauses: PauseDetector,
    /// Last reason for which the seed rejected this node.
    last_rejection: String,
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
            applied_epoch: 0,
            deadline: None,
            check_ends: None,
            next_heartbeat: None,
            seed_suspected_at: None,
            pauses: PauseDetector::default(),
            last_rejection: String::new(),
        }
    }

    /// Creates a follower from a snapshot. Its next incarnations have this address.
    pub fn resume(timing: Timing, address: FabricAddress, snapshot: FollowerSnapshot) -> Self {
        Self {
            prior: Some(snapshot.prior),
            ..Self::new(timing, address, snapshot.incarnation)
        }
    }

    /// Starts with the view of the previous process, which the kernel may not have applied yet. The dead timeout of the
    /// seed starts now.
    fn on_start(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.reachable_seed().is_some() {
            self.deadline = Some(now + self.timing.dead_after);
        }
        let view = self.prior.as_ref().map(|prior| prior.view.clone());
        actions.extend(view.map(Action::ApplyView));
    }

    /// Returns the seed if it is a reachable member of the view of this node.
    fn reachable_seed(&self) -> Option<&Member> {
        let seed = self.prior.as_ref()?.view.find_member(SEED_NODE);
        seed.filter(|seed| seed.is_reachable())
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
        // A seed that accepts connections but sends nothing is as silent as one that accepts none.
        if self.reachable_seed().is_none() {
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
        let follows_seed = self.reachable_seed().is_some();
        let Some(connection) = self.connection.as_mut().filter(|c| c.link == link) else {
            return;
        };
        let welcomed = connection.welcomed;
        // Before the welcome, the sender may be a seed that this node does not follow: it defers or rejects the hello.
        if welcomed || !follows_seed || matches!(message, Message::Welcome { .. }) {
            self.deadline = Some(now + self.timing.dead_after);
            self.check_ends = None;
        }
        match message {
            Message::Welcome { node, secret, view } if !welcomed => {
                connection.welcomed = true;
                self.next_heartbeat = Some(now);
                self.last_rejection.clear();
                let incarnation = self.incarnation;
                let identity = Identity {
                    node,
                    incarnation,
                    secret,
                };
                self.on_welcome(identity, view, actions);
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
            Message::Probe(node, incarnation) if welcomed => {
                actions.push(Action::Probe(node, incarnation));
            }
            Message::Evicted => {
                tracing::warn!(
                    "this incarnation has ended at the seed; the log of the seed has the reason"
                );
                self.start_new_incarnation(actions);
            }
            Message::Goodbye => self.on_seed_left(actions),
            Message::Rejected(reason) => self.on_rejected(reason, actions),
            _ => self.close_connection(actions),
        }
    }

    /// Ends the daemon if this node has never joined. Else the node keeps its incarnation, and connects again.
    fn on_rejected(&mut self, reason: String, actions: &mut Vec<Action>) {
        if self.prior.is_none() {
            return actions.push(Action::Fail(reason));
        }
        if self.last_rejection != reason {
            tracing::error!("the seed rejects this node, which keeps its regions: {reason}");
            self.last_rejection = reason;
        }
        self.close_connection(actions);
    }

    fn on_welcome(&mut self, identity: Identity, view: View, actions: &mut Vec<Action>) {
        let Identity { node, secret, .. } = identity;
        match &self.prior {
            // Another identity than that of the hello.
            Some(prior) if (prior.node, prior.secret) != (node, secret) => {
                self.close_connection(actions)
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

    /// Applies a view of the seed, in which this node must be a reachable member. If the view lacks an admission that
    /// this kernel needs, the next hello asks for it.
    fn adopt_view(&mut self, view: View, actions: &mut Vec<Action>) {
        let Some(prior) = &mut self.prior else {
            return;
        };
        let own = view.find_member(prior.node);
        let own = own.filter(|own| own.incarnation == self.incarnation && own.is_reachable());
        let seed = view.find_member(SEED_NODE).map(|seed| seed.incarnation);
        let is_valid = view.is_valid() && view.keeps_fences_of(&prior.view, prior.node);
        let (Some(_), Some(seed), true) = (own, seed, is_valid) else {
            return self.close_connection(actions);
        };
        prior.seed_incarnation = seed;
        if view.epoch > prior.view.epoch {
            self.apply_view(view, actions);
        }
    }

    fn apply_view(&mut self, view: View, actions: &mut Vec<Action>) {
        if let Some(prior) = &mut self.prior {
            prior.view = view.clone();
            actions.push(Action::ApplyView(view));
        }
    }

    /// Continues without the seed, which has left the cluster. All followers compute the same view from the same view.
    fn on_seed_left(&mut self, actions: &mut Vec<Action>) {
        self.give_up_connection(actions);
        let view = self.prior.as_ref().map(|prior| &prior.view);
        let view = view.filter(|view| view.find_member(SEED_NODE).is_some());
        if let Some(view) = view.map(View::without_seed) {
            self.apply_view(view, actions);
        }
    }

    /// Continues without the seed, which replies neither by TCP nor by RDMA.
    fn mark_seed_unreachable(&mut self, actions: &mut Vec<Action>) {
        self.give_up_connection(actions);
        let view = self.prior.as_ref();
        if let Some(view) = view.map(|prior| prior.view.with_unreachable_seed()) {
            tracing::warn!("seed is unreachable by TCP and RDMA; continuing without it");
            self.apply_view(view, actions);
        }
    }

    /// Ends this incarnation. The next one joins when the seed is connected again.
    fn start_new_incarnation(&mut self, actions: &mut Vec<Action>) {
        self.give_up_connection(actions);
        self.incarnation = next_incarnation(self.incarnation);
        self.applied_epoch = 0;
        if self.prior.take().is_some() {
            actions.push(Action::Leave);
        }
    }

    fn on_suspect(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let connection = self.connection.as_ref().filter(|c| c.welcomed);
        let Some(link) = connection.map(|c| c.link) else {
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

    /// Processes a reply by RDMA: of the seed to a check of this node, or of another node to a check of the seed.
    fn on_alive(&mut self, now: Instant, node: u32, incarnation: u64, actions: &mut Vec<Action>) {
        if node != SEED_NODE {
            let connection = self.connection.as_ref().filter(|c| c.welcomed);
            let alive = Message::Alive(node, incarnation);
            return actions.extend(connection.map(|c| Action::Send(c.link, alive)));
        }
        let is_seed = self
            .reachable_seed()
            .is_some_and(|seed| seed.incarnation == incarnation);
        if is_seed && self.check_ends.take().is_some() {
            // Its connection is silent: establish another one.
            self.close_connection(actions);
            self.deadline = Some(now + self.timing.dead_after);
        }
    }

    fn on_tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let pause = self.pauses.tick(now, &self.timing);
        for deadline in [&mut self.deadline, &mut self.check_ends] {
            *deadline = deadline.map(|deadline| deadline + pause);
        }
        if self.next_heartbeat.is_some_and(|at| at <= now) {
            self.next_heartbeat = Some(now + self.timing.heartbeat_interval);
            self.send_heartbeat(false, actions);
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.on_seed_silent(now, actions);
        }
    }

    /// Checks a silent seed by RDMA, and marks it as unreachable at the end of the check.
    fn on_seed_silent(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let seed = self.reachable_seed().map(|seed| seed.incarnation);
        match (seed, self.check_ends) {
            (None, _) => self.give_up_connection(actions),
            (Some(incarnation), None) => {
                self.check_ends = Some(now + self.timing.check_time());
                actions.push(Action::Probe(SEED_NODE, incarnation));
            }
            (Some(_), Some(ends)) if ends <= now => self.mark_seed_unreachable(actions),
            (Some(_), Some(_)) => {}
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

    /// Closes the connection, and stops the timers of the seed.
    fn give_up_connection(&mut self, actions: &mut Vec<Action>) {
        self.close_connection(actions);
        self.deadline = None;
        self.check_ends = None;
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
            Input::Alive(node, incarnation) => self.on_alive(now, node, incarnation, actions),
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
        }))
    }
}
