// SPDX-License-Identifier: GPL-2.0

//! Table of regions or of mappings, by number.
//!
//! # Locking
//!
//! `IdTable::table` (mutex, named by [`IdTable::new`]) protects the table. No other lock is taken under the
//! mutex, and an iteration does not hold the mutex between two steps.

use core::pin::Pin;
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    str::CStr,
    sync::{Arc, LockClassKey, Mutex},
};

/// Object with a number that is unique in its table.
pub(super) trait Numbered {
    /// Returns the number.
    fn id(&self) -> u64;
}

/// Objects by number.
#[pin_data]
pub(super) struct IdTable<T: Numbered> {
    #[pin]
    table: Mutex<RBTree<u64, Arc<T>>>,
}

impl<T: Numbered> IdTable<T> {
    /// Creates an empty table, whose mutex has this name and lockdep class.
    pub(super) fn new(
        name: &'static CStr,
        class: Pin<&'static LockClassKey>,
    ) -> impl PinInit<Self> {
        pin_init!(Self { table <- Mutex::new(RBTree::new(), name, class) })
    }

    /// Adds an object.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory within the limit of the cgroup.
    pub(super) fn insert(&self, object: Arc<T>) -> Result {
        // Allocate without the lock: a charged allocation can sleep at the limit of its cgroup.
        let node = RBTreeNode::new(object.id(), object, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Returns the object with this number.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: no such object.
    pub(super) fn get(&self, id: u64) -> Result<Arc<T>> {
        self.table.lock().get(&id).cloned().ok_or(ENOENT)
    }

    /// Returns the object with the lowest number that is at least `id`.
    pub(super) fn at_or_after(&self, id: u64) -> Option<Arc<T>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }

    /// Returns all objects, in ascending order of their numbers. Objects added or removed during the
    /// iteration may be missed.
    pub(super) fn iter(&self) -> impl Iterator<Item = Arc<T>> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let object = self.at_or_after(next)?;
            next = object.id() + 1;
            Some(object)
        })
    }

    /// Removes the object with this number and returns it.
    pub(super) fn remove(&self, id: u64) -> Option<Arc<T>> {
        self.table.lock().remove(&id)
    }
}
