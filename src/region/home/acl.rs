// SPDX-License-Identifier: GPL-2.0

//! Access control list (ACL) of a region at its home.
//!
//! # Operation
//!
//! The owner and root have all rights. Users with an ACL entry have the rights of the entry. All other users
//! have the rights granted to [`Grantee::Others`]. If a user loses a right, the mappings that have this right
//! are marked as revoked, and [`crate::region::grant`] invalidates them.
//!
//! # Recovery
//!
//! The requests of one node can arrive in any order. The request with the highest sequence number wins.
//!
//! # Locking
//!
//! The region's `state` mutex protects the ACL. An entry is allocated before the mutex is taken, since a
//! charged allocation can sleep at the limit of its cgroup.

use super::{Region, RegionState};
use crate::bindings;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, rbtree::RBTreeNodeReservation};
use kite_core::{
    rights::{effective_rights, Rights},
    view::NodeInstance,
};

/// User or group of users that rights are granted to.
#[derive(Clone, Copy)]
pub(crate) enum Grantee {
    /// User with this uid.
    User(u32),
    /// All users without an ACL entry.
    Others,
}

impl Grantee {
    /// Returns the wire representation: whether a user is named, and the uid.
    pub(crate) fn to_wire(self) -> (bool, u32) {
        match self {
            Self::User(uid) => (true, uid),
            Self::Others => (false, 0),
        }
    }

    /// Decodes the wire representation.
    pub(crate) fn from_wire((named, uid): (bool, u32)) -> Self {
        if named {
            Self::User(uid)
        } else {
            Self::Others
        }
    }
}

/// Preallocated ACL entry.
pub(crate) type AclReservation = RBTreeNodeReservation<u32, Rights>;

impl RegionState {
    /// Returns the rights of a user.
    pub(super) fn rights_of(&self, uid: u32) -> Rights {
        effective_rights(
            self.owner,
            self.acl.get(&uid).copied(),
            self.other_rights,
            uid,
        )
    }

    /// Marks the mappers that have a right their users lack, and removes their waiting (not granted) waiters.
    /// Returns `true` if a mapper was newly marked.
    fn mark_revoked(&mut self) -> bool {
        let (owner, other_rights, revoked_before) =
            (self.owner, self.other_rights, self.revoked_count);
        for entry in self.mappers.values_mut() {
            let granted_rights = self.acl.get(&entry.uid).copied();
            let is_allowed = effective_rights(owner, granted_rights, other_rights, entry.uid)
                .contains(entry.rights);
            if !is_allowed && !entry.revoked {
                entry.revoked = true;
                self.revoked_count += 1;
            }
        }
        let has_new = self.revoked_count != revoked_before;
        if has_new {
            let mappers = &self.mappers;
            self.lock_table
                .remove_gone(|waiter_id, mapping, is_waiting| {
                    let entry = mappers.get(&(waiter_id.instance.node, mapping));
                    is_waiting && entry.is_some_and(|entry| entry.revoked)
                });
        }
        has_new
    }
}

impl Region {
    /// Allocates an ACL entry, charged to the region's owner.
    pub(crate) fn reserve_acl_entry(&self) -> Result<AclReservation> {
        self.owner_memcg
            .with_active(|| RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT))
    }

    /// Sets the rights of a grantee. The caller must call [`Self::mark_revoked`] afterwards. Of the requests
    /// of one node, the one with the highest sequence number wins, in whatever order they arrive.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`: a later request of the same node was executed before.
    /// - `EACCES`: the mapper is not a master.
    /// - `ENOENT`: the mapper does not exist, or the region is being freed.
    /// - `EINVAL`: the user is root or the owner, which have all rights.
    /// - `ENOMEM`: the ACL is full.
    pub(crate) fn grant(
        &self,
        (node, mapping): (u32, u64),
        sequence: Option<(NodeInstance, u64)>,
        (grantee, rights): (Grantee, Rights),
        reservation: AclReservation,
    ) -> Result {
        let mut state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check_rights(node, mapping, Rights::MASTER)?;
        if let (Some((instance, sequence)), Some((last_instance, last_sequence))) =
            (sequence, state.last_grant)
        {
            if instance == last_instance && sequence < last_sequence {
                return Err(ETIMEDOUT);
            }
        }
        match grantee {
            Grantee::Others => state.other_rights = rights,
            Grantee::User(uid) if uid == 0 || uid == state.owner => return Err(EINVAL),
            Grantee::User(uid) => {
                let is_new = state.acl.get(&uid).is_none();
                if is_new && state.acl_len == bindings::KITE_GRANTS_MAX {
                    return Err(ENOMEM);
                }
                state.acl_len += u32::from(is_new);
                state.acl.insert(reservation.into_node(uid, rights));
            }
        }
        state.last_grant = sequence.or(state.last_grant);
        Ok(())
    }

    /// Marks the mappers that have a right their users lack ([`Self::next_revoked_of`]). Returns `true` if a
    /// mapper was newly marked. May grant locks to other waiters.
    pub(crate) fn mark_revoked(&self) -> bool {
        self.state.lock().mark_revoked()
    }

    /// Returns the rights of users without an ACL entry.
    pub(crate) fn other_rights(&self) -> Rights {
        self.state.lock().other_rights
    }

    /// Returns `true` if a mapper is marked as revoked.
    pub(crate) fn has_revoked_mappers(&self) -> bool {
        self.state.lock().revoked_count != 0
    }

    /// Returns the first revoked mapping of a node with a number of at least `mapping`.
    pub(crate) fn next_revoked_of(&self, node: u32, mapping: u64) -> Option<u64> {
        let mut state = self.state.lock();
        if state.revoked_count == 0 {
            return None;
        }
        let mut cursor = state.mappers.cursor_lower_bound_mut(&(node, mapping))?;
        while cursor.current().0 .0 == node && !cursor.current().1.revoked {
            cursor = cursor.move_next()?;
        }
        let (key, _) = cursor.current();
        (key.0 == node).then_some(key.1)
    }
}
