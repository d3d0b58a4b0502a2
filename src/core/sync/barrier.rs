// SPDX-License-Identifier: GPL-2.0

//! Barriers: each arrival waits until a given number of participants has arrived, then all proceed.
//!
//! LITE has `LT_barrier`, a single unnamed barrier for the whole cluster. A barrier is reusable. Each release
//! is a generation. A participant that canceled its wait can detect from the next generation number that the
//! waiters were released without it.

/// Reusable barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Barrier {
    /// Number of completed rounds.
    generation: u64,
    /// Number of participants of the current round.
    count: u32,
    /// Number of participants of the current round that have arrived.
    arrived: u32,
}

/// Result of an arrival at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArriveResult {
    /// The participant must wait.
    Wait,
    /// The participant is the last: all are released with this generation, which is 1 for the first round.
    Release(u64),
    /// The waiters of the current round specified another number of participants.
    CountMismatch,
}

impl Barrier {
    /// Adds an arrival to the current round, of `count` participants.
    #[must_use]
    pub fn arrive(&mut self, count: u32) -> ArriveResult {
        if self.arrived != 0 && self.count != count {
            return ArriveResult::CountMismatch;
        }
        self.count = count;
        if count.saturating_sub(self.arrived) > 1 {
            self.arrived += 1;
            return ArriveResult::Wait;
        }
        self.arrived = 0;
        self.generation += 1;
        ArriveResult::Release(self.generation)
    }

    /// Removes a waiter from the current round.
    pub fn cancel_wait(&mut self) {
        self.arrived = self.arrived.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn last_arrival_releases_all_waiters() {
        let mut barrier = Barrier::default();
        for generation in 1..4 {
            assert_eq!(barrier.arrive(3), ArriveResult::Wait);
            assert_eq!(barrier.arrive(3), ArriveResult::Wait);
            assert_eq!(barrier.arrive(3), ArriveResult::Release(generation));
        }
        assert_eq!(barrier.arrive(1), ArriveResult::Release(4));
    }

    #[test]
    fn arrival_with_another_count_is_rejected() {
        let mut barrier = Barrier::default();
        assert_eq!(barrier.arrive(2), ArriveResult::Wait);
        assert_eq!(barrier.arrive(3), ArriveResult::CountMismatch);
        barrier.cancel_wait();
        assert_eq!(barrier.arrive(3), ArriveResult::Wait);
    }

    proptest! {
        /// Random arrivals and cancellations: a round is released if and only if all participants have
        /// arrived.
        #[test]
        fn barrier_releases_only_when_all_have_arrived(count in 1u32..6, arrivals in prop::collection::vec(any::<bool>(), 0..200)) {
            let (mut barrier, mut arrived, mut generation) = (Barrier::default(), 0, 0);
            for arrives in arrivals {
                if arrives {
                    arrived += 1;
                    let expected = if arrived == count {
                        (arrived, generation) = (0, generation + 1);
                        ArriveResult::Release(generation)
                    } else {
                        ArriveResult::Wait
                    };
                    prop_assert_eq!(barrier.arrive(count), expected);
                } else if arrived != 0 {
                    arrived -= 1;
                    barrier.cancel_wait();
                }
            }
        }
    }
}
