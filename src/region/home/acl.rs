// SPDX-License-Identifier: GPL-2.0

//! Who has which rights to a region, as its home knows them: its owner all, users that were named those that they
//! were granted, and all others what was said for them.
//!
//! Whoever loses a right loses the mappings that he has by it: they are marked, and [`crate::region::grant`] sees to
//! their end.

use super::{Region, RegionState};
use crate::bindings;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, rbtree::RBTreeNodeReservation};
use kite_core::{
    rights::{effective_rights, Rights},
    view::NodeInstance,
};

/// Whom rights are granted to.
#[derive(Clone, Copy)]
pub(crate) enum Grantee {
    /// This user.
    User(u32),
    /// All who are not named.
    Others,
}

impl Grantee {
    /// As a message has it.
    pub(crate) fn to_wire(self) -> (bool, u32) {
        match self {
            Self::User(uid) => (true, uid),
            Self::Others => (false, 0),
        }
    }

    /// Takes it from a message.
    pub(crate) fn from_wire((named, uid): (bool, u32)) -> Self {
        if named {
            Self::User(uid)
        } else {
            Self::Others
        }
    }
}

/// Memory for a grant.
pub(crate) type AclReservation = RBTreeNodeReservation<u32, Rights>;

impl RegionState {
    /// The rights that a user has.
    pub(super) fn rights_of(&self, uid: u32) -> Rights {
        effective_rights(
            self.owner,
            self.acl.get(&uid).copied(),
            self.other_rights,
            uid,
        )
    }

    /// Marks the mappers that have a right which their users have not. They wait for no lock any more. Returns
    /// whether there are any that were not marked before.
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
    /// Memory for a grant, for which the region's owner pays.
    pub(crate) fn reserve_acl_entry(&self) -> Result<AclReservation> {
        self.owner_memcg
            .with_active(|| RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT))
    }

    /// Grants a user, or all that are not named, these rights and no others; [`Self::revoke`] is to follow. Of
    /// the requests of one node the last counts, by their numbers, in whichever order they come.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT` if a later one of that node was faster.
    /// - `EACCES` if who does so is no master; `ENOENT` if he is no mapper, or the region is being freed.
    /// - `EINVAL` if the user is root or the owner, who have all rights.
    /// - `ENOMEM` if too many are named.
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

    /// Marks the mappers that have a right which their users have not ([`Self::revoked_of`]). Returns whether
    /// there are any that were not marked before. Others may have news of their tickets then.
    pub(crate) fn mark_revoked(&self) -> bool {
        self.state.lock().mark_revoked()
    }

    /// Rights of users that were not named.
    pub(crate) fn other_rights(&self) -> Rights {
        self.state.lock().other_rights
    }

    /// Whether there are mappers whose rights were revoked.
    pub(crate) fn has_revoked_mappers(&self) -> bool {
        self.state.lock().revoked_count != 0
    }

    /// The first mapping of it on `node`, from number `mapping` on, whose rights were revoked.
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
