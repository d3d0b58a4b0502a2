// SPDX-License-Identifier: GPL-2.0

//! Table of the endpoints of a fabric, by the IDs that receive completions carry.
//!
//! # Operation
//!
//! The fabric inserts the endpoint of the setup QP. The connector creates the endpoints of connections. Each
//! of them holds a reservation of receive CQ entries ([`EndpointTable::reserve`]).
//!
//! # Locking
//!
//! `EndpointTable::endpoints` is the spin lock of the XArray. [`Endpoint`]s are dropped after the lock is
//! released, because destroying a QP sleeps.

use super::endpoint::{Endpoint, EndpointResources, RecvCqBudget, RecvCqReservation};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
    xarray::{AllocKind, XArray},
};
use kite_core::view::NodeInstance;

/// ID of the control endpoint. IDs of RC endpoints are higher.
pub(super) const SETUP_ENDPOINT_ID: u32 = 0;

/// Endpoints by ID.
#[pin_data]
pub(super) struct EndpointTable {
    #[pin]
    endpoints: XArray<Arc<Endpoint>>,
    /// ID of the next RC endpoint.
    next_id: Atomic<u32>,
    recv_cq_budget: Arc<RecvCqBudget>,
}

impl EndpointTable {
    /// Creates an empty table, for a receive CQ with `recv_cqe_count` entries.
    pub(super) fn new(recv_cqe_count: u32) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            endpoints <- XArray::new(AllocKind::Alloc),
            next_id: Atomic::new(SETUP_ENDPOINT_ID + 1),
            recv_cq_budget: RecvCqBudget::new(recv_cqe_count)?,
        })
    }

    /// Inserts an endpoint under its ID.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn insert(&self, endpoint: Arc<Endpoint>) -> Result {
        let index = endpoint.id() as usize;
        let stored = self.endpoints.lock().store(index, endpoint, GFP_ATOMIC);
        stored.map(drop).map_err(|error| error.error)
    }

    /// Reserves receive CQ entries for one RC endpoint.
    ///
    /// # Errors
    ///
    /// - `ENOSPC`: the receive CQ has no room.
    pub(super) fn reserve(&self) -> Result<RecvCqReservation> {
        self.recv_cq_budget.reserve()
    }

    /// Creates an RC endpoint to `peer` and inserts it. The connection must hold a [`RecvCqReservation`].
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - The error of the RNIC if the QP cannot be created.
    pub(super) fn create(
        &self,
        resources: &EndpointResources,
        peer: NodeInstance,
    ) -> Result<Arc<Endpoint>> {
        let id = self.next_id.fetch_add(1u32, Relaxed);
        let endpoint = Arc::new(Endpoint::new_rc(resources, id, peer)?, GFP_KERNEL)?;
        self.insert(endpoint.clone())?;
        Ok(endpoint)
    }

    /// Returns the endpoint with this ID.
    pub(super) fn get(&self, id: u32) -> Option<Arc<Endpoint>> {
        self.endpoints.lock().get(id as usize).map(Into::into)
    }

    /// Removes the endpoint with this ID. Dropping its last reference sleeps.
    pub(super) fn remove(&self, id: u32) {
        // The lock is released before the endpoint is dropped.
        let removed = self.endpoints.lock().remove(id as usize);
        drop(removed);
    }
}
