// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Percentiles of times, and plateau of a rate.

use serde::Serialize;

/// Ticks of a sliding window.
const WINDOW_TICKS: usize = 20;

/// Percentiles of times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) min: f64,
    pub(crate) median: f64,
    /// 99th percentile.
    pub(crate) p99: f64,
}

impl Percentiles {
    /// Returns the percentiles of times in nanoseconds, or `None` if there are none.
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

/// Plateau of a count per tick.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Plateau {
    /// First tick of a window of 20 ticks whose mean is at least 90 % of the rate.
    pub(crate) tick: usize,
    /// Rate per tick: the mean of the second half.
    pub(crate) rate: f64,
}

/// Returns the plateau, or `None` if the counts of the second half are 0.
pub(crate) fn plateau(ticks: &[u64]) -> Option<Plateau> {
    let rate = mean(&ticks[ticks.len() / 2..]);
    let mut windows = ticks.windows(WINDOW_TICKS.min(ticks.len().max(1)));
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
    fn percentiles_of_known_times_are_exact() {
        let times = Percentiles::of((1..=200).rev().map(|ms| ms * 1_000_000).collect()).unwrap();
        assert_eq!((times.min, times.median, times.p99), (1.0, 101.0, 199.0));
        let one = Percentiles::of(vec![5_000_000]).unwrap();
        assert_eq!((one.min, one.median, one.p99), (5.0, 5.0, 5.0));
        assert_eq!(Percentiles::of(vec![]), None);
    }

    #[test]
    fn plateau_starts_at_the_step_of_the_count() {
        let steps = [vec![0; 100], vec![10; 400]].concat();
        let Plateau { tick, rate } = plateau(&steps).unwrap();
        assert_eq!(rate, 10.0);
        assert!((95..=100).contains(&tick), "{tick}");
        assert_eq!(plateau(&[0; 50]), None);
        assert_eq!(plateau(&[]), None);
    }

    proptest! {
        #[test]
        fn plateau_of_arbitrary_counts_is_in_range(ticks in prop::collection::vec(0..1000u64, 0..100)) {
            if let Some(Plateau { tick, rate }) = plateau(&ticks) {
                prop_assert!(tick < ticks.len() && rate > 0.0);
            }
        }
    }
}
