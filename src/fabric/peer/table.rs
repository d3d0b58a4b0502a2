// SPDX-License-Identifier: GPL-2.0

//! Table of the peers of a fabric: the other nodes of the view, and the local node.
//!
//! # Operation
//!
//! A view change replaces the table ([`Fabric::replace_peers`]). The caller keeps the [`Peer`] of a node that
//! stays in the view in the same incarnation, and with it the connections.
//!
//! # Recovery
//!
//! A removed node may still run. [`Fabric::fence_peers`] revokes its access to local memory.
//! [`Fabric::drain_peers`] then waits for the local users of the connections and destroys the QPs.
//!
//! # Locking
//!
//! - `Fabric::peers` and `Fabric::self_peer` are spin locks, held for a lookup.
//! - Order: `Fabric::peers`, then the locks of [`super::suspicion`].
//! - The table may change between two calls of [`Fabric::nth_peer`], so an iteration by index may skip a
//!   peer.

use super::{identity::LocalIdentity, Peer};
use crate::{
    errno,
    fabric::{conn::credit::StaleQp, Fabric},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

impl Fabric {
    /// Returns the peer with this node number.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    pub(crate) fn peer(&self, node: u32) -> Result<Arc<Peer>> {
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
    /// - `EHOSTDOWN`: the node is not in the view, or has another incarnation.
    pub(crate) fn peer_by_instance(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let peer = self.peer(instance.node)?;
        if peer.instance() == instance {
            Ok(peer)
        } else {
            Err(errno::hostdown())
        }
    }

    /// Like [`Self::peer_by_instance`], but also finds this node.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view, or has another incarnation.
    pub(crate) fn peer_or_self(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let self_peer = self.self_peer.lock().clone();
        let self_peer = self_peer.filter(|self_peer| self_peer.instance() == instance);
        self_peer.map_or_else(|| self.peer_by_instance(instance), Ok)
    }

    /// Sets the peer that stands for this node. `None` if this node is in no view.
    pub(crate) fn set_self_peer(&self, self_peer: Option<Arc<Peer>>) {
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
        if let Ok(peer) = self.peer_by_instance(instance) {
            for conn in peer.conns() {
                if let Some(generation) = conn.stale_generation() {
                    let conn = conn.clone();
                    stale_qps.push(
                        StaleQp {
                            conn,
                            generation,
                            instance,
                        },
                        GFP_KERNEL,
                    )?;
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
    pub(crate) fn all_peers(&self) -> Result<KVec<Arc<Peer>>> {
        let mut all = KVec::new();
        while let Some(peer) = self.nth_peer(all.len()) {
            all.push(peer, GFP_KERNEL)?;
        }
        Ok(all)
    }

    /// Returns the identity that this node presents to its peers, for one incarnation.
    ///
    /// # Errors
    ///
    /// - `EIO`: the port query failed.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn local_identity(
        &self,
        instance: NodeInstance,
        secret: [u8; 16],
    ) -> Result<Arc<LocalIdentity>> {
        let identity = LocalIdentity {
            instance,
            secret,
            rkey: self.global_rkey(),
            mtu: self.device().query_port(self.resources.port)?.mtu,
            rd_atomic: self.device().limits().max_rd_atomic,
            max_conns: self.config.conns_per_peer.get(),
            connector_waker: self.connector_waker.clone(),
            suspect_listener: self.suspect_listener.clone(),
            stats: self.stats.clone(),
        };
        Ok(Arc::new(identity, GFP_KERNEL)?)
    }

    /// Returns the `i`th peer in order of node numbers.
    pub(in crate::fabric) fn nth_peer(&self, i: usize) -> Option<Arc<Peer>> {
        self.peers.lock().get(i).cloned()
    }

    /// Returns the number of peers.
    pub(in crate::fabric) fn peer_count(&self) -> usize {
        self.peers.lock().len()
    }

    /// Returns a suspected peer that was not reported yet, and marks the suspicion as reported.
    pub(crate) fn pop_suspect(&self) -> Option<u32> {
        let peers = self.peers.lock();
        let suspect = peers.iter().find(|peer| peer.consume_suspicion());
        suspect.map(|peer| peer.node())
    }

    /// Replaces the peers by `peers`, which must be sorted by node number. Returns the old ones.
    pub(crate) fn replace_peers(&self, peers: KVec<Arc<Peer>>) -> KVec<Arc<Peer>> {
        let old = core::mem::replace(&mut *self.peers.lock(), peers);
        // The connector may have skipped a peer while it iterated by index.
        self.connector_waker.event.complete();
        old
    }

    /// Closes all connections to `peers`: users receive `error`. On return, none of `peers` can access local
    /// memory. The DCT is rotated too, because a removed node may still run and have the old DCT number.
    pub(crate) fn fence_peers(&self, peers: &[Arc<Peer>], error: Error) {
        peers.iter().for_each(|peer| peer.close(error));
        if let Some(dc) = self.dc.as_ref().filter(|_| !peers.is_empty()) {
            dc.rotate_dct(|| self.drain_recv_cq());
        }
    }

    /// Waits until the connections to `peers` have no users, and destroys their QPs. The connections must be
    /// closed.
    pub(crate) fn drain_peers(&self, peers: &[Arc<Peer>]) {
        self.demote_peers(peers);
        for conn in peers.iter().flat_map(|peer| peer.conns()) {
            let (endpoint, reservation) = conn.drain();
            if let Some(endpoint) = endpoint {
                self.destroy_endpoint(endpoint);
            }
            drop(reservation);
        }
    }
}
