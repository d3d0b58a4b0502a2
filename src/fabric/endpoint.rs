// SPDX-License-Identifier: GPL-2.0

//! A queue pair with what it needs to be used: receive buffers, and a number to find it by.
//!
//! Receive completions carry the channel's number and the index of the buffer. A number is never used
//! twice, so a completion of a channel that is gone finds nothing and is dropped.

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

/// Bytes of a receive buffer.
pub(crate) const RECV_BUFFER_BYTES: usize = MAX_CONTROL_BYTES;

/// Control requests that may wait for their replies on one RC queue pair.
pub(crate) const MAX_CONTROL_REQUESTS: u32 = 4;

/// Receives posted on an RC queue pair: for the peer's requests, for replies to those of ours that went by
/// it, and for writes to rings, which take one each and none of its bytes.
pub(crate) const RC_RECV_DEPTH: u32 = 2 * MAX_CONTROL_REQUESTS + 24;

/// Send requests that fit an RC queue pair.
pub(crate) const RC_SEND_DEPTH: u32 = 256;

/// Receives posted on the UD queue pair. More datagrams at once are lost, and repeated by their senders.
const UD_RECV_DEPTH: u32 = 64;
const UD_SEND_DEPTH: u32 = 16;

/// Places for RC channels that share a receive completion queue with the UD channel: as many as never
/// overflow it.
pub(crate) struct RecvCqBudget {
    reserved: Atomic<u32>,
    capacity: u32,
}

impl RecvCqBudget {
    /// Places with a completion queue of `entries`.
    pub(crate) fn new(cqe_count: u32) -> Result<Arc<Self>> {
        let budget = Self {
            reserved: Atomic::new(0u32),
            capacity: cqe_count.saturating_sub(UD_RECV_DEPTH) / RC_RECV_DEPTH,
        };
        Ok(Arc::new(budget, GFP_KERNEL)?)
    }

    /// Takes one.
    ///
    /// # Errors
    ///
    /// `ENOSPC`.
    pub(crate) fn reserve(self: &Arc<Self>) -> Result<RecvCqReservation> {
        let reservation = RecvCqReservation(self.clone());
        if self.reserved.fetch_add(1u32, Relaxed) < self.capacity {
            Ok(reservation)
        } else {
            // It goes, and its count with it.
            Err(ENOSPC)
        }
    }
}

/// A place for one channel.
pub(crate) struct RecvCqReservation(Arc<RecvCqBudget>);

impl Drop for RecvCqReservation {
    fn drop(&mut self) {
        self.0.reserved.fetch_sub(1u32, Relaxed);
    }
}

/// What all channels of an RNIC are made from.
pub(crate) struct EndpointResources {
    pub(crate) pd: Arc<Pd>,
    pub(crate) send_engine: Arc<SendEngine>,
    pub(crate) recv_cq: Arc<Cq<ThreadWaker>>,
    pub(crate) port: PortNum,
}

/// A queue pair and its receive buffers.
pub(crate) struct Endpoint {
    id: u32,
    peer: NodeInstance,
    // Destroyed before the memory that it may write to is freed: fields drop in this order.
    qp: Qp<ThreadWaker, ThreadWaker>,
    recv_buffers: DmaPages,
    recv_count: u32,
    /// The slots' buffers may be named by requests of ours.
    _send_engine: Arc<SendEngine>,
    lkey: u32,
}

impl Endpoint {
    /// Makes an RC channel in INIT, its receives posted.
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

    /// Makes the UD channel, ready.
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
            _send_engine: send_engine,
            lkey,
        };
        for i in 0..recv_count {
            endpoint.post_recv(i)?;
        }
        Ok(endpoint)
    }

    /// Starts the UD channel anew, which failed. A buffer of which the poller has yet to hear may end up
    /// posted twice: then two datagrams can garble each other, which their senders repeat.
    pub(crate) fn restart_ud(&self, qkey: u32) -> Result {
        self.qp.modify_to_reset()?;
        self.qp.modify_ud_to_rts(qkey)?;
        (0..self.recv_count).try_for_each(|i| self.post_recv(i))
    }

    /// The number that receive completions carry.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// The node at the other end; number 0 for the UD channel, which has none.
    pub(crate) fn peer(&self) -> NodeInstance {
        self.peer
    }

    /// The queue pair.
    pub(crate) fn qp(&self) -> &Qp<ThreadWaker, ThreadWaker> {
        &self.qp
    }

    /// Copies what was received in buffer `index` to `out`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such buffer.
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

    /// Posts receive buffer `index` again.
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
        // SAFETY: The buffers are ours, and freed after the queue pair.
        unsafe { self.qp.post_recv(wr_id, &sge) }
    }
}
