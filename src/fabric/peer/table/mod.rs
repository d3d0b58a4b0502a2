// SPDX-License-Identifier: GPL-2.0

//! Table of the peers of a fabric: the other reachable nodes of the view, and the local node.
//!
//! # Operation
//!
//! A view change replaces the table ([`PeerTable::replace`]). The caller keeps the [`Peer`] of a node that
//! stays reachable in the same incarnation, and with it the connections. The table also holds the set of
//! peers that are promoted to RC connections ([`promotion`]).
//!
//! # Recovery
//!
//! A removed or unreachable node may still run. [`Fabric::fence_peers`] revokes its access to local memory.
//! [`Fabric::drain_peers`] then waits for the local users of the connections and destroys the QPs.
//!
//! # Locking
//!
//! - `PeerTable::peers` and `PeerTable::self_peer` are spin locks, held for a lookup.
//! - `PeerTable::promoted_peers`: see [`promotion`].
//! - Order: `PeerTable::peers`, then the locks of [`super::suspicion`].
//! - The table may change between two calls of [`PeerTable::nth`], so an iteration by index may skip a
//!   peer.
//!
//! [`Fabric::fence_peers`]: crate::fabric::Fabric::fence_peers
//! [`Fabric::drain_peers`]: crate::fabric::Fabric::drain_peers

mod promotion;

use super::Peer;
use crate::{
    errno,
    fabric::{conn::credit::StaleQp, recv::wake::ThreadWaker},
    stats::Stats,
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
};
use kite_core::{policy::promotion::PromotedPeers, view::NodeInstance};

/// Peers of a fabric.
#[pin_data]
pub(crate) struct PeerTable {
    /// Other reachable nodes of the view, sorted by node number.
    #[pin]
    peers: SpinLock<KVec<Arc<Peer>>>,
    /// This node as a peer. Has no RC connections: a node reaches itself by DC.
    #[pin]
    self_peer: SpinLock<Option<Arc<Peer>>>,
    #[pin]
    promoted_peers: SpinLock<PromotedPeers>,
    connector_waker: Arc<ThreadWaker>,
    stats: Arc<Stats>,
}

impl PeerTable {
    /// Creates an empty table. At most `max_promoted` peers will be promoted.
    pub(in crate::fabric) fn new(
        max_promoted: u8,
        connector_waker: Arc<ThreadWaker>,
        stats: Arc<Stats>,
    ) -> impl PinInit<Self> {
        let promoted_peers = PromotedPeers::new(max_promoted.into());
        pin_init!(Self {
            peers <- new_spinlock!(KVec::new(), "PeerTable::peers"),
            self_peer <- new_spinlock!(None, "PeerTable::self_peer"),
            promoted_peers <- new_spinlock!(promoted_peers, "PeerTable::promoted_peers"),
            connector_waker,
            stats,
        })
    }

    /// Returns the peer with this node number.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not a reachable member.
    pub(crate) fn get(&self, node: u32) -> Result<Arc<Peer>> {
        let peers = self.peers.lock();
        let index = peers
            .binary_search_by_key(&node, |peer| peer.node())
            .map_err(|_| errno::hostdown())?;
        Ok(peers[index].clone())
    }

    /// Returns the peer with this node number and incarnation.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not a reachable member, or has another incarnation.
    pub(crate) fn get_instance(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let peer = self.get(instance.node)?;
        if peer.instance() == instance {
            Ok(peer)
        } else {
            Err(errno::hostdown())
        }
    }

    /// Like [`Self::get_instance`], but also finds this node.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not a reachable member, or has another incarnation.
    pub(crate) fn get_or_self(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let self_peer = self.self_peer.lock().clone();
        let self_peer = self_peer.filter(|self_peer| self_peer.instance() == instance);
        self_peer.map_or_else(|| self.get_instance(instance), Ok)
    }

    /// Sets the peer that stands for this node. `None` if this node is in no view.
    pub(crate) fn set_self(&self, self_peer: Option<Arc<Peer>>) {
        let old = core::mem::replace(&mut *self.self_peer.lock(), self_peer);
        drop(old);
    }

    /// Returns the QPs to a peer that failed and have no successor yet. Returns an empty list if the peer is
    /// not in the view.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn stale_qps(&self, instance: NodeInstance) -> Result<KVec<StaleQp>> {
        let mut stale_qps = KVec::new();
        if let Ok(peer) = self.get_instance(instance) {
            for conn in peer.conns() {
                if let Some(generation) = conn.stale_generation() {
                    let conn = conn.clone();
                    stale_qps.push(StaleQp { conn, generation }, GFP_KERNEL)?;
                }
            }
        }
        Ok(stale_qps)
    }

    /// Returns all peers, sorted by node number.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn all(&self) -> Result<KVec<Arc<Peer>>> {
        let mut all = KVec::new();
        while let Some(peer) = self.nth(all.len()) {
            all.push(peer, GFP_KERNEL)?;
        }
        Ok(all)
    }

    /// Returns the `i`th peer in order of node numbers.
    pub(in crate::fabric) fn nth(&self, i: usize) -> Option<Arc<Peer>> {
        self.peers.lock().get(i).cloned()
    }

    /// Returns the number of peers.
    pub(in crate::fabric) fn len(&self) -> usize {
        self.peers.lock().len()
    }

    /// Returns a suspected peer that was not reported yet, and marks the suspicion as reported.
    pub(crate) fn pop_suspect(&self) -> Option<u32> {
        let peers = self.peers.lock();
        let suspect = peers.iter().find(|peer| peer.consume_suspicion());
        suspect.map(|peer| peer.node())
    }

    /// Announces to a node that this node acts on the view of `epoch`. Does nothing if the node is not in the
    /// view. See [`Peer::announce_view`].
    pub(crate) fn announce_view(&self, instance: NodeInstance, epoch: u64) {
        if let Ok(peer) = self.get_instance(instance) {
            peer.announce_view(epoch);
        }
    }

    /// Replaces the peers by `peers`, which must be sorted by node number. Returns the old ones.
    pub(crate) fn replace(&self, peers: KVec<Arc<Peer>>) -> KVec<Arc<Peer>> {
        let old = core::mem::replace(&mut *self.peers.lock(), peers);
        // The connector may have skipped a peer while it iterated by index.
        self.connector_waker.event.complete();
        old
    }
}
