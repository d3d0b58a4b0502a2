// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State machine of a follower: joins the cluster of a coordinator, applies its views, and continues without it.
//!
//! # Operation
//!
//! The incarnation of a follower lasts as long as its kernel. Each hello carries the view of the kernel, so that the
//! seed can admit again the pairs of nodes that have fenced each other.
//!
//! # Recovery
//!
//! A follower that loses the seed on TCP keeps its view while the seed's kernel replies over RDMA ([`seed_check`]). A
//! follower that loses the coordinator of a store keeps its view. A view that would connect a fenced pair without a later
//! admission is refused: the follower connects again. Only [`Message::Evicted`] ends the incarnation.

mod seed_check;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use kite::Member;

use seed_check::SeedCheck;

use super::snapshot::FollowerSnapshot;
use super::{
    next_incarnation, Action, Identity, Input, LinkId, MembershipMachine, Snapshot, Timing,
    SUSPICION_GAP,
};
use crate::host::Host;
use crate::protocol::{Instance, KernelInfo, Message, PriorMembership, View, SEED_NODE};

/// State machine of a member other than the seed.
#[derive(Debug)]
pub struct Follower {
    timing: Timing,
    kernel: KernelInfo,
    incarnation: u64,
    /// Number of the seed. `None` if the coordinator is that of a store.
    seed: Option<u32>,
    connection: Option<Connection>,
    /// Set by the first welcome of this incarnation.
    prior: Option<PriorMembership>,
    /// Last incarnation of each node that was removed during this incarnation.
    removed_incarnations: HashMap<u32, u64>,
    applied_epoch: u64,
    /// Time at which the kernel of the seed is checked, unless the seed sends a message before. `None` if the seed is
    /// no reachable member.
    check_at: Option<Instant>,
    check: Option<SeedCheck>,
    /// `true` after a check of this silence of the seed.
    is_seed_known_silent: bool,
    /// Nodes that the seed has requested to probe.
    requested_probes: BTreeSet<Instance>,
    next_heartbeat: Option<Instant>,
    /// Time of the last report that the seed does not respond to the kernel.
    seed_suspected_at: Option<Instant>,
    /// Reason of the last rejection, so that repeated rejections are logged once.
    last_rejection: String,
}

#[derive(Debug)]
struct Connection {
    link: LinkId,
    coordinator: Host,
    is_welcomed: bool,
    /// Time at which the connection is closed, unless a message arrives before.
    deadline: Instant,
}

impl Follower {
    /// Creates a follower of a seed with this kernel. `incarnation` is not 0.
    pub fn new(timing: Timing, kernel: KernelInfo, incarnation: u64) -> Self {
        Self {
            timing,
            kernel,
            incarnation,
            seed: Some(SEED_NODE),
            connection: None,
            prior: None,
            removed_incarnations: HashMap::new(),
            applied_epoch: 0,
            check_at: None,
            check: None,
            is_seed_known_silent: false,
            requested_probes: BTreeSet::new(),
            next_heartbeat: None,
            seed_suspected_at: None,
            last_rejection: String::new(),
        }
    }

    /// Creates a follower from a snapshot.
    pub fn resume(timing: Timing, kernel: KernelInfo, snapshot: FollowerSnapshot) -> Self {
        Self {
            prior: Some(snapshot.prior),
            removed_incarnations: snapshot.removed_incarnations,
            ..Self::new(timing, kernel, snapshot.incarnation)
        }
    }

    /// Makes this a follower of a store.
    #[must_use]
    pub fn of_store(mut self) -> Self {
        self.seed = None;
        self
    }

    /// Starts with the view of the previous process, which the kernel may not have applied yet.
    fn on_start(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.schedule_check(now);
        let view = self.prior.as_ref().map(|prior| prior.view.clone());
        actions.extend(view.map(Action::ApplyView));
    }

