// SPDX-License-Identifier: GPL-2.0

//! How what was posted ends: done, failed, or to go again by the same way or another. What is not known to be undone
//! goes again only if that does no harm.

use super::batch::{RetryCause, VqpBatch, VqpBatchState};
use crate::{
    errno,
    fabric::{
        conn::credit::StaleQp,
        dc::DciCredit,
        peer::PeerAddress,
        send::{
            path::PostCredit,
            slots::{Recovery, SlotGuard, STUCK_AFTER_MS},
        },
    },
    sys::deadline::Deadline,
    verbs::cq::WcStatus,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// How the posted requests of a batch ended.
pub(in crate::vqp) enum VqpBatchOutcome {
    /// All are done.
    Done,
    /// One failed, after so many that were done.
    Failed { done: usize, error: Error },
    /// The node did not do the next where it was reached, after so many that were done.
    RetryExceeded {
        done: usize,
        address: Arc<PeerAddress>,
        cause: RetryCause,
    },
    /// The connection failed, after so many that were done, perhaps because somebody refused the next.
    ConnFailed {
        done: usize,
        stale_qp: StaleQp,
        refused: bool,
    },
    /// Somebody else's failed, or nobody's: then it is not certain that what has not ended was not done. It goes again.
    Retry { done: usize, none_executed: bool },
}

impl VqpBatch {
    /// How many requests those are for which the RNIC has done so much.
    fn count_done_requests(&self, mut done_wrs: usize) -> usize {
        let done_requests = self.remaining().iter().take_while(|request| {
            let is_complete = done_wrs >= request.wr_count();
            done_wrs = done_wrs.saturating_sub(request.wr_count());
            is_complete
        });
        done_requests.count()
    }

    /// Whether it is under way, or nobody says why it is not.
    fn is_outcome_unknown(&self) -> bool {
        match &self.state {
            VqpBatchState::Posted(slot, credit, _) => {
                !slot.is_done() || slot.first_error() == WcStatus::Flushed && credit.is_healthy()
            }
            _ => false,
        }
    }

    /// Makes what carries it fail if it takes longer than any RNIC should.
    fn force_completion_if_stuck(&mut self) {
        let VqpBatchState::Posted(slot, credit, _) = &self.state else {
            return;
        };
        // Others may be before it.
        if !self.completion_deadline.has_expired() || !credit.has_timed_out() {
            return;
        }
        self.completion_deadline = Deadline::after_ms(STUCK_AFTER_MS);
        let recover = |recovery| credit.recover(recovery);
        if core::mem::replace(&mut self.force_failed, true) {
            slot.force_reset(recover);
        } else {
            if credit.is_healthy() {
                pr_warn!("work requests do not complete: moving their QP to ERR\n");
            }
            // If that fails, too, they are ended the next time.
            let _ = recover(Recovery::ToError);
        }
    }

    /// How it ended, if it was posted and did.
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
                            stale_qp: conn_credit.stale_qp(peer),
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
            // Whose it was is known when they have heard of it.
            let (failed_by, failure) = credit.failed_by()?;
            // A peer does nothing that comes after what it refused. If it was nobody's, or was not answered, some may
            // have been done that have not ended.
            let refused = matches!(failure, WcStatus::RemoteError | WcStatus::RnrRetryExceeded);
            let none_executed =
                failed_by != NodeInstance::default() && (failed_by != peer || refused);
            let harmless = failure != WcStatus::RetryExceeded || failed_by != peer;
            if none_executed || harmless && self.is_idempotent() {
                let _ = slot.wait(|recovery| credit.recover(recovery));
                return Some(VqpBatchOutcome::Retry {
                    done,
                    none_executed: none_executed,
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
