// SPDX-License-Identifier: GPL-2.0

//! Endpoint: a QP with its receive buffers, and an ID by which receive completions find it.
//!
//! # Operation
//!
//! Receive completions carry the ID of the endpoint and the index of the buffer. IDs are never reused, so the
//! completion of a removed endpoint finds no endpoint and is dropped. The only shared state is the counter of
//! [`RecvCqBudget`], a relaxed atomic.

use super::{recv::wake::ThreadWaker, send::slots::SendEngine};
use crate::{
    sys::pages::{ContiguousPages, MemcgCharge},
    verbs::{
        cq::Cq,
        device::PortNum,
        dma::DmaPages,
        pd::Pd,
        qp::{Qp, QpCaps},
        work::{MAX_INLINE_BYTES, MAX_SGE},
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};
use kite_core::{view::NodeInstance, wire::MAX_CONTROL_BYTES, wrid::WrId};

/// Size of a receive buffer in bytes.
pub(crate) const RECV_BUFFER_BYTES: usize = MAX_CONTROL_BYTES;

/// Maximum number of control requests that wait for a reply on one RC QP.
pub(crate) const MAX_CONTROL_REQUESTS: u32 = 4;

/// Maximum number of these that take long: the peer clears memory before it replies. The others remain for
/// requests that do not.
pub(crate) const MAX_LONG_REQUESTS: u32 = 1;

/// Receives posted on an RC QP: for requests of the peer, for replies to local requests on this QP, and for
/// ring writes. A ring write is an RDMA write with immediate, which consumes a receive but none of its bytes.
pub(crate) const RC_RECV_DEPTH: u32 = 2 * MAX_CONTROL_REQUESTS + 24;

/// Send queue depth of an RC QP.
pub(crate) const RC_SEND_DEPTH: u32 = 256;

/// Receives posted on the UD QP. Excess datagrams are lost, and their senders retransmit.
const UD_RECV_DEPTH: u32 = 64;
const UD_SEND_DEPTH: u32 = 16;

/// Limits the number of RC endpoints that share the receive CQ with the UD endpoint, so that the CQ cannot
/// overflow.
pub(crate) struct RecvCqBudget {
    reserved: Atomic<u32>,
    capacity: u32,
}

impl RecvCqBudget {
    /// Creates the budget of a CQ with `cqe_count` entries.
    pub(crate) fn new(cqe_count: u32) -> Result<Arc<Self>> {
        let budget = Self {
            reserved: Atomic::new(0u32),
            capacity: cqe_count.saturating_sub(UD_RECV_DEPTH) / RC_RECV_DEPTH,
        };
        Ok(Arc::new(budget, GFP_KERNEL)?)
    }

    /// Reserves CQ entries for one RC endpoint.
    ///
    /// # Errors
    ///
    /// - `ENOSPC`: the budget is exhausted.
    pub(crate) fn reserve(self: &Arc<Self>) -> Result<RecvCqReservation> {
        let reservation = RecvCqReservation(self.clone());
        if self.reserved.fetch_add(1u32, Relaxed) < self.capacity {
            Ok(reservation)
        } else {
            // Dropping `reservation` reverts the count.
            Err(ENOSPC)
        }
    }
}

/// Reservation of receive CQ entries for one RC endpoint. Returned on drop.
pub(crate) struct RecvCqReservation(Arc<RecvCqBudget>);

impl Drop for RecvCqReservation {
    fn drop(&mut self) {
        self.0.reserved.fetch_sub(1u32, Relaxed);
    }
}

/// Objects of an RNIC from which endpoints are created.
pub(crate) struct EndpointResources {
    pub(crate) pd: Arc<Pd>,
    pub(crate) send_engine: Arc<SendEngine>,
    pub(crate) recv_cq: Arc<Cq<ThreadWaker>>,
    pub(crate) port: PortNum,
}

/// A QP and its receive buffers.
pub(crate) struct Endpoint {
    id: u32,
    peer: NodeInstance,
    // Fields drop in this order: the QP is destroyed before the buffers that it may write are freed.
    qp: Qp<ThreadWaker, ThreadWaker>,
    recv_buffers: DmaPages,
    recv_count: u32,
    /// Slots of requests on this QP, which may address their buffers.
    send_engine: Arc<SendEngine>,
    lkey: u32,
}

impl Endpoint {
    /// Creates an RC endpoint in INIT, with all receives posted.
    pub(crate) fn new_rc(
        resources: &EndpointResources,
        id: u32,
        peer: NodeInstance,
    ) -> Result<Self> {
        let sge = resources
            .pd
            .device()
            .limits()
            .max_send_sge
            .min(MAX_SGE as u32);
        let caps = QpCaps {
            max_send_wr: RC_SEND_DEPTH,
            max_recv_wr: RC_RECV_DEPTH,
            max_send_sge: sge,
            max_inline_data: MAX_INLINE_BYTES as u32,
        };
        let (send_cq, recv_cq) = (resources.send_engine.cq(), resources.recv_cq.clone());
        let qp = Qp::new_rc(resources.pd.clone(), send_cq, recv_cq, resources.port, caps)?;
        Self::new(resources, id, peer, qp, RC_RECV_DEPTH)
    }

    /// Creates the UD endpoint in RTS, with all receives posted.
    pub(crate) fn new_ud(resources: &EndpointResources, id: u32, qkey: u32) -> Result<Self> {
        let caps = QpCaps {
            max_send_wr: UD_SEND_DEPTH,
            max_recv_wr: UD_RECV_DEPTH,
            max_send_sge: 1,
            max_inline_data: 0,
        };
        let (send_cq, recv_cq) = (resources.send_engine.cq(), resources.recv_cq.clone());
        let qp = Qp::new_ud(
            resources.pd.clone(),
            send_cq,
            recv_cq,
            resources.port,
            caps,
            qkey,
        )?;
        Self::new(resources, id, NodeInstance::default(), qp, UD_RECV_DEPTH)
    }

    fn new(
        resources: &EndpointResources,
        id: u32,
        peer: NodeInstance,
        qp: Qp<ThreadWaker, ThreadWaker>,
        recv_count: u32,
    ) -> Result<Self> {
        let pages =
            ContiguousPages::new(recv_count as usize * RECV_BUFFER_BYTES, MemcgCharge::Kernel)?;
        let recv_buffers = DmaPages::new(resources.pd.device(), pages)?;
        let (send_engine, lkey) = (resources.send_engine.clone(), resources.pd.local_dma_lkey());
        let endpoint = Self {
            id,
            peer,
            qp,
            recv_buffers,
            recv_count,
            send_engine,
            lkey,
        };
        for i in 0..recv_count {
            endpoint.post_recv(i)?;
        }
        Ok(endpoint)
    }

    /// Restarts the failed UD endpoint. A buffer may end up posted twice if the poller has not processed
    /// its completion yet. Two datagrams can then corrupt each other, and their senders retransmit.
    pub(crate) fn restart_ud(&self, qkey: u32) -> Result {
        self.qp.modify_to_reset()?;
        self.qp.modify_ud_to_rts(qkey)?;
        (0..self.recv_count).try_for_each(|i| self.post_recv(i))
    }

    /// Returns the ID that receive completions carry.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Returns the remote node. The UD endpoint has none: its node number is 0.
    pub(crate) fn peer(&self) -> NodeInstance {
        self.peer
    }

    /// Returns the QP.
    pub(crate) fn qp(&self) -> &Qp<ThreadWaker, ThreadWaker> {
        &self.qp
    }

    /// Returns the slots for requests on the QP.
    pub(super) fn send_engine(&self) -> &Arc<SendEngine> {
        &self.send_engine
    }

    /// Returns the lkey by which requests on the QP address local memory.
    pub(super) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Copies received bytes from buffer `index` to `out`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: no buffer has this index.
    pub(crate) fn read_recv(&self, index: u32, out: &mut [u8]) -> Result {
        let offset = self.recv_offset(index)?;
        self.recv_buffers.sync_for_cpu(offset, out.len());
        self.recv_buffers.read(offset, out)
    }

    fn recv_offset(&self, index: u32) -> Result<usize> {
        let is_valid = index < self.recv_count;
        is_valid
            .then_some(index as usize * RECV_BUFFER_BYTES)
            .ok_or(EINVAL)
    }

    /// Posts receive buffer `index`.
    pub(crate) fn post_recv(&self, index: u32) -> Result {
        let offset = self.recv_offset(index)?;
        let sge = self
            .recv_buffers
            .sge(self.lkey, offset, RECV_BUFFER_BYTES)
            .ok_or(EINVAL)?;
        let wr_id = WrId {
            slot: index,
            generation: self.id,
        }
        .to_u64();
        // SAFETY: The buffer belongs to `self.recv_buffers`, which is freed after the QP is destroyed (see
        // the field order).
        unsafe { self.qp.post_recv(wr_id, &sge) }
    }
}
