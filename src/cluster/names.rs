// SPDX-License-Identifier: GPL-2.0

//! The names that this node keeps: which node is the home of each name's region.

use kernel::{new_mutex, prelude::*, rbtree::RBTree, sync::Mutex};
use kite_core::name::Name;

/// Where a name leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NameEntry {
    /// The node that owns the region.
    pub(crate) home: u32,
    /// The region's number there.
    pub(crate) region: u64,
}

/// The table.
#[pin_data]
pub(crate) struct NameTable {
    #[pin]
    table: Mutex<RBTree<Name, NameEntry>>,
}

impl NameTable {
    /// Makes an empty table.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new()) })
    }

    /// Enters a name. Entering the same twice is fine.
    ///
    /// # Errors
    ///
    /// - `EEXIST` if the name leads elsewhere.
    /// - `ENOMEM`.
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

    /// Removes a name, if it leads there.
    pub(crate) fn unregister(&self, name: &Name, entry: NameEntry) {
        let mut table = self.table.lock();
        if table.get(name) == Some(&entry) {
            table.remove(name);
        }
    }

    /// Looks a name up.
    pub(crate) fn lookup(&self, name: &Name) -> Option<NameEntry> {
        self.table.lock().get(name).copied()
    }

    /// Keeps only the entries that `keep` says.
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
