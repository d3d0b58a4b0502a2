// SPDX-License-Identifier: GPL-2.0

//! Change of the view, as it affects the peers.
//!
//! # Operation
//!
//! A peer is kept if its node stays reachable in the same incarnation and of the same admission. All other
//! peers are closed: their nodes are removed, unreachable, or were fenced and admitted again. If this node
//! itself was admitted again, other nodes have fenced it, so all peers are closed.
//!
//! # Recovery
//!
//! All allocations precede the first effect. So a failed change leaves the former view in effect.
//!
//! # Locking
//!
//! The caller holds `MemoryService::view_change_lock`. `Cluster::state` is taken for single steps.

use super::{
    members::{build_members, is_reachable, member_instance, view_member},
    Cluster,
};
use crate::{
    bindings, errno,
    fabric::peer::{
        identity::{LocalIdentity, PeerIdentity},
        ControlAddress, Peer,
    },
    verbs::address::PortAddress,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::{self, NodeInstance};

/// View that is not yet committed.
pub(crate) struct PreparedView {
    /// All peers of the view.
    peers: KVec<Arc<Peer>>,
    /// Nodes whose peers were closed, but which stay in the view.
    fenced: KVec<NodeInstance>,
    /// Reachable nodes whose peers are new: they were not reachable before, or were admitted again.
    admitted: KVec<NodeInstance>,
    /// Nodes that are no longer in the view.
    removed: KVec<NodeInstance>,
}

impl PreparedView {
    /// Returns the nodes that were fenced and remain members.
    pub(crate) fn fenced(&self) -> &[NodeInstance] {
        &self.fenced
    }

    /// Returns the nodes that are reachable by a later admission than before.
    pub(crate) fn admitted(&self) -> &[NodeInstance] {
        &self.admitted
    }

    /// Returns the nodes that were removed.
    pub(crate) fn removed(&self) -> &[NodeInstance] {
        &self.removed
    }
}

/// Difference between the peers of two views.
struct PeerDelta {
    /// All peers of the new view.
    peers: KVec<Arc<Peer>>,
    /// Peers of both views.
    kept: KVec<Arc<Peer>>,
    /// Nodes of the peers of the new view only.
    admitted: KVec<NodeInstance>,
    /// Peers of the old view only.
    closed: KVec<Arc<Peer>>,
}

impl Cluster {
    /// Starts a view change to `members`. On return, removed and fenced nodes are disconnected.
    ///
    /// The caller must clean up the state of these nodes, and then call [`Self::commit_view`]. A node that is
    /// admitted again thus never finds state of its earlier admission. Calls must not overlap.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the epoch does not increase, the members are not a valid view with this node, or this node
    ///   does not have the address in the view.
    /// - `EPERM`: [`Self::join`] was not called.
    /// - `EIO`: the RNIC rejected a query or the creation of the DCT.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn prepare_view(
        &self,
        epoch: u64,
        members: &[bindings::kite_member],
    ) -> Result<PreparedView> {
        let own = self.open_local_node(epoch, members)?;
        let delta = self.diff_peers(&own, members)?;
        let removed = self.removed_instances(members)?;
        let fenced = fenced_instances(&delta.closed, members)?;
        let new_members = build_members(members)?;
        self.fabric.peers.replace(delta.kept);
        // Fence before the new epoch is visible: nodes of the new view rely on fenced nodes having no access
        // to the memory of this node.
        self.fabric.fence_peers(&delta.closed, errno::hostdown());
        continue_sequences(&delta.peers, &delta.closed);
        self.replace_members(epoch, new_members);
        self.update_directory(epoch, !delta.closed.is_empty());
        self.fabric.drain_peers(&delta.closed);
        Ok(PreparedView {
            peers: delta.peers,
            fenced,
            admitted: delta.admitted,
            removed,
        })
    }

    /// Completes a view change: new peers become reachable.
    pub(crate) fn commit_view(&self, view: PreparedView) {
        let before = self.fabric.peers.replace(view.peers);
        drop(before);
    }

    /// Checks a view, and opens the local port, the DCT and the peer that stands for this node.
    fn open_local_node(
        &self,
        epoch: u64,
        members: &[bindings::kite_member],
    ) -> Result<Arc<LocalIdentity>> {
        let local = self.state.lock().local.ok_or(EPERM)?;
        let view_members = members.iter().map(view_member);
        if epoch <= self.epoch() || !view::is_valid_view(epoch, view_members, local.instance) {
            return Err(EINVAL);
        }
        let own = LocalIdentity::new(&self.fabric, local.instance, local.secret)?;
        for member in members.iter().filter(|m| m.node == local.instance.node) {
            self.fabric.local_address.pin(&member.address)?;
            self.fabric.open_dct()?;
            if self.fabric.peers.get_or_self(local.instance).is_err() {
                let self_peer = new_peer(&own, member, member.admitted_epoch)?;
                self.fabric.peers.set_self(Some(self_peer));
            }
        }
        Ok(own)
    }

    fn diff_peers(
        &self,
        own: &Arc<LocalIdentity>,
        members: &[bindings::kite_member],
    ) -> Result<PeerDelta> {
        let (mut peers, mut kept, mut closed) = (KVec::new(), KVec::new(), KVec::new());
        let mut admitted = KVec::new();
        let own_admission = members
            .iter()
            .find(|member| member.node == own.instance.node)
            .map_or(0, |member| member.admitted_epoch);
        let others = members
            .iter()
            .filter(|m| m.node != own.instance.node && is_reachable(m));
        for member in others {
            let admission = own_admission.max(member.admitted_epoch);
            let is_same = |peer: &Arc<Peer>| {
                peer.instance() == member_instance(member) && peer.identity.admission == admission
            };
            match self.fabric.peer(member.node).ok().filter(is_same) {
                Some(peer) => {
                    kept.push(peer.clone(), GFP_KERNEL)?;
                    peers.push(peer, GFP_KERNEL)?;
                }
                None => {
                    peers.push(new_peer(own, member, admission)?, GFP_KERNEL)?;
                    admitted.push(member_instance(member), GFP_KERNEL)?;
                }
            }
        }
        for old in self.fabric.peers.all()? {
            if !kept.iter().any(|peer: &Arc<Peer>| Arc::ptr_eq(peer, &old)) {
                closed.push(old, GFP_KERNEL)?;
            }
        }
        Ok(PeerDelta {
            peers,
            kept,
            admitted,
            closed,
        })
    }

    /// Returns the members of the current view that are not among `members`.
    fn removed_instances(&self, members: &[bindings::kite_member]) -> Result<KVec<NodeInstance>> {
        let mut removed = KVec::new();
        for old in &self.state.lock().members {
            let instance = member_instance(&old.info);
            if !contains(members, instance) {
                removed.push(instance, GFP_KERNEL)?;
            }
        }
        Ok(removed)
    }

    /// Installs the members of the view of `epoch`. No member is synced yet.
    fn replace_members(&self, epoch: u64, members: KVec<super::members::Member>) {
        let mut state = self.state.lock();
        state.epoch = epoch;
        let old = core::mem::replace(&mut state.members, members);
        drop(state);
        drop(old);
    }

    fn update_directory(&self, epoch: u64, has_closed: bool) {
        let is_reachable = |instance| self.is_reachable(instance);
        let has_replica = |instance| self.has_directory_replica(instance);
        self.directory
            .on_view_change(epoch, is_reachable, has_replica, has_closed);
    }
}

