// SPDX-License-Identifier: GPL-2.0

//! Barriers: who comes waits until as many have come as there are to be, and all go on (LITE:
//! `LT_barrier`, which has one without a name for the whole cluster).
//!
//! A barrier can be used again and again. Each time it lets a crowd pass is a generation, so who gave up
//! waiting sees by the next number whether the others went on without him.

/// A barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Barrier {
    /// Crowds that have passed.
    generation: u64,
    /// As how many the present crowd is to pass.
    count: u32,
    /// How many of it have come.
    arrived: u32,
}

/// What one finds who comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArriveResult {
    /// He is to wait.
    Wait,
    /// He is the last: all pass, as this generation, which is 1 the first time.
    Release(u64),
    /// Others wait for a crowd of another size.
    CountMismatch,
}

impl Barrier {
    /// One more comes to a crowd of `count`.
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

    /// One who waits goes away.
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
        /// Whoever comes and goes: a crowd passes when, and only when, all of it are there.
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
