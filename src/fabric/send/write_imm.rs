// SPDX-License-Identifier: GPL-2.0

//! Writes to a peer's memory of which its kernel hears at once, by an immediate (LITE, section 5.1).
//!
//! Notices go by a lane, one connection: so they come in the order in which they are sent, one after the
//! other's end. One whose queue pair failed is written again there, and it is certain that nothing of the
//! first attempt can come later. But its reader may hear of it twice, and has to know.

use super::{
    inflight::{InflightGuard, InflightOp, Segment},
    slots::{SlotClass, SlotGuard},
};
use crate::{
    fabric::{
        conn::{credit::ConnCredit, Conn},
        qos::LatencyProbe,
        Fabric,
    },
    sys::deadline::Deadline,
    trace,
    verbs::cq::WcStatus,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// Times that a notice is written again that the peer or our RNIC refused, as in [`super::transfer`].
const MAX_REJECTIONS: u32 = 3;

/// Bytes for a peer's memory.
pub(crate) struct ImmWrite {
    target: NodeInstance,
    addr: u64,
    immediate: u32,
}

/// What a notice writes.
#[derive(Clone, Copy)]
pub(crate) struct ImmPayload<'a> {
    pub(crate) bytes: &'a [u8],
    /// Somebody of high priority waits for it.
    pub(crate) high_priority: bool,
}

impl<'a> ImmPayload<'a> {
    /// What one kernel tells another.
    pub(crate) const fn internal(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            high_priority: false,
        }
    }

    fn start_probe(&self, fabric: &Fabric) -> Option<LatencyProbe> {
        let start = || fabric.qos.start_probe(self.bytes.len(), false);
        self.high_priority.then(start).flatten()
    }
}

impl ImmWrite {
    /// A notice to write to `addr` at a node, which hears `immediate`.
    pub(crate) fn new(target: NodeInstance, addr: u64, immediate: u32) -> Self {
        Self {
            target,
            addr,
            immediate,
        }
    }
}

/// The way of notices to one node.
pub(crate) struct OrderedConn(Arc<Conn>);

impl Fabric {
    /// A lane to a node.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn ordered_conn(&self, target: NodeInstance) -> Result<OrderedConn> {
        self.peer_by_instance(target)?
            .select_conn(self.qos.conn_subset(false))
            .map(OrderedConn)
    }

    /// Writes at most as many bytes as the buffer of a slot has. After an error they may have been
    /// written; then the same notice may be given again, by the same lane, with other bytes.
    ///
    /// # Errors
    ///
    /// - Those of `permit`, which is asked before each attempt.
    /// - `EHOSTDOWN` if the node is not, or no longer, in the view.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    /// - `EIO` if the peer or the RNIC refused; `ERANGE` for too many bytes.
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
        // If it may not be done any more, that is the reason to give.
        acquire_guard().and(Err(EIO))
    }

    /// As [`Self::notify`], but without waiting: posts them, or returns nothing if it would have to wait
    /// first. What lands has been written; what fails may be given to [`Self::notify`].
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn try_post_write_imm<G: InflightGuard>(
        &self,
        OrderedConn(conn): &OrderedConn,
        write: &ImmWrite,
        payload: ImmPayload<'_>,
        acquire_guard: impl FnOnce() -> Result<G>,
    ) -> Result<Option<InflightOp<G>>> {
        let bytes = payload.bytes;
        let acquire = || -> Result<(ConnCredit, SlotGuard)> {
            let credit = conn.acquire_segment(1, self, None)?;
            Ok((
                credit,
                self.send_engine().acquire_slot(SlotClass::Data, None)?,
            ))
        };
        let (credit, slot) = match acquire() {
            Err(error) if error == EAGAIN => return Ok(None),
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

    /// Posts what is in the claim's buffer. If the RNIC refuses it, the claim fails.
    fn post_write_imm(
        &self,
        write: &ImmWrite,
        len: usize,
        credit: &ConnCredit,
        slot: &SlotGuard,
    ) -> Result {
        slot.buffer().sync_for_device(len);
        let sge = slot.buffer().sge(self.local_key(), 0, len).ok_or(ERANGE)?;
        // SAFETY: The request names the claim's buffer.
        let posted = unsafe { credit.write_imm(slot, &[sge], write.addr, write.immediate) };
        if posted.is_err() {
            slot.mark_failed();
        }
        Ok(())
    }
}
