// SPDX-License-Identifier: GPL-2.0

//! Requests of a peer that are in progress, and rejection of copies that arrive too late.
//!
//! # Operation
//!
//! Each request carries the low watermark of its sender: all requests with lower ids have ended at the
//! sender. A request is admitted unless a copy is in progress or the table is full.
//!
//! The reply uses the QP on which the last copy arrived, even if that copy was dropped. On this QP the sender
//! has a receive for the reply. The sender may have given up the QPs of earlier copies.
//!
//! # Recovery
//!
//! The sender retries a request when its QP failed or the reply is late. Copies may arrive at any time,
//! even after the request that undoes the first one. Such a copy would, for example, lend memory to an
//! operation that has ended. Hence a copy below the low watermark is dropped. An undo request is dropped
//! while a request below its low watermark is in progress. The sender retries every request that gets no
//! reply.

/// Maximum number of requests of one peer in progress. Further requests are dropped.
const MAX_INFLIGHT: usize = 64;

/// Request in progress.
#[derive(Clone, Copy, Debug, Default)]
struct InflightRequest {
    /// Id of the request; 0 for a free entry.
    request_id: u64,
    /// QP on which the last copy arrived.
    qp_id: u32,
}

/// Requests in progress of one peer in one incarnation.
#[derive(Clone, Debug)]
pub struct InflightRequests {
    low_watermark: u64,
    requests: [InflightRequest; MAX_INFLIGHT],
}

impl Default for InflightRequests {
    fn default() -> Self {
        Self {
            low_watermark: 0,
            requests: [InflightRequest::default(); MAX_INFLIGHT],
        }
    }
}

impl InflightRequests {
    /// Admits a request that arrived on QP `qp_id` with its sender's `low_watermark`. A `request_id` of 0 is
    /// rejected.
    ///
    /// `is_undo` is `true` if the request may undo the effect of an earlier one. If the function returns
    /// `true`, the caller must execute the request and then call [`Self::complete`].
    #[must_use]
    pub fn admit(
        &mut self,
        request_id: u64,
        low_watermark: u64,
        is_undo: bool,
        qp_id: u32,
    ) -> bool {
        self.low_watermark = self.low_watermark.max(low_watermark);
        let is_stale = request_id < self.low_watermark;
        let mut inflight = self.requests.iter().filter(|open| open.request_id != 0);
        let conflicts_with_stale = is_undo && inflight.any(|open| open.request_id < low_watermark);
        if request_id == 0 || is_stale {
            return false;
        }
        if let Some(duplicate) = self.find(request_id) {
            duplicate.qp_id = qp_id;
            return false;
        }
        let free = self.find(0).filter(|_| !conflicts_with_stale);
        free.map(|slot| *slot = InflightRequest { request_id, qp_id })
            .is_some()
    }

    fn find(&mut self, request_id: u64) -> Option<&mut InflightRequest> {
        self.requests
            .iter_mut()
            .find(|open| open.request_id == request_id)
    }

    /// Returns `true` if the sender may still be waiting for the reply to a request.
    pub fn is_live(&self, request_id: u64) -> bool {
        request_id >= self.low_watermark
    }

    /// Marks a request as executed. Returns the QP for the reply, or `None` if the request is not in
    /// progress.
    pub fn complete(&mut self, request_id: u64) -> Option<u32> {
        self.find(request_id)
            .map(|open| core::mem::take(open).qp_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QP: u32 = 7;

    #[test]
    fn completed_request_is_admitted_again() {
        let mut ledger = InflightRequests::default();
        assert!(ledger.admit(3, 3, false, QP));
        assert!(!ledger.admit(3, 3, false, QP), "while a copy is at work");
        ledger.complete(3);
        assert!(ledger.admit(3, 3, false, QP), "the answer may be lost");
    }

    #[test]
    fn duplicate_below_the_low_watermark_is_dropped() {
        let mut ledger = InflightRequests::default();
        assert!(ledger.admit(3, 3, false, QP));
        ledger.complete(3);
        assert!(ledger.admit(4, 4, true, QP));
        assert!(ledger.is_live(4) && !ledger.is_live(3));
        assert!(!ledger.admit(3, 3, false, QP));
    }

    #[test]
    fn complete_returns_the_qp_of_the_last_duplicate() {
        let mut ledger = InflightRequests::default();
        assert!(ledger.admit(3, 3, false, 1));
        assert!(ledger.admit(4, 3, false, 2));
        assert!(!ledger.admit(3, 3, false, 5));
        assert_eq!((ledger.complete(3), ledger.complete(4)), (Some(5), Some(2)));
        assert_eq!(ledger.complete(3), None);
        assert!(ledger.admit(3, 3, false, 6));
        assert_eq!(ledger.complete(3), Some(6));
    }

    #[test]
    fn undo_request_is_refused_while_a_stale_request_is_served() {
        let mut ledger = InflightRequests::default();
        assert!(ledger.admit(3, 3, false, QP));
        assert!(!ledger.admit(4, 4, true, QP));
        assert!(ledger.admit(5, 4, false, QP), "others need not wait");
        ledger.complete(3);
        assert!(ledger.admit(4, 4, true, QP));
    }

    #[test]
    fn concurrent_requests_are_admitted_up_to_the_limit() {
        let mut ledger = InflightRequests::default();
        let all = || 1..=MAX_INFLIGHT as u64;
        assert!(all().all(|call| ledger.admit(call, 1, true, QP)));
        assert!(!ledger.admit(100, 1, true, QP), "no room");
        ledger.complete(7);
        assert!(ledger.admit(100, 1, true, QP));
    }

    proptest! {
        /// The sender has one request at a time and resends it at random. The receiver gets and completes
        /// copies in any order. When a request is admitted, no earlier one is in progress, and none is
        /// admitted later.
        #[test]
        fn requests_take_effect_in_order(steps in prop::collection::vec((0u8..3, 0usize..8), 0..400)) {
            let mut ledger = InflightRequests::default();
            let (mut current, mut sent_copies, mut at_work) = (1u64, vec![1u64], Vec::new());
            let mut answered = false;
            for (step, pick) in steps {
                match step {
                    0 if answered => {
                        current += 1;
                        answered = false;
                        sent_copies.push(current);
                    }
                    0 => sent_copies.push(current),
                    1 if !sent_copies.is_empty() => {
                        let copy = sent_copies.swap_remove(pick % sent_copies.len());
                        if ledger.admit(copy, copy, true, QP) {
                            prop_assert!(at_work.is_empty(), "{copy} begins during {at_work:?}");
                            at_work.push(copy);
                        }
                    }
                    2 if !at_work.is_empty() => {
                        let done = at_work.swap_remove(pick % at_work.len());
                        ledger.complete(done);
                        answered |= done == current;
                    }
                    _ => {}
                }
            }
        }
    }
}
