// SPDX-License-Identifier: GPL-2.0

//! Which calls of a peer are being answered, and which came too late.
//!
//! A request is sent again when its queue pair failed or its answer is late, so copies of it may arrive
//! at any time, even after the request that undoes it: memory would be lent to a call that nobody
//! makes any more. Each request therefore says below which number all calls of the sender have ended
//! (its *floor*). A copy from below the floor is dropped, and so is one of which another copy is being
//! answered; and nothing is undone while a copy from below the floor is still at work. Whoever was not
//! answered asks again.
//!
//! The answer goes by the queue pair by which the last copy came, dropped or not: there the sender has a
//! receive for it, while it may have given up those by which earlier ones came.

/// Calls of one peer that are answered at a time. More are dropped.
const MAX_INFLIGHT: usize = 64;

/// A call that is being answered.
#[derive(Clone, Copy, Debug, Default)]
struct InflightRequest {
    /// Its number; 0 is none.
    request_id: u64,
    /// The queue pair by which it last came.
    qp_id: u32,
}

/// The calls of one peer in one life.
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
    /// Enters `call`, a number above 0, whose request came by the queue pair `by`, states `floor`, and
    /// perhaps undoes what an earlier one did. Returns whether to answer it; then [`Self::complete`] is to be
    /// told of the end.
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

    /// Whether anybody still wants `call` to be answered.
    pub fn is_live(&self, request_id: u64) -> bool {
        request_id >= self.low_watermark
    }

    /// What `call` asked for is done. Returns the queue pair by which to answer.
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
        /// A caller that makes calls one after another, each resent at will, while the receiver gets and
        /// finishes copies in any order: when a call is begun, no earlier one is at work or ever begins.
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
