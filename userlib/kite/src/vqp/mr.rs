// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory registered for virtual queue pairs.

use std::os::fd::AsFd;

use crate::cluster::Cluster;
use crate::error::Result;
use crate::memory::Buffer;
use crate::rights::Rights;
use crate::sys;

/// Memory region (MR) of this session, for work requests of this node and of others. Dropping it deregisters the
/// memory.
///
/// # Examples
/// ```no_run
/// use kite::{Buffer, Cluster, Rights};
///
/// let mr = Cluster::open()?.reg_mr(Buffer::new(4096)?, Rights::READ)?;
/// mr.buffer().store(0, b"hello")?;
/// let remote = mr.remote_memory();
/// println!("address {:#x}, key {}", remote.addr, remote.rkey); // for other nodes
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct Mr {
    cluster: Cluster,
    buffer: Buffer,
    key: u32,
}

/// Address and key of an MR of another node, as its owner has sent them. The default is none.
///
/// # Examples
/// ```
/// let remote = kite::RemoteMemory { addr: 0x7f00_0000_0000, rkey: 17 };
/// assert_ne!(remote, kite::RemoteMemory::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of the first byte in the address space of the owner.
    pub addr: u64,
    /// Key.
    pub rkey: u32,
}

impl Cluster {
    /// Registers memory for virtual queue pairs. `other_rights` are the rights of holders of the key other than this
    /// user and root: read, write, or both, which includes atomic operations.
    ///
    /// The memory counts against `RLIMIT_MEMLOCK` of the user. It stays pinned for 2.5 s after its deregistration.
    ///
    /// # Errors
    /// - [`Error::Fault`](crate::Error::Fault): the memory is not mapped.
    /// - [`Error::Invalid`](crate::Error::Invalid): a length of 0 or over [`MR_SIZE_MAX`](crate::MR_SIZE_MAX), or
    ///   other rights.
    /// - [`Error::NotJoined`](crate::Error::NotJoined): this node is in no cluster.
    /// - [`Error::NotSupportedByRnic`](crate::Error::NotSupportedByRnic): too long for a key of the RNIC.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory): no memory, the limit of locked memory, or
    ///   [`MRS_MAX`](crate::MRS_MAX) MRs.
    pub fn reg_mr(&self, memory: Buffer, other_rights: Rights) -> Result<Mr> {
        let mut raw = sys::kite_reg_mr {
            other_rights: other_rights.bits(),
            ..Default::default()
        };
        sys::reg_mr(self.as_fd(), memory.mapping(), &mut raw)?;
        Ok(Mr {
            cluster: self.clone(),
            buffer: memory,
            key: raw.key,
        })
    }
}

impl Mr {
    /// Returns the memory.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns address and key, to be sent to other nodes.
    pub fn remote_memory(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.buffer.as_ptr() as u64,
            rkey: self.key,
        }
    }

    /// Returns the key, and the address of the byte at `offset` for the ABI. The kernel rejects an address outside
    /// the MR.
    pub(crate) fn key_and_addr(&self, offset: usize) -> (u32, u64) {
        let addr = (self.buffer.as_ptr() as u64).saturating_add(offset as u64);
        (self.key, addr)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if !self.cluster.is_owner_process() {
            return;
        }
        let mut raw = sys::kite_dereg_mr {
            key: self.key,
            ..Default::default()
        };
        // An error means that the RNIC, and the MR with it, was removed.
        let _ = sys::dereg_mr(self.cluster.as_fd(), &mut raw);
    }
}
