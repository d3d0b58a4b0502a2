// SPDX-License-Identifier: GPL-2.0

//! Send of a message by a poller, without waiting.
//!
//! # Operation
//!
//! Non-blocking form of [`RpcChannel::send`]. The message gets a slot in the ring at the other end when one
//! is free. The message is posted when the QP has credits. Then the owner polls for the completion.
//!
//! # Recovery
//!
//! After a QP failure or a stuck write, the owner must call [`RpcSendOp::finish`], which may sleep. A message
//! that is dropped after it got a slot is replaced by a void message.

use crate::{
    control::retry::CONTROL_TIMEOUT_MS,
    fabric::send::inflight::PolledOp,
    region::map::remote::OwnedRemoteAccess,
    rpc::{
        channel::{
            tx::{RingSlotAddr, WritePath},
            RpcChannel,
        },
        Rpc, RpcMessage,
    },
    stats::Stats,
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};

/// Progress of a send.
pub(crate) enum RpcSendState {
    /// The message is in the ring at the other end.
    Done,
    /// The write was posted and has not completed.
    Inflight,
    /// Nothing was done, for lack of ring space or credits.
    NoCredits,
    /// The QP failed, or the write is stuck. Call [`RpcSendOp::finish`], which waits.
    Failed,
}

/// Send in progress.
pub(crate) struct RpcSendOp {
    rpc: Arc<Rpc>,
    channel: Arc<RpcChannel>,
    message: RpcMessage,
    /// Write address, from the reservation of the slot until the write completes.
    slot_addr: Option<RingSlotAddr>,
    inflight: Option<PolledOp<OwnedRemoteAccess>>,
    /// Set once a QP failed with the write in flight.
    qp_failed: bool,
}

impl RpcSendOp {
    /// Creates a send. Nothing happens before [`Self::advance`].
    pub(crate) fn new(rpc: Arc<Rpc>, channel: Arc<RpcChannel>, message: RpcMessage) -> Self {
        Self {
            rpc,
            channel,
            message,
            slot_addr: None,
            inflight: None,
            qp_failed: false,
        }
    }

    /// Returns `true` if a write is posted and was not reaped.
    pub(crate) fn is_inflight(&self) -> bool {
        self.inflight.is_some()
    }

    /// Returns `true` if no posted write is incomplete.
    pub(crate) fn has_completed(&self) -> bool {
        self.inflight.as_ref().is_none_or(PolledOp::is_done)
    }

    /// Polls the send CQ, for all waiters, if a write is in flight. Returns `true` in that case.
    pub(crate) fn poll_cq(&self) -> bool {
        if let Some(op) = &self.inflight {
            op.poll_cq();
        }
        self.is_inflight()
    }

    /// Advances the send as far as possible without waiting.
    ///
    /// # Errors
    ///
    /// See [`RpcChannel::send`].
    pub(crate) fn advance(
        &mut self,
        stats: &Stats,
        now: Instant<Monotonic>,
    ) -> Result<RpcSendState> {
        let Some(op) = self.inflight.take() else {
            return if self.qp_failed {
                Ok(RpcSendState::Failed)
            } else {
                self.start()
            };
        };
        if op.is_done() {
            return self.reap(stats, op);
        }
        let is_stuck = op.is_stuck(now);
        self.inflight = Some(op);
        Ok(if is_stuck {
            RpcSendState::Failed
        } else {
            RpcSendState::Inflight
        })
    }

    /// Reaps the posted write. Waits for the RNIC if the write has not completed.
    fn reap(&mut self, stats: &Stats, op: PolledOp<OwnedRemoteAccess>) -> Result<RpcSendState> {
        if op.complete(stats, |_, _| Ok(()))?.is_some() {
            self.qp_failed = true;
            return Ok(RpcSendState::Failed);
        }
        self.complete_write();
        Ok(RpcSendState::Done)
    }

    fn complete_write(&mut self) {
        if self.slot_addr.take().is_some() {
            self.channel.complete_write(&self.message.header.slot);
        }
    }

    fn start(&mut self) -> Result<RpcSendState> {
        if self.slot_addr.is_none() {
            let Some(reservation) = self.channel.try_reserve(&self.message)? else {
                return Ok(RpcSendState::NoCredits);
            };
            self.slot_addr = Some(self.channel.encode_at(&mut self.message, reservation)?);
        }
        let Some(slot_addr) = &self.slot_addr else {
            return Err(EIO);
        };
        if let WritePath::Local(_) = slot_addr.path {
            // A write to this node does not wait.
            let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
            self.channel
                .write_message(&self.rpc, slot_addr, &self.message, deadline)?;
            self.complete_write();
            return Ok(RpcSendState::Done);
        }
        let Some(op) = self.channel.post(&self.rpc, slot_addr, &self.message)? else {
            return Ok(RpcSendState::NoCredits);
        };
        self.inflight = Some(PolledOp::new(op, Instant::now()));
        Ok(RpcSendState::Inflight)
    }

    /// Completes the send. May sleep until the deadline.
    ///
    /// # Errors
    ///
    /// See [`RpcChannel::send`].
    pub(crate) fn finish(mut self, stats: &Stats, deadline: Deadline) -> Result {
        if let Some(op) = self.inflight.take() {
            if matches!(self.reap(stats, op)?, RpcSendState::Done) {
                return Ok(());
            }
        }
        let (channel, rpc) = (self.channel.clone(), self.rpc.clone());
        let Some(slot_addr) = &self.slot_addr else {
            return channel.send(&rpc, &mut self.message, deadline);
        };
        channel.write_message(&rpc, slot_addr, &self.message, deadline)?;
        self.complete_write();
        Ok(())
    }
}

impl Drop for RpcSendOp {
    fn drop(&mut self) {
        drop(self.inflight.take());
        if let Some(slot_addr) = self.slot_addr.take() {
            self.channel
                .write_void_deferred(&self.rpc, slot_addr, self.message.header);
        }
    }
}
