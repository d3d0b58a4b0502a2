// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Creating regions.

use std::os::fd::AsFd;

use super::Region;
use crate::cluster::Cluster;
use crate::error::Result;
use crate::memory::Buffer;
use crate::rights::Rights;
use crate::sys;

/// Attributes of a new region. Its memory is zeroed.
///
/// # Examples
/// ```no_run
/// use kite::{AllocOptions, Cluster, Rights};
///
/// let options = AllocOptions::new(1 << 20)
///     .nodes([1, 2])
///     .name("table")
///     .other_rights(Rights::READ);
/// let table = Cluster::open()?.alloc(&options)?;
/// assert_eq!(table.len(), 1 << 20);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AllocOptions {
    len: u64,
    nodes: Vec<u32>,
    name: String,
    other_rights: Rights,
}

impl AllocOptions {
    /// Describes an anonymous region of `len` bytes, at least 1, on this node, without rights for others.
    pub fn new(len: u64) -> Self {
        Self {
            len,
            nodes: Vec::new(),
            name: String::new(),
            other_rights: Rights::empty(),
        }
    }

    /// Stripes the region over `nodes`, chunk by chunk, in this order. At most
    /// [`STRIPE_WIDTH_MAX`](crate::STRIPE_WIDTH_MAX) nodes; none means this node.
    pub fn nodes(mut self, nodes: impl Into<Vec<u32>>) -> Self {
        self.nodes = nodes.into();
        self
    }

    /// Sets a name, unique in the cluster, of at most [`NAME_MAX`](crate::NAME_MAX) bytes. A named region exists
    /// until it is freed or its home, this node, leaves the cluster. An anonymous region ends with its session.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets the rights of users other than root and the owner, which is the effective user of the caller.
    pub fn other_rights(mut self, rights: Rights) -> Self {
        self.other_rights = rights;
        self
    }
}

impl Cluster {
    /// Allocates a region and opens it with all rights. The deadline is 10 s, plus 4 s for each GiB.
    ///
    /// # Errors
    /// - [`Error::Exists`](crate::Error::Exists): the name is taken.
    /// - [`Error::HostDown`](crate::Error::HostDown): a node is not in the view.
    /// - [`Error::Invalid`](crate::Error::Invalid): a length of 0, or more than
    ///   [`STRIPE_WIDTH_MAX`](crate::STRIPE_WIDTH_MAX) nodes.
    /// - [`Error::NameTooLong`](crate::Error::NameTooLong): more than [`NAME_MAX`](crate::NAME_MAX) bytes.
    /// - [`Error::NotJoined`](crate::Error::NotJoined): this node is in no cluster.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory): no memory, or the limit of a node on lent memory.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): a node did not reply in time.
    pub fn alloc(&self, options: &AllocOptions) -> Result<Region> {
        let mut alloc = sys::kite_alloc {
            len: options.len,
            other_rights: options.other_rights.bits(),
            name: sys::pack_name(&options.name)?,
            ..Default::default()
        };
        sys::alloc(self.as_fd(), &options.nodes, &mut alloc)?;
        Region::from_handle(self.clone(), alloc.handle)
    }

    /// Creates a region of memory of this program, and opens it with all rights. The program may use the memory
    /// while other nodes access it. An empty `name` creates an anonymous region. `other_rights` are the rights of
    /// users other than this one and root.
    ///
    /// The memory is pinned while the region exists, and counts against `RLIMIT_MEMLOCK` of the user.
    ///
    /// # Errors
    /// - [`Error::Fault`](crate::Error::Fault): the memory is not mapped, or not writable.
    /// - [`Error::Invalid`](crate::Error::Invalid): the memory does not begin at a page, or maps a page twice.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory): no memory, or the limit of locked memory.
    /// - [`Error::Exists`](crate::Error::Exists), [`Error::NameTooLong`](crate::Error::NameTooLong),
    ///   [`Error::NotJoined`](crate::Error::NotJoined), [`Error::TimedOut`](crate::Error::TimedOut): see
    ///   [`alloc`](Self::alloc).
    pub fn register_region(
        &self,
        memory: &Buffer,
        name: &str,
        other_rights: Rights,
    ) -> Result<Region> {
        let mut register = sys::kite_register {
            other_rights: other_rights.bits(),
            name: sys::pack_name(name)?,
            ..Default::default()
        };
        sys::register_region(self.as_fd(), memory.mapping(), &mut register)?;
        Region::from_handle(self.clone(), register.handle)
    }
}
