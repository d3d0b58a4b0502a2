// SPDX-License-Identifier: GPL-2.0

//! A message that is sent without waiting, by who looks after many.
//!
//! [`Link::send`] for others: it gets its place in the ring of the other end when there is room, is posted when
//! the queue pair has some, and is looked for. If it is given up, a void one is in its stead.

use crate::{
    fabric::send::inflight::PolledOp,
    region::{map::OwnedRemoteAccess, CONTROL_TIMEOUT_MS},
    rpc::{
        channel::{RingSlotAddr, RpcChannel, WritePath},
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

/// How far a message is.
pub(crate) enum RpcSendState {
    /// At the other end.
    Done,
    /// It was posted.
    Inflight,
    /// Nothing was done for want of room.
    NoCredits,
    /// Its queue pair failed, or takes too long: [`Sending::finish`] waits for what it takes.
    Failed,
}

/// A message that is being sent.
pub(crate) struct RpcSendOp {
    rpc: Arc<Rpc>,
    channel: Arc<RpcChannel>,
    message: RpcMessage,
    /// Where it goes, until it is there.
    slot_addr: Option<RingSlotAddr>,
    inflight: Option<PolledOp<OwnedRemoteAccess>>,
    /// It was posted by a queue pair that failed.
    qp_failed: bool,
}

impl RpcSendOp {
    /// Nothing is done before [`Self::advance`].
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

    /// Whether it was posted, and its completion is to come.
    pub(crate) fn is_inflight(&self) -> bool {
        self.inflight.is_some()
    }

    /// Whether what was posted has completed.
    pub(crate) fn has_completed(&self) -> bool {
        self.inflight.as_ref().is_none_or(PolledOp::is_done)
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(crate) fn poll_cq(&self) -> bool {
        if let Some(op) = &self.inflight {
            op.poll_cq();
        }
        self.is_inflight()
    }

    /// Goes on, without waiting.
    ///
    /// # Errors
    ///
    /// As for [`Link::send`].
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

    /// Waits for what was posted, which takes as long as the RNIC.
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
            // To this node itself, which waits for nothing.
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

    /// Does what is left, and waits for what it takes.
    ///
    /// # Errors
    ///
    /// As for [`Link::send`].
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
