// SPDX-License-Identifier: GPL-2.0

//! Table of the regions of which this node is the home.
//!
//! # Locking
//!
//! `RegionTable::table` (mutex) protects the table. No other lock is taken under the mutex.

use super::Region;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{Arc, Mutex},
};

/// Regions of which this node is the home, by number.
#[pin_data]
pub(crate) struct RegionTable {
    #[pin]
    table: Mutex<RBTree<u64, Arc<Region>>>,
}

impl RegionTable {
    /// Creates an empty table.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new(), "RegionTable::table") })
    }

    /// Adds a region.
    pub(crate) fn insert(&self, region: Arc<Region>) -> Result {
        // Allocate without the lock: a charged allocation can sleep at the limit of its cgroup.
        let node = RBTreeNode::new(region.id, region, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Returns the region with this number.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: no such region.
    pub(crate) fn get(&self, id: u64) -> Result<Arc<Region>> {
        self.table.lock().get(&id).cloned().ok_or(ENOENT)
    }

    /// Returns the region with the lowest number that is at least `id`.
    pub(crate) fn at_or_after(&self, id: u64) -> Option<Arc<Region>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }

    /// Returns all regions, in ascending order of their numbers. Regions added or removed during the
    /// iteration may be missed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Arc<Region>> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let region = self.at_or_after(next)?;
            next = region.id + 1;
            Some(region)
        })
    }

    /// Removes the region with this number and returns it.
    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Region>> {
        self.table.lock().remove(&id)
    }
}
