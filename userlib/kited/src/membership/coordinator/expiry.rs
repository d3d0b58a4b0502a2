// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Eviction: an operator removes a member, or permits that members are removed that are unreachable for long.
//!
//! The incarnation of an evicted node has ended. Its regions and locks are gone for the cluster, memory that others lent
//! to it is free again, and names are free. A node that still runs is fenced by the view without it. It joins with
//! another incarnation when it connects.

use std::time::{Duration, Instant};

use super::{Coordinator, Peer};
use crate::membership::Action;
use crate::protocol::{Instance, Message};

impl Coordinator {
    /// Evicts members that are unreachable for this time without interruption, as this process observes them. Without
    /// a time, no member is evicted.
    #[must_use]
    pub fn with_expiry(mut self, forget_after: Option<Duration>) -> Self {
        self.forget_after = forget_after;
        self
    }

    pub(super) fn on_evict(&mut self, instance: Instance, actions: &mut Vec<Action>) {
        let member = self.peers.get(&instance.node).map(|peer| &peer.member);
        if member.map(Instance::from) == Some(instance) {
            tracing::warn!(node = instance.node, "evicted by an operator");
            self.remove_peer(instance.node, Some(Message::Evicted), actions);
        }
    }

    pub(super) fn evict_expired_peers(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let Some(limit) = self.forget_after else {
            return;
        };
        let mut expired = Vec::new();
        for (&node, peer) in &mut self.peers {
            if unreachable_time(peer, now) >= limit {
                expired.push(node);
            }
        }
        for node in expired {
            tracing::error!(node, "evicted: unreachable for {limit:?}");
            self.remove_peer(node, Some(Message::Evicted), actions);
        }
    }
}

/// Returns the time for which a member is unreachable, and starts to count it.
fn unreachable_time(peer: &mut Peer, now: Instant) -> Duration {
    if peer.member.is_reachable() {
        peer.unreachable_at = None;
        return Duration::ZERO;
    }
    now - *peer.unreachable_at.get_or_insert(now)
}
