// SPDX-License-Identifier: GPL-2.0

//! Who is in the cluster, and who keeps which name.
//!
//! The daemon says who is in the *view*; the kernel acts on nothing else. A change of view closes the
//! connections to those who left before it does anything else, so that what follows can count on
//! their absence.
//!
//! Each name is kept by one node of the view, which the name itself determines
//! (`kite_core::name_hash`). When the view changes, every node tells every other the names that the
//! other keeps from now on, or that it acts on the view. A node that has heard from all is *synced*: only then
//! does it say of a name that it does not exist, grant a new one, or reuse memory that a node which left may have lent out
//! (whoever has told its names has also closed its mappings of the dead node's regions, and nothing that
//! they have sent can come late).

pub(crate) mod directory;
mod names;

use self::directory::AddressDirectory;
pub(crate) use self::directory::DIRECTORY_REPLICAS;
use crate::{
    bindings, errno,
    fabric::{
        peer::{ControlAddress, LocalIdentity, Peer, PeerIdentity},
        Fabric,
    },
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
    view::{self, NodeInstance},
};
pub(crate) use names::{NameEntry, NameTable};

/// This node, as the daemon named it.
#[derive(Clone, Copy)]
struct LocalNode {
    instance: NodeInstance,
    secret: [u8; 16],
}

/// A member of the view.
struct Member {
    info: bindings::kite_member,
    /// The latest epoch for which it told us its names.
    synced_epoch: u64,
}

/// The peers of a view that is about to begin.
pub(crate) struct PreparedView(KVec<Arc<Peer>>);

/// The peers of a new view, those who were peers before, and those who are none any more.
struct ViewDelta {
    peers: KVec<Arc<Peer>>,
    kept: KVec<Arc<Peer>>,
    removed: KVec<Arc<Peer>>,
}

/// The life that a member of a view is in.
pub(crate) fn member_instance(member: &bindings::kite_member) -> NodeInstance {
    NodeInstance {
        node: member.node,
        incarnation: member.incarnation,
    }
}

struct ClusterState {
    local: Option<LocalNode>,
    members: KVec<Member>,
    /// Epoch of `members`; 0 without a view. Who acts on the members says by this epoch which they were, so
    /// neither is seen without the other.
    epoch: u64,
}

impl ClusterState {
    /// The number of this node, if there is a view.
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
    /// No cluster yet.
    pub(crate) fn new(fabric: Arc<Fabric>) -> impl PinInit<Self> {
        pin_init!(Self {
            fabric,
            state <- new_mutex!(ClusterState { local: None, members: KVec::new(), epoch: 0 }),
            names <- NameTable::new(),
            directory <- AddressDirectory::new(),
        })
    }

    /// Makes this node a member to be.
    ///
    /// # Errors
    ///
    /// - `EBUSY` if there is a daemon already.
    /// - `EINVAL` for an impossible number or incarnation.
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

