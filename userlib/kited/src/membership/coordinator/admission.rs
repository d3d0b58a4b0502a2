// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Admission of new incarnations: hellos without a prior membership, and numbers.
//!
//! # Operation
//!
//! The hello of a node that may not join yet is deferred. Heartbeats of the seed keep its connection open meanwhile.
//!
//! A hello with the GID of a member replaces the former incarnation of that node. If the member is connected, two hosts
//! may have the same GID. The seed requests a heartbeat of the member first. If one arrives within the dead timeout, the
//! hello is rejected.

use std::collections::HashSet;
use std::net::Ipv6Addr;
use std::time::Instant;

use kite::{FabricAddress, Member, MEMBERS_MAX, NODE_ID_MAX};

use super::{send_and_close, Coordinator, Peer};
use crate::membership::{Action, LinkId};
use crate::protocol::{Instance, KernelInfo, Message};

/// Connection that belongs to no member yet.
#[derive(Debug)]
pub(super) struct PendingConn {
    /// Time at which the connection is closed, or its deferred hello is processed.
    deadline: Instant,
    deferred: Option<Deferred>,
}

/// Hello that is processed later.
#[derive(Debug)]
struct Deferred {
    hello: Message,
    /// Connected member with the same GID.
    duplicate_of: Option<u32>,
}

impl PendingConn {
    /// Returns a connection without a message.
    pub(super) fn new(deadline: Instant) -> Self {
        Self {
            deadline,
            deferred: None,
        }
    }

    /// Returns `true` if a hello arrived and is deferred.
    pub(super) fn is_deferred(&self) -> bool {
        self.deferred.is_some()
    }

    fn is_duplicate_of(&self, node: u32) -> bool {
        let deferred = self.deferred.as_ref();
        deferred.is_some_and(|deferred| deferred.duplicate_of == Some(node))
    }
}

/// Reason for which a node cannot join now.
enum JoinObstacle {
    Rejected(String),
    Deferred {
        until: Instant,
        duplicate_of: Option<u32>,
    },
}

impl Coordinator {
    /// Processes the first message of a connection.
    pub(super) fn on_first_message(
        &mut self,
        now: Instant,
        link: LinkId,
        message: Message,
        actions: &mut Vec<Action>,
    ) {
        let Message::Hello {
            incarnation: incarnation @ 1..,
            kernel,
            prior,
        } = message
        else {
            return actions.push(Action::Close(link));
        };
        if let Some(reason) = self.wire_mismatch(kernel) {
            // A member sends its hello again several times per second.
            if prior.is_none_or(|prior| self.rejected.insert(prior.node)) {
                tracing::warn!(address = %kernel.address, "join rejected: {reason}");
            }
            return send_and_close(link, Message::Rejected(reason), actions);
        }
        if let Some(prior) = prior {
            return self.on_return(now, link, incarnation, &prior, actions);
        }
        let address = kernel.address;
        let joined = self
            .check_join(now, &address, actions)
            .and_then(|()| self.join_node(now, (incarnation, kernel), actions));
        match joined {
            Ok(node) => self.welcome(now, link, node, actions),
            Err(JoinObstacle::Rejected(reason)) => {
                tracing::warn!(%address, "join rejected: {reason}");
                send_and_close(link, Message::Rejected(reason), actions);
            }
            Err(JoinObstacle::Deferred {
                until,
                duplicate_of,
            }) => {
                tracing::info!(%address, "join deferred by {:?}", until - now);
                let hello = Message::Hello {
                    incarnation,
                    kernel,
                    prior: None,
                };
                let deferred = Some(Deferred {
                    hello,
                    duplicate_of,
                });
                let deadline = until;
                let pending = PendingConn { deadline, deferred };
                self.pending_conns.insert(link, pending);
            }
        }
    }

    /// Returns the GID of the seed.
    pub(super) fn own_gid(&self) -> Option<Ipv6Addr> {
        self.own.map(|own| own.address.gid)
    }

    /// Checks whether the node with this address may join now.
    fn check_join(
        &mut self,
        now: Instant,
        address: &FabricAddress,
        actions: &mut Vec<Action>,
    ) -> Result<(), JoinObstacle> {
        if self.own_gid() == Some(address.gid) {
            let reason = "RNIC has the same GID as the RNIC of the seed";
            return Err(JoinObstacle::Rejected(reason.into()));
        }
        let former = self.node_numbers.get(&address.gid).copied();
        let quarantined = former.and_then(|node| self.quarantined_until(now, node));
        let survivors = self.survivors_until.filter(|&until| now < until);
        if let Some(until) = quarantined.max(survivors) {
            let duplicate_of = None;
            return Err(JoinObstacle::Deferred {
                until,
                duplicate_of,
            });
        }
        former.map_or(Ok(()), |node| self.check_duplicate(now, node, actions))
    }

    /// Returns the reason for which a kernel cannot exchange messages with those of the members.
    fn wire_mismatch(&self, kernel: KernelInfo) -> Option<String> {
        let (own, other) = (self.wire_version, kernel.wire_version);
        (own != other).then(|| {
            format!(
                "module kite of the node has wire version {other}, that of the cluster has {own}: install the same \
                 version on both"
            )
        })
    }

