// SPDX-License-Identifier: GPL-2.0

//! Eviction of idle connections beyond `max_idle_conns` (KRCORE, section 4.6).
//!
//! A node of a large cluster thus has QPs for the peers that it uses, not for all peers that it ever used.
//!
//! # Operation
//!
//! At each tick, the connector marks the surplus connections that have been idle for the longest time. The
//! next step of such a connection starts the eviction if the connection is still idle. Both sides must agree
//! (`kite_core::proto::conn`), so a connection that the peer uses stays.
//!
//! # Locking
//!
//! `Conn::state` is held for one connection at a time. The selection is therefore a snapshot.

use super::Conn;
use crate::{fabric::Fabric, stats::Stats};
use kernel::{prelude::*, sync::Arc};

/// Maximum number of connections that one tick marks.
const MAX_EVICTIONS_PER_ROUND: u64 = 16;

/// Budget of connected QPs of an RNIC: `max_idle_conns`, idle or not.
pub(super) struct ConnBudget<'a>(pub(super) &'a Stats);

impl ConnBudget<'_> {
    fn max() -> u64 {
        crate::params::max_idle_conns().into()
    }

    /// Returns `true` if a connection may be set up before a user needs it.
    pub(super) fn has_room(&self) -> bool {
        self.0.connected_qps.get() < Self::max()
    }

    /// Returns the number of connected QPs above the budget.
    fn surplus(&self) -> u64 {
        self.0.connected_qps.get().saturating_sub(Self::max())
    }

    /// Returns `true` if more QPs are connected than the budget.
    pub(super) fn is_exceeded(&self) -> bool {
        self.surplus() != 0
    }
}

/// Snapshot of the connections that may be evicted.
struct IdleConns {
    /// Number of evictions in progress.
    evicting: u64,
    /// Idle time in ms, and the connection.
    idle: KVec<(i64, Arc<Conn>)>,
}

impl IdleConns {
    /// Collects the connections of all peers.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list.
    fn collect(fabric: &Fabric) -> Result<Self> {
        let (mut evicting, mut idle) = (0, KVec::new());
        for conn in fabric.peers.all()?.iter().flat_map(|peer| peer.conns()) {
            evicting += u64::from(conn.is_evicting());
            if let Some(idle_ms) = conn.evictable_idle_ms() {
                idle.push((idle_ms, conn.clone()), GFP_KERNEL)?;
            }
        }
        Ok(Self { evicting, idle })
    }

    /// Marks the connections that have been idle for the longest time, so that `surplus` evictions are in
    /// progress.
    fn mark_longest_idle(mut self, surplus: u64) {
        let count = surplus.saturating_sub(self.evicting);
        for _ in 0..count.min(MAX_EVICTIONS_PER_ROUND) {
            let longest_idle = (0..self.idle.len()).max_by_key(|i| self.idle[*i].0);
            let Some((_, conn)) = longest_idle.and_then(|i| self.idle.remove(i).ok()) else {
                return;
            };
            conn.mark_surplus();
        }
    }
}

/// Marks idle connections for eviction, at most as many as exceed the budget. Evictions in progress count.
pub(super) fn evict_idle_conns(fabric: &Fabric) {
    let budget = ConnBudget(&fabric.stats);
    if !budget.is_exceeded() {
        return;
    }
    // Without memory, the next tick repeats the selection.
    if let Ok(idle_conns) = IdleConns::collect(fabric) {
        idle_conns.mark_longest_idle(budget.surplus());
    }
}
