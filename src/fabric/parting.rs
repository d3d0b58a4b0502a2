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

/// Connections that are kept though nobody uses them.
fn most() -> u64 {
    (*crate::module_parameters::connections.value()).into()
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
        let surplus = self.surplus().min(AT_ONCE);
        if surplus == 0 {
            return;
        }
        // Without memory it is tried again at the next tick.
        let mut idle = self.idle_connections().unwrap_or_default();
        for _ in 0..surplus {
            let longest = (0..idle.len()).max_by_key(|i| idle[*i].0);
            let Some((_, conn)) = longest.and_then(|i| idle.remove(i).ok()) else {
                return;
            };
            conn.spare();
        }
    }

    /// All that nobody uses, and for how many milliseconds nobody has.
    fn idle_connections(&self) -> Result<KVec<(i64, Arc<Conn>)>> {
        let mut idle = KVec::new();
        for peer in &self.all_peers()? {
            for conn in &peer.conns {
                if let Some(idle_ms) = conn.idle_ms() {
                    idle.push((idle_ms, conn.clone()), GFP_KERNEL)?;
                }
            }
        }
        Ok(idle)
    }
}
