// SPDX-License-Identifier: GPL-2.0

//! Peers that get so many requests of virtual queue pairs that these go by connections (KRCORE, section 4.6):
//! `kite_core::promotion` decides.

use super::{conn::Conn, peer::Peer, Fabric};
use crate::sys::deadline::now;
use kernel::sync::{
    atomic::{Acquire, Release},
    Arc,
};
use kite_core::promotion::Outcome;

fn now_ms() -> u64 {
    now() / 1_000_000
}

impl Fabric {
    /// So many more requests go to a peer.
    pub(crate) fn demand(&self, peer: &Peer, requests: u32) {
        if peer.identity.pairs() == 0 {
            return;
        }
        let now = now_ms();
        let enough = peer.demand.lock().add(now, requests);
        if let Some(enough) = enough.filter(|_| !peer.promoted.load(Acquire)) {
            self.offer(peer, enough, now);
        }
    }

    fn offer(&self, peer: &Peer, enough: u32, now: u64) {
        let demand = |life| {
            let other = self.peer_in(life);
            other.map_or(0, |other| other.demand.lock().at(now))
        };
        // Held until all know: another may be promoted in place of this one at once.
        let mut promoted = self.promoted.lock();
        // Another may have been faster, and the peer may have left.
        if peer.is_promoted() || self.peer_in(peer.life()).is_err() {
            return;
        }
        let Outcome::Promoted(instead_of) = promoted.offer(peer.life(), enough, demand) else {
            return;
        };
        peer.promoted.store(true, Release);
        self.stats.promotions.add(1);
        self.stats.promoted.add(instead_of.is_none().into());
        if let Some(other) = instead_of.and_then(|life| self.peer_in(life).ok()) {
            other.promoted.store(false, Release);
        }
    }

    /// A connection to a peer, once it is ready.
    pub(crate) fn connection(&self, peer: &Peer) -> Option<Arc<Conn>> {
        let conn = peer.pick(self.qos.share(false)).ok()?;
        if conn.is_ready() {
            return Some(conn);
        }
        conn.need();
        None
    }

    /// Peers have left.
    pub(super) fn demote(&self, peers: &[Arc<Peer>]) {
        let mut promoted = self.promoted.lock();
        let before = promoted.count();
        peers.iter().for_each(|peer| promoted.remove(peer.life()));
        self.stats.promoted.sub((before - promoted.count()) as u64);
    }
}

impl Peer {
    /// Whether what virtual queue pairs ask of it is to go by connections.
    pub(crate) fn is_promoted(&self) -> bool {
        self.promoted.load(Acquire)
    }
}
