// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Access to the memory of a key: kind and user of the access, and the reasons for which it fails.

use super::{READABLE, WRITABLE};

/// Kind of access to the memory of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The queue pair reads data to send.
    LocalRead,
    /// The queue pair writes received data.
    LocalWrite,
    /// RDMA READ of a peer.
    RemoteRead,
    /// RDMA WRITE of a peer.
    RemoteWrite,
    /// Atomic operation of a peer.
    RemoteAtomic,
}

impl Access {
    /// Returns the bit that the entry of a page needs for this access.
    pub(super) fn page_bit(self) -> u64 {
        match self {
            Access::LocalRead | Access::RemoteRead => READABLE,
            Access::LocalWrite | Access::RemoteWrite | Access::RemoteAtomic => WRITABLE,
        }
    }

    /// Returns `true` for an access of a peer.
    pub(super) fn is_remote(self) -> bool {
        self != self.for_referenced_key()
    }

    /// Returns the access that a key must allow if another key refers to it. Only the referring key restricts the
    /// peer: a memory window may let a peer write to a region that only its owner may write to.
    pub(super) fn for_referenced_key(self) -> Access {
        match self {
            Access::LocalRead | Access::RemoteRead => Access::LocalRead,
            Access::LocalWrite | Access::RemoteWrite | Access::RemoteAtomic => Access::LocalWrite,
        }
    }
}

/// User of a key, and kind of the access.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// The protection domain of the queue pair, shared receive queue or DC target.
    pub pd: u32,
    /// Number of the queue pair, for keys that are bound to one.
    pub qp: u32,
    /// Kind of the access.
    pub access: Access,
}

/// Reason for which an access fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MkeyFault {
    /// The key does not exist, or has another variant.
    Key,
    /// The key is in the free state.
    Free,
    /// The key belongs to another protection domain.
    Domain,
    /// The key is bound to another queue pair.
    Owner,
    /// The key does not allow the access.
    Rights,
    /// The address is outside of the memory of the key.
    Range,
    /// A page is absent.
    Absent(Absent),
    /// The chain of keys that refer to one another is too long.
    Depth,
    /// The bus address is not mapped.
    Bus,
}

/// Absent memory of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent {
    /// Key with the absent page, variant included. It may be another key, to which the key of the access refers.
    pub key: u32,
    /// Address of the first absent byte in this key.
    pub address: u64,
    /// Number of bytes of the access from this address on.
    pub length: u64,
}
