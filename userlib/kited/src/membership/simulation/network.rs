// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Model of the networks: TCP connections with the seed, and RDMA between all hosts.
//!
//! A cut direction of TCP delays messages, and keeps their order. A connection ends for one side at once, and for the
//! other side when the end arrives.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::membership::LinkId;
use crate::protocol::Message;

/// Maximum undelivered messages of one direction. The sender then closes the connection.
const QUEUE_MAX: usize = 64;

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Seed,
    Follower,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Seed => Self::Follower,
            Self::Follower => Self::Seed,
        }
    }
}

/// Event in flight.
#[derive(Debug)]
pub(super) enum InFlight {
    Message(Message),
    Closed,
}

#[derive(Debug, Default)]
struct SimLink {
    follower: usize,
    to_seed: VecDeque<InFlight>,
    to_follower: VecDeque<InFlight>,
    /// Sides that have ended the connection or do not exist any longer.
    ended: BTreeSet<Side>,
}

impl SimLink {
    fn queue_to(&mut self, side: Side) -> &mut VecDeque<InFlight> {
        match side {
            Side::Seed => &mut self.to_seed,
            Side::Follower => &mut self.to_follower,
        }
    }
}

/// Networks of a cluster.
#[derive(Debug, Default)]
pub(super) struct Network {
    links: BTreeMap<LinkId, SimLink>,
    last_link: LinkId,
    /// Directions of TCP in which nothing arrives: follower, and receiver.
    pub(super) tcp_cuts: BTreeSet<(usize, Side)>,
    /// Pairs of sender and receiver between which no RDMA arrives.
    pub(super) rdma_cuts: BTreeSet<(usize, usize)>,
}

impl Network {
    /// Returns `true` if a connection of a follower can be established.
    pub(super) fn can_connect(&self, follower: usize) -> bool {
        let is_cut = |side| self.tcp_cuts.contains(&(follower, side));
        !is_cut(Side::Seed) && !is_cut(Side::Follower)
    }

    pub(super) fn connect(&mut self, follower: usize) -> LinkId {
        self.last_link += 1;
        let link = SimLink {
            follower,
            ..SimLink::default()
        };
        self.links.insert(self.last_link, link);
        self.last_link
    }

    /// Returns `true` if the follower has a connection that it has not ended.
    pub(super) fn has_link(&self, follower: usize) -> bool {
        let mut links = self.links.values();
        links.any(|link| link.follower == follower && !link.ended.contains(&Side::Follower))
    }

    /// Returns the connections that a host has not ended.
    pub(super) fn links_of(&self, host: usize) -> Vec<(LinkId, Side)> {
        let side = if host == 0 {
            Side::Seed
        } else {
            Side::Follower
        };
        let links = self.links.iter().filter(|(_, link)| {
            !link.ended.contains(&side) && (host == 0 || link.follower == host)
        });
        links.map(|(&id, _)| (id, side)).collect()
    }

    /// Sends a message from one side. Returns `false` if too many messages wait.
    pub(super) fn send(&mut self, id: LinkId, from: Side, message: Message) -> bool {
        let Some(link) = self.links.get_mut(&id) else {
            return true;
        };
        if link.ended.contains(&from) || link.ended.contains(&from.other()) {
            return true;
        }
        let queue = link.queue_to(from.other());
        queue.push_back(InFlight::Message(message));
        queue.len() <= QUEUE_MAX
    }

    /// Ends a connection at one side. With `notify` the other side receives the end.
    pub(super) fn end(&mut self, id: LinkId, side: Side, notify: bool) -> bool {
        let Some(link) = self.links.get_mut(&id) else {
            return false;
        };
        if !link.ended.insert(side) {
            return false;
        }
        link.queue_to(side).clear();
        if link.ended.contains(&side.other()) {
            self.links.remove(&id);
        } else if notify {
            link.queue_to(side.other()).push_back(InFlight::Closed);
        }
        true
    }

    /// Returns the next event that arrives at a host on a connection.
    pub(super) fn receive(&mut self, id: LinkId, side: Side) -> Option<InFlight> {
        let link = self.links.get_mut(&id)?;
        if self.tcp_cuts.contains(&(link.follower, side)) || link.ended.contains(&side) {
            return None;
        }
        link.queue_to(side).pop_front()
    }

    /// Returns `true` if requests and replies of RDMA arrive between two hosts.
    pub(super) fn has_rdma(&self, one: usize, other: usize) -> bool {
        !self.rdma_cuts.contains(&(one, other)) && !self.rdma_cuts.contains(&(other, one))
    }
}
