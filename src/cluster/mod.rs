// SPDX-License-Identifier: GPL-2.0

//! Cluster membership and ownership of region names.
//!
//! # Operation
//!
//! The daemon sets the *view*, the list of members ([`members`]). The kernel makes no membership decisions of
//! its own. A view change ([`view_change`]) first disconnects the nodes that are removed or unreachable, so
//! all later steps can rely on their absence. Peers for the new nodes become reachable last.
//!
//! Two reachable members own each name: a hash of the name and the members determines them
//! (`kite_core::name_hash`). At a view change, each node sends every member the names that the member now
//! owns, or announces the view without names. A node is *synced* once all reachable members, the node itself
//! included, have done so. Only a synced node reports a name as nonexistent, registers a new name, or reuses
//! memory lent to a removed home. A member that has sent its names has also closed its mappings of regions of
//! removed nodes. No access through these mappings can arrive any longer.
//!
//! # Recovery
//!
//! What belongs to an unreachable member remains: its names stay taken, and the memory lent to it stays lent.
//! Only the removal of a node releases both.
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
mod members;
mod names;
mod view_change;

use self::{directory::AddressDirectory, members::ClusterState};
pub(crate) use self::{
    directory::DIRECTORY_REPLICAS,
    members::{is_reachable, member_instance},
    names::NameTable,
};
use crate::{
    bindings, errno,
    fabric::{peer::Peer, Fabric},
    sys::thread::pi_mutex::{new_pi_mutex, PiMutex},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::{self, NodeInstance};

/// Identity of this node, set by the daemon.
#[derive(Clone, Copy)]
struct LocalNode {
    instance: NodeInstance,
    secret: [u8; 16],
}

/// The cluster, as seen through one RNIC.
#[pin_data]
pub(crate) struct Cluster {
    pub(crate) fabric: Arc<Fabric>,
    #[pin]
    state: PiMutex<ClusterState>,
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
            state <- new_pi_mutex!(ClusterState::new(), "Cluster::state"),
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
}