    fn on_opened(
        &mut self,
        now: Instant,
        (link, coordinator): (LinkId, Host),
        actions: &mut Vec<Action>,
    ) {
        self.close_connection(actions);
        self.connection = Some(Connection {
            link,
            coordinator,
            is_welcomed: false,
            deadline: now + self.timing.dead_after,
        });
        // An incarnation without a welcome may have been in views of other nodes. Their kernels must not meet it again.
        if self.prior.is_none() {
            self.incarnation = next_incarnation(self.incarnation);
        }
        let hello = Message::Hello {
            incarnation: self.incarnation,
            kernel: self.kernel,
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
        let Some(connection) = self.connection.as_mut().filter(|c| c.link == link) else {
            return;
        };
        connection.deadline = now + self.timing.dead_after;
        match connection.is_welcomed {
            true => {
                self.schedule_check(now);
                self.is_seed_known_silent = false;
                self.on_seed_message(now, message, actions);
            }
            false => self.on_first_message(now, message, actions),
        }
    }

    /// Processes a message before the welcome. A seed that defers the hello sends heartbeats. The seed that this node
    /// follows has responded only when the welcome arrives.
    fn on_first_message(&mut self, now: Instant, message: Message, actions: &mut Vec<Action>) {
        match message {
            Message::Welcome { node, secret, view } => {
                let incarnation = self.incarnation;
                let identity = Identity {
                    node,
                    incarnation,
                    secret,
                };
                self.on_welcome(now, identity, view, actions);
            }
            Message::Heartbeat { .. } | Message::Hosts(_) => {}
            Message::Rejected(reason) if self.prior.is_none() => actions.push(Action::Fail(reason)),
            Message::Rejected(reason) => {
                if self.last_rejection != reason {
                    tracing::error!("coordinator rejects this node: {reason} (retrying)");
                }
                self.last_rejection = reason;
                self.close_connection(actions);
            }
            Message::Evicted => {
                tracing::error!("incarnation has ended: the log of the coordinator has the reason");
                self.start_new_incarnation(actions);
            }
            _ => self.close_connection(actions),
        }
    }

    /// Processes a message of the seed that this node follows.
    fn on_seed_message(&mut self, now: Instant, message: Message, actions: &mut Vec<Action>) {
        match message {
            Message::View(view) => self.adopt_view(now, view, actions),
            Message::Hosts(mut hosts) => {
                let seed = self.connection.as_ref().map(|c| c.coordinator.clone());
                hosts.extend(self.seed.zip(seed));
                actions.push(Action::PublishHosts(hosts));
            }
            Message::Heartbeat { probe: true, .. } => self.send_heartbeat(false, actions),
            Message::Heartbeat { .. } => {}
            Message::Probe(instance) => {
                if self.requested_probes.insert(instance) {
                    actions.push(Action::Probe(instance));
                }
            }
            Message::Evicted => {
                tracing::error!("incarnation has ended: the log of the coordinator has the reason");
                self.start_new_incarnation(actions);
            }
            Message::Goodbye => self.on_seed_left(now, actions),
            _ => self.close_connection(actions),
        }
    }

    fn on_welcome(
        &mut self,
        now: Instant,
        identity: Identity,
        view: View,
        actions: &mut Vec<Action>,
    ) {
        let Identity { node, secret, .. } = identity;
        let expected = self.prior.as_ref().map(|prior| (prior.node, prior.secret));
        let is_expected = expected.is_none_or(|expected| expected == (node, secret));
        if !is_expected || !self.can_adopt(node, &view) {
            return self.refuse_view(view.epoch, actions);
        }
        if self.prior.is_none() {
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
        }
        if let Some(connection) = &mut self.connection {
            connection.is_welcomed = true;
        }
        self.last_rejection.clear();
        self.next_heartbeat = Some(now);
        self.adopt_view(now, view, actions);
        self.schedule_check(now);
    }

    /// Applies a view of the seed.
    fn adopt_view(&mut self, now: Instant, view: View, actions: &mut Vec<Action>) {
        let Some(node) = self.prior.as_ref().map(|prior| prior.node) else {
            return;
        };
        if !self.can_adopt(node, &view) {
            return self.refuse_view(view.epoch, actions);
        }
        let seed = self.seed.and_then(|seed| view.find_member(seed));
        let seed_incarnation = seed.map_or(0, |seed| seed.incarnation);
        if let Some(prior) = &mut self.prior {
            prior.seed_incarnation = seed_incarnation;
            if view.epoch > prior.view.epoch {
                self.apply_view(now, view, actions);
            }
        }
    }

    /// Returns `true` if the kernel of this node may apply the view: this node is a reachable member, no removed
    /// incarnation returns, and each fenced node that returns has a later admission.
    fn can_adopt(&self, node: u32, view: &View) -> bool {
        let own = view.find_reachable(node);
        let Some(own) = own.filter(|own| own.incarnation == self.incarnation) else {
            return false;
        };
        let is_removed =
            |m: &Member| self.removed_incarnations.get(&m.node) == Some(&m.incarnation);
        let lacks_seed = self
            .seed
            .is_some_and(|seed| view.find_member(seed).is_none());
        if !view.is_valid() || lacks_seed || view.members.iter().any(is_removed) {
            return false;
        }
        let Some(prior) = self.prior.as_ref().map(|prior| &prior.view) else {
            return true;
        };
        prior.epoch >= view.epoch || view.find_stale_pair(own, prior).is_none()
    }

    fn refuse_view(&mut self, epoch: u64, actions: &mut Vec<Action>) {
        tracing::error!(epoch, "view of the coordinator refused (connecting again)");
        self.close_connection(actions);
    }

    fn apply_view(&mut self, now: Instant, view: View, actions: &mut Vec<Action>) {
        let Some(prior) = &mut self.prior else {
            return;
        };
        let removed = prior
            .view
            .members
            .iter()
            .filter(|m| !view.has_member(m.node, m.incarnation));
        self.removed_incarnations
            .extend(removed.map(|m| (m.node, m.incarnation)));
        prior.view = view.clone();
        actions.push(Action::ApplyView(view));
        self.schedule_check(now);
    }

    /// Ends this incarnation. The next one joins when the seed is connected again.
    fn start_new_incarnation(&mut self, actions: &mut Vec<Action>) {
        self.close_connection(actions);
        self.incarnation = next_incarnation(self.incarnation);
        self.removed_incarnations.clear();
        self.applied_epoch = 0;
        (self.check, self.check_at) = (None, None);
        if self.prior.take().is_some() {
            actions.push(Action::Leave);
        }
    }

    fn on_suspect(&mut self, now: Instant, node: u32, actions: &mut Vec<Action>) {
        let Some(link) = self.welcomed_link() else {
            return;
        };
        if self.seed == Some(node)
            && self
                .seed_suspected_at
                .replace(now)
                .is_none_or(|at| now >= at + SUSPICION_GAP)
        {
            let deadline = now + self.timing.probe_grace();
            self.check_at = self.check_at.map(|at| at.min(deadline));
            self.send_heartbeat(true, actions);
        }
        actions.push(Action::Send(link, Message::Suspect(node)));
    }

    fn on_tick(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_heartbeat.is_some_and(|at| at <= now) {
            self.next_heartbeat = Some(now + self.timing.heartbeat_interval);
            self.send_heartbeat(false, actions);
        }
        let is_silent = |connection: &Connection| connection.deadline <= now;
        if self.connection.as_ref().is_some_and(is_silent) {
            self.close_connection(actions);
        }
        if self.check_at.is_some_and(|at| at <= now) {
            self.start_check(now, actions);
        }
        self.conclude_check(now, actions);
    }

    fn on_leave(&mut self, actions: &mut Vec<Action>) {
        if let Some(connection) = &self.connection {
            actions.push(Action::Send(connection.link, Message::Goodbye));
        }
        self.close_connection(actions);
        // The incarnation has ended for the other nodes, so no later process may continue it.
        self.prior = None;
    }

    fn welcomed_link(&self) -> Option<LinkId> {
        let connection = self.connection.as_ref()?;
        connection.is_welcomed.then_some(connection.link)
    }

    fn send_heartbeat(&self, probe: bool, actions: &mut Vec<Action>) {
        if let Some(link) = self.welcomed_link() {
            let epoch = self.applied_epoch;
            actions.push(Action::Send(link, Message::Heartbeat { epoch, probe }));
        }
    }

    fn close_connection(&mut self, actions: &mut Vec<Action>) {
        self.requested_probes.clear();
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
            Input::Probed(instance, result) => self.on_probed(now, instance, result, actions),
            Input::Tick => self.on_tick(now, actions),
            Input::Leave => self.on_leave(actions),
            Input::Evict(instance) => match self.welcomed_link() {
                Some(link) => actions.push(Action::Send(link, Message::Evict(instance))),
                None => tracing::error!(node = instance.node, "cannot evict: no coordinator"),
            },
        }
    }

    fn snapshot(&self) -> Option<Snapshot> {
        let prior = self.prior.clone()?;
        Some(Snapshot::Follower(FollowerSnapshot {
            incarnation: self.incarnation,
            prior,
            removed_incarnations: self.removed_incarnations.clone(),
        }))
    }
}
