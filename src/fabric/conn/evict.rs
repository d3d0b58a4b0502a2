// SPDX-License-Identifier: GPL-2.0

//! Connections beyond a bound, which are given up if nobody uses them (KRCORE, section 4.6): so a node of a large
//! cluster has queue pairs for those that it talks to, and not for all that it ever did.
//!
//! Those go first that nobody has used for longest. `kite_core::proto::conn` has both sides agree to it.

use super::Conn;
use crate::{fabric::Fabric, stats::Stats};
use kernel::{prelude::*, sync::Arc};

/// Connections that are given up at a time.
const MAX_EVICTIONS_PER_ROUND: u64 = 16;

/// One that nobody has used for so many milliseconds.
type IdleConn = (i64, Arc<Conn>);

/// Connections that are kept though nobody uses them.
fn max_idle_conns() -> u64 {
    crate::params::max_idle_conns().into()
}

/// Whether there is room for connections that nobody needs yet.
pub(in crate::fabric) fn has_conn_budget(stats: &Stats) -> bool {
    stats.connected_qps.get() < max_idle_conns()
}

impl Fabric {
    /// How many connections there are too many.
    fn surplus_conns(&self) -> u64 {
        self.stats
            .connected_qps
            .get()
            .saturating_sub(max_idle_conns())
    }

    /// Whether there are too many connections.
    pub(in crate::fabric) fn is_over_conn_budget(&self) -> bool {
        self.surplus_conns() != 0
    }

    /// Begins to give up as many connections as there are too many, if nobody uses so many.
    pub(in crate::fabric) fn evict_idle_conns(&self) {
        if !self.is_over_conn_budget() {
            return;
        }
        // Without memory it is tried again at the next tick.
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

    /// How many are being given up, and all that may be.
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
