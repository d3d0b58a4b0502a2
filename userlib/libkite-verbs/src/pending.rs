// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Pending requests of the connection manager: those that the program has neither accepted nor rejected.
//!
//! A pending request holds a virtual QP and memory. All identifiers of a process share the virtual QPs, so each remote
//! user gets at most half of them for pending requests.
//!
//! # Locking
//!
//! [`PendingRequests::counts`] is a leaf: a holder takes no other lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use kite::{PeerCred, VQPS_MAX};

use crate::sync::lock;

/// Maximum pending requests of a user of a node.
const USER_PENDING_MAX: usize = VQPS_MAX / 2;

/// Pending requests of a process.
#[derive(Default)]
pub(crate) struct PendingRequests {
    /// Numbers of requests by node and user. There is no entry for 0.
    counts: Mutex<HashMap<(u32, u32), usize>>,
}

/// Place of a pending request, which is free again when the guard is dropped.
pub(crate) struct PendingRequestGuard {
    requests: Arc<PendingRequests>,
    peer: (u32, u32),
}

impl PendingRequestGuard {
    /// Takes a place. Returns `None` if the user has [`USER_PENDING_MAX`] pending requests.
    pub(crate) fn acquire(requests: &Arc<PendingRequests>, peer: PeerCred) -> Option<Self> {
        let peer = (peer.node, peer.uid);
        let mut counts = lock(&requests.counts);
        let count = counts.entry(peer).or_default();
        if *count >= USER_PENDING_MAX {
            return None;
        }
        *count += 1;
        Some(Self {
            requests: requests.clone(),
            peer,
        })
    }
}

impl Drop for PendingRequestGuard {
    fn drop(&mut self) {
        let mut counts = lock(&self.requests.counts);
        if let Some(count) = counts.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_of_a_node_gets_half_of_the_vqps_for_pending_requests() {
        let requests = Arc::default();
        let acquire = |node, uid| PendingRequestGuard::acquire(&requests, PeerCred { node, uid });
        let mut held: Vec<_> = (0..VQPS_MAX / 2).map(|_| acquire(1, 7)).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(acquire(1, 7).is_none());
        assert!(acquire(1, 8).is_some() && acquire(2, 7).is_some());
        held.pop();
        assert!(acquire(1, 7).is_some());
        held.clear();
        assert!(lock(&requests.counts).is_empty());
    }
}
