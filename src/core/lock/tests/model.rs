// SPDX-License-Identifier: GPL-2.0

//! The protocol by which nodes take locks of another, tried exhaustively: every order in which messages
//! come, late, twice or never, in which who waits gives up, and in which one of them dies.
//!
//! What is sent can be delivered at any time from then on, and again; so a message that is lost is one that
//! is not delivered. What is insisted on ([`Leave`], [`Granted`] and [`Gone`]) is gone once it was
//! delivered, if chance wills it: then it was acknowledged. The home remembers all its answers here; that it may forget
//! some is the matter of [`crate::once`].

use super::super::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// A ticket: whose it is, and its number.
type Ticket = (usize, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Message {
    Enter(Ticket),
    /// The answer to that; with the lock, whether there is a warning.
    Entered(Ticket, Option<bool>),
    /// With whether it unlocks.
    Leave(Ticket, bool),
    Granted(Ticket, bool),
    /// The node's mapping has ended.
    Gone(usize),
}
use Message::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// It has asked, and may have heard already that it has the lock.
    Asks(Option<bool>),
    Waits,
    Holds {
        warned: bool,
    },
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    phase: Phase,
    /// Number of its last ticket.
    ticket: u8,
    /// Whether its tickets share the lock.
    shared: bool,
}

/// All that there is at a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    nodes: Vec<Node>,
    line: Vec<(Ticket, Claim)>,
    /// What the home has answered; nothing to what was given up before it came.
    answers: BTreeMap<Ticket, Option<Message>>,
    gone: BTreeSet<usize>,
    sent: BTreeSet<Message>,
    /// One died with the lock to itself, and nobody has put right what it left.
    damaged: bool,
}

impl World {
    fn new(shared: &[bool]) -> Self {
        let node = |&shared| Node {
            phase: Phase::Idle,
            ticket: 0,
            shared,
        };
        Self {
            nodes: shared.iter().map(node).collect(),
            line: Vec::new(),
            answers: BTreeMap::new(),
            gone: BTreeSet::new(),
            sent: BTreeSet::new(),
            damaged: false,
        }
    }

    /// Everything that can happen next; and whether no message changes anything any more.
    fn next(&self, tickets: u8) -> (Vec<World>, bool) {
        let mut worlds = Vec::new();
        let mut settled = true;
        for &message in &self.sent {
            let mut kept = self.clone();
            kept.deliver(message);
            if matches!(message, Leave(..) | Granted(..) | Gone(_)) {
                let mut taken = kept.clone();
                taken.sent.remove(&message);
                worlds.push(taken);
            }
            if kept != *self {
                settled = false;
                worlds.push(kept);
            }
        }
        for node in 0..self.nodes.len() {
            worlds.extend(self.acts(node, tickets));
        }
        (worlds, settled)
    }

