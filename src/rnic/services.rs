// SPDX-License-Identifier: GPL-2.0

//! Services of one RNIC, and [`RecvDispatcher`], which passes received messages to them.
//!
//! # Operation
//!
//! A service references only the services on which it is built. This module handles the events that concern
//! all services: view changes, leaving the cluster, and removal of the RNIC.

use crate::{
    errno,
    fabric::{peer::Peer, recv::handler::RecvHandler, Fabric},
    region::MemoryService,
    rpc::Rpc,
    sys::revocable::RevocableGuard,
    vqp::{table::VqpTable, Vqp},
};
use core::ops::Deref;
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    view::NodeInstance,
    wire::{ring::Immediate, ControlHeader},
};

/// Services of an RNIC.
pub(crate) struct RnicServices {
    rpc: Arc<Rpc>,
    vqp_table: Arc<VqpTable>,
}

impl RnicServices {
    /// Creates RPC and VQPs on top of a memory service.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn new(memory_service: Arc<MemoryService>) -> Result<Arc<Self>> {
        let services = Self {
            vqp_table: VqpTable::new(memory_service.clone())?,
            rpc: Rpc::new(memory_service)?,
        };
        Ok(Arc::new(services, GFP_KERNEL)?)
    }

    fn memory_service(&self) -> &Arc<MemoryService> {
        &self.rpc.memory_service
    }

    /// Returns the fabric of the services.
    pub(crate) fn fabric(&self) -> &Arc<Fabric> {
        self.memory_service().fabric()
    }

    /// Handles a view change: shuts down VQPs and RPC channels to removed and fenced nodes, and delivers
    /// packets deferred for this view.
    pub(crate) fn on_view_change(&self) {
        let cluster = &self.memory_service().cluster;
        let is_connected = |vqp: &Vqp| cluster.is_connected(vqp.peer, vqp.admission);
        self.vqp_table
            .shutdown_unless(is_connected, errno::hostdown());
        self.vqp_table.deliver_deferred();
        self.rpc.disconnect_fenced_members();
    }

    /// Leaves the cluster and shuts down all VQPs.
    pub(crate) fn leave(&self) {
        self.rpc.leave();
        // The node is in no view any longer, so no further VQP is created.
        self.vqp_table
            .shutdown_unless(|_| false, errno::hostunreach());
    }

    /// Waits for deferred work of VQPs and for all requests of peers received so far.
    pub(crate) fn flush(&self) {
        self.vqp_table.flush();
        self.memory_service().flush_requests();
    }

    /// Drops the services. No guard of the services may exist any longer. Returns `true` if no service was
    /// still referenced.
    pub(crate) fn close(self: Arc<Self>) -> bool {
        let (rpc, vqp_table) = (self.rpc.clone(), self.vqp_table.clone());
        let memory_service = rpc.memory_service.clone();
        // The order is from top to bottom: `self` references RPC and the VQPs, and both reference the memory
        // service. A service that is tested before its users are dropped counts as still referenced.
        // The elements of an array are evaluated in order.
        let unique = [
            Arc::into_unique_or_drop(self).map(drop),
            Arc::into_unique_or_drop(vqp_table).map(drop),
            Arc::into_unique_or_drop(rpc).map(drop),
            Arc::into_unique_or_drop(memory_service).map(drop),
        ];
        unique.iter().all(Option::is_some)
    }
}

/// Guard of the RPC service for one request.
pub(crate) struct RpcGuard<'a>(pub(crate) RevocableGuard<'a, Arc<RnicServices>>);

impl Deref for RpcGuard<'_> {
    type Target = Arc<Rpc>;

    fn deref(&self) -> &Arc<Rpc> {
        &self.0.rpc
    }
}

/// Guard of the memory service for one request.
pub(crate) struct MemoryServiceGuard<'a>(pub(crate) RevocableGuard<'a, Arc<RnicServices>>);

impl Deref for MemoryServiceGuard<'_> {
    type Target = Arc<MemoryService>;

    fn deref(&self) -> &Arc<MemoryService> {
        self.0.memory_service()
    }
}

/// Guard of the VQP table for one request.
pub(crate) struct VqpTableGuard<'a>(pub(crate) RevocableGuard<'a, Arc<RnicServices>>);

impl Deref for VqpTableGuard<'_> {
    type Target = Arc<VqpTable>;

    fn deref(&self) -> &Arc<VqpTable> {
        &self.0.vqp_table
    }
}

/// Receive handler: dispatches messages from the poller to the services.
pub(crate) struct RecvDispatcher(pub(crate) Arc<RnicServices>);

impl RecvHandler for RecvDispatcher {
    fn on_request(&self, from: Arc<Peer>, header: ControlHeader, bytes: &[u8]) {
        self.0.rpc.on_request(from, header, bytes);
    }

    fn on_view(&self, from: &Peer, epoch: u64) {
        self.0.memory_service().on_view_announced(from, epoch);
    }

    fn on_immediate(&self, from: NodeInstance, immediate: u32) {
        let immediate = Immediate::from_u32(immediate);
        self.0.rpc.on_immediate(from, immediate);
    }

    fn on_packet(&self, from: Option<NodeInstance>, bytes: KVec<u8>) {
        self.0.vqp_table.deliver(from, bytes);
    }
}
