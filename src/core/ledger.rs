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
const ROOM: usize = 64;

/// A call that is being answered.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    /// Its number; 0 is none.
    call: u64,
    /// The queue pair by which it last came.
    by: u32,
}

/// The calls of one peer in one life.
#[derive(Clone, Debug)]
pub struct Ledger {
    floor: u64,
    open: [Open; ROOM],
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            floor: 0,
            open: [Open::default(); ROOM],
        }
    }
}

impl Ledger {
    /// Enters `call`, a number above 0, whose request came by the queue pair `by`, states `floor`, and
    /// perhaps undoes what an earlier one did. Returns whether to answer it; then [`Self::end`] is to be
    /// told of the end.
    #[must_use]
    pub fn begin(&mut self, call: u64, floor: u64, undoes: bool, by: u32) -> bool {
        self.floor = self.floor.max(floor);
        let late = call < self.floor;
        let mut open = self.open.iter().filter(|open| open.call != 0);
        let haunted = undoes && open.any(|open| open.call < floor);
        if call == 0 || late {
            return false;
        }
        if let Some(copied) = self.find(call) {
            copied.by = by;
            return false;
        }
        let free = self.find(0).filter(|_| !haunted);
        free.map(|place| *place = Open { call, by }).is_some()
    }

    fn find(&mut self, call: u64) -> Option<&mut Open> {
        self.open.iter_mut().find(|open| open.call == call)
    }

    /// Whether anybody still wants `call` to be answered.
    pub fn wants(&self, call: u64) -> bool {
        call >= self.floor
    }

    /// What `call` asked for is done. Returns the queue pair by which to answer.
    pub fn end(&mut self, call: u64) -> Option<u32> {
        self.find(call).map(|open| core::mem::take(open).by)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QP: u32 = 7;

    #[test]
    fn a_call_is_answered_again_after_it_was_answered() {
        let mut ledger = Ledger::default();
        assert!(ledger.begin(3, 3, false, QP));
        assert!(!ledger.begin(3, 3, false, QP), "while a copy is at work");
        ledger.end(3);
        assert!(ledger.begin(3, 3, false, QP), "the answer may be lost");
    }

    #[test]
    fn a_copy_that_comes_after_the_end_of_its_call_is_dropped() {
        let mut ledger = Ledger::default();
        assert!(ledger.begin(3, 3, false, QP));
        ledger.end(3);
        assert!(ledger.begin(4, 4, true, QP));
        assert!(ledger.wants(4) && !ledger.wants(3));
        assert!(!ledger.begin(3, 3, false, QP));
    }

    #[test]
    fn the_answer_goes_by_the_queue_pair_of_the_last_copy() {
        let mut ledger = Ledger::default();
        assert!(ledger.begin(3, 3, false, 1));
        assert!(ledger.begin(4, 3, false, 2));
        assert!(!ledger.begin(3, 3, false, 5));
        assert_eq!((ledger.end(3), ledger.end(4)), (Some(5), Some(2)));
        assert_eq!(ledger.end(3), None);
        assert!(ledger.begin(3, 3, false, 6));
        assert_eq!(ledger.end(3), Some(6));
    }

    #[test]
    fn what_undoes_a_call_waits_for_its_last_copy() {
        let mut ledger = Ledger::default();
        assert!(ledger.begin(3, 3, false, QP));
        assert!(!ledger.begin(4, 4, true, QP));
        assert!(ledger.begin(5, 4, false, QP), "others need not wait");
        ledger.end(3);
        assert!(ledger.begin(4, 4, true, QP));
    }

    #[test]
    fn calls_at_once_do_not_hinder_each_other() {
        let mut ledger = Ledger::default();
        let all = || 1..=ROOM as u64;
        assert!(all().all(|call| ledger.begin(call, 1, true, QP)));
        assert!(!ledger.begin(100, 1, true, QP), "no room");
        ledger.end(7);
        assert!(ledger.begin(100, 1, true, QP));
    }

    proptest! {
        /// A caller that makes calls one after another, each resent at will, while the receiver gets and
        /// finishes copies in any order: when a call is begun, no earlier one is at work or ever begins.
        #[test]
        fn calls_take_effect_in_order(steps in prop::collection::vec((0u8..3, 0usize..8), 0..400)) {
            let mut ledger = Ledger::default();
            let (mut current, mut sent, mut at_work) = (1u64, vec![1u64], Vec::new());
            let mut answered = false;
            for (step, pick) in steps {
                match step {
                    0 if answered => {
                        current += 1;
                        answered = false;
                        sent.push(current);
                    }
                    0 => sent.push(current),
                    1 if !sent.is_empty() => {
                        let copy = sent.swap_remove(pick % sent.len());
                        if ledger.begin(copy, copy, true, QP) {
                            prop_assert!(at_work.is_empty(), "{copy} begins during {at_work:?}");
                            at_work.push(copy);
                        }
                    }
                    2 if !at_work.is_empty() => {
                        let done = at_work.swap_remove(pick % at_work.len());
                        ledger.end(done);
                        answered |= done == current;
                    }
                    _ => {}
                }
            }
        }
    }
}
