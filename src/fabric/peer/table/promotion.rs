// SPDX-License-Identifier: GPL-2.0

//! Promotion of peers from DC to RC connections, by the rate of virtual queue pair requests (KRCORE, section
//! 4.6).
//!
//! # Operation
//!
//! `kite_core::policy::promotion` decides. Each request to a peer adds to its request rate. A peer above the
//! threshold is promoted while the set has room, or replaces a promoted peer with at most half its
//! rate. Requests then use an RC connection once it is ready, and DC until then.
//!
//! # Locking
//!
//! - `PeerTable::promoted_peers` (spin lock) protects the set. The lock is held until `Peer::promoted` of all
//!   affected peers is stored, since another thread may replace the new peer at once.
//! - Order: `PeerTable::promoted_peers`, then `PeerTable::peers` and `Peer::request_rate` of other peers.
//! - `Peer::promoted` is stored with `Release` and loaded with `Acquire`.

use super::{Peer, PeerTable};
use crate::sys::deadline::monotonic_ns;
use kernel::sync::{
    atomic::{Acquire, Release},
    Arc,
};
use kite_core::policy::promotion::PromotionOutcome;

fn now_ms() -> u64 {
    monotonic_ns() / 1_000_000
}

impl PeerTable {
    /// Records requests of virtual queue pairs to a peer, and promotes the peer if its rate suffices.
    pub(crate) fn record_requests(&self, peer: &Peer, requests: u32) {
        if peer.identity.max_conns() == 0 {
            return;
        }
        let now = now_ms();
        let rate = peer.request_rate.lock().add(now, requests);
        if let Some(rate) = rate.filter(|_| !peer.promoted.load(Acquire)) {
            self.consider_promotion(peer, rate, now);
        }
    }

    fn consider_promotion(&self, peer: &Peer, rate: u32, now: u64) {
        let rate_of = |instance| {
            let other = self.get_instance(instance);
            other.map_or(0, |other| other.request_rate.lock().value_at(now))
        };
        // Hold the lock until both `promoted` flags are stored: another thread may replace this peer at once.
        let mut promoted = self.promoted_peers.lock();
        // Another thread may have promoted the peer first, or the peer may have left the view.
        if peer.is_promoted() || self.get_instance(peer.instance()).is_err() {
            return;
        }
        let PromotionOutcome::Promoted(replaced) =
            promoted.consider(peer.instance(), rate, rate_of)
        else {
            return;
        };
        peer.promoted.store(true, Release);
        self.stats.promotions.add(1);
        self.stats.promoted_peers.add(replaced.is_none().into());
        if let Some(other) = replaced.and_then(|instance| self.get_instance(instance).ok()) {
            other.promoted.store(false, Release);
        }
    }

    /// Removes peers that left the view from the promoted peers.
    pub(in crate::fabric) fn demote(&self, peers: &[Arc<Peer>]) {
        let mut promoted = self.promoted_peers.lock();
        let old_count = promoted.count();
        peers
            .iter()
            .for_each(|peer| promoted.remove(peer.instance()));
        self.stats
            .promoted_peers
            .sub((old_count - promoted.count()) as u64);
    }
}

impl Peer {
    /// Returns `true` if requests of virtual queue pairs use RC connections to the peer.
    pub(crate) fn is_promoted(&self) -> bool {
        self.promoted.load(Acquire)
    }
}
