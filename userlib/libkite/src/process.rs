// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What this process has open: one session, and regions by the handles that C knows.
//!
//! A handle is never used twice, so one that was closed is refused for ever.

use std::collections::HashMap;
use std::sync::{OnceLock, PoisonError, RwLock};

use kite_rs::{Cluster, Error, Region, Result};

static SESSION: OnceLock<Cluster> = OnceLock::new();
static REGIONS: Table<Region> = Table::new();

/// Joins on this RNIC; returns the number of this node.
pub(crate) fn join(rnic: &str) -> Result<i32> {
    let cluster = Cluster::open_rnic(rnic)?;
    let view = cluster.nodes()?;
    if view.epoch == 0 {
        return Err(Error::NotJoined);
    }
    SESSION.set(cluster).map_err(|_| Error::Busy)?;
    i32::try_from(view.own).map_err(|_| Error::Io)
}

/// The session.
pub(crate) fn session() -> Result<&'static Cluster> {
    SESSION.get().ok_or(Error::NotBound)
}

/// Keeps a region; returns its handle.
pub(crate) fn keep(region: Region) -> i64 {
    REGIONS.insert(region)
}

/// The region of a handle.
pub(crate) fn region(lh: i64) -> Result<Region> {
    REGIONS.get(lh).ok_or(Error::BadHandle)
}

/// The region of a handle, which is closed hereby.
pub(crate) fn take(lh: i64) -> Result<Region> {
    REGIONS.remove(lh).ok_or(Error::BadHandle)
}

struct Table<T>(RwLock<Option<Entries<T>>>);

struct Entries<T> {
    next: i64,
    entries: HashMap<i64, T>,
}

impl<T: Clone> Table<T> {
    const fn new() -> Self {
        Self(RwLock::new(None))
    }

    fn insert(&self, value: T) -> i64 {
        // No code panics under the lock, so what it guards is whole in any case.
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let table = table.get_or_insert_with(|| Entries {
            next: 1,
            entries: HashMap::new(),
        });
        let key = table.next;
        table.next += 1;
        table.entries.insert(key, value);
        key
    }

    fn get(&self, key: i64) -> Option<T> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.as_ref()?.entries.get(&key).cloned()
    }

    fn remove(&self, key: i64) -> Option<T> {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        table.as_mut()?.entries.remove(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_used_once() {
        let table = Table::new();
        let first = table.insert('a');
        assert!(first > 0);
        assert_eq!(table.get(first), Some('a'));
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert_ne!(first, second);
        assert_eq!((table.get(first), table.remove(first)), (None, None));
        assert_eq!(table.get(second), Some('b'));
    }
}
