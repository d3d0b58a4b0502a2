// SPDX-License-Identifier: GPL-2.0

//! Outcome of posted batches: complete, failed, or to be retried.
//!
//! # Operation
//!
//! The first error of a batch, and the cause of the QP's failure, decide about its outcome.
//! [`super::recover`] applies the outcome.
//!
//! # Recovery
//!
//! Requests whose execution is uncertain are retried only if they are idempotent: none is atomic.
//!
//! A batch in flight for [`STUCK_AFTER_MS`] on a QP without progress is forced to complete: first the QP is
//! moved to the error state, then to reset.
//!
//! # Locking
//!
//! All state is under `Vqp::state`.

use super::batch::{RetryCause, VqpBatch, VqpBatchState};
use crate::{
    errno,
    fabric::{
        conn::credit::StaleQp,
        dc::DciCredit,
        peer::PeerAddress,
        send::{
            post_credit::PostCredit,
            slots::{Recovery, SlotGuard, STUCK_AFTER_MS},
        },
    },
    sys::deadline::Deadline,
    verbs::cq::WcStatus,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// Outcome of a posted batch. `done` counts the requests that completed before the failure.
pub(in crate::vqp) enum VqpBatchOutcome {
    /// All requests completed.
    Done,
    /// A request failed. Later requests are canceled.
    Failed { done: usize, error: Error },
    /// The node did not execute the next request at `address`. It either sent no acknowledgment or no receive
    /// buffer was available, as `cause` states.
    RetryExceeded {
        done: usize,
        address: Arc<PeerAddress>,
        cause: RetryCause,
    },
    /// The connection failed. `refused` is set if the cause may be a rejection of the next request.
    ConnFailed {
        done: usize,
        stale_qp: StaleQp,
        refused: bool,
    },
    /// The DCI failed because of another request, or without a known cause. The remaining requests are
    /// retried, because they were not executed or are idempotent.
    Retry { done: usize, none_executed: bool },
}

impl VqpBatch {
    /// Returns the number of requests that the first `done_wrs` completed work requests cover.
    fn count_done_requests(&self, mut done_wrs: usize) -> usize {
        let done_requests = self.remaining().iter().take_while(|request| {
            let is_complete = done_wrs >= request.wr_count();
            done_wrs = done_wrs.saturating_sub(request.wr_count());
            is_complete
        });
        done_requests.count()
    }

    /// Returns `true` if the batch is in flight, or was flushed without a reported cause so far.
    fn is_outcome_unknown(&self) -> bool {
        match &self.state {
            VqpBatchState::Posted(slot, credit, _) => {
                !slot.is_done() || slot.first_error() == WcStatus::Flushed && credit.is_healthy()
            }
            _ => false,
        }
    }

    /// Forces completions, if the QP makes no progress for the time limit.
    fn force_completion_if_stuck(&mut self) {
        let VqpBatchState::Posted(slot, credit, _) = &self.state else {
            return;
        };
        // Other batches may be ahead on the QP.
        if !self.completion_deadline.has_expired() || !credit.has_timed_out() {
            return;
        }
        self.completion_deadline = Deadline::after_ms(STUCK_AFTER_MS);
        let recover = |recovery| credit.recover(recovery);
        if core::mem::replace(&mut self.force_failed, true) {
            slot.force_reset(recover);
        } else {
            if credit.is_healthy() {
                slot.warn_stuck();
            }
            // If this fails, the next attempt resets the QP.
            let _ = recover(Recovery::ToError);
        }
    }

    /// Returns the outcome of a posted batch, or `None` if the batch has not ended.
    pub(in crate::vqp) fn poll_outcome(&mut self, peer: NodeInstance) -> Option<VqpBatchOutcome> {
        if self.is_outcome_unknown() {
            self.force_completion_if_stuck();
        }
        let VqpBatchState::Posted(slot, credit, address) = &self.state else {
            return None;
        };
        if !slot.is_done() {
            return None;
        }
        let wr_count = self.wr_count();
        let done =
            self.count_done_requests(wr_count - (slot.failed_count() as usize).min(wr_count));
        match credit {
            PostCredit::Dc(dci_credit) => {
                self.poll_dc_outcome(peer, done, (slot, dci_credit, address))
            }
            PostCredit::Rc(conn_credit) => {
                match slot.wait(|recovery| conn_credit.recover(recovery)) {
                    WcStatus::Success => Some(VqpBatchOutcome::Done),
                    status => {
                        conn_credit.report_failure(status);
                        Some(VqpBatchOutcome::ConnFailed {
                            done,
                            stale_qp: conn_credit.stale_qp(),
                            refused: matches!(status, WcStatus::RemoteError | WcStatus::LocalError),
                        })
                    }
                }
            }
        }
    }

    fn poll_dc_outcome(
        &self,
        peer: NodeInstance,
        done: usize,
        (slot, credit, address): (&SlotGuard, &DciCredit, &Arc<PeerAddress>),
    ) -> Option<VqpBatchOutcome> {
        let mut status = slot.first_error();
        if status == WcStatus::Flushed {
            credit.report_failure(status, peer);
            // The cause is known once the owner of the failed request has reported it.
            let (failed_by, failure) = credit.failed_by()?;
            // A peer executes no request after one that it rejected. If the cause is unknown or the peer did
            // not respond, requests without completion may have been executed.
            let refused = matches!(failure, WcStatus::RemoteError | WcStatus::RnrRetryExceeded);
            let none_executed =
                failed_by != NodeInstance::default() && (failed_by != peer || refused);
            let harmless = failure != WcStatus::RetryExceeded || failed_by != peer;
            if none_executed || harmless && self.is_idempotent() {
                // The first error is known: this only waits for the remaining completions.
                let _ = slot.wait(|recovery| credit.recover(recovery));
                return Some(VqpBatchOutcome::Retry {
                    done,
                    none_executed,
                });
            }
            status = failure;
        }
        let own_status = slot.wait(|recovery| credit.recover(recovery));
        if own_status == WcStatus::Success {
            return Some(VqpBatchOutcome::Done);
        }
        credit.report_failure(own_status, peer);
        let old_address = address.clone();
        match status {
            WcStatus::RetryExceeded if self.is_idempotent() => {
                let cause = RetryCause::NoAck;
                Some(VqpBatchOutcome::RetryExceeded {
                    done,
                    address: old_address,
                    cause,
                })
            }
            WcStatus::RnrRetryExceeded => {
                let cause = RetryCause::Rnr;
                Some(VqpBatchOutcome::RetryExceeded {
                    done,
                    address: old_address,
                    cause,
                })
            }
            _ => {
                let error = match own_status {
                    WcStatus::RetryExceeded => ETIMEDOUT,
                    WcStatus::Flushed if self.is_idempotent() => errno::canceled(),
                    WcStatus::Flushed => ETIMEDOUT,
                    _ => EIO,
                };
                Some(VqpBatchOutcome::Failed { done, error })
            }
        }
    }
}
