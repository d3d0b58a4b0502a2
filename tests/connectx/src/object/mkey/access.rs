// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Access to the memory of a key: kind and user of the access, and the reasons for which it fails.

use super::{READABLE, WRITABLE};

/// Use of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// By the queue pair's own owner, to send.
    LocalRead,
    /// By the queue pair's own owner, to receive.
    LocalWrite,
    /// By RDMA READ of a peer.
    RemoteRead,
    /// By RDMA WRITE of a peer.
    RemoteWrite,
    /// By an atomic operation of a peer.
    RemoteAtomic,
}

impl Access {
    /// The bit that the entry of a page needs for it.
    pub(super) fn page_bit(self) -> u64 {
        match self {
            Access::LocalRead | Access::RemoteRead => READABLE,
            Access::LocalWrite | Access::RemoteWrite | Access::RemoteAtomic => WRITABLE,
        }
    }

    /// Returns `true` if the access is a peer's.
    pub(super) fn is_remote(self) -> bool {
        self != self.behind_another()
    }

    /// Returns the access that a key must allow if another key refers to it. Only the referring key restricts the
    /// peer: a memory window may let a peer write to a region that only its owner may write to.
    pub(super) fn behind_another(self) -> Access {
        match self {
            Access::LocalRead | Access::RemoteRead => Access::LocalRead,
            Access::LocalWrite | Access::RemoteWrite | Access::RemoteAtomic => Access::LocalWrite,
        }
    }
}

/// User of a key, and the use.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// The protection domain of the queue pair, shared receive queue or DC target.
    pub pd: u32,
    /// The queue pair, for keys that are bound to one.
    pub qp: u32,
    /// The use.
    pub access: Access,
}

/// Why memory cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There is no such key, or its variant is another.
    Key,
    /// The key is in the free state.
    Free,
    /// The key is of another protection domain.
    Domain,
    /// The key is bound to another queue pair.
    Owner,
    /// The key does not allow it.
    Rights,
    /// The address is outside of what the key names.
    Range,
    /// A page is absent for now.
    Absent(Absent),
    /// Too many keys refer to one another.
    Depth,
    /// There is no memory at the bus address.
    Bus,
}

/// Absent memory of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent {
    /// All of the number of the key with the absent page: perhaps one behind that which was named.
    pub key: u32,
    /// The first absent byte, as an address of that key.
    pub address: u64,
    /// Number of bytes of the access from there on.
    pub length: u64,
}
