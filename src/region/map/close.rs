// SPDX-License-Identifier: GPL-2.0

//! Closing of handles, and freeing of their regions.
//!
//! # Operation
//!
//! Closing a handle ends the mapping after accesses in progress. The home removes the mapper once the mapping
//! is drained, in the background if need be. Closing the only mapping of an anonymous region frees the
//! region.
//!
//! # Recovery
//!
//! A closed mapping stays in the table until the mapping is drained ([`super::detached`]).

use super::{detached::DetachedMapping, Mapping};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::CONTROL_TIMEOUT_MS},
    region::{home::reclaim::Teardown, MemoryService},
    sys::deadline::Deadline,
    verbs::log::rnic_debug,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::wire::ControlRequest;

impl MemoryService {
    /// Closes a mapping. Waits for accesses in progress. The home is notified in the background.
    pub(crate) fn unmap(self: &Arc<Self>, mapping: &Arc<Mapping>) {
        unmap_deferred(DetachedMapping::new(self, mapping));
    }

    /// Closes a mapping as [`Self::unmap`] does, but notifies the home synchronously if the mapping is
    /// drained and the home replies before the deadline.
    pub(crate) fn unmap_within(self: &Arc<Self>, mapping: &Arc<Mapping>, deadline: Deadline) {
        let detached = DetachedMapping::new(self, mapping);
        let request = ControlRequest::UnmapRegion {
            region: mapping.region,
            mapping: mapping.id,
        };
        let send = || self.request(mapping.home, &request, deadline);
        let unmapped =
            detached.is_drained() && send().is_ok_and(|reply| reply.expect_done().is_ok());
        if !unmapped {
            unmap_deferred(detached);
        }
    }

    /// Closes the only mapping of an anonymous region of this node. The region is freed in the background.
    pub(crate) fn release_anonymous(self: &Arc<Self>, mapping: &Arc<Mapping>) {
        let detached = DetachedMapping::new(self, mapping);
        let freed = self.region(mapping.region).and_then(|region| {
            let is_first = region.start_free(mapping.home, mapping.id)?;
            if is_first {
                Teardown::start_deferred(self, &region, WorkPriority::Background);
            }
            Ok(())
        });
        if let Err(error) = freed {
            rnic_debug!(
                self.fabric().device(),
                "anonymous region was freed before: {error:?}\n"
            );
        }
        // Until the mapping is drained, freeing the region queries it.
        detached.defer_until_drained(WorkPriority::Background, |_, _, detached| drop(detached));
    }

    /// Frees the region of a mapping and closes the mapping.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the mapping lacks mastership.
    /// - `EBADF`: the handle was closed.
    /// - `EHOSTDOWN`: the home died or is unreachable.
    /// - `ESTALE`: the region was freed.
    /// - `ETIMEDOUT`: the home did not finish in time.
    pub(crate) fn free(self: &Arc<Self>, mapping: &Arc<Mapping>) -> Result {
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        mapping.wait_home(deadline)?;
        let request = ControlRequest::FreeRegion {
            region: mapping.region,
            mapping: mapping.id,
        };
        mapping.suppress_event();
        let freed = self.request_with_retry(mapping.home, &request, deadline);
        freed
            .and_then(|reply| reply.expect_done())
            .map_err(|error| {
                mapping.restore_event();
                // The mapping was removed at the home: another thread has closed the handle.
                if error == ENOENT {
                    EBADF
                } else {
                    error
                }
            })?;
        drop(DetachedMapping::new(self, mapping));
        Ok(())
    }
}

/// Removes the mapper at the home in the background, once the mapping is drained.
fn unmap_deferred(detached: DetachedMapping) {
    let request = ControlRequest::UnmapRegion {
        region: detached.region,
        mapping: detached.id,
    };
    let priority = if detached.had_waiters() {
        WorkPriority::Lock
    } else {
        WorkPriority::Background
    };
    detached.defer_until_drained(priority, move |service, instance, _detached| {
        service.request_while_reachable(instance, &request);
    });
}
