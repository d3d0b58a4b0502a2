// SPDX-License-Identifier: GPL-2.0

//! Table of the mappings of this node.
//!
//! # Locking
//!
//! `MappingTable::table` (mutex) protects the table. No other lock is taken under the mutex, and
//! [`MappingTable::for_each`] calls `f` without the mutex.

use super::Mapping;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{Arc, Mutex},
};

/// Mappings of this node by number.
#[pin_data]
pub(crate) struct MappingTable {
    #[pin]
    table: Mutex<RBTree<u64, Arc<Mapping>>>,
}

impl MappingTable {
    /// Creates an empty table.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new(), "MappingTable::table") })
    }

    /// Adds a mapping.
    pub(crate) fn insert(&self, mapping: Arc<Mapping>) -> Result {
        // Allocate without the lock: a charged allocation can sleep at the limit of its cgroup.
        let node = RBTreeNode::new(mapping.id, mapping, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Returns the mapping with this number.
    pub(crate) fn get(&self, id: u64) -> Option<Arc<Mapping>> {
        self.table.lock().get(&id).cloned()
    }

    /// Removes the mapping with this number and returns it.
    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Mapping>> {
        self.table.lock().remove(&id)
    }

    /// Calls `f` for every mapping, in order of the numbers and without the table lock.
    pub(crate) fn for_each(&self, f: impl Fn(&Mapping)) {
        let mut next = 0;
        while let Some(mapping) = self.at_or_after(next) {
            next = mapping.id + 1;
            f(&mapping);
        }
    }

    fn at_or_after(&self, id: u64) -> Option<Arc<Mapping>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }
}