    /// Checks that the member with the GID of a new node is not connected, or does not respond.
    fn check_duplicate(
        &mut self,
        now: Instant,
        node: u32,
        actions: &mut Vec<Action>,
    ) -> Result<(), JoinObstacle> {
        let timeout = self.timing.dead_after;
        let peer = self.peers.get_mut(&node);
        let Some((link, peer)) = peer.and_then(|peer| Some((peer.link?, peer))) else {
            return Ok(());
        };
        let is_new = peer.challenged_at.is_none();
        let until = *peer.challenged_at.get_or_insert(now) + timeout;
        if until <= now {
            return Ok(());
        }
        if is_new {
            actions.push(self.heartbeat_action(link, true));
        }
        let duplicate_of = Some(node);
        Err(JoinObstacle::Deferred {
            until,
            duplicate_of,
        })
    }

    /// Rejects the nodes that have the GID of a member, since the member has sent a message.
    pub(super) fn reject_duplicates_of(&mut self, node: u32, actions: &mut Vec<Action>) {
        let conns = self.pending_conns.iter();
        let duplicates = conns.filter(|(_, conn)| conn.is_duplicate_of(node));
        let duplicates: Vec<LinkId> = duplicates.map(|(&link, _)| link).collect();
        for link in duplicates {
            self.pending_conns.remove(&link);
            tracing::error!(
                node,
                "join of a second host with the GID of a connected node rejected"
            );
            let reason = format!("node {node} is connected and has the same GID as this RNIC");
            send_and_close(link, Message::Rejected(reason), actions);
        }
    }

    /// Processes the hellos of nodes with the GID of a member at the next tick, since the member is disconnected.
    pub(super) fn expire_duplicates_of(&mut self, now: Instant, node: u32) {
        let conns = self.pending_conns.values_mut();
        let duplicates = conns.filter(|conn| conn.is_duplicate_of(node));
        duplicates.for_each(|conn| conn.deadline = now);
    }

    /// Admits a new incarnation of the node with this kernel. Returns its number.
    fn join_node(
        &mut self,
        now: Instant,
        (incarnation, kernel): (u64, KernelInfo),
        actions: &mut Vec<Action>,
    ) -> Result<u32, JoinObstacle> {
        let node = self.assign_number(&kernel.address)?;
        let former = self.peers.get(&node);
        if former.is_some_and(|peer| peer.member.incarnation != incarnation) {
            tracing::info!(node, "former incarnation of the node has ended");
            self.remove_peer(node, Some(Message::Evicted), actions);
        }
        tracing::info!(node, address = %kernel.address, "node joins the cluster");
        let member = kernel.new_member(Instance { node, incarnation });
        self.insert_peer(now, member, false);
        self.admit(node);
        Ok(node)
    }

    /// Returns the number for the node with this address: its previous number, or the smallest unused one.
    fn assign_number(&self, address: &FabricAddress) -> Result<u32, JoinObstacle> {
        let former = self.node_numbers.get(&address.gid).copied();
        let replaces = former.is_some_and(|node| self.peers.contains_key(&node));
        let has_capacity = replaces || self.peers.len() + 1 < MEMBERS_MAX;
        former
            .or_else(|| self.unused_number())
            .filter(|_| has_capacity)
            .ok_or_else(|| JoinObstacle::Rejected("cluster is full".into()))
    }

    fn unused_number(&self) -> Option<u32> {
        let used: HashSet<u32> = self.node_numbers.values().copied().collect();
        (1..=NODE_ID_MAX).find(|&node| !self.is_own(node) && !used.contains(&node))
    }

    /// Inserts a member in place of its former incarnation. The caller admits it.
    pub(super) fn insert_peer(&mut self, now: Instant, member: Member, is_inherited: bool) {
        self.node_numbers.insert(member.address.gid, member.node);
        let deadline = now + self.timing.dead_after;
        let mut peer = Peer::new(member, deadline, is_inherited);
        let former = self.peers.remove(&member.node);
        peer.link = former.and_then(|former| former.link);
        self.peers.insert(member.node, peer);
        self.is_changed = true;
    }

    /// Makes `link` the connection of a peer, and closes its previous connection. The step ends with the welcome.
    pub(super) fn welcome(
        &mut self,
        now: Instant,
        link: LinkId,
        node: u32,
        actions: &mut Vec<Action>,
    ) {
        self.on_peer_heard(now, node, actions);
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        // The kernel receives the current view now, so its time to apply the view starts now.
        peer.lag = None;
        if let Some(former) = peer.link.replace(link) {
            self.links.remove(&former);
            actions.push(Action::Close(former));
        }
        self.links.insert(link, node);
        self.welcomes.push((link, node));
    }

    /// Closes connections without a hello, and processes deferred hellos.
    pub(super) fn process_expired_conns(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let expired = self.pending_conns.iter().filter(|(_, c)| c.deadline <= now);
        let expired: Vec<LinkId> = expired.map(|(&link, _)| link).collect();
        for link in expired {
            let conn = self.pending_conns.remove(&link);
            match conn.and_then(|conn| conn.deferred) {
                Some(deferred) => self.on_first_message(now, link, deferred.hello, actions),
                None => actions.push(Action::Close(link)),
            }
        }
    }
}
