// SPDX-License-Identifier: GPL-2.0

//! RDMA WRITE with immediate: a write to memory of a peer that also notifies the kernel of the peer (LITE,
//! section 5.1).
//!
//! # Operation
//!
//! All writes through one [`OrderedConn`] use the same connection. Writes that follow each other's completion
//! therefore arrive in order. [`OrderedConn::prepare`] creates an [`ImmWriteOp`], which either waits for the
//! completion or posts without waiting.
//!
//! # Recovery
//!
//! A write that failed with its QP is retried on the same connection. There, nothing of the first attempt
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

impl OrderedConn {
    /// Selects a connection to a node for ordered writes.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    pub(crate) fn select(fabric: &Fabric, target: NodeInstance) -> Result<Self> {
        fabric
            .peer_by_instance(target)?
            .select_conn(fabric.qos.conn_subset(false))
            .map(Self)
    }

    /// Prepares a write of `payload` over the connection.
    pub(crate) fn prepare<'a>(
        &'a self,
        fabric: &'a Fabric,
        write: &'a ImmWrite,
        payload: ImmPayload<'a>,
    ) -> ImmWriteOp<'a> {
        ImmWriteOp {
            fabric,
            conn: &self.0,
            write,
            payload,
        }
    }
}

/// One write with immediate over a connection.
pub(crate) struct ImmWriteOp<'a> {
    fabric: &'a Fabric,
    conn: &'a Arc<Conn>,
    write: &'a ImmWrite,
    payload: ImmPayload<'a>,
}

impl ImmWriteOp<'_> {
    /// Starts the latency measurement of a high-priority write.
    fn start_probe(&self) -> Option<LatencyProbe> {
        let start = || self.fabric.qos.start_probe(self.payload.bytes.len(), false);
        self.payload.high_priority.then(start).flatten()
    }

    /// Writes the payload, and waits for the completion. Retries the write if the QP fails.
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
    pub(crate) fn execute<G: InflightGuard>(
        &self,
        acquire_guard: impl Fn() -> TryResult<G>,
        deadline: Deadline,
    ) -> Result {
        let bytes = self.payload.bytes;
        let mut rejections = 0;
        while rejections <= MAX_REJECTIONS {
            let probe = self.start_probe();
            let credit = self.conn.acquire_segment(1, self.fabric, Some(deadline))?;
            let slot = self
                .fabric
                .send_engine()
                .acquire_slot(SlotClass::Data, Some(deadline))?;
            slot.buffer().write(0, bytes)?;
            let guard = acquire_guard()?;
            self.post(&credit, &slot)?;
            let status = slot.wait(|recovery| credit.recover(recovery));
            if status == WcStatus::Success {
                if let Some(probe) = probe {
                    probe.finish();
                }
                return Ok(());
            }
            credit.report_failure(status);
            guard.add_stale_qp(credit.stale_qp());
            self.fabric.stats.retries.add(1);
            trace::retry(self.write.target.node, bytes.len() as u64, status.code());
            match status {
                WcStatus::TimedOut => return Err(EIO),
                WcStatus::RemoteError | WcStatus::LocalError => rejections += 1,
                _ => {}
            }
        }
        // If access is no longer permitted, return that error.
        drop(acquire_guard()?);
        Err(EIO)
    }

    /// Posts the payload without waiting. Returns `None` if no credit or slot is available.
    ///
    /// The data is written once the returned operation succeeds. After a failure the caller may call
    /// [`Self::execute`].
    ///
    /// # Errors
    ///
    /// - The error of `acquire_guard`.
    /// - `EHOSTDOWN`: the node left the view.
    /// - `ERANGE`: the payload is longer than the buffer of a slot.
    pub(crate) fn try_post<G: InflightGuard>(
        &self,
        acquire_guard: impl FnOnce() -> TryResult<G>,
    ) -> Result<Option<InflightOp<G>>> {
        let bytes = self.payload.bytes;
        let (credit, slot) = match self.try_acquire() {
            Err(TryError::WouldBlock) => return Ok(None),
            acquired => acquired?,
        };
        slot.buffer().write(0, bytes)?;
        let guard = acquire_guard()?;
        let probe = self.start_probe();
        self.post(&credit, &slot)?;
        let segment = Segment {
            instance: self.write.target,
            addr: self.write.addr,
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

    /// Acquires a credit and a slot without waiting.
    fn try_acquire(&self) -> TryResult<(ConnCredit, SlotGuard)> {
        let credit = self.conn.acquire_segment(1, self.fabric, None)?;
        let slot = self
            .fabric
            .send_engine()
            .acquire_slot(SlotClass::Data, None)?;
        Ok((credit, slot))
    }

    /// Posts the payload from the buffer of `slot`. If the RNIC rejects the work request, `slot` fails.
    fn post(&self, credit: &ConnCredit, slot: &SlotGuard) -> Result {
        let len = self.payload.bytes.len();
        slot.buffer().sync_for_device(len);
        let sge = slot.buffer().sge(self.fabric.local_key(), 0, len);
        let sge = sge.ok_or(ERANGE)?;
        let opcode = RdmaOpcode::WriteWithImm {
            imm_data: self.write.immediate,
        };
        // SAFETY: The work request names the buffer of `slot`.
        let posted = unsafe { credit.post(slot, opcode, &[sge], self.write.addr) };
        if posted.is_err() {
            slot.mark_failed();
        }
        Ok(())
    }
}
