// SPDX-License-Identifier: GPL-2.0

//! Exhaustive check of the protocol by which nodes acquire locks at the home of a region.
//!
//! The model explores every order in which messages arrive late, twice or never. A waiter may cancel at any
//! time, and one node may die.
//!
//! A sent message can be delivered at any later time, and repeatedly. A lost message is one that is never
//! delivered. The sender retransmits [`Release`], [`Granted`] and [`MappingEnded`] until acknowledged. After
//! a delivery, such messages may be removed from the network: the acknowledgment has arrived. The home
//! caches all replies in the model. Eviction from the reply cache is covered by [`crate::proto::once`].

use crate::sync::lock::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use ModelMessage::*;

/// Ticket: the node that owns the ticket, and its number.
type ModelTicket = (usize, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ModelMessage {
    Acquire(ModelTicket),
    /// Reply to [`Acquire`]. `Some` if the lock is granted, with the value of `owner_died`.
    AcquireReplied(ModelTicket, Option<bool>),
    /// With `true` for an unlock, `false` for a cancellation.
    Release(ModelTicket, bool),
    Granted(ModelTicket, bool),
    /// The mapping of the node has ended.
    MappingEnded(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ModelPhase {
    Idle,
    /// [`Acquire`] was sent. `Some` if [`Granted`] has already arrived, with the value of `owner_died`.
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
    /// Number of the last ticket.
    ticket: u8,
    /// `true` if the tickets of the node are shared.
    shared: bool,
}

/// State of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LockModel {
    nodes: Vec<ModelNode>,
    queue: Vec<(ModelTicket, LockWaiter)>,
    /// Cached replies of the home. `None` for a ticket that was released before [`Acquire`] arrived.
    replies: BTreeMap<ModelTicket, Option<ModelMessage>>,
    ended_mappings: BTreeSet<usize>,
    in_flight: BTreeSet<ModelMessage>,
    /// An exclusive holder died, and no exclusive holder has unlocked with `owner_died` since.
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

    /// Returns all possible next states, and `true` if no delivery changes the state.
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

    /// Returns all states that a step of `node` can produce.
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
        // Only node 0 may die: one death suffices, and keeps the number of states small.
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
                    ReleaseReason::Canceled
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

    /// Removes a live ticket from the queue, and sends grants to the waiters that now hold the lock.
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

    /// Returns the phase of a ticket's node, if the ticket is the current one of the node.
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
        // If no message changes the state, a waiting node implies a holder.
        let stuck = quiescent && holders.is_empty() && self.nodes.iter().any(is_waiting);
        assert!(!stuck, "the lock has no owner: {self:?}");
        // In such a state, each queue entry is a tombstone or belongs to a node that waits or holds.
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

/// Explores all reachable states. Returns their number.
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
#[ignore = "long"]
fn two_exclusive_nodes_with_two_tickets_keep_the_invariants() {
    assert!(explore_states(&[false, false], 2) > 10_000);
}

#[test]
fn three_nodes_with_one_ticket_keep_the_invariants() {
    assert!(explore_states(&[false, true, true], 1) > 10_000);
}
