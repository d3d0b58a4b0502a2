// SPDX-License-Identifier: GPL-2.0

//! Peers that get so many requests of virtual queue pairs that these go by connections (KRCORE, section 4.6):
//! `kite_core::policy::promotion` decides.

use super::Conn;
use crate::{
    fabric::{peer::Peer, Fabric},
    sys::deadline::monotonic_ns,
};
use kernel::sync::{
    atomic::{Acquire, Release},
    Arc,
};
use kite_core::policy::promotion::PromotionOutcome;

fn now_ms() -> u64 {
    monotonic_ns() / 1_000_000
}

impl Fabric {
    /// So many more requests go to a peer.
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
            let other = self.peer_by_instance(instance);
            other.map_or(0, |other| other.request_rate.lock().value_at(now))
        };
        // Held until all know: another may be promoted in place of this one at once.
        let mut promoted = self.promoted_peers.lock();
        // Another may have been faster, and the peer may have left.
        if peer.is_promoted() || self.peer_by_instance(peer.instance()).is_err() {
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
        if let Some(other) = replaced.and_then(|instance| self.peer_by_instance(instance).ok()) {
            other.promoted.store(false, Release);
        }
    }

    /// A connection to a peer, once it is ready.
    pub(crate) fn ready_conn(&self, peer: &Peer) -> Option<Arc<Conn>> {
        let conn = peer.select_conn(self.qos.conn_subset(false)).ok()?;
        if conn.is_ready() {
            return Some(conn);
        }
        conn.request_connect();
        None
    }

    /// Peers have left.
    pub(in crate::fabric) fn demote_peers(&self, peers: &[Arc<Peer>]) {
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
    /// Whether what virtual queue pairs ask of it is to go by connections.
    pub(crate) fn is_promoted(&self) -> bool {
        self.promoted.load(Acquire)
    }
}
