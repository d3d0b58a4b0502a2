// SPDX-License-Identifier: GPL-2.0

//! Rights to a memory region.
//!
//! A handle is a capability: it carries the rights it was mapped with (LITE, section 4: read, write
//! and master). This says what the rights are and who gets them.

use core::ops::{BitAnd, BitOr};

/// A set of rights, with the bits of the ABI (`KITE_READ`, `KITE_WRITE`, `KITE_MASTER`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(u32);

impl Rights {
    /// No right at all.
    pub const NONE: Self = Self(0);
    /// To read the memory.
    pub const READ: Self = Self(1);
    /// To write the memory.
    pub const WRITE: Self = Self(2);
    /// To free the region, and to grant rights to it.
    pub const MASTER: Self = Self(4);
    /// All of them.
    pub const ALL: Self = Self(7);

    /// Takes the bits of the ABI or of a message. `None` if one of them is not defined.
    #[inline]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::ALL.0 == 0 {
            Some(Self(bits))
        } else {
            None
        }
    }

    /// The bits of the ABI.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether all of `rights` are among these. Always true of [`Rights::NONE`].
    #[inline]
    pub const fn contains(self, rights: Self) -> bool {
        self.0 & rights.0 == rights.0
    }

    /// Whether there is none.
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

/// The rights that user `uid` has to a region of user `owner_uid` which gives `own` to that very user, if
/// anything, and `others` to the rest.
///
/// The owner and root have all of them. Users are the numeric ones of the initial user namespace and
/// mean the same on every node of the cluster.
#[inline]
pub const fn effective_rights(
    owner_uid: u32,
    user_rights: Option<Rights>,
    other_rights: Rights,
    uid: u32,
) -> Rights {
    match user_rights {
        _ if uid == owner_uid || uid == 0 => Rights::ALL,
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