/// Returns `true` if a view contains this instance of a node.
fn contains(members: &[bindings::kite_member], instance: NodeInstance) -> bool {
    members.iter().any(|m| member_instance(m) == instance)
}

/// Returns the nodes of closed peers that remain members.
fn fenced_instances(
    closed: &[Arc<Peer>],
    members: &[bindings::kite_member],
) -> Result<KVec<NodeInstance>> {
    let mut fenced = KVec::new();
    for instance in closed.iter().map(|peer| peer.instance()) {
        if contains(members, instance) {
            fenced.push(instance, GFP_KERNEL)?;
        }
    }
    Ok(fenced)
}

/// Makes the peers of nodes that were fenced and admitted again continue the sequence numbers of their
/// predecessors, which are closed.
fn continue_sequences(peers: &[Arc<Peer>], closed: &[Arc<Peer>]) {
    for former in closed {
        let successor = peers
            .iter()
            .find(|peer| peer.instance() == former.instance());
        if let Some(successor) = successor {
            successor.continue_sequences(former);
        }
    }
}

fn new_peer(
    own: &Arc<LocalIdentity>,
    member: &bindings::kite_member,
    admission: u64,
) -> Result<Arc<Peer>> {
    let address = ControlAddress {
        destination: PortAddress {
            gid: member.address.gid,
            lid: member.address.lid,
        },
        qpn: member.address.qpn,
    };
    let identity = PeerIdentity {
        local: own.clone(),
        peer: member_instance(member),
        admission,
    };
    Peer::new(identity, address, member.features)
}
