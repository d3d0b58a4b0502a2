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
    passed: u64,
    /// As how many the present crowd is to pass.
    count: u32,
    /// How many of it have come.
    here: u32,
}

/// What one finds who comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// He is to wait.
    Waits,
    /// He is the last: all pass, as this generation, which is 1 the first time.
    Passes(u64),
    /// Others wait for a crowd of another size.
    OtherCount,
}

impl Barrier {
    /// One more comes to a crowd of `count`.
    #[must_use]
    pub fn arrive(&mut self, count: u32) -> Arrival {
        if self.here != 0 && self.count != count {
            return Arrival::OtherCount;
        }
        self.count = count;
        if count.saturating_sub(self.here) > 1 {
            self.here += 1;
            return Arrival::Waits;
        }
        self.here = 0;
        self.passed += 1;
        Arrival::Passes(self.passed)
    }

    /// One who waits goes away.
    pub fn leave(&mut self) {
        self.here = self.here.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_lets_all_pass() {
        let mut barrier = Barrier::default();
        for generation in 1..4 {
            assert_eq!(barrier.arrive(3), Arrival::Waits);
            assert_eq!(barrier.arrive(3), Arrival::Waits);
            assert_eq!(barrier.arrive(3), Arrival::Passes(generation));
        }
        assert_eq!(barrier.arrive(1), Arrival::Passes(4));
    }

    #[test]
    fn a_crowd_agrees_on_its_size() {
        let mut barrier = Barrier::default();
        assert_eq!(barrier.arrive(2), Arrival::Waits);
        assert_eq!(barrier.arrive(3), Arrival::OtherCount);
        barrier.leave();
        assert_eq!(barrier.arrive(3), Arrival::Waits);
    }

    proptest! {
        /// Whoever comes and goes: a crowd passes when, and only when, all of it are there.
        #[test]
        fn nobody_passes_alone(count in 1u32..6, steps in prop::collection::vec(any::<bool>(), 0..200)) {
            let (mut barrier, mut here, mut passed) = (Barrier::default(), 0, 0);
            for comes in steps {
                if comes {
                    here += 1;
                    let expected = if here == count {
                        (here, passed) = (0, passed + 1);
                        Arrival::Passes(passed)
                    } else {
                        Arrival::Waits
                    };
                    prop_assert_eq!(barrier.arrive(count), expected);
                } else if here != 0 {
                    here -= 1;
                    barrier.leave();
                }
            }
        }
    }
}
