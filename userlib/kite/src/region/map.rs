// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Opening named regions.

use std::os::fd::AsFd;

use super::Region;
use crate::cluster::Cluster;
use crate::error::Result;
use crate::rights::Rights;
use crate::sys;

/// Named region to open, and conditions.
///
/// # Examples
/// ```no_run
/// use kite::{Cluster, MapOptions, Rights};
///
/// let cluster = Cluster::open()?;
/// // Any user can create a region named "table" before root does.
/// let table = cluster.map_with(&MapOptions::by_name("table").owner(0), Rights::READ)?;
/// assert_eq!(table.info().owner, 0);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MapOptions {
    name: String,
    home: u32,
    id: u64,
    owner: Option<u32>,
}

impl MapOptions {
    /// Selects the region to which a name belongs.
    pub fn by_name(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            home: 0,
            id: 0,
            owner: None,
        }
    }

    /// Selects the region of this [`id`](crate::RegionEntry::id) at its home; [`NODE_SELF`](crate::NODE_SELF) is this
    /// node. The region has a name, which may belong to another region: see
    /// [`RegionEntry::in_conflict`](crate::RegionEntry::in_conflict).
    pub fn by_id(home: u32, id: u64) -> Self {
        Self {
            home,
            id,
            ..Self::by_name("")
        }
    }

    /// Opens the region only if this user owns it. Without this method any user may own it.
    pub fn owner(mut self, uid: u32) -> Self {
        self.owner = Some(uid);
        self
    }
}

impl Cluster {
    /// Opens the region of this name with exactly these rights, at least one.
    ///
    /// # Errors
    /// See [`map_with`](Self::map_with).
    pub fn map(&self, name: &str, rights: Rights) -> Result<Region> {
        self.map_with(&MapOptions::by_name(name), rights)
    }

    /// Opens a region with exactly these rights, at least one.
    ///
    /// # Errors
    /// - [`Error::Denied`](crate::Error::Denied): the user lacks one of the rights, or another user owns the region.
    /// - [`Error::HostDown`](crate::Error::HostDown): the home of the region is down.
    /// - [`Error::Invalid`](crate::Error::Invalid): no rights, neither name nor ID, or the user namespace of this
    ///   process does not map the required owner.
    /// - [`Error::NotFound`](crate::Error::NotFound): no region has the name, or the home has no named region of the
    ///   ID.
    /// - [`Error::NameTooLong`](crate::Error::NameTooLong), [`Error::NotJoined`](crate::Error::NotJoined),
    ///   [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::TimedOut`](crate::Error::TimedOut): see
    ///   [`alloc`](Self::alloc).
    pub fn map_with(&self, options: &MapOptions, rights: Rights) -> Result<Region> {
        let mut map = sys::kite_map {
            name: sys::pack_name(&options.name)?,
            region: options.id,
            home: options.home,
            rights: rights.bits(),
            flags: options.owner.map_or(0, |_| sys::KITE_MAP_OWNER),
            owner: options.owner.unwrap_or(0),
            ..Default::default()
        };
        sys::map(self.as_fd(), &mut map)?;
        Region::from_handle(self.clone(), map.handle)
    }
}
