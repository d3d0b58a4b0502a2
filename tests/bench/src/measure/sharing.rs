// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Bandwidth of two priorities that share an RNIC, over time. Phases: high only, both, low only (LITE, figures 16 and
//! 17, with streams of writes).

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

/// Policies. The first one is the baseline of the others.
pub(crate) const POLICIES: [&str; 3] = ["none", "sw", "hw"];

/// Seconds of the phases: high only, both, low only.
pub(crate) const PHASES: [f64; 3] = [4.0, 10.0, 4.0];

/// Settling time in seconds after the start of a phase, excluded from means.
const SETTLING_SECONDS: f64 = 1.0;

/// Bandwidth in an interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Seconds since the start of high.
    pub(crate) seconds: f64,
    /// MiB/s.
    pub(crate) rate: f64,
}

impl Sample {
    /// Parses a line of `kite-workload stream`, received at this time: interval in ms, and bytes.
    pub(crate) fn parse(seconds: f64, line: &str) -> Result<Self> {
        let parse = || {
            let (ms, bytes) = line.split_once(' ')?;
            let (ms, bytes) = (ms.parse::<f64>().ok()?, bytes.parse::<f64>().ok()?);
            let rate = bytes / (1 << 20) as f64 / (ms / 1e3);
            rate.is_finite().then_some(Self { seconds, rate })
        };
        parse().with_context(|| format!("unexpected output of kite-workload stream: {line}"))
    }
}

/// Results of a policy.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Sharing {
    pub(crate) policy: String,
    pub(crate) high: Vec<Sample>,
    pub(crate) low: Vec<Sample>,
}

/// Returns the mean bandwidth of a phase, without the settling time.
fn mean(samples: &[Sample], phase: usize) -> f64 {
    let start: f64 = PHASES[..phase].iter().sum();
    let during = start + SETTLING_SECONDS..start + PHASES[phase];
    let rates = samples
        .iter()
        .filter(|sample| during.contains(&sample.seconds));
    let (sum, count) = rates.fold((0.0, 0.0), |(sum, count), sample| {
        (sum + sample.rate, count + 1.0)
    });
    sum / count
}

impl Sharing {
    /// Returns the share of its bandwidth alone that high keeps beside low.
    pub(crate) fn kept_share(&self) -> f64 {
        mean(&self.high, 1) / mean(&self.high, 0)
    }

    /// Returns the ratio of the total bandwidth to that under another policy.
    pub(crate) fn total_ratio(&self, other: &Self) -> f64 {
        let total = |sharing: &Self| mean(&sharing.high, 1) + mean(&sharing.low, 1);
        total(self) / total(other)
    }
}

pub(crate) fn json(all: &[Sharing]) -> Value {
    let policy_json = |sharing: &Sharing| {
        json!({
            "policy": sharing.policy,
            "high_to_alone": sharing.kept_share(),
            "total_to_none": all.first().map(|none| sharing.total_ratio(none)),
            "high": sharing.high,
            "low": sharing.low,
        })
    };
    all.iter().map(policy_json).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(rate: f64, from: f64, to: f64) -> Vec<Sample> {
        let times = (0..).map(|i| from + f64::from(i) / 4.0);
        let times = times.take_while(|seconds| *seconds < to);
        times.map(|seconds| Sample { seconds, rate }).collect()
    }

    #[test]
    fn line_is_parsed_and_errors_are_rejected() {
        let sample = Sample::parse(2.0, "500 1048576").unwrap();
        assert_eq!((sample.seconds, sample.rate), (2.0, 2.0));
        for line in ["", "500", "0 5", "x 1"] {
            assert!(Sample::parse(0.0, line).is_err(), "{line}");
        }
    }

    #[test]
    fn kept_share_is_relative_to_high_alone() {
        let high = [steady(100.0, 0.0, 4.0), steady(90.0, 4.0, 14.0)].concat();
        let low = [steady(30.0, 4.0, 14.0), steady(120.0, 14.0, 18.0)].concat();
        let policy = "sw".into();
        let sharing = Sharing { policy, high, low };
        assert_eq!(sharing.kept_share(), 0.9);
        let mut other = sharing.clone();
        other.low = steady(60.0, 4.0, 14.0);
        assert_eq!(sharing.total_ratio(&other), 0.8);
        assert_eq!(json(&[sharing])[0]["total_to_none"], 1.0);
    }
}
