// SPDX-License-Identifier: GPL-2.0

//! Batches of requests, and how a batch is posted.
//!
//! # Operation
//!
//! A push is split into batches of at most the size that one slot and the receive window of the peer take.
//! A batch is posted with one doorbell. [`VqpBatchState`] describes the state machine.
//!
//! # Recovery
//!
//! A batch that cannot be posted has a [`BatchBlocker`], which a worker resolves
//! ([`crate::vqp::resolve`]). [`super::complete`] decides about batches that failed.
//!
//! # Locking
//!
//! All state is under `Vqp::state`.

use super::{
    mr_cache::{MrCache, MrLease},
    request::{KernelAtomic, MrUse, VqpRequest},
};
use crate::{
    errno::{TryError, TryResult},
    fabric::{
        conn::credit::StaleQp,
        dc::MAX_INFLIGHT_DCI_BYTES,
        peer::PeerAddress,
        send::{
            post_credit::PostCredit,
            slots::{SlotGuard, MAX_WRS_PER_SLOT, STUCK_AFTER_MS},
        },
        Fabric,
    },
    sys::deadline::Deadline,
    verbs::{cq::WcStatus, work::RdmaOp},
    vqp::{ids::EndpointIds, sink::CompletionSink},
};
use kernel::{alloc::Flags, prelude::*, sync::Arc};
use kite_core::{
    proto::window::{SendWindow, MAX_BURST_MESSAGES},
    view::NodeInstance,
    wire::packet::{MAX_INLINE_PAYLOAD_BYTES, MAX_RC_INLINE_PAYLOAD_BYTES, PACKET_HEADER_SIZE},
};

/// Maximum number of bytes in a batch on a connection, since later requests of other users wait for it.
const RC_BATCH_MAX_BYTES: u64 = 1 << 20;

/// Maximum delay in milliseconds until this node receives a view in which the peer has a new address.
const VIEW_LAG_MS: u32 = 4000;

/// Delay in milliseconds after the first RNR error of a node, and number of times that the delay is doubled.
const RNR_BACKOFF_MS: u32 = 300;
const RNR_BACKOFF_MAX_SHIFT: u32 = 3;

/// State of a batch.
pub(in crate::vqp) enum VqpBatchState {
    /// Ready to be posted.
    Ready,
    /// Blocked until the remote MRs are validated again.
    StaleMr,
    /// In flight: the remaining requests are posted to this address.
    Posted(SlotGuard, PostCredit, Arc<PeerAddress>),
    /// Blocked after a failure: the node did not respond, or had no receive buffer. Its address may differ by
    /// now from the recorded one.
    AwaitingRetry(Arc<PeerAddress>, RetryCause),
    /// Waiting after the failure of a connection, since its packets may still arrive, at most until the
    /// deadline. Then the batch is retried, or fails with the error.
    Quiescing(StaleQp, Deadline, Option<Error>),
    /// Blocked: a worker executes the requests in the peer's kernel.
    ViaKernel,
    /// Ended. No further requests of the batch are posted.
    Finished,
}

/// Reason why a node did not execute a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::vqp) enum RetryCause {
    /// The node sent no acknowledgment.
    NoAck,
    /// The node had no receive buffer, and may have one soon.
    Rnr,
}

/// Requests that were pushed together and are posted with one doorbell.
pub(in crate::vqp) struct VqpBatch {
    pub(in crate::vqp) number: u64,
    pub(in crate::vqp) requests: KVec<VqpRequest>,
    /// Number of requests that are complete.
    pub(in crate::vqp) done_count: usize,
    /// Number of requests whose completion was delivered.
    pub(in crate::vqp) reported_count: usize,
    pub(in crate::vqp) state: VqpBatchState,
    /// Numbers of rejections on a connection, and of RNR errors.
    pub(in crate::vqp) rc_retries: u32,
    pub(in crate::vqp) rnr_retries: u32,
    /// Deadline after which the batch is forced to complete. `force_failed` is set after the first attempt.
    pub(in crate::vqp) completion_deadline: Deadline,
    pub(in crate::vqp) force_failed: bool,
    /// Result of the first incomplete request, once the batch has ended.
    pub(in crate::vqp) error: Option<Error>,
    /// Receiver of the completions, or `None` if they are popped.
    pub(in crate::vqp) sink: Option<Arc<dyn CompletionSink>>,
}

/// Reason why a batch cannot be posted.
pub(in crate::vqp) enum BatchBlocker {
    /// The address of the node must change, or this many milliseconds must pass.
    AddressChange(Arc<PeerAddress>, u32),
    /// The entries of remote MRs must be read again.
    StaleMrs(KVec<MrUse>),
    /// Atomics must be executed by the peer's kernel.
    KernelAtomics(KVec<KernelAtomic>),
}

impl VqpBatch {
    fn new(requests: KVec<VqpRequest>) -> Self {
        Self {
            number: 0,
            requests,
            done_count: 0,
            reported_count: 0,
            state: VqpBatchState::Ready,
            rc_retries: 0,
            rnr_retries: 0,
            completion_deadline: Deadline::after_ms(STUCK_AFTER_MS),
            force_failed: false,
            error: None,
            sink: None,
        }
    }

