// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Summary statistics of latencies.

use std::time::Duration;

use serde::Serialize;

/// Summary statistics in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct LatencySummary {
    pub(super) min_us: f64,
    pub(super) median_us: f64,
    pub(super) mean_us: f64,
    pub(super) p99_us: f64,
    pub(super) max_us: f64,
}

impl LatencySummary {
    /// Returns `None` if `times` is empty.
    pub(super) fn from_times(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let (&min, &max) = (times.first()?, times.last()?);
        let mean = times.iter().sum::<Duration>().as_secs_f64() / times.len() as f64;
        Some(Self {
            min_us: to_us(min),
            median_us: to_us(percentile(&times, 50)),
            mean_us: mean * 1e6,
            p99_us: to_us(percentile(&times, 99)),
            max_us: to_us(max),
        })
    }
}

/// Returns the smallest time that at least `percent` of all times do not exceed.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

fn to_us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(times: impl IntoIterator<Item = u64>) -> Option<LatencySummary> {
        LatencySummary::from_times(times.into_iter().map(Duration::from_micros).collect())
    }

    #[test]
    fn no_times_have_no_summary() {
        assert_eq!(summary([]), None);
    }

    #[test]
    fn single_time_is_every_statistic() {
        let one = summary([7]).unwrap();
        for value in [
            one.min_us,
            one.median_us,
            one.mean_us,
            one.p99_us,
            one.max_us,
        ] {
            assert!((value - 7.0).abs() < 1e-9);
        }
    }

    #[test]
    fn percentiles_do_not_depend_on_order() {
        let all = summary((1..=200).rev()).unwrap();
        assert!((all.min_us - 1.0).abs() < 1e-9);
        assert!((all.median_us - 100.0).abs() < 1e-9);
        assert!((all.mean_us - 100.5).abs() < 1e-9);
        assert!((all.p99_us - 198.0).abs() < 1e-9);
        assert!((all.max_us - 200.0).abs() < 1e-9);
    }
}
