// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Medians and spreads. A median because one disturbed round must not decide, a spread because the
//! reader has to see whether the machine was quiet.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The least.
    pub min_us: f64,
    /// Half of the times are not above it.
    pub median_us: f64,
    /// The average.
    pub mean_us: f64,
    /// All but one in a hundred are not above it.
    pub p99_us: f64,
}

impl Times {
    /// Returns the statistics, or `None` without times.
    pub fn of(mut times: Vec<Duration>) -> Option<Self> {
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

/// A median, and the values farthest from it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the values are not above it.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

impl Spread {
    /// Returns the statistics, or `None` without values or if a value is not a number.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
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

    /// Returns the statistics of ratios of values that were measured one after the other: a disturbance of a round
    /// affects both values.
    pub fn of_ratios(values: &[f64], to: &[f64]) -> Option<Self> {
        Self::of(values.iter().zip(to).map(|(value, to)| value / to))
    }
}

/// The least value that `percent` of all do not exceed.
fn rank<T>(sorted: &[T], percent: usize) -> Option<&T> {
    sorted.get((sorted.len() * percent).div_ceil(100).max(1) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_no_values_are_none() {
        assert_eq!(Times::of(Vec::new()), None);
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of_ratios(&[1.0], &[]), None);
    }

    #[test]
    fn times_return_minimum_median_p99_and_mean() {
        let times = Times::of((1..=100).rev().map(Duration::from_micros).collect()).unwrap();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(near(times.min_us, 1.0) && near(times.median_us, 50.0));
        assert!(near(times.p99_us, 99.0) && near(times.mean_us, 50.5));
    }

    #[test]
    fn median_of_even_count_is_mean_of_middle_values() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (2.5, 1.0, 4.0));
        assert_eq!(Spread::of([7.0]).unwrap().median, 7.0);
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let spread = Spread::of_ratios(&[2.0, 20.0, 9.0], &[1.0, 10.0, 3.0]).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (2.0, 2.0, 3.0));
    }

    #[test]
    fn a_division_by_zero_is_no_ratio() {
        assert_eq!(Spread::of_ratios(&[1.0], &[0.0]), None);
    }
}
