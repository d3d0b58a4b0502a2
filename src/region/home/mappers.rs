// SPDX-License-Identifier: GPL-2.0

//! Mappers of a region at its home: the handles to the region on all nodes, with their rights.
//!
//! # Recovery
//!
//! Mappers of a removed or fenced node are removed at the view change. Their waiters stay until the node can
//! no longer act as owner of a lock ([`super::waiters`]). A fenced node that is admitted again maps the
//! regions again ([`crate::region::map::reopen`]).
//!
//! # Locking
//!
//! All methods take the region's `state` mutex for one step. Iterators take the mutex per item.

use super::{lock_table::WaiterId, MapperInfo, Region};
use crate::errno::TryError;
use kernel::prelude::*;
use kite_core::rights::Rights;

/// Request to add a mapper: a handle to the region on some node.
#[derive(Clone, Copy)]
pub(crate) struct MapRequest {
    pub(crate) node: u32,
    /// Number of the mapping at that node.
    pub(crate) mapping: u64,
    pub(crate) rights: Rights,
    /// User for which the region is mapped.
    pub(crate) uid: u32,
}

impl Region {
    /// Adds a mapper. Adding the same mapper again succeeds.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the user does not have these rights, or has lost one.
    /// - `ENOENT`: the region is being freed.
    /// - `EINPROGRESS`: the region is moving.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn map(&self, request: MapRequest) -> Result {
        let MapRequest { rights, uid, .. } = request;
        let key = (request.node, request.mapping);
        let mut state = self.state.lock();
        if rights.is_empty() || !state.rights_of(uid).contains(rights) {
            return Err(EACCES);
        }
        if state.freeing {
            return Err(ENOENT);
        }
        if state.mappers.get(&key).is_some() {
            return state.check_rights(request.node, request.mapping, rights);
        }
        if state.change_state.frozen {
            return Err(TryError::InTransition.into());
        }
        let entry = MapperInfo {
            rights,
            uid,
            revoked: false,
        };
        state
            .mappers
            .try_create_and_insert(key, entry, GFP_KERNEL)?;
        state.mapping_count += 1;
        Ok(())
    }

    /// Checks that a mapper has these rights.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the mapper lacks a right.
    /// - `ENOENT`: the mapper does not exist, or the region is being freed.
    pub(crate) fn check_rights(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check_rights(node, mapping, rights)
    }

    /// Removes a mapper, if it exists, and its waiters. May grant locks to other waiters.
    pub(crate) fn unmap(&self, node: u32, mapping: u64) {
        let mut state = self.state.lock();
        state.remove_mapper((node, mapping));
        if !state.freeing {
            let is_gone = |waiter_id: WaiterId, waiter_mapping, _| {
                waiter_id.instance.node == node && waiter_mapping == mapping
            };
            state.lock_table.remove_gone(is_gone);
        }
    }

    /// Removes all mappers of a removed or fenced node. Their waiters stay until
    /// [`Self::remove_fenced_waiters`].
    pub(crate) fn remove_node_mappers(&self, node: u32) {
        let mut state = self.state.lock();
        while let Some(key) = state
            .mappers
            .cursor_lower_bound(&(node, 0))
            .map(|cursor| *cursor.current().0)
            .filter(|key| key.0 == node)
        {
            state.remove_mapper(key);
        }
    }

    /// Returns the number of mappers.
    pub(crate) fn mapping_count(&self) -> u32 {
        self.state.lock().mapping_count
    }

    /// Returns the nodes with a mapping, in ascending order. Nodes added during the iteration may be missed.
    pub(crate) fn mapper_nodes(&self) -> impl Iterator<Item = u32> + '_ {
        let mut last = 0;
        core::iter::from_fn(move || {
            last = self.mapper_at_or_after(last + 1, 0)?.0;
            Some(last)
        })
    }

    /// Returns the first mapping of a node with a number of at least `mapping`.
    pub(crate) fn next_mapping_of(&self, node: u32, mapping: u64) -> Option<u64> {
        let found = self.mapper_at_or_after(node, mapping);
        found.filter(|mapper| mapper.0 == node).map(|found| found.1)
    }

    /// Returns the first mapper at or after this key.
    fn mapper_at_or_after(&self, node: u32, mapping: u64) -> Option<(u32, u64)> {
        let state = self.state.lock();
        let cursor = state.mappers.cursor_lower_bound(&(node, mapping))?;
        Some(*cursor.current().0)
    }
}
