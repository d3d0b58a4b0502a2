// SPDX-License-Identifier: GPL-2.0

//! Send of a message.
//!
//! # Operation
//!
//! The message gets a slot in the ring at the other end. The message is posted when the QP has credits. Then
//! the write completes. A poller advances the send without waiting ([`RpcSendOp::advance`]). A thread that
//! may sleep waits for each step ([`RpcSendOp::finish`], [`RpcChannel::send`]).
//!
//! # Recovery
//!
//! After a QP failure or a stuck write, the owner must call [`RpcSendOp::finish`], which writes the message
//! again. A message that is dropped after it got a slot is replaced by a void message.

use super::{
    tx::{RingSlotAddr, WritePath},
    RpcChannel,
};
use crate::{
    control::retry::CONTROL_TIMEOUT_MS,
    errno::{TryError, TryResult},
    fabric::send::inflight::PolledOp,
    region::map::remote::OwnedRemoteAccess,
    rpc::{Rpc, RpcMessage},
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::ring::RingSlot;

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
    pub(crate) fn advance(&mut self, now: Instant<Monotonic>) -> Result<RpcSendState> {
        let Some(op) = self.inflight.take() else {
            return if self.qp_failed {
                Ok(RpcSendState::Failed)
            } else {
                self.start()
            };
        };
        if op.is_done() {
            return self.reap(op);
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
    fn reap(&mut self, op: PolledOp<OwnedRemoteAccess>) -> Result<RpcSendState> {
        let stats = &self.rpc.memory_service.stats;
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
            let Some(slot) = self.channel.try_reserve(&self.message)? else {
                return Ok(RpcSendState::NoCredits);
            };
            self.place(slot)?;
        }
        let slot_addr = self.slot_addr.as_ref().ok_or(EIO)?;
        if let WritePath::Local(_) = slot_addr.path {
            // A write to this node does not wait.
            self.write(Deadline::after_ms(CONTROL_TIMEOUT_MS))?;
            return Ok(RpcSendState::Done);
        }
        let Some(op) = self.channel.post(&self.rpc, slot_addr, &self.message)? else {
            return Ok(RpcSendState::NoCredits);
        };
        self.inflight = Some(PolledOp::new(op, Instant::now()));
        Ok(RpcSendState::Inflight)
    }

    /// Assigns a slot to the message.
    fn place(&mut self, slot: RingSlot) -> Result {
        self.slot_addr = Some(self.channel.encode_at(&mut self.message, slot)?);
        Ok(())
    }

    /// Writes the message to its slot, and waits for the completion.
    fn write(&mut self, deadline: Deadline) -> Result {
        let slot_addr = self.slot_addr.as_ref().ok_or(EIO)?;
        let content = self.message.content();
        self.channel
            .write(&self.rpc, slot_addr, content, deadline)?;
        self.complete_write();
        Ok(())
    }

    /// Completes the send. May sleep until the deadline.
    ///
    /// # Errors
    ///
    /// See [`RpcChannel::send`].
    pub(crate) fn finish(mut self, deadline: Deadline) -> Result {
        if let Some(op) = self.inflight.take() {
            if matches!(self.reap(op)?, RpcSendState::Done) {
                return Ok(());
            }
        }
        if self.slot_addr.is_none() {
            let slot = self.channel.reserve(&self.rpc, &self.message, deadline)?;
            self.place(slot)?;
        }
        self.write(deadline)
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

impl RpcChannel {
    /// Writes a message to the other end. After an error, the other end may still receive the message.
    ///
    /// # Errors
    ///
    /// - See [`Self::check_open`].
    /// - `ETIMEDOUT`: the deadline expired, possibly while the ring was full.
    /// - `EINTR`: a signal arrived, and the deadline is interruptible.
    /// - `EIO`: the RNIC or the peer rejected the write.
    /// - `ENOMEM`: no memory.
    pub(crate) fn send(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        message: RpcMessage,
        deadline: Deadline,
    ) -> Result {
        RpcSendOp::new(rpc.clone(), self.clone(), message).finish(deadline)
    }

    /// Writes a message to the other end, without waiting for a free slot. See [`Self::send`].
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the ring is full.
    /// - Errors of [`Self::send`].
    pub(in crate::rpc) fn try_send(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        message: RpcMessage,
    ) -> TryResult {
        let slot = self.try_reserve(&message)?.ok_or(TryError::WouldBlock)?;
        let mut op = RpcSendOp::new(rpc.clone(), self.clone(), message);
        op.place(slot)?;
        Ok(op.write(Deadline::after_ms(CONTROL_TIMEOUT_MS))?)
    }
}