    /// Returns `true` if requests can be posted together. Limits are the RNIC's queue, the window of the peer
    /// endpoint, and `max_bytes`. With `separate_atomics`, atomics are not combined with other requests.
    fn fits_limits(requests: &[VqpRequest], (max_bytes, separate_atomics): (u64, bool)) -> bool {
        let atomics = requests.iter().filter(|request| request.is_atomic());
        let is_uniform =
            !separate_atomics || matches!(atomics.count(), n if n == 0 || n == requests.len());
        let wr_count: usize = requests.iter().map(VqpRequest::wr_count).sum();
        let messages = requests.iter().filter(|request| request.has_message());
        let bytes: u64 = requests.iter().map(VqpRequest::bytes).sum();
        is_uniform
            && wr_count <= MAX_WRS_PER_SLOT as usize
            && messages.count() <= MAX_BURST_MESSAGES as usize
            && (bytes <= max_bytes || requests.len() == 1)
    }

    /// Splits requests into batches that fit the transport of `address`. `gfp` is used for allocations.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(in crate::vqp) fn split(
        mut requests: KVec<VqpRequest>,
        address: &PeerAddress,
        gfp: Flags,
    ) -> Result<KVec<Self>> {
        let (max_inline, max_bytes) = match address.dc_address {
            Some(_) => (MAX_INLINE_PAYLOAD_BYTES, MAX_INFLIGHT_DCI_BYTES),
            None => (MAX_RC_INLINE_PAYLOAD_BYTES, RC_BATCH_MAX_BYTES),
        };
        let limits = (max_bytes, !address.has_atomics);
        requests
            .iter_mut()
            .for_each(|request| request.max_inline_bytes = max_inline);
        let mut batches = KVec::new();
        let mut current = KVec::new();
        if Self::fits_limits(&requests, limits) {
            batches.push(Self::new(requests), gfp)?;
            return Ok(batches);
        }
        for request in requests {
            current.push(request, gfp)?;
            if !Self::fits_limits(&current, limits) {
                let mut next = KVec::new();
                if let Some(last) = current.pop() {
                    next.push(last, gfp)?;
                }
                batches.push(Self::new(core::mem::replace(&mut current, next)), gfp)?;
            }
        }
        batches.push(Self::new(current), gfp)?;
        Ok(batches)
    }

    /// Returns the incomplete requests.
    pub(in crate::vqp) fn remaining(&self) -> &[VqpRequest] {
        &self.requests[self.done_count..]
    }

    /// Returns the number of work requests for the incomplete requests.
    pub(in crate::vqp) fn wr_count(&self) -> usize {
        self.remaining().iter().map(VqpRequest::wr_count).sum()
    }

    /// Returns the number of bytes that the incomplete requests transfer.
    pub(in crate::vqp) fn bytes(&self) -> u64 {
        self.remaining().iter().map(VqpRequest::bytes).sum()
    }

    pub(in crate::vqp) fn is_posted(&self) -> bool {
        matches!(self.state, VqpBatchState::Posted(..))
    }

    /// Returns `true` if the batch waits until packets of a failed connection can no longer arrive.
    pub(in crate::vqp) fn is_quiescing(&self) -> bool {
        matches!(self.state, VqpBatchState::Quiescing(..))
    }

    /// Returns `true` if the batch is ready, and the peer endpoint has credits for its messages.
    pub(in crate::vqp) fn can_post(&self, send_window: &SendWindow) -> bool {
        let numbers = self
            .remaining()
            .iter()
            .filter_map(|request| request.msg_sequence);
        matches!(self.state, VqpBatchState::Ready)
            && numbers.max().is_none_or(|last| send_window.can_send(last))
    }

    /// Returns `true` if the leases of all remote MRs are valid.
    pub(in crate::vqp) fn has_valid_leases(&self) -> bool {
        let mut leases = self.remaining().iter().filter_map(|request| request.lease);
        leases.all(MrLease::is_valid)
    }

    /// Returns the reason why the batch is blocked, or `None` if it is not.
    pub(in crate::vqp) fn blocker(&self) -> Option<BatchBlocker> {
        match &self.state {
            VqpBatchState::AwaitingRetry(address, cause) => {
                let timeout_ms = match cause {
                    RetryCause::NoAck => VIEW_LAG_MS,
                    RetryCause::Rnr => {
                        RNR_BACKOFF_MS << self.rnr_retries.min(RNR_BACKOFF_MAX_SHIFT)
                    }
                };
                Some(BatchBlocker::AddressChange(address.clone(), timeout_ms))
            }
            VqpBatchState::StaleMr => {
                let mut uses = KVec::new();
                // Entries for which there is no memory stay stale, so the batch is blocked again.
                for mr_use in self
                    .remaining()
                    .iter()
                    .filter_map(|request| request.remote_use)
                {
                    let _ = uses.push(mr_use, GFP_KERNEL);
                }
                Some(BatchBlocker::StaleMrs(uses))
            }
            VqpBatchState::ViaKernel => Some(BatchBlocker::KernelAtomics(self.kernel_atomics())),
            _ => None,
        }
    }

    /// Validates the incomplete requests against the cached entries.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: an entry is not cached, or its lease has expired.
    /// - `EACCES`, `ERANGE`: the entry does not allow a request.
    pub(in crate::vqp) fn revalidate_mrs(&mut self, mr_cache: &MrCache) -> TryResult {
        for request in &mut self.requests[self.done_count..] {
            if let Some(mr_use) = request.remote_use {
                request.validate_mr(
                    mr_use,
                    mr_cache.get(mr_use.key).ok_or(TryError::WouldBlock)?,
                )?;
            }
        }
        Ok(())
    }

    /// Ends the batch, with `error` for the incomplete requests.
    pub(in crate::vqp) fn fail(&mut self, error: Error, peer: NodeInstance) {
        self.drain(peer);
        self.error = Some(error);
        self.state = VqpBatchState::Finished;
    }

    pub(in crate::vqp) fn has_message(&self) -> bool {
        self.remaining().iter().any(VqpRequest::has_message)
    }

    /// Returns `true` if the incomplete requests can be executed twice: none is atomic. The peer endpoint
    /// drops the copy of a message by its sequence number.
    pub(in crate::vqp) fn is_idempotent(&self) -> bool {
        !self
            .remaining()
            .iter()
            .any(|request| request.verb.is_atomic())
    }

    /// Waits until no request of a posted batch is in flight. The batch becomes ready again.
    pub(in crate::vqp) fn drain(&mut self, peer: NodeInstance) {
        if let VqpBatchState::Posted(slot, credit, _) = &self.state {
            let status = slot.wait(|recovery| credit.recover(recovery));
            if status != WcStatus::Success {
                // Other users of the QP wait for the cause of the failure.
                credit.report_failure(status, peer);
            }
            self.state = VqpBatchState::Ready;
        }
    }

    /// Returns `true` if an RC QP supports all incomplete requests.
    pub(in crate::vqp) fn is_rc_capable(&self) -> bool {
        self.bytes() <= RC_BATCH_MAX_BYTES && self.remaining().iter().all(VqpRequest::is_rc_capable)
    }

    /// Posts the incomplete requests.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - `EINVAL`: a message does not fit the slot's buffer.
    /// - Any error of the driver.
    /// - [`TryError::WouldBlock`]: the lease of a remote MR has expired meanwhile. The batch waits until the MR
    ///   is validated again.
    pub(in crate::vqp) fn post(
        &mut self,
        fabric: &Fabric,
        ids: &EndpointIds,
        (slot, credit): (SlotGuard, PostCredit),
        address: Arc<PeerAddress>,
    ) -> TryResult {
        let posted = self.post_ops(fabric, ids, (&slot, &credit), &address);
        if let Err(TryError::WouldBlock) = posted {
            self.state = VqpBatchState::StaleMr;
        }
        posted?;
        self.state = VqpBatchState::Posted(slot, credit, address);
        (self.completion_deadline, self.force_failed) = (Deadline::after_ms(STUCK_AFTER_MS), false);
        Ok(())
    }

    /// Builds the work requests of the incomplete requests, and posts them. See [`Self::post`].
    fn post_ops(
        &self,
        fabric: &Fabric,
        ids: &EndpointIds,
        (slot, credit): (&SlotGuard, &PostCredit),
        address: &PeerAddress,
    ) -> TryResult {
        let post = |ops: &[RdmaOp<'_>]| {
            // SAFETY: The batch holds the registered memory, and waits for the end of the requests. Headers
            // are in the slot's buffer, which the slot keeps mapped until then.
            unsafe {
                credit.post(slot, address.dc_address.as_ref(), ops, || {
                    self.has_valid_leases()
                })
            }
        };
        let remaining = self.remaining();
        if let [request] = remaining {
            // Fast path without allocation: most batches have one request.
            let sges = request.build_sges(0, fabric, ids, slot)?;
            slot.buffer().sync_for_device(PACKET_HEADER_SIZE);
            match request.build_ops(&sges) {
                (op, None) => post(&[op]),
                (op, Some(message_op)) => post(&[op, message_op]),
            }
        } else {
            let mut sges = KVec::with_capacity(remaining.len(), GFP_KERNEL)?;
            for (i, request) in remaining.iter().enumerate() {
                sges.push(request.build_sges(i, fabric, ids, slot)?, GFP_KERNEL)?;
            }
            slot.buffer()
                .sync_for_device(remaining.len() * PACKET_HEADER_SIZE);
            let mut ops = KVec::with_capacity(self.wr_count(), GFP_KERNEL)?;
            for (request, sges) in remaining.iter().zip(&sges) {
                let (op, message_op) = request.build_ops(sges);
                ops.push(op, GFP_KERNEL)?;
                message_op.map_or(Ok(()), |message_op| ops.push(message_op, GFP_KERNEL))?;
            }
            post(&ops)
        }
    }
}
