// SPDX-License-Identifier: GPL-2.0

//! Access rights to a memory region.
//!
//! A handle is a capability: it carries the rights that it was mapped with (LITE, section 4: read, write and
//! master). This module defines the rights and computes the rights of a user.

use core::ops::{BitAnd, BitOr};

/// Set of rights, with the bits of the ABI (`KITE_READ`, `KITE_WRITE`, `KITE_MASTER`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(u32);

impl Rights {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// Read the memory.
    pub const READ: Self = Self(1);
    /// Write the memory.
    pub const WRITE: Self = Self(2);
    /// Free the region, and grant rights to other users.
    pub const MASTER: Self = Self(4);
    /// All rights.
    pub const ALL: Self = Self(7);

    /// Creates a set from the bits of the ABI or of a message. Returns `None` if an undefined bit is set.
    #[inline]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::ALL.0 == 0 {
            Some(Self(bits))
        } else {
            None
        }
    }

    /// Returns the bits of the ABI.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns `true` if all of `rights` are in the set. Always `true` for [`Rights::NONE`].
    #[inline]
    pub const fn contains(self, rights: Self) -> bool {
        self.0 & rights.0 == rights.0
    }

    /// Returns `true` if the set is empty.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl BitOr for Rights {
    type Output = Self;

    #[inline]
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Rights {
    type Output = Self;

    #[inline]
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// UID of root.
const ROOT_UID: u32 = 0;

/// UID of root processes without the capabilities of root: the default overflow UID of Linux.
pub const SQUASHED_ROOT_UID: u32 = 65_534;

/// Returns the UID that determines the rights of a process with the effective UID `euid`.
///
/// Root of a container without capabilities must not have the rights of root on all nodes.
#[inline]
pub fn acting_uid(euid: u32, has_sys_admin: impl FnOnce() -> bool) -> u32 {
    if euid == ROOT_UID && !has_sys_admin() {
        SQUASHED_ROOT_UID
    } else {
        euid
    }
}

/// Returns the rights of user `uid` to a region of user `owner_uid`.
///
/// `user_rights` are the rights granted to `uid` specifically, if any. They replace `other_rights`, which all
/// other users have. The owner and root have all rights.
///
/// User ids are those of the initial user namespace and mean the same user on every node of the cluster.
#[inline]
pub const fn effective_rights(
    owner_uid: u32,
    user_rights: Option<Rights>,
    other_rights: Rights,
    uid: u32,
) -> Rights {
    match user_rights {
        _ if uid == owner_uid || uid == ROOT_UID => Rights::ALL,
        Some(own) => own,
        None => other_rights,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn owner_and_root_have_all_rights() {
        for own in [None, Some(Rights::NONE)] {
            assert_eq!(effective_rights(1000, own, Rights::NONE, 1000), Rights::ALL);
            assert_eq!(effective_rights(1000, own, Rights::NONE, 0), Rights::ALL);
        }
        assert_eq!(
            effective_rights(1000, None, Rights::READ, 1001),
            Rights::READ
        );
        assert_eq!(effective_rights(0, None, Rights::NONE, 1), Rights::NONE);
    }

    #[test]
    fn root_without_capabilities_acts_as_another_user() {
        assert_eq!(acting_uid(ROOT_UID, || true), ROOT_UID);
        assert_eq!(acting_uid(ROOT_UID, || false), SQUASHED_ROOT_UID);
        for has_sys_admin in [false, true] {
            assert_eq!(acting_uid(1000, || has_sys_admin), 1000);
        }
        let squashed = acting_uid(ROOT_UID, || false);
        let rights = effective_rights(1000, None, Rights::NONE, squashed);
        assert_eq!(rights, Rights::NONE);
    }

    #[test]
    fn user_rights_replace_other_rights() {
        for own in [Rights::NONE, Rights::WRITE] {
            assert_eq!(effective_rights(1000, Some(own), Rights::READ, 1001), own);
        }
    }

    #[test]
    fn all_contains_every_right() {
        assert_eq!(Rights::READ | Rights::WRITE | Rights::MASTER, Rights::ALL);
        assert!(Rights::NONE.is_empty() && !Rights::READ.is_empty());
        assert!(Rights::NONE.contains(Rights::NONE));
    }

    proptest! {
        #[test]
        fn rights_bits_round_trip(bits in prop_oneof![0u32..16, any::<u32>()]) {
            match Rights::from_bits(bits) {
                Some(rights) => prop_assert_eq!(rights.bits(), bits),
                None => prop_assert!(bits > 7),
            }
        }

        #[test]
        fn rights_behave_as_a_set(a in 0u32..8, b in 0u32..8) {
            let (x, y) = (Rights::from_bits(a).unwrap(), Rights::from_bits(b).unwrap());
            prop_assert!((x | y).contains(x) && (x | y).contains(y));
            prop_assert!(x.contains(x & y) && y.contains(x & y));
            prop_assert_eq!(x.contains(y), x & y == y);
        }

        #[test]
        fn user_without_own_rights_gets_other_rights(owner: u32, uid in 1u32.., bits in 0u32..8) {
            let others = Rights::from_bits(bits).unwrap();
            let rights = effective_rights(owner, None, others, uid);
            prop_assert_eq!(rights, if uid == owner { Rights::ALL } else { others });
        }
    }
}