    /// Begins to change the view to `members`. Returns those who left, with whom nothing is connected any
    /// more, and whom [`Self::admit`] is to be given when all that is left of them is gone: a node that
    /// comes back must not meet the remains of its former life. Only the daemon calls this, one call at a
    /// time.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the epoch does not rise or the members are not a view with this node in it, at an
    /// address that it has; `EPERM` without [`Self::join`], `ENOMEM`.
    pub(crate) fn prepare_view(
        &self,
        epoch: u64,
        members: &[bindings::kite_member],
    ) -> Result<(KVec<Arc<Peer>>, PreparedView)> {
        let local = self.state.lock().local.ok_or(EPERM)?;
        let instances = members
            .iter()
            .map(|member| (member.node, member.incarnation));
        if epoch <= self.epoch()
            || !view::is_valid_view(instances, local.instance.node, local.instance.incarnation)
        {
            return Err(EINVAL);
        }
        let own = self.fabric.local_identity(local.instance, local.secret)?;
        for member in members.iter().filter(|m| m.node == local.instance.node) {
            self.fabric.pin_address(&member.address)?;
            self.fabric.open_dct()?;
            if self.fabric.peer_or_self(local.instance).is_err() {
                self.fabric
                    .set_self_peer(Some(Self::new_peer(&own, member)?));
            }
        }
        let delta = self.diff_view(&own, members)?;
        let new_members = Self::build_members(members)?;
        self.fabric.replace_peers(delta.kept);
        // Whoever acts on the new view takes it that nobody else reaches our memory.
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

    /// Completes the change of view: those who joined may be talked to.
    pub(crate) fn commit_view(&self, peers: PreparedView) {
        let before = self.fabric.replace_peers(peers.0);
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

    /// Puts the new list in place. Nobody has told their names for it yet.
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
        for old in self.fabric.all_peers()? {
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

    /// Leaves the cluster. Returns those who were peers, with whom nothing is connected any more.
    pub(crate) fn leave(&self) -> KVec<Arc<Peer>> {
        let peers = self.fabric.replace_peers(KVec::new());
        self.fabric.fence_peers(&peers, errno::hostdown());
        self.fabric.drain_peers(&peers);
        self.directory.clear();
        self.fabric.set_self_peer(None);
        self.fabric.unpin_address();
        let mut state = self.state.lock();
        let members = core::mem::take(&mut state.members);
        state.local = None;
        state.epoch = 0;
        drop(state);
        drop(members);
        peers
    }

    /// Epoch of the view, 0 when there is none.
    pub(crate) fn epoch(&self) -> u64 {
        self.state.lock().epoch
    }

    /// The number of this node.
    ///
    /// # Errors
    ///
    /// `EHOSTUNREACH` without a view.
    pub(crate) fn local_node(&self) -> Result<u32> {
        self.state
            .lock()
            .local_node()
            .ok_or_else(errno::hostunreach)
    }

    /// The node that keeps `name`.
    ///
    /// # Errors
    ///
    /// `EHOSTUNREACH` without a view.
    pub(crate) fn name_owner(&self, name: &Name) -> Result<u32> {
        let state = self.state.lock();
        let nodes = state.members.iter().map(|member| member.info.node);
        name_hash::name_owner(name, nodes).ok_or_else(errno::hostunreach)
    }

    /// The node of that number, in its present life.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn instance_of(&self, node: u32) -> Result<NodeInstance> {
        let state = self.state.lock();
        let at = state
            .members
            .binary_search_by_key(&node, |member| member.info.node);
        at.map(|at| member_instance(&state.members[at].info))
            .map_err(|_| errno::hostdown())
    }

    /// Whether a node is in the view, in this life.
    pub(crate) fn is_member(&self, instance: NodeInstance) -> bool {
        self.instance_of(instance.node) == Ok(instance)
    }

    /// Takes note that a node has told all its names for the view of `epoch`, if that is the present one. Returns
    /// whether it was the last of all.
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

    /// The epoch of the present view, if all nodes have told their names for it, this one included.
    pub(crate) fn synced_epoch(&self) -> Option<u64> {
        let state = self.state.lock();
        let is_synced = |member: &Member| member.synced_epoch >= state.epoch;
        (state.epoch != 0 && state.members.iter().all(is_synced)).then_some(state.epoch)
    }

    /// Whether a node is out of the view, in this life, and all who are in it have heard so: nobody is reached
    /// by it any more.
    pub(crate) fn is_fully_removed(&self, instance: NodeInstance) -> bool {
        let state = self.state.lock();
        let is_synced = |member: &Member| member.synced_epoch >= state.epoch;
        let is_same_instance = |member: &Member| self::member_instance(&member.info) == instance;
        state.epoch != 0
            && state
                .members
                .iter()
                .all(|member| is_synced(member) && !is_same_instance(member))
    }

    /// The view: epoch, number of this node, and members in order of their numbers.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn view(&self) -> Result<(u64, u32, KVec<bindings::kite_member>)> {
        let state = self.state.lock();
        let mut members = KVec::with_capacity(state.members.len(), GFP_KERNEL)?;
        for member in &state.members {
            members.push(member.info, GFP_KERNEL)?;
        }
        Ok((state.epoch, state.local_node().unwrap_or(0), members))
    }
}
