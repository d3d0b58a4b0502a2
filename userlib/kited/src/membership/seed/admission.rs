// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Admission of nodes: hellos, numbers and welcomes.

use std::collections::HashSet;
use std::net::Ipv6Addr;
use std::time::Instant;

use kite::{FabricAddress, Member, MEMBERS_MAX, NODE_ID_MAX};

use super::{send_and_close, Peer, PendingConn, Seed};
use crate::membership::{Action, LinkId};
use crate::protocol::{Message, PriorMembership, SEED_NODE};

impl PendingConn {
    /// Returns `true` if a node with this GID waits that has not joined before.
    fn is_of_new_node(&self, gid: Ipv6Addr) -> bool {
        let hello = self.hello.as_ref();
        hello.is_some_and(|hello| match hello {
            Message::Hello { address, prior, .. } => address.gid == gid && prior.is_none(),
            _ => false,
        })
    }
}

impl Seed {
    /// Processes the first message of a connection, or defers the hello.
    pub(super) fn on_first_message(
        &mut self,
        now: Instant,
        link: LinkId,
        message: Message,
        actions: &mut Vec<Action>,
    ) {
        let Message::Hello {
            incarnation: incarnation @ 1..,
            address,
            prior: ref former,
        } = message
        else {
            return actions.push(Action::Close(link));
        };
        let is_new = former.is_none();
        if let Some(deadline) = self.deferred_until(now, (incarnation, &address), is_new, actions) {
            tracing::info!(%address, "join deferred by {:?}", deadline - now);
            let hello = Some(message);
            let pending = PendingConn { deadline, hello };
            self.pending_conns.insert(link, pending);
        } else if let Message::Hello { prior, .. } = message {
            self.on_hello(now, link, (incarnation, address), prior, actions);
        }
    }

    /// Returns the time until which a hello is deferred, if any. Probes the member that has the GID of a new node.
    fn deferred_until(
        &mut self,
        now: Instant,
        (incarnation, address): (u64, &FabricAddress),
        is_new: bool,
        actions: &mut Vec<Action>,
    ) -> Option<Instant> {
        let newcomers_after = self.newcomers_after.filter(|&at| is_new && now < at);
        newcomers_after
            .or_else(|| self.quarantined_until(now, address))
            .or_else(|| self.challenge(now, (incarnation, address), is_new, actions))
    }

    /// Probes the connected member that has the GID of a new node. Returns the time for its reply. A member that does
    /// not reply was restarted, and the new node replaces it.
    fn challenge(
        &mut self,
        now: Instant,
        (incarnation, address): (u64, &FabricAddress),
        is_new: bool,
        actions: &mut Vec<Action>,
    ) -> Option<Instant> {
        let node = self.node_numbers.get(&address.gid).filter(|_| is_new)?;
        let peer = self.peers.get(node)?;
        let link = peer
            .link
            .filter(|_| peer.member.incarnation != incarnation)?;
        if let Some(&until) = self.challenged.get(&address.gid) {
            return (now < until).then_some(until);
        }
        let until = now + self.timing.probe_grace();
        self.challenged.insert(address.gid, until);
        actions.push(self.heartbeat_action(link, true));
        Some(until)
    }

    /// Rejects new nodes with the GID of a member that replies.
    pub(super) fn reject_challengers(&mut self, node: u32, actions: &mut Vec<Action>) {
        let Some(gid) = self.peers.get(&node).map(|peer| peer.member.address.gid) else {
            return;
        };
        if self.challenged.remove(&gid).is_none() {
            return;
        }
        let pending_conns = self.pending_conns.iter();
        let challengers = pending_conns.filter(|(_, pending)| pending.is_of_new_node(gid));
        let challengers: Vec<LinkId> = challengers.map(|(&link, _)| link).collect();
        for link in challengers {
            self.pending_conns.remove(&link);
            let reason = format!("another node with the GID {gid} is connected");
            send_and_close(link, Message::Rejected(reason), actions);
        }
    }

    fn on_hello(
        &mut self,
        now: Instant,
        link: LinkId,
        (incarnation, address): (u64, FabricAddress),
        prior: Option<PriorMembership>,
        actions: &mut Vec<Action>,
    ) {
        self.challenged.remove(&address.gid);
        if let Some(prior) = prior {
            return self.readmit(now, link, (incarnation, address), prior, actions);
        }
        match self.assign_number(&address) {
            Ok(node) => {
                tracing::info!(node, %address, "node joins the cluster");
                if self.peers.contains_key(&node) {
                    self.remove_peer(node, Some(Message::Evicted), actions);
                }
                let member = self.next_member(node, incarnation, address);
                self.insert_peer(now, member, false);
                self.publish_view(actions);
                self.send_welcome(now, link, node, actions);
            }
            Err(reason) => send_and_close(link, Message::Rejected(reason.into()), actions),
        }
    }

    /// Returns a member that the next view admits.
    pub(super) fn next_member(
        &self,
        node: u32,
        incarnation: u64,
        address: FabricAddress,
    ) -> Member {
        Member {
            node,
            incarnation,
            address,
            admitted_epoch: self.next_epoch(),
            unreachable_since: 0,
        }
    }

    /// Returns the number for the node with this address: its previous number, or the smallest unused one.
    fn assign_number(&self, address: &FabricAddress) -> Result<u32, &'static str> {
        if address.gid == self.self_member.address.gid {
            return Err("RNIC has the same GID as the RNIC of the seed");
        }
        let former = self.node_numbers.get(&address.gid).copied();
        let replaces = former.is_some_and(|node| self.peers.contains_key(&node));
        let has_capacity = replaces || self.peers.len() + 1 < MEMBERS_MAX;
        former
            .or_else(|| self.unused_number())
            .filter(|_| has_capacity)
            .ok_or("cluster is full")
    }

    fn unused_number(&self) -> Option<u32> {
        let used: HashSet<u32> = self.node_numbers.values().copied().collect();
        (SEED_NODE + 1..=NODE_ID_MAX).find(|node| !used.contains(node))
    }

    pub(super) fn insert_peer(&mut self, now: Instant, member: Member, is_inherited: bool) {
        self.node_numbers.insert(member.address.gid, member.node);
        let deadline = now + self.timing.dead_after;
        self.peers
            .insert(member.node, Peer::new(member, deadline, is_inherited));
    }

    /// Makes `link` the connection of a peer, closes its previous connection, and sends the welcome.
    pub(super) fn send_welcome(
        &mut self,
        now: Instant,
        link: LinkId,
        node: u32,
        actions: &mut Vec<Action>,
    ) {
        let view = self.view();
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        peer.deadline = now + self.timing.dead_after;
        peer.check_ends = None;
        if let Some(former) = peer.link.replace(link) {
            self.links.remove(&former);
            actions.push(Action::Close(former));
        }
        self.links.insert(link, node);
        let secret = self.secret;
        actions.push(Action::Send(link, Message::Welcome { node, secret, view }));
        self.send_hosts(actions);
    }
}
