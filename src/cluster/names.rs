// SPDX-License-Identifier: GPL-2.0

//! Names that this node stores, with the home of each named region.
//!
//! # Locking
//!
//! `NameTable::table` (mutex) protects the table. Holders may sleep in allocations. [`NameTable::retain`]
//! calls its predicate with the mutex held, and so does [`NameTable::for_each`].

use kernel::{new_mutex, prelude::*, rbtree::RBTree, sync::Mutex};
use kite_core::name::Name;

/// Home and region of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NameEntry {
    /// ID of the region's home.
    pub(crate) home: u32,
    /// Region ID at the home.
    pub(crate) region: u64,
}

/// Table of owned names.
#[pin_data]
pub(crate) struct NameTable {
    #[pin]
    table: Mutex<RBTree<Name, NameEntry>>,
}

impl NameTable {
    /// Creates an empty table.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new(), "NameTable::table") })
    }

    /// Registers a name. Idempotent.
    ///
    /// # Errors
    ///
    /// - `EEXIST`: the name has another entry.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn register(&self, name: Name, entry: NameEntry) -> Result {
        let mut table = self.table.lock();
        match table.get(&name) {
            Some(existing) if *existing == entry => Ok(()),
            Some(_) => Err(EEXIST),
            None => table
                .try_create_and_insert(name, entry, GFP_KERNEL)
                .map(|_| ()),
        }
    }

    /// Removes a name, unless the name has another entry.
    pub(crate) fn unregister(&self, name: &Name, entry: NameEntry) {
        let mut table = self.table.lock();
        if table.get(name) == Some(&entry) {
            table.remove(name);
        }
    }

    /// Returns the entry of a name.
    pub(crate) fn lookup(&self, name: &Name) -> Option<NameEntry> {
        self.table.lock().get(name).copied()
    }

    /// Calls `f` with all entries, and stops at the first error. `f` runs with the table locked.
    ///
    /// # Errors
    ///
    /// The error of `f`.
    pub(crate) fn for_each(&self, mut f: impl FnMut(Name, NameEntry) -> Result) -> Result {
        let table = self.table.lock();
        table.iter().try_for_each(|(name, entry)| f(*name, *entry))
    }

    /// Removes all entries for which `predicate` is false.
    pub(crate) fn retain(&self, predicate: impl Fn(&Name, &NameEntry) -> bool) {
        let mut table = self.table.lock();
        let mut cursor = table.cursor_front_mut();
        while let Some(at) = cursor {
            let (name, entry) = at.current();
            cursor = if predicate(name, entry) {
                at.move_next()
            } else {
                at.remove_current().0
            };
        }
    }
}
