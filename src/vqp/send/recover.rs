// SPDX-License-Identifier: GPL-2.0

//! Outcomes of posted batches, applied to all batches of a VQP.
//!
//! # Operation
//!
//! Each batch is reaped as soon as it has ended, regardless of its position, so none keeps resources longer
//! than necessary.
//!
//! # Recovery
//!
//! - A request failed: all later requests fail with `ECANCELED`.
//! - The DCI failed for another reason, or the node did not respond: the batch and all later batches are
//!   retried, if they were not executed or contain no atomic operation. A SEND that was executed is harmless:
//!   the peer endpoint detects the copy by its sequence number.
//! - The connection failed: the batch waits until packets of the old QP can no longer arrive. It is retried
//!   if no request in flight is atomic, after a rejection at most [`MAX_RC_RETRIES`] times.
//! - A batch that is not retried fails: its first incomplete request with `ETIMEDOUT`, or with `EIO` after a
//!   rejection, and all later requests with `ECANCELED`.
//!
//! # Locking
//!
//! All state is under `Vqp::state`, whose holder may sleep while it drains batches of a failed QP.

use super::{
    batch::{RetryCause, VqpBatch, VqpBatchState},
    complete::VqpBatchOutcome,
    mr_cache::MrCache,
    VqpState,
};
use crate::{
    errno::{self, TryError},
    fabric::Fabric,
    sys::deadline::Deadline,
};
use kernel::prelude::*;
use kite_core::policy::transport::TransportSelector;

/// Maximum number of retries of a batch that the peer or the local RNIC rejected on a connection. The request
/// whose completion reports the error need not be the faulty one.
const MAX_RC_RETRIES: u32 = 3;

/// Time in milliseconds after which packets of a failed connection can no longer arrive, if no new QP
/// replaces it.
const STALE_PACKET_LIFETIME_MS: u32 = 10_000;

impl VqpState {
    /// Updates posted batches that have ended. Returns the number of requests to be retried.
    pub(in crate::vqp) fn reap_batches(&mut self) -> usize {
        let mut requeued = 0;
        for i in 0..self.batches.len() {
            if let Some(outcome) = self.batches[i].poll_outcome(self.peer) {
                self.apply_outcome(i, outcome);
                if !matches!(self.batches[i].state, VqpBatchState::Finished) {
                    requeued += self.batches[i].remaining().len();
                }
            }
        }
        requeued
    }

    /// Applies the outcome of batch `i`.
    fn apply_outcome(&mut self, i: usize, outcome: VqpBatchOutcome) {
        let batch = &mut self.batches[i];
        match outcome {
            VqpBatchOutcome::Done => {
                batch.done_count = batch.requests.len();
                batch.state = VqpBatchState::Finished;
            }
            VqpBatchOutcome::Failed { done, error } => {
                batch.done_count += done;
                self.fail_from(i, error);
            }
            VqpBatchOutcome::Retry {
                done,
                none_executed,
            } => {
                batch.done_count += done;
                match none_executed || self.can_requeue_from(i) {
                    true => self.requeue_from(i, VqpBatchState::Ready),
                    false => self.fail_from(i, ETIMEDOUT),
                }
            }
            VqpBatchOutcome::RetryExceeded {
                done,
                address,
                cause,
            } => {
                batch.done_count += done;
                let is_rnr = cause == RetryCause::Rnr;
                match is_rnr || self.can_requeue_from(i) {
                    true => self.requeue_from(i, VqpBatchState::AwaitingRetry(address, cause)),
                    false => self.fail_from(i, ETIMEDOUT),
                }
                self.batches[i].rnr_retries += u32::from(is_rnr);
            }
            VqpBatchOutcome::ConnFailed {
                done,
                stale_qp,
                refused,
            } => {
                batch.done_count += done;
                batch.rc_retries += u32::from(refused);
                let retries_exhausted = batch.rc_retries > MAX_RC_RETRIES;
                let error = match !retries_exhausted && self.can_requeue_from(i) {
                    true => None,
                    false => Some(if refused { EIO } else { ETIMEDOUT }),
                };
                let deadline = Deadline::after_ms(STALE_PACKET_LIFETIME_MS);
                self.requeue_from(i, VqpBatchState::Quiescing(stale_qp, deadline, error));
                // Return to DC, if there is DC: a faulty request is identified there.
                self.transport_selector = TransportSelector::default();
            }
        }
    }

    /// Returns `true` if the posted requests from batch `i` on are all idempotent: none is atomic.
    fn can_requeue_from(&self, i: usize) -> bool {
        let mut batches = self.batches[i..].iter();
        batches.all(|batch| !batch.is_posted() || batch.is_idempotent())
    }

    /// Ends the wait of a [`VqpBatchState::Quiescing`] batch, once packets of the failed connection can no
    /// longer arrive, or the node has left.
    pub(in crate::vqp) fn check_quiesced(&mut self, fabric: &Fabric) {
        let is_quiescing = |batch: &VqpBatch| matches!(batch.state, VqpBatchState::Quiescing(..));
        let Some(i) = self.batches.iter().position(is_quiescing) else {
            return;
        };
        let VqpBatchState::Quiescing(stale_qp, deadline, error) = &self.batches[i].state else {
            return;
        };
        let is_quiesced = stale_qp.is_fenced() || deadline.has_expired();
        let removed = fabric.peers.get_or_self(self.peer).err();
        match error.filter(|_| is_quiesced).or(removed) {
            Some(error) => self.fail_from(i, error),
            None if is_quiesced => self.batches[i].state = VqpBatchState::Ready,
            None => {}
        }
    }

    /// Moves batch `i` to `state`, and drains all later batches, which are then retried. The caller must
    /// ensure that these batches are idempotent or were not executed, or that `state` ends in a failure.
    fn requeue_from(&mut self, i: usize, state: VqpBatchState) {
        for batch in &mut self.batches[i + 1..] {
            batch.drain(self.peer);
        }
        self.batches[i].state = state;
    }

    /// Fails the first incomplete request of batch `i` with `error`, and all later requests with `ECANCELED`.
    pub(in crate::vqp) fn fail_from(&mut self, i: usize, error: Error) {
        let mut batch_error = error;
        for batch in &mut self.batches[i..] {
            if batch.has_message() && self.closed_with.is_none() {
                // The peer endpoint would miss the sequence number of the message, and no later message can
                // be received.
                self.closed_with = Some(errno::connreset());
            }
            batch.fail(batch_error, self.peer);
            batch_error = errno::canceled();
        }
    }

    /// Applies the result of a resolution: the batch becomes ready, or fails.
    pub(in crate::vqp) fn apply_resolution(
        &mut self,
        (number, resolution): (u64, Result<bool>),
        mr_cache: &MrCache,
    ) {
        let Some(i) = self.batches.iter().position(|batch| batch.number == number) else {
            return;
        };
        let batch = &mut self.batches[i];
        let result = match (&batch.state, resolution) {
            (VqpBatchState::AwaitingRetry(_, RetryCause::NoAck), Ok(false)) => {
                Err(ETIMEDOUT.into())
            }
            (VqpBatchState::StaleMr, Ok(_)) => batch.revalidate_mrs(mr_cache),
            (VqpBatchState::AwaitingRetry(..) | VqpBatchState::StaleMr, found) => {
                found.map(drop).map_err(TryError::from)
            }
            _ => return,
        };
        match result {
            Ok(()) => batch.state = VqpBatchState::Ready,
            // The READ of an entry took longer than its lease: the batch stays blocked.
            Err(TryError::WouldBlock) => {}
            Err(error) => self.fail_from(i, error.into()),
        }
    }
}
