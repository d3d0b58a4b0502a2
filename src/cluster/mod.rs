// SPDX-License-Identifier: GPL-2.0

//! Cluster membership and ownership of region names.
//!
//! # Operation
//!
//! The daemon sets the *view*, the list of members. The kernel makes no membership decisions of its own. A
//! view change first disconnects the removed nodes ([`Cluster::prepare_view`]), so all later steps can rely
//! on their absence. Peers for the new nodes become reachable last ([`Cluster::commit_view`]).
//!
//! One member owns each name: a hash of the name and the members determines the owner
//! (`kite_core::name_hash`). At a view change, each node sends every member the names that the member now
//! owns, or announces the view without names. A node is *synced* once all members, the node itself included,
//! have done so. Only a synced node reports a name as nonexistent, registers a new name, or reuses memory
//! lent to a removed home. A member that has sent its names has also closed its mappings of regions of
//! removed nodes. No access through these mappings can arrive any longer.
//!
//! # Locking
//!
//! - `Cluster::state` (mutex): the identity of this node, the members and the epoch, which change together.
//!   Innermost lock of this module; holders may sleep in allocations.
//! - [`NameTable`] (mutex): names owned by this node. Nests outside `Cluster::state`: the predicates of
//!   [`NameTable::retain`] read the members.
//! - [`AddressDirectory`]: see [`directory`]. Nests outside `Cluster::state`.
//!
//! Callers of [`Cluster::prepare_view`], [`Cluster::commit_view`] and [`Cluster::leave`] hold
//! `MemoryService::view_change_lock`, so view changes do not overlap.

pub(crate) mod directory;
mod names;

