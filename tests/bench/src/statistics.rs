// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Medians and spreads. The median is robust against a disturbed round, and the spread shows how quiet the host was.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Minimum.
    pub min_us: f64,
    /// Median.
    pub median_us: f64,
    /// Mean.
    pub mean_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}

impl Times {
    /// Returns the statistics, or `None` without times.
    pub fn from_durations(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let mean = us(times.iter().sum()) / times.len() as f64;
        Some(Times {
            min_us: us(*times.first()?),
            median_us: us(*rank(&times, 50)?),
            mean_us: mean,
            p99_us: us(*rank(&times, 99)?),
        })
    }
}

/// Median, minimum and maximum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    /// Returns the statistics, or `None` without values or if a value is not a number.
    pub fn from_values(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_unstable_by(f64::total_cmp);
        if values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
        Some(Spread {
            median: (values[low] + values[high]) / 2.0,
            min: *values.first()?,
            max: *values.last()?,
        })
    }

    /// Returns the statistics of the ratios `values[i] / bases[i]`. Both values are of the same round, so a disturbance
    /// affects both.
    pub fn from_ratios(values: &[f64], bases: &[f64]) -> Option<Self> {
        Self::from_values(values.iter().zip(bases).map(|(value, base)| value / base))
    }
}

/// Returns the percentile of sorted values, by nearest rank.
fn rank<T>(sorted: &[T], percent: usize) -> Option<&T> {
    sorted.get((sorted.len() * percent).div_ceil(100).max(1) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_no_values_are_none() {
        assert_eq!(Times::from_durations(Vec::new()), None);
        assert_eq!(Spread::from_values([]), None);
        assert_eq!(Spread::from_ratios(&[1.0], &[]), None);
    }

    #[test]
    fn times_return_minimum_median_p99_and_mean() {
        let times =
            Times::from_durations((1..=100).rev().map(Duration::from_micros).collect()).unwrap();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(near(times.min_us, 1.0) && near(times.median_us, 50.0));
        assert!(near(times.p99_us, 99.0) && near(times.mean_us, 50.5));
    }

    #[test]
    fn median_of_even_count_is_mean_of_middle_values() {
        let spread = Spread::from_values([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (2.5, 1.0, 4.0));
        assert_eq!(Spread::from_values([7.0]).unwrap().median, 7.0);
    }

    #[test]
    fn ratios_use_values_of_the_same_round() {
        let spread = Spread::from_ratios(&[2.0, 20.0, 9.0], &[1.0, 10.0, 3.0]).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (2.0, 2.0, 3.0));
    }

    #[test]
    fn division_by_zero_returns_none() {
        assert_eq!(Spread::from_ratios(&[1.0], &[0.0]), None);
    }
}
