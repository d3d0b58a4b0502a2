// SPDX-License-Identifier: GPL-2.0

//! Reopening of mappings after their home was fenced.
//!
//! # Operation
//!
//! The home removes all mappers of nodes that it fences, and of all nodes if it was fenced itself. Once the
//! view has the home as reachable member again, this node maps each region again, under the same number, on
//! the foreground workqueue of the home.
//!
//! # Recovery
//!
//! - The region was freed: the mapping ends with `ESTALE`. The user has lost a right: with `EACCES`.
//! - The home is fenced again: the next view with the home as reachable member starts another attempt.
//! - The handle is closed meanwhile: the mapper is removed again, since the request to remove the mapper may
//!   have preceded the one that added it.

use super::{chunk_map::HomeLink, Mapping};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        retry::{CONTROL_TIMEOUT_MS, RETRY_MS},
    },
    region::MemoryService,
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::NodeInstance,
    wire::{ControlRequest, InvalidateReason},
};

/// Opens the suspended mappings of regions of a reachable home again, in the background.
pub(in crate::region) fn reopen_mappings(service: &Arc<MemoryService>, home: NodeInstance) {
    let Ok(admission) = service.cluster.admission_of(home) else {
        return;
    };
    let is_suspended = |mapping: &Arc<Mapping>| {
        mapping.home_instance == home && mapping.chunk_map.home_link() != HomeLink::Connected
    };
    for mapping in service.mappings().filter(is_suspended) {
        mapping.chunk_map.suspend(HomeLink::Reopening);
        let reopening = Reopening { mapping, admission };
        service.defer(home.node, WorkPriority::Foreground, move |service, _| {
            reopening.run(service)
        });
    }
}

/// Mapping that is being opened again.
struct Reopening {
    mapping: Arc<Mapping>,
    /// Admission of the home. The attempt ends if the home is fenced again.
    admission: u64,
}

impl Reopening {
    /// Repeats the attempt until it succeeds, or the mapping ends, or the home is fenced again. Does nothing
    /// if the attempt of an earlier view change has succeeded.
    fn run(&self, service: &Arc<MemoryService>) {
        let mapping = &*self.mapping;
        let is_needed = || {
            let home = mapping.home_instance;
            let is_connected = service.cluster.is_connected(home, self.admission);
            is_connected && mapping.chunk_map.home_link() != HomeLink::Connected
        };
        while is_needed() && mapping.access().is_ok() {
            let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
            match mapping.open_at_home(service, deadline) {
                Ok(()) => break,
                Err(error) if error == ENOENT => mapping.invalidate(InvalidateReason::Freed),
                Err(error) if error == EACCES => mapping.invalidate(InvalidateReason::Revoked),
                Err(_) => fsleep(Delta::from_millis(RETRY_MS)),
            }
        }
        if mapping.access().is_err() {
            self.remove_mapper(service);
        }
    }

    /// Removes the mapper at the home, which an attempt may have added after the mapping ended.
    fn remove_mapper(&self, service: &Arc<MemoryService>) {
        let request = ControlRequest::UnmapRegion {
            region: self.mapping.region,
            mapping: self.mapping.id,
        };
        service.request_while_reachable(self.mapping.home_instance, &request);
    }
}