use self::directory::AddressDirectory;
pub(crate) use self::directory::DIRECTORY_REPLICAS;
use crate::{
    bindings,
    errno::{self, TryError},
    fabric::{
        peer::{
            identity::{LocalIdentity, PeerIdentity},
            ControlAddress, Peer,
        },
        Fabric,
    },
    sys::deadline::{retry_until, Deadline},
    verbs::address::PortAddress,
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::{
    name::Name,
    name_hash,
    view::{self, NodeInstance, ViewMember},
};
pub(crate) use names::{NameEntry, NameTable};

/// Identity of this node, set by the daemon.
#[derive(Clone, Copy)]
struct LocalNode {
    instance: NodeInstance,
    secret: [u8; 16],
}

/// Member of the view.
struct Member {
    info: bindings::kite_member,
    /// Latest epoch for which the member has sent its names or announced the view.
    synced_epoch: u64,
}

/// Peers of a view that is not yet committed.
pub(crate) struct PreparedView(KVec<Arc<Peer>>);

/// Difference between two views: all peers of the new view, peers of both views, and removed peers.
struct ViewDelta {
    peers: KVec<Arc<Peer>>,
    kept: KVec<Arc<Peer>>,
    removed: KVec<Arc<Peer>>,
}

/// Returns the node instance of a member.
pub(crate) fn member_instance(member: &bindings::kite_member) -> NodeInstance {
    NodeInstance {
        node: member.node,
        incarnation: member.incarnation,
    }
}

/// Returns a member in the form that `kite_core` checks.
fn view_member(member: &bindings::kite_member) -> ViewMember {
    ViewMember {
        instance: member_instance(member),
        admitted_epoch: member.admitted_epoch,
        unreachable_since: member.unreachable_since,
    }
}

struct ClusterState {
    local: Option<LocalNode>,
    members: KVec<Member>,
    /// Epoch of `members`; 0 without a view. Both are read under one lock, because nodes identify by this
    /// epoch the members on which they act.
    epoch: u64,
}

impl ClusterState {
    /// Returns the ID of this node, or `None` without a view.
    fn local_node(&self) -> Option<u32> {
        let local = self.local.filter(|_| self.epoch != 0)?;
        Some(local.instance.node)
    }
}

/// The cluster, as seen through one RNIC.
#[pin_data]
pub(crate) struct Cluster {
    pub(crate) fabric: Arc<Fabric>,
    #[pin]
    state: Mutex<ClusterState>,
    #[pin]
    pub(crate) names: NameTable,
    #[pin]
    directory: AddressDirectory,
}

impl Cluster {
    /// Creates the state of a node that has not joined a cluster.
    pub(crate) fn new(fabric: Arc<Fabric>) -> impl PinInit<Self> {
        pin_init!(Self {
            fabric,
            state <- new_mutex!(ClusterState { local: None, members: KVec::new(), epoch: 0 }, "Cluster::state"),
            names <- NameTable::new(),
            directory <- AddressDirectory::new(),
        })
    }

    /// Sets the identity of this node. A view can be set from then on.
    ///
    /// # Errors
    ///
    /// - `EBUSY`: another daemon has joined.
    /// - `EINVAL`: the node ID is out of range, the incarnation is 0, or a reserved field is nonzero.
    pub(crate) fn join(&self, join: &bindings::kite_join) -> Result {
        if !view::is_valid_node_id(join.node) || join.incarnation == 0 || join.reserved != 0 {
            return Err(EINVAL);
        }
        let mut state = self.state.lock();
        if state.local.is_some() {
            return Err(EBUSY);
        }
        let instance = NodeInstance {
            node: join.node,
            incarnation: join.incarnation,
        };
        let secret = join.secret;
        state.local = Some(LocalNode { instance, secret });
        Ok(())
    }

    /// Starts a view change to `members`. Returns the removed peers, which are disconnected, and the peers of
    /// the new view.
    ///
    /// The caller must clean up all state of the removed peers, and then call [`Self::commit_view`]. A node
    /// that rejoins thus never finds state of its earlier incarnation. Calls must not overlap.
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
    ) -> Result<(KVec<Arc<Peer>>, PreparedView)> {
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
                self.fabric
                    .peers
                    .set_self(Some(Self::new_peer(&own, member)?));
            }
        }
        let delta = self.diff_view(&own, members)?;
        let new_members = Self::build_members(members)?;
        self.fabric.peers.replace(delta.kept);
        // Fence before the new epoch is visible: nodes of the new view rely on removed nodes having no access
        // to the memory of this node.
        self.fabric.fence_peers(&delta.removed, errno::hostdown());
        self.replace_members(epoch, new_members);
        let has_removed = !delta.removed.is_empty();
        let (is_member, has_replica) = (
            |instance| self.is_member(instance),
            |instance| self.has_directory_replica(instance),
        );
        self.directory
            .on_view_change(epoch, is_member, has_replica, has_removed);
        self.fabric.drain_peers(&delta.removed);
        Ok((delta.removed, PreparedView(delta.peers)))
    }

    /// Completes a view change: peers that joined become reachable.
    pub(crate) fn commit_view(&self, peers: PreparedView) {
        let before = self.fabric.peers.replace(peers.0);
        drop(before);
    }

    fn build_members(members: &[bindings::kite_member]) -> Result<KVec<Member>> {
        let mut list = KVec::with_capacity(members.len(), GFP_KERNEL)?;
        for member in members {
            list.push(
                Member {
                    info: *member,
                    synced_epoch: 0,
                },
                GFP_KERNEL,
            )?;
        }
        Ok(list)
    }

    /// Installs the members of the view of `epoch`. No member is synced yet.
    fn replace_members(&self, epoch: u64, members: KVec<Member>) {
        let mut state = self.state.lock();
        state.epoch = epoch;
        let old = core::mem::replace(&mut state.members, members);
        drop(state);
        drop(old);
    }

    fn diff_view(
        &self,
        own: &Arc<LocalIdentity>,
        members: &[bindings::kite_member],
    ) -> Result<ViewDelta> {
        let (mut peers, mut kept, mut removed) = (KVec::new(), KVec::new(), KVec::new());
        for member in members.iter().filter(|m| m.node != own.instance.node) {
            let is_same_instance = |peer: &Arc<Peer>| peer.instance() == member_instance(member);
            match self.fabric.peer(member.node).ok().filter(is_same_instance) {
                Some(peer) => {
                    kept.push(peer.clone(), GFP_KERNEL)?;
                    peers.push(peer, GFP_KERNEL)?;
                }
                None => peers.push(Self::new_peer(own, member)?, GFP_KERNEL)?,
            }
        }
        for old in self.fabric.peers.all()? {
            if !kept.iter().any(|peer: &Arc<Peer>| Arc::ptr_eq(peer, &old)) {
                removed.push(old, GFP_KERNEL)?;
            }
        }
        Ok(ViewDelta {
            peers,
            kept,
            removed,
        })
    }

    fn new_peer(own: &Arc<LocalIdentity>, member: &bindings::kite_member) -> Result<Arc<Peer>> {
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
        };
        Peer::new(identity, address)
    }

    /// Leaves the cluster. Returns the former peers, which are disconnected.
    pub(crate) fn leave(&self) -> KVec<Arc<Peer>> {
        let peers = self.fabric.peers.replace(KVec::new());
        self.fabric.fence_peers(&peers, errno::hostdown());
        self.fabric.drain_peers(&peers);
        self.directory.clear();
        self.fabric.peers.set_self(None);
        self.fabric.local_address.unpin();
        self.fabric.close_dct();
        let mut state = self.state.lock();
        let members = core::mem::take(&mut state.members);
        state.local = None;
        state.epoch = 0;
        drop(state);
        drop(members);
        peers
    }

    /// Returns the epoch of the view; 0 without a view.
    pub(crate) fn epoch(&self) -> u64 {
        self.state.lock().epoch
    }

    /// Returns the ID of this node.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: there is no view.
    pub(crate) fn local_node(&self) -> Result<u32> {
        self.state
            .lock()
            .local_node()
            .ok_or_else(errno::hostunreach)
    }

    /// Returns the ID of the node that owns `name`.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: there is no view.
    pub(crate) fn name_owner(&self, name: &Name) -> Result<u32> {
        let state = self.state.lock();
        let nodes = state.members.iter().map(|member| member.info.node);
        name_hash::name_owner(name, nodes).ok_or_else(errno::hostunreach)
    }

    /// Returns the current instance of a node.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    pub(crate) fn instance_of(&self, node: u32) -> Result<NodeInstance> {
        let state = self.state.lock();
        let at = state
            .members
            .binary_search_by_key(&node, |member| member.info.node);
        at.map(|at| member_instance(&state.members[at].info))
            .map_err(|_| errno::hostdown())
    }

    /// Returns `true` if this instance of a node is in the view.
    pub(crate) fn is_member(&self, instance: NodeInstance) -> bool {
        self.instance_of(instance.node) == Ok(instance)
    }

    /// Records that a node has sent all its names for the view of `epoch`. Has no effect for another view.
    ///
    /// Returns `true` if all members are synced now, and were not before.
    pub(crate) fn on_member_synced(&self, instance: NodeInstance, epoch: u64) -> bool {
        let mut state = self.state.lock();
        let is_unsynced = |member: &&mut Member| {
            member_instance(&member.info) == instance && member.synced_epoch < epoch
        };
        let is_current = state.epoch == epoch;
        let Some(member) = state
            .members
            .iter_mut()
            .find(is_unsynced)
            .filter(|_| is_current)
        else {
            return false;
        };
        member.synced_epoch = epoch;
        state
            .members
            .iter()
            .all(|member| member.synced_epoch == epoch)
    }

    /// Waits until all members have synchronized the view. After that, nothing sent by removed nodes arrives.
    ///
    /// # Errors
    ///
    /// See [`retry_until`] and [`Self::local_node`].
    pub(crate) fn wait_view_synced(&self, deadline: Deadline) -> Result {
        retry_until(deadline, || {
            self.local_node()?;
            let is_synced = self.synced_epoch().is_some();
            is_synced.then_some(()).ok_or(TryError::WouldBlock)
        })
    }

    /// Returns the epoch of the view if all members, this node included, have sent their names.
    pub(crate) fn synced_epoch(&self) -> Option<u64> {
        let state = self.state.lock();
        let is_synced = |member: &Member| member.synced_epoch >= state.epoch;
        (state.epoch != 0 && state.members.iter().all(is_synced)).then_some(state.epoch)
    }

    /// Returns `true` if this instance of a node is not in the view, and all members are synced. Then the
    /// removed instance cannot access any member.
    pub(crate) fn is_fully_removed(&self, instance: NodeInstance) -> bool {
        let state = self.state.lock();
        let is_synced = |member: &Member| member.synced_epoch >= state.epoch;
        let is_same_instance = |member: &Member| member_instance(&member.info) == instance;
        state.epoch != 0
            && state
                .members
                .iter()
                .all(|member| is_synced(member) && !is_same_instance(member))
    }

    /// Returns the view: epoch, ID of this node (0 without a view), and members in ascending order of IDs.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn view(&self) -> Result<(u64, u32, KVec<bindings::kite_member>)> {
        let state = self.state.lock();
        let mut members = KVec::with_capacity(state.members.len(), GFP_KERNEL)?;
        for member in &state.members {
            members.push(member.info, GFP_KERNEL)?;
        }
        Ok((state.epoch, state.local_node().unwrap_or(0), members))
    }
}
