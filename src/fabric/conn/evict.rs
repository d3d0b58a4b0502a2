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

/// Idle time in ms, and the connection.
type IdleConn = (i64, Arc<Conn>);

/// Returns the number of connected QPs that are kept, idle or not.
fn max_idle_conns() -> u64 {
    crate::params::max_idle_conns().into()
}

/// Returns `true` if a connection may be set up before a user needs it.
pub(in crate::fabric) fn has_conn_budget(stats: &Stats) -> bool {
    stats.connected_qps.get() < max_idle_conns()
}

impl Fabric {
    /// Returns the number of connected QPs above the maximum.
    fn surplus_conns(&self) -> u64 {
        self.stats
            .connected_qps
            .get()
            .saturating_sub(max_idle_conns())
    }

    /// Returns `true` if more QPs are connected than the maximum.
    pub(in crate::fabric) fn is_over_conn_budget(&self) -> bool {
        self.surplus_conns() != 0
    }

    /// Marks idle connections for eviction, at most as many as exceed the maximum. Evictions in progress
    /// count.
    pub(in crate::fabric) fn evict_idle_conns(&self) {
        if !self.is_over_conn_budget() {
            return;
        }
        // Without memory, the next tick repeats the selection.
        let Ok((evicting, mut idle)) = self.evictable_conns() else {
            return;
        };
        let surplus = self.surplus_conns().saturating_sub(evicting);
        for _ in 0..surplus.min(MAX_EVICTIONS_PER_ROUND) {
            let longest_idle = (0..idle.len()).max_by_key(|i| idle[*i].0);
            let Some((_, conn)) = longest_idle.and_then(|i| idle.remove(i).ok()) else {
                return;
            };
            conn.mark_surplus();
        }
    }

    /// Returns the number of evictions in progress, and the connections that may be evicted.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list.
    fn evictable_conns(&self) -> Result<(u64, KVec<IdleConn>)> {
        let (mut evicting, mut idle) = (0, KVec::new());
        for conn in self.all_peers()?.iter().flat_map(|peer| peer.conns()) {
            evicting += u64::from(conn.is_evicting());
            if let Some(idle_ms) = conn.evictable_idle_ms() {
                idle.push((idle_ms, conn.clone()), GFP_KERNEL)?;
            }
        }
        Ok((evicting, idle))
    }
}
