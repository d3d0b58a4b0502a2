// SPDX-License-Identifier: GPL-2.0

//! Names that this node stores, with the home of each named region.
//!
//! # Operation
//!
//! Several regions can have one name, since the halves of a partition do not know the names of each other. The
//! name belongs to the oldest: a lookup returns it. The others stay in the table, in conflict, and the next one
//! has the name once the oldest is freed or renamed. The owners of a name thus agree, in whatever order they
//! receive the regions.
//!
//! # Locking
//!
//! `NameTable::table` (mutex) protects the table. Holders may sleep in allocations. [`NameTable::retain`]
//! calls its predicate with the mutex held, and so does [`NameTable::for_each`].

use kernel::{new_mutex, prelude::*, rbtree::RBTree, sync::Mutex};
use kite_core::{name::Name, wire::NamedRegion};

/// Regions in the order of their names, and of their age for each name.
type Names = RBTree<NamedRegion, ()>;

/// Table of owned names.
#[pin_data]
pub(crate) struct NameTable {
    #[pin]
    table: Mutex<Names>,
}

/// Returns the oldest region with a name.
fn oldest(table: &Names, name: &Name) -> Option<NamedRegion> {
    let cursor = table.cursor_lower_bound(&NamedRegion::first(*name))?;
    let (named, ()) = cursor.current();
    (named.name == *name).then_some(*named)
}

impl NameTable {
    /// Creates an empty table.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new(), "NameTable::table") })
    }

    /// Registers the name of a region. Idempotent.
    ///
    /// # Errors
    ///
    /// - `EEXIST`: the name belongs to another region.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn register(&self, named: NamedRegion) -> Result {
        let mut table = self.table.lock();
        match oldest(&table, &named.name) {
            Some(existing) if existing == named => Ok(()),
            Some(_) => Err(EEXIST),
            None => table
                .try_create_and_insert(named, (), GFP_KERNEL)
                .map(|_| ()),
        }
    }

    /// Adds a region to those with its name. Returns `false` if the name belongs to an older region.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn add(&self, named: NamedRegion) -> Result<bool> {
        let mut table = self.table.lock();
        table.try_create_and_insert(named, (), GFP_KERNEL)?;
        Ok(oldest(&table, &named.name) == Some(named))
    }

    /// Removes a region from those with its name.
    pub(crate) fn unregister(&self, name: &Name, home: u32, region: u64) {
        let mut table = self.table.lock();
        let mut cursor = table.cursor_lower_bound_mut(&NamedRegion::first(*name));
        while let Some(at) = cursor {
            let (named, ()) = at.current();
            if named.name != *name {
                return;
            }
            if (named.home, named.region) == (home, region) {
                at.remove_current();
                return;
            }
            cursor = at.move_next();
        }
    }

    /// Returns the region to which a name belongs.
    pub(crate) fn lookup(&self, name: &Name) -> Option<NamedRegion> {
        oldest(&self.table.lock(), name)
    }

    /// Calls `f` with all regions, and stops at the first error. `f` runs with the table locked.
    ///
    /// # Errors
    ///
    /// The error of `f`.
    pub(crate) fn for_each(&self, f: impl FnMut(&NamedRegion) -> Result) -> Result {
        self.table.lock().keys().try_for_each(f)
    }

    /// Removes all regions for which `predicate` is false.
    pub(crate) fn retain(&self, predicate: impl Fn(&NamedRegion) -> bool) {
        let mut table = self.table.lock();
        let mut cursor = table.cursor_front_mut();
        while let Some(at) = cursor {
            cursor = if predicate(at.current().0) {
                at.move_next()
            } else {
                at.remove_current().0
            };
        }
    }
}
