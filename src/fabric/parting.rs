// SPDX-License-Identifier: GPL-2.0

//! Connections beyond a bound, which are given up if nobody uses them (KRCORE, section 4.6): so a node of a large
//! cluster has queue pairs for those that it talks to, and not for all that it ever did.
//!
//! Those go first that nobody has used for longest. `kite_core::conn` has both sides agree to it.

use super::{conn::Conn, Fabric};
use crate::stats::Stats;
use kernel::{prelude::*, sync::Arc};

/// Connections that are given up at a time.
const AT_ONCE: u64 = 16;

/// One that nobody has used for so many milliseconds.
type Idle = (i64, Arc<Conn>);

/// Connections that are kept though nobody uses them.
fn most() -> u64 {
    crate::params::connections().into()
}

/// Whether there is room for connections that nobody needs yet.
pub(super) fn has_room(stats: &Stats) -> bool {
    stats.connections.get() < most()
}

impl Fabric {
    /// How many connections there are too many.
    fn surplus(&self) -> u64 {
        self.stats.connections.get().saturating_sub(most())
    }

    /// Whether there are too many connections.
    pub(super) fn is_crowded(&self) -> bool {
        self.surplus() != 0
    }

    /// Begins to give up as many connections as there are too many, if nobody uses so many.
    pub(super) fn part_with_idle(&self) {
        if !self.is_crowded() {
            return;
        }
        // Without memory it is tried again at the next tick.
        let Ok((parting, mut idle)) = self.spare_connections() else {
            return;
        };
        let surplus = self.surplus().saturating_sub(parting);
        for _ in 0..surplus.min(AT_ONCE) {
            let longest = (0..idle.len()).max_by_key(|i| idle[*i].0);
            let Some((_, conn)) = longest.and_then(|i| idle.remove(i).ok()) else {
                return;
            };
            conn.spare();
        }
    }

    /// How many are being given up, and all that may be.
    fn spare_connections(&self) -> Result<(u64, KVec<Idle>)> {
        let (mut parting, mut idle) = (0, KVec::new());
        for conn in self.all_peers()?.iter().flat_map(|peer| peer.conns()) {
            parting += u64::from(conn.is_parting());
            if let Some(idle_ms) = conn.idle_ms() {
                idle.push((idle_ms, conn.clone()), GFP_KERNEL)?;
            }
        }
        Ok((parting, idle))
    }
}
