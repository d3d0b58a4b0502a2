// SPDX-License-Identifier: GPL-2.0

//! The protocol by which nodes take locks of another, tried exhaustively: every order in which messages
//! come, late, twice or never, in which who waits gives up, and in which one of them dies.
//!
//! What is sent can be delivered at any time from then on, and again; so a message that is lost is one that
//! is not delivered. What is insisted on ([`Leave`], [`Granted`] and [`Gone`]) is gone once it was
//! delivered, if chance wills it: then it was acknowledged. The home remembers all its answers here; that it may forget
//! some is the matter of [`crate::proto::once`].

use crate::sync::lock::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use ModelMessage::*;

/// A ticket: whose it is, and its number.
type ModelTicket = (usize, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ModelMessage {
    Acquire(ModelTicket),
    /// The answer to that; with the lock, whether there is a warning.
    AcquireReplied(ModelTicket, Option<bool>),
    /// With whether it unlocks.
    Release(ModelTicket, bool),
    Granted(ModelTicket, bool),
    /// The node's mapping has ended.
    MappingEnded(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ModelPhase {
    Idle,
    /// It has asked, and may have heard already that it has the lock.
    Acquiring(Option<bool>),
    Waiting,
    Holding {
        owner_died: bool,
    },
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelNode {
    phase: ModelPhase,
    /// Number of its last ticket.
    ticket: u8,
    /// Whether its tickets share the lock.
    shared: bool,
}

/// All that there is at a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LockModel {
    nodes: Vec<ModelNode>,
    queue: Vec<(ModelTicket, LockWaiter)>,
    /// What the home has answered; nothing to what was given up before it came.
    replies: BTreeMap<ModelTicket, Option<ModelMessage>>,
    ended_mappings: BTreeSet<usize>,
    in_flight: BTreeSet<ModelMessage>,
    /// One died with the lock to itself, and nobody has put right what it left.
    is_inconsistent: bool,
}

impl LockModel {
    fn new(shared: &[bool]) -> Self {
        let new_node = |&shared| ModelNode {
            phase: ModelPhase::Idle,
            ticket: 0,
            shared,
        };
        Self {
            nodes: shared.iter().map(new_node).collect(),
            queue: Vec::new(),
            replies: BTreeMap::new(),
            ended_mappings: BTreeSet::new(),
            in_flight: BTreeSet::new(),
            is_inconsistent: false,
        }
    }

    /// Everything that can happen next; and whether no message changes anything any more.
    fn successors(&self, tickets: u8) -> (Vec<LockModel>, bool) {
        let mut worlds = Vec::new();
        let mut quiescent = true;
        for &message in &self.in_flight {
            let mut delivered_again = self.clone();
            delivered_again.deliver(message);
            if matches!(message, Release(..) | Granted(..) | MappingEnded(_)) {
                let mut acknowledged = delivered_again.clone();
                acknowledged.in_flight.remove(&message);
                worlds.push(acknowledged);
            }
            if delivered_again != *self {
                quiescent = false;
                worlds.push(delivered_again);
            }
        }
        for node in 0..self.nodes.len() {
            worlds.extend(self.node_steps(node, tickets));
        }
        (worlds, quiescent)
    }

    /// What a node may do.
    fn node_steps(&self, node: usize, tickets: u8) -> Vec<LockModel> {
        let mut successors = Vec::new();
        let mut add_successor = |change: &dyn Fn(&mut LockModel)| {
            let mut world = self.clone();
            change(&mut world);
            successors.push(world);
        };
        let ModelNode { phase, ticket, .. } = self.nodes[node];
        match phase {
            ModelPhase::Dead => {}
            ModelPhase::Idle if ticket == tickets => {}
            ModelPhase::Idle => add_successor(&|world| {
                world.nodes[node].ticket += 1;
                world.nodes[node].phase = ModelPhase::Acquiring(None);
                world.in_flight.insert(Acquire((node, ticket + 1)));
            }),
            ModelPhase::Acquiring(_) | ModelPhase::Waiting => {
                add_successor(&|world| world.release(node, false))
            }
            ModelPhase::Holding { .. } => add_successor(&|world| world.release(node, true)),
        }
        // One that dies is enough to know, and spares time.
        if node == 0 && phase != ModelPhase::Dead {
            add_successor(&|world| world.kill(node));
        }
        successors
    }

    fn release(&mut self, node: usize, is_unlock: bool) {
        let ModelNode { phase, ticket, .. } = self.nodes[node];
        if phase == (ModelPhase::Holding { owner_died: true }) && !self.nodes[node].shared {
            self.is_inconsistent = false;
        }
        self.nodes[node].phase = ModelPhase::Idle;
        self.in_flight.insert(Release((node, ticket), is_unlock));
    }

    fn kill(&mut self, node: usize) {
        let is_holder = matches!(self.nodes[node].phase, ModelPhase::Holding { .. });
        self.is_inconsistent |= is_holder && !self.nodes[node].shared;
        self.nodes[node].phase = ModelPhase::Dead;
        self.in_flight.insert(MappingEnded(node));
    }

    fn deliver(&mut self, message: ModelMessage) {
        match message {
            Acquire(ticket) => self.on_acquire(ticket),
            Release(ticket, unlocks) => {
                self.replies.entry(ticket).or_insert(None);
                let reason = if unlocks {
                    ReleaseReason::Unlocked
                } else {
                    ReleaseReason::Cancelled
                };
                self.remove_waiter(ticket, reason);
            }
            MappingEnded(node) => {
                self.ended_mappings.insert(node);
                let tickets: Vec<ModelTicket> =
                    self.queue.iter().map(|(ticket, _)| *ticket).collect();
                let own = tickets.into_iter().filter(|ticket| ticket.0 == node);
                own.for_each(|ticket| self.remove_waiter(ticket, ReleaseReason::OwnerDied));
            }
            AcquireReplied(ticket, granted) => self.on_acquire_reply(ticket, granted),
            Granted(ticket, warned) => self.on_granted(ticket, warned),
        }
    }

    fn on_acquire(&mut self, ticket: ModelTicket) {
        if !self.replies.contains_key(&ticket) && !self.ended_mappings.contains(&ticket.0) {
            let shared = self.nodes[ticket.0].shared;
            let turn = WaiterState::Waiting;
            self.queue.push((
                ticket,
                LockWaiter {
                    shared,
                    state: turn,
                },
            ));
            grant_next(self.queue.iter_mut().map(|(_, claim)| claim));
            let granted = match self.queue.last().unwrap().1.state {
                WaiterState::Granted { owner_died: warned } => Some(warned),
                _ => None,
            };
            self.replies
                .insert(ticket, Some(AcquireReplied(ticket, granted)));
        }
        self.in_flight
            .extend(self.replies.get(&ticket).copied().flatten());
    }

    /// Ends a ticket that is alive, and tells those whose turn it is then.
    fn remove_waiter(&mut self, ticket: ModelTicket, reason: ReleaseReason) {
        let is_live = |(other, claim): &(ModelTicket, LockWaiter)| {
            *other == ticket && claim.state != WaiterState::OwnerDied
        };
        let Some(at) = self.queue.iter().position(is_live) else {
            return;
        };
        let removal = self.queue[at].1.release(reason);
        if removal != Removal::None {
            self.queue.remove(at);
        }
        if removal == Removal::WaiterAndTombstone {
            self.queue
                .retain(|(_, claim)| claim.state != WaiterState::OwnerDied);
        }
        let before = self.queue.clone();
        grant_next(self.queue.iter_mut().map(|(_, claim)| claim));
        for ((ticket, now), (_, before)) in self.queue.iter().zip(before) {
            if let (WaiterState::Granted { owner_died: warned }, WaiterState::Waiting) =
                (now.state, before.state)
            {
                self.in_flight.insert(Granted(*ticket, warned));
            }
        }
    }

    /// The node of a ticket, if it is the one that it is about.
    fn phase_of(&mut self, ticket: ModelTicket) -> Option<&mut ModelPhase> {
        let node = &mut self.nodes[ticket.0];
        (node.ticket == ticket.1).then_some(&mut node.phase)
    }

    fn on_acquire_reply(&mut self, ticket: ModelTicket, granted: Option<bool>) {
        let Some(phase) = self.phase_of(ticket) else {
            return;
        };
        if let ModelPhase::Acquiring(known_grant) = *phase {
            match granted.or(known_grant) {
                Some(warned) => self.start_holding(ticket.0, warned),
                None => *phase = ModelPhase::Waiting,
            }
        }
    }

    fn on_granted(&mut self, ticket: ModelTicket, warned: bool) {
        match self.phase_of(ticket) {
            Some(phase @ ModelPhase::Acquiring(_)) => *phase = ModelPhase::Acquiring(Some(warned)),
            Some(ModelPhase::Waiting) => self.start_holding(ticket.0, warned),
            _ => {}
        }
    }

    fn start_holding(&mut self, node: usize, warned: bool) {
        assert!(warned || !self.is_inconsistent, "not warned: {self:?}");
        self.nodes[node].phase = ModelPhase::Holding { owner_died: warned };
    }

    fn check(&self, quiescent: bool) {
        let is_holder = |node: &ModelNode| matches!(node.phase, ModelPhase::Holding { .. });
        let is_waiting =
            |node: &ModelNode| matches!(node.phase, ModelPhase::Acquiring(_) | ModelPhase::Waiting);
        let holders: Vec<&ModelNode> = self.nodes.iter().filter(|node| is_holder(node)).collect();
        let is_exclusive = holders.len() <= 1 || holders.iter().all(|node| node.shared);
        assert!(is_exclusive, "two have it: {self:?}");
        // Whoever waits, waits for somebody.
        let stuck = quiescent && holders.is_empty() && self.nodes.iter().any(is_waiting);
        assert!(!stuck, "nobody has it: {self:?}");
        // Nor is anything left in line of who is not there.
        let has_owner = |(ticket, claim): &(ModelTicket, LockWaiter)| {
            let node = &self.nodes[ticket.0];
            claim.state == WaiterState::OwnerDied
                || node.ticket == ticket.1 && (is_waiting(node) || is_holder(node))
        };
        assert!(
            !quiescent || self.queue.iter().all(has_owner),
            "haunted: {self:?}"
        );
    }
}

/// Visits all worlds; returns how many there are.
fn explore_states(shared: &[bool], tickets: u8) -> usize {
    let first = LockModel::new(shared);
    let mut seen = HashSet::from([first.clone()]);
    let mut todo = vec![first];
    while let Some(world) = todo.pop() {
        let (worlds, quiescent) = world.successors(tickets);
        world.check(quiescent);
        for next in worlds {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    seen.len()
}

#[test]
fn two_exclusive_nodes_with_two_tickets_keep_the_invariants() {
    assert!(explore_states(&[false, false], 2) > 10_000);
}

#[test]
fn three_nodes_with_one_ticket_keep_the_invariants() {
    assert!(explore_states(&[false, true, true], 1) > 10_000);
}
