// SPDX-License-Identifier: GPL-2.0

//! Members of the view: their reachability, admissions and synchronization.
//!
//! # Operation
//!
//! A member is *reachable* or *unreachable*. Two reachable members are *connected* since their admission: the
//! later one of the epochs at which the view last admitted either of them. An object that depends on state
//! at another node records the admission. After the other node was fenced and admitted again, the admission
//! differs ([`Cluster::is_connected`]), so the object is known to be stale.
//!
//! # Locking
//!
//! `Cluster::state` (mutex) protects [`ClusterState`]. Holders may sleep in allocations.

use super::{Cluster, LocalNode};
use crate::{
    bindings,
    errno::{self, TryError},
    sys::deadline::{retry_until, Deadline},
};
use kernel::prelude::*;
use kite_core::{
    name::Name,
    name_hash::{self, NameOwners},
    view::{NodeInstance, ViewMember},
};

/// Member of the view.
pub(super) struct Member {
    pub(super) info: bindings::kite_member,
    /// Latest epoch for which the member has sent its names or announced the view.
    synced_epoch: u64,
}

impl Member {
    fn instance(&self) -> NodeInstance {
        member_instance(&self.info)
    }

    fn is_reachable(&self) -> bool {
        is_reachable(&self.info)
    }
}

/// Returns the node instance of a member.
pub(crate) fn member_instance(member: &bindings::kite_member) -> NodeInstance {
    NodeInstance {
        node: member.node,
        incarnation: member.incarnation,
    }
}

/// Returns `true` if a member is reachable.
pub(crate) fn is_reachable(member: &bindings::kite_member) -> bool {
    member.unreachable_since == 0
}

/// Returns a member in the form that `kite_core` checks.
pub(super) fn view_member(member: &bindings::kite_member) -> ViewMember {
    ViewMember {
        instance: member_instance(member),
        admitted_epoch: member.admitted_epoch,
        unreachable_since: member.unreachable_since,
    }
}

pub(super) struct ClusterState {
    pub(super) local: Option<LocalNode>,
    pub(super) members: KVec<Member>,
    /// Epoch of `members`; 0 without a view. Both are read under one lock, because nodes identify by this
    /// epoch the members on which they act.
    pub(super) epoch: u64,
}

impl ClusterState {
    /// Returns the state of a node that has not joined.
    pub(super) const fn new() -> Self {
        Self {
            local: None,
            members: KVec::new(),
            epoch: 0,
        }
    }

    /// Returns the ID of this node, or `None` without a view.
    pub(super) fn local_node(&self) -> Option<u32> {
        let local = self.local.filter(|_| self.epoch != 0)?;
        Some(local.instance.node)
    }

    /// Returns the member with this node number.
    fn member(&self, node: u32) -> Option<&Member> {
        let index = self
            .members
            .binary_search_by_key(&node, |member| member.info.node);
        self.members.get(index.ok()?)
    }

    /// Returns the reachable members.
    pub(super) fn reachable(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.is_reachable())
    }

    /// Returns the admission of a reachable member, or `None` for any other node.
    fn admission_of(&self, instance: NodeInstance) -> Option<u64> {
        let member = self.member(instance.node)?;
        let local = self.member(self.local_node()?)?;
        let is_reachable = member.instance() == instance && member.is_reachable();
        is_reachable.then_some(member.info.admitted_epoch.max(local.info.admitted_epoch))
    }

    /// Returns `true` if all reachable members have sent their names for the view.
    fn is_synced(&self) -> bool {
        self.epoch != 0
            && self
                .reachable()
                .all(|member| member.synced_epoch >= self.epoch)
    }
}

/// Creates the members of a new view. No member is synced.
pub(super) fn build_members(members: &[bindings::kite_member]) -> Result<KVec<Member>> {
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

impl Cluster {
    /// Returns the owners of `name` among the reachable members.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: there is no view.
    pub(crate) fn name_owners(&self, name: &Name) -> Result<NameOwners> {
        let state = self.state.lock();
        let nodes = state.reachable().map(|member| member.info.node);
        name_hash::name_owners(name, nodes).ok_or_else(errno::hostunreach)
    }

    /// Returns the current instance of a reachable node.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not a reachable member.
    pub(crate) fn instance_of(&self, node: u32) -> Result<NodeInstance> {
        let state = self.state.lock();
        let member = state.member(node).filter(|member| member.is_reachable());
        member.map(Member::instance).ok_or_else(errno::hostdown)
    }

    /// Returns the current instance of a node, reachable or not.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    pub(crate) fn member_instance_of(&self, node: u32) -> Result<NodeInstance> {
        let state = self.state.lock();
        let member = state.member(node);
        member.map(Member::instance).ok_or_else(errno::hostdown)
    }

    /// Returns `true` if this instance of a node is in the view, reachable or not.
    pub(crate) fn is_member(&self, instance: NodeInstance) -> bool {
        self.member_instance_of(instance.node) == Ok(instance)
    }

    /// Returns `true` if a member of the view is unreachable.
    pub(crate) fn has_unreachable_member(&self) -> bool {
        let state = self.state.lock();
        state.reachable().count() < state.members.len()
    }

    /// Returns `true` if this instance of a node is a reachable member.
    pub(crate) fn is_reachable(&self, instance: NodeInstance) -> bool {
        self.instance_of(instance.node) == Ok(instance)
    }

    /// Returns the epoch since which this node and this instance of a node are connected: the later one of
    /// their admissions. For this node, the epoch of its own admission.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not a reachable member.
    pub(crate) fn admission_of(&self, instance: NodeInstance) -> Result<u64> {
        let state = self.state.lock();
        state.admission_of(instance).ok_or_else(errno::hostdown)
    }

    /// Returns `true` if this instance of a node is reachable, and neither it nor this node was fenced since
    /// `admission`, which [`Self::admission_of`] returned. Always `true` for this node.
    pub(crate) fn is_connected(&self, instance: NodeInstance, admission: u64) -> bool {
        let state = self.state.lock();
        let is_local = state.local_node() == Some(instance.node);
        let found = state.admission_of(instance);
        found.is_some_and(|found| is_local || found == admission)
    }

    /// Records that a node has sent all its names for the view of `epoch`. Has no effect for another view.
    ///
    /// Returns `true` if all reachable members are synced now, and were not before.
    pub(crate) fn on_member_synced(&self, instance: NodeInstance, epoch: u64) -> bool {
        let mut state = self.state.lock();
        let is_unsynced =
            |member: &&mut Member| member.instance() == instance && member.synced_epoch < epoch;
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
        state.is_synced()
    }

    /// Waits until all reachable members have synchronized the view. After that, nothing sent by removed or
    /// fenced nodes arrives.
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

    /// Returns the epoch of the view if all reachable members, this node included, have sent their names.
    pub(crate) fn synced_epoch(&self) -> Option<u64> {
        let state = self.state.lock();
        state.is_synced().then_some(state.epoch)
    }

    /// Returns `true` if this instance of a node has been removed or fenced since `admission`, and all
    /// reachable members have synchronized the view. Then no access of that time can reach a member.
    pub(crate) fn is_fenced_everywhere(&self, instance: NodeInstance, admission: u64) -> bool {
        self.synced_epoch().is_some() && !self.is_connected(instance, admission)
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
