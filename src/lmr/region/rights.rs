// SPDX-License-Identifier: GPL-2.0

//! Who has which rights to a region, as its home knows them: its owner all, users that were named those that they
//! were granted, and all others what was said for them.
//!
//! Whoever loses a right loses the mappings that he has by it: they are marked, and [`super::super::grant`] sees to
//! their end.

use super::{Region, State};
use crate::bindings;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, rbtree::RBTreeNodeReservation};
use kite_core::{
    rights::{granted, Rights},
    view::Life,
};

/// Whom rights are granted to.
#[derive(Clone, Copy)]
pub(crate) enum Whom {
    /// This user.
    User(u32),
    /// All who are not named.
    Others,
}

impl Whom {
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
pub(crate) type BlankGrant = RBTreeNodeReservation<u32, Rights>;

impl State {
    /// The rights that a user has.
    pub(super) fn rights_of(&self, uid: u32) -> Rights {
        granted(
            self.owner,
            self.granted.get(&uid).copied(),
            self.others,
            uid,
        )
    }

    /// Marks the mappers that have a right which their users have not. They wait for no lock any more. Returns
    /// whether there are any that were not marked before.
    fn revoke(&mut self) -> bool {
        let (owner, others, before) = (self.owner, self.others, self.revoking);
        for entry in self.mappers.values_mut() {
            let own = self.granted.get(&entry.uid).copied();
            let keeps = granted(owner, own, others, entry.uid).contains(entry.rights);
            if !keeps && !entry.revoked {
                entry.revoked = true;
                self.revoking += 1;
            }
        }
        let fresh = self.revoking != before;
        if fresh {
            let mappers = &self.mappers;
            self.lines.bury(|bearer, mapping, waits| {
                let entry = mappers.get(&(bearer.life.node, mapping));
                waits && entry.is_some_and(|entry| entry.revoked)
            });
        }
        fresh
    }
}

impl Region {
    /// Memory for a grant, for which the region's owner pays.
    pub(crate) fn blank_grant(&self) -> Result<BlankGrant> {
        self.payer
            .pays(|| RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT))
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
        number: Option<(Life, u64)>,
        (whom, rights): (Whom, Rights),
        memory: BlankGrant,
    ) -> Result {
        let mut state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check(node, mapping, Rights::MASTER)?;
        if let (Some((life, number)), Some((last_life, last))) = (number, state.last_grant) {
            if life == last_life && number < last {
                return Err(ETIMEDOUT);
            }
        }
        match whom {
            Whom::Others => state.others = rights,
            Whom::User(uid) if uid == 0 || uid == state.owner => return Err(EINVAL),
            Whom::User(uid) => {
                let fresh = state.granted.get(&uid).is_none();
                if fresh && state.grants == bindings::KITE_GRANTS_MAX {
                    return Err(ENOMEM);
                }
                state.grants += u32::from(fresh);
                state.granted.insert(memory.into_node(uid, rights));
            }
        }
        state.last_grant = number.or(state.last_grant);
        Ok(())
    }

    /// Marks the mappers that have a right which their users have not ([`Self::revoked_of`]). Returns whether
    /// there are any that were not marked before. Others may have news of their tickets then.
    pub(crate) fn revoke(&self) -> bool {
        self.state.lock().revoke()
    }

    /// Rights of users that were not named.
    pub(crate) fn others(&self) -> Rights {
        self.state.lock().others
    }

    /// Whether there are mappers whose rights were revoked.
    pub(crate) fn is_revoking(&self) -> bool {
        self.state.lock().revoking != 0
    }

    /// The first mapping of it on `node`, from number `mapping` on, whose rights were revoked.
    pub(crate) fn revoked_of(&self, node: u32, mapping: u64) -> Option<u64> {
        let mut state = self.state.lock();
        if state.revoking == 0 {
            return None;
        }
        let mut at = state.mappers.cursor_lower_bound_mut(&(node, mapping))?;
        while at.current().0 .0 == node && !at.current().1.revoked {
            at = at.move_next()?;
        }
        let (key, _) = at.current();
        (key.0 == node).then_some(key.1)
    }
}
