// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What is reckoned from times and counts.

use serde::Serialize;

/// Ticks over which a rate is taken.
const WINDOW: usize = 20;

/// Some times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Times {
    pub(crate) min: f64,
    pub(crate) median: f64,
    /// So much or less is 99 % of them.
    pub(crate) p99: f64,
}

impl Times {
    /// Returns the figures of at least one time, in nanoseconds.
    pub(crate) fn of(mut ns: Vec<u64>) -> Option<Self> {
        ns.sort_unstable();
        let last = ns.len().checked_sub(1)?;
        let at = |percent: usize| ns[(last * percent).div_ceil(100)] as f64 / 1e6;
        Some(Self {
            min: at(0),
            median: at(50),
            p99: at(99),
        })
    }
}

/// When a count for each tick has reached what it stays at.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Plateau {
    /// The tick from which on there is nine tenths of it, over twenty ticks.
    pub(crate) tick: usize,
    /// Steady rate: the mean of the second half, per tick.
    pub(crate) rate: f64,
}

/// Finds it; there is none if nothing is counted in the second half.
pub(crate) fn plateau(ticks: &[u64]) -> Option<Plateau> {
    let rate = mean(&ticks[ticks.len() / 2..]);
    let mut windows = ticks.windows(WINDOW.min(ticks.len().max(1)));
    let tick = windows.position(|window| mean(window) >= 0.9 * rate)?;
    (rate > 0.0).then_some(Plateau { tick, rate })
}

fn mean(counts: &[u64]) -> f64 {
    counts.iter().sum::<u64>() as f64 / counts.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_are_in_order() {
        let times = Times::of((1..=200).rev().map(|ms| ms * 1_000_000).collect()).unwrap();
        assert_eq!((times.min, times.median, times.p99), (1.0, 101.0, 199.0));
        let one = Times::of(vec![5_000_000]).unwrap();
        assert_eq!((one.min, one.median, one.p99), (5.0, 5.0, 5.0));
        assert_eq!(Times::of(vec![]), None);
    }

    #[test]
    fn a_plateau_begins_where_it_is_reached() {
        let steps = [vec![0; 100], vec![10; 400]].concat();
        let Plateau { tick, rate } = plateau(&steps).unwrap();
        assert_eq!(rate, 10.0);
        assert!((95..=100).contains(&tick), "{tick}");
        assert_eq!(plateau(&[0; 50]), None);
        assert_eq!(plateau(&[]), None);
    }

    proptest! {
        #[test]
        fn no_counts_are_too_odd(ticks in prop::collection::vec(0..1000u64, 0..100)) {
            if let Some(Plateau { tick, rate }) = plateau(&ticks) {
                prop_assert!(tick < ticks.len() && rate > 0.0);
            }
        }
    }
}