    /// What a node may do.
    fn acts(&self, node: usize, tickets: u8) -> Vec<World> {
        let mut acts = Vec::new();
        let mut act = |how: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            how(&mut world);
            acts.push(world);
        };
        let Node { phase, ticket, .. } = self.nodes[node];
        match phase {
            Phase::Dead => {}
            Phase::Idle if ticket == tickets => {}
            Phase::Idle => act(&|world| {
                world.nodes[node].ticket += 1;
                world.nodes[node].phase = Phase::Asks(None);
                world.sent.insert(Enter((node, ticket + 1)));
            }),
            Phase::Asks(_) | Phase::Waits => act(&|world| world.leave(node, false)),
            Phase::Holds { .. } => act(&|world| world.leave(node, true)),
        }
        // One that dies is enough to know, and spares time.
        if node == 0 && phase != Phase::Dead {
            act(&|world| world.die(node));
        }
        acts
    }

    fn leave(&mut self, node: usize, unlocks: bool) {
        let Node { phase, ticket, .. } = self.nodes[node];
        if phase == (Phase::Holds { warned: true }) && !self.nodes[node].shared {
            self.damaged = false;
        }
        self.nodes[node].phase = Phase::Idle;
        self.sent.insert(Leave((node, ticket), unlocks));
    }

    fn die(&mut self, node: usize) {
        let holds = matches!(self.nodes[node].phase, Phase::Holds { .. });
        self.damaged |= holds && !self.nodes[node].shared;
        self.nodes[node].phase = Phase::Dead;
        self.sent.insert(Gone(node));
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Enter(ticket) => self.on_enter(ticket),
            Leave(ticket, unlocks) => {
                self.answers.entry(ticket).or_insert(None);
                let how = if unlocks { End::Unlocked } else { End::GivenUp };
                self.end(ticket, how);
            }
            Gone(node) => {
                self.gone.insert(node);
                let tickets: Vec<Ticket> = self.line.iter().map(|(ticket, _)| *ticket).collect();
                let own = tickets.into_iter().filter(|ticket| ticket.0 == node);
                own.for_each(|ticket| self.end(ticket, End::Died));
            }
            Entered(ticket, granted) => self.on_entered(ticket, granted),
            Granted(ticket, warned) => self.on_granted(ticket, warned),
        }
    }

    fn on_enter(&mut self, ticket: Ticket) {
        if !self.answers.contains_key(&ticket) && !self.gone.contains(&ticket.0) {
            let shared = self.nodes[ticket.0].shared;
            let turn = Turn::Waits;
            self.line.push((ticket, Claim { shared, turn }));
            advance(self.line.iter_mut().map(|(_, claim)| claim));
            let granted = match self.line.last().unwrap().1.turn {
                Turn::Has { warned } => Some(warned),
                _ => None,
            };
            self.answers.insert(ticket, Some(Entered(ticket, granted)));
        }
        self.sent
            .extend(self.answers.get(&ticket).copied().flatten());
    }

    /// Ends a ticket that is alive, and tells those whose turn it is then.
    fn end(&mut self, ticket: Ticket, how: End) {
        let alive = |(other, claim): &(Ticket, Claim)| *other == ticket && claim.turn != Turn::Died;
        let Some(at) = self.line.iter().position(alive) else {
            return;
        };
        let rest = self.line[at].1.end(how);
        if rest != Rest::Itself {
            self.line.remove(at);
        }
        if rest == Rest::Neither {
            self.line.retain(|(_, claim)| claim.turn != Turn::Died);
        }
        let before = self.line.clone();
        advance(self.line.iter_mut().map(|(_, claim)| claim));
        for ((ticket, now), (_, before)) in self.line.iter().zip(before) {
            if let (Turn::Has { warned }, Turn::Waits) = (now.turn, before.turn) {
                self.sent.insert(Granted(*ticket, warned));
            }
        }
    }

    /// The node of a ticket, if it is the one that it is about.
    fn about(&mut self, ticket: Ticket) -> Option<&mut Phase> {
        let node = &mut self.nodes[ticket.0];
        (node.ticket == ticket.1).then_some(&mut node.phase)
    }

    fn on_entered(&mut self, ticket: Ticket, granted: Option<bool>) {
        let Some(phase) = self.about(ticket) else {
            return;
        };
        if let Phase::Asks(heard) = *phase {
            match granted.or(heard) {
                Some(warned) => self.holds(ticket.0, warned),
                None => *phase = Phase::Waits,
            }
        }
    }

    fn on_granted(&mut self, ticket: Ticket, warned: bool) {
        match self.about(ticket) {
            Some(phase @ Phase::Asks(_)) => *phase = Phase::Asks(Some(warned)),
            Some(Phase::Waits) => self.holds(ticket.0, warned),
            _ => {}
        }
    }

    fn holds(&mut self, node: usize, warned: bool) {
        assert!(warned || !self.damaged, "not warned: {self:?}");
        self.nodes[node].phase = Phase::Holds { warned };
    }

    fn check(&self, settled: bool) {
        let holds = |node: &Node| matches!(node.phase, Phase::Holds { .. });
        let waits = |node: &Node| matches!(node.phase, Phase::Asks(_) | Phase::Waits);
        let holders: Vec<&Node> = self.nodes.iter().filter(|node| holds(node)).collect();
        let fine = holders.len() <= 1 || holders.iter().all(|node| node.shared);
        assert!(fine, "two have it: {self:?}");
        // Whoever waits, waits for somebody.
        let stuck = settled && holders.is_empty() && self.nodes.iter().any(waits);
        assert!(!stuck, "nobody has it: {self:?}");
        // Nor is anything left in line of who is not there.
        let owned = |(ticket, claim): &(Ticket, Claim)| {
            let node = &self.nodes[ticket.0];
            claim.turn == Turn::Died || node.ticket == ticket.1 && (waits(node) || holds(node))
        };
        assert!(!settled || self.line.iter().all(owned), "haunted: {self:?}");
    }
}

/// Visits all worlds; returns how many there are.
fn explore(shared: &[bool], tickets: u8) -> usize {
    let first = World::new(shared);
    let mut seen = HashSet::from([first.clone()]);
    let mut todo = vec![first];
    while let Some(world) = todo.pop() {
        let (worlds, settled) = world.next(tickets);
        world.check(settled);
        for next in worlds {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    seen.len()
}

#[test]
fn two_nodes_that_come_twice() {
    assert!(explore(&[false, false], 2) > 10_000);
}

#[test]
fn three_nodes_that_come_once() {
    assert!(explore(&[false, true, true], 1) > 10_000);
}
