// SPDX-License-Identifier: GPL-2.0

//! RDMA WRITE with immediate: a write to memory of a peer that also notifies the kernel of the peer (LITE,
//! section 5.1).
//!
//! # Operation
//!
//! All writes through one [`OrderedConn`] use the same connection. Writes that follow each other's completion
//! therefore arrive in order.
//!
//! # Recovery
//!
//! A write that failed with its QP is repeated on the same connection. There, nothing of the first attempt
//! can arrive later. The receiver may however receive the same write twice, and must detect duplicates.

use super::{
    inflight::{InflightGuard, InflightOp, Segment},
    slots::{SlotClass, SlotGuard},
};
use crate::{
    errno::{TryError, TryResult},
    fabric::{
        conn::{credit::ConnCredit, Conn},
        qos::LatencyProbe,
        Fabric,
    },
    sys::deadline::Deadline,
    trace,
    verbs::{cq::WcStatus, work::RdmaOpcode},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// Maximum repetitions of a write that the peer or the local RNIC rejected. See [`super::transfer`].
const MAX_REJECTIONS: u32 = 3;

/// Destination and immediate of a write.
pub(crate) struct ImmWrite {
    target: NodeInstance,
    /// Address at the target node.
    addr: u64,
    immediate: u32,
}

/// Data of a write with immediate.
#[derive(Clone, Copy)]
pub(crate) struct ImmPayload<'a> {
    pub(crate) bytes: &'a [u8],
    /// `true` if a high-priority tenant waits for the write, which is then measured for QoS.
    pub(crate) high_priority: bool,
}

impl<'a> ImmPayload<'a> {
    /// Creates a payload for a message between kernels, which is not measured.
    pub(crate) const fn internal(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            high_priority: false,
        }
    }

    /// Starts the latency measurement of a high-priority write.
    fn start_probe(&self, fabric: &Fabric) -> Option<LatencyProbe> {
        let start = || fabric.qos.start_probe(self.bytes.len(), false);
        self.high_priority.then(start).flatten()
    }
}

impl ImmWrite {
    /// Creates a write to `addr` at `target`. The kernel of the target receives `immediate`.
    pub(crate) fn new(target: NodeInstance, addr: u64, immediate: u32) -> Self {
        Self {
            target,
            addr,
            immediate,
        }
    }
}

/// Connection to one node that delivers writes with immediate in order.
pub(crate) struct OrderedConn(Arc<Conn>);

impl Fabric {
    /// Selects a connection to a node for ordered writes.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    pub(crate) fn ordered_conn(&self, target: NodeInstance) -> Result<OrderedConn> {
        self.peer_by_instance(target)?
            .select_conn(self.qos.conn_subset(false))
            .map(OrderedConn)
    }

    /// Writes `payload`, and waits for the completion. Repeats the write if the QP fails.
    ///
    /// After an error the data may have been written. The caller may then repeat the same write on the same
    /// connection, also with other data. `acquire_guard` is called before each attempt.
    ///
    /// # Errors
    ///
    /// - The error of `acquire_guard`.
    /// - `EHOSTDOWN`: the node is not in the view, or left the view.
    /// - `ETIMEDOUT`: the deadline passed.
    /// - `EINTR`: a signal arrived that ends the wait according to the deadline.
    /// - `EIO`: the peer or the RNIC rejected the write, or QP recovery failed.
    /// - `ERANGE`: the payload is longer than the buffer of a slot.
    pub(crate) fn write_imm<G: InflightGuard>(
        &self,
        OrderedConn(conn): &OrderedConn,
        write: &ImmWrite,
        payload: ImmPayload<'_>,
        acquire_guard: impl Fn() -> Result<G>,
        deadline: Deadline,
    ) -> Result {
        let bytes = payload.bytes;
        let mut rejections = 0;
        while rejections <= MAX_REJECTIONS {
            let probe = payload.start_probe(self);
            let credit = conn.acquire_segment(1, self, Some(deadline))?;
            let slot = self
                .send_engine()
                .acquire_slot(SlotClass::Data, Some(deadline))?;
            slot.buffer().write(0, bytes)?;
            let guard = acquire_guard()?;
            self.post_write_imm(write, bytes.len(), &credit, &slot)?;
            let status = slot.wait(|recovery| credit.recover(recovery));
            if status == WcStatus::Success {
                if let Some(probe) = probe {
                    probe.finish();
                }
                return Ok(());
            }
            credit.report_failure(status);
            guard.add_stale_qp(credit.stale_qp(write.target));
            self.stats.retries.add(1);
            trace::retry(write.target.node, bytes.len() as u64, status.code());
            match status {
                WcStatus::TimedOut => return Err(EIO),
                WcStatus::RemoteError | WcStatus::LocalError => rejections += 1,
                _ => {}
            }
        }
        // If access is no longer permitted, return that error.
        acquire_guard().and(Err(EIO))
    }

    /// Posts `payload` without waiting. Returns `None` if no credit or slot is available.
    ///
    /// The data is written once the returned operation succeeds. After a failure the caller may call
    /// [`Self::write_imm`].
    ///
    /// # Errors
    ///
    /// - The error of `acquire_guard`.
    /// - `EHOSTDOWN`: the node left the view.
    /// - `ERANGE`: the payload is longer than the buffer of a slot.
    pub(crate) fn try_post_write_imm<G: InflightGuard>(
        &self,
        OrderedConn(conn): &OrderedConn,
        write: &ImmWrite,
        payload: ImmPayload<'_>,
        acquire_guard: impl FnOnce() -> Result<G>,
    ) -> Result<Option<InflightOp<G>>> {
        let bytes = payload.bytes;
        let acquire = || -> TryResult<(ConnCredit, SlotGuard)> {
            let credit = conn.acquire_segment(1, self, None)?;
            Ok((
                credit,
                self.send_engine().acquire_slot(SlotClass::Data, None)?,
            ))
        };
        let (credit, slot) = match acquire() {
            Err(TryError::WouldBlock) => return Ok(None),
            acquired => acquired?,
        };
        slot.buffer().write(0, bytes)?;
        let guard = acquire_guard()?;
        let probe = payload.start_probe(self);
        self.post_write_imm(write, bytes.len(), &credit, &slot)?;
        let segment = Segment {
            instance: write.target,
            addr: write.addr,
            len: bytes.len(),
            buffer_offset: 0,
        };
        Ok(Some(InflightOp {
            slot,
            credit,
            guard,
            segment,
            probe,
        }))
    }

    /// Posts the first `len` bytes of the buffer of `slot`. If the RNIC rejects the work request, `slot`
    /// fails.
    fn post_write_imm(
        &self,
        write: &ImmWrite,
        len: usize,
        credit: &ConnCredit,
        slot: &SlotGuard,
    ) -> Result {
        slot.buffer().sync_for_device(len);
        let sge = slot.buffer().sge(self.local_key(), 0, len).ok_or(ERANGE)?;
        let opcode = RdmaOpcode::WriteWithImm {
            imm_data: write.immediate,
        };
        // SAFETY: The work request names the buffer of `slot`.
        let posted = unsafe { credit.post(slot, opcode, &[sge], write.addr) };
        if posted.is_err() {
            slot.mark_failed();
        }
        Ok(())
    }
}
