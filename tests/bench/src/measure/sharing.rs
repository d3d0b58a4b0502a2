// SPDX-License-Identifier: GPL-2.0 OR MIT
//! How two priorities share an RNIC over time: first there is high alone, then low comes, and then high goes
//! (LITE, figures 16 and 17, with streams of writes).

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{json, Value};

/// The policies, and the one that others are compared with first.
pub(crate) const POLICIES: [&str; 3] = ["none", "sw", "hw"];

/// Seconds of high alone, of both, and of low alone.
pub(crate) const PHASES: [f64; 3] = [4.0, 10.0, 4.0];

/// Seconds after a change that count for no mean: low has to be noticed.
const SETTLING: f64 = 1.0;

/// Bytes written in an interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Sample {
    /// Seconds since high began.
    pub(crate) at: f64,
    /// MiB/s.
    pub(crate) rate: f64,
}

impl Sample {
    /// Reads a line of the program that writes, which came at that time.
    pub(crate) fn parse(at: f64, line: &str) -> Result<Self> {
        let parse = || {
            let (ms, bytes) = line.split_once(' ')?;
            let (ms, bytes) = (ms.parse::<f64>().ok()?, bytes.parse::<f64>().ok()?);
            let rate = bytes / (1 << 20) as f64 / (ms / 1e3);
            rate.is_finite().then_some(Self { at, rate })
        };
        parse().with_context(|| format!("no measurement: {line}"))
    }
}

/// Results of a policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sharing {
    pub(crate) policy: &'static str,
    pub(crate) high: Vec<Sample>,
    pub(crate) low: Vec<Sample>,
}

/// The mean within a phase, when it has settled.
fn mean(samples: &[Sample], phase: usize) -> f64 {
    let start: f64 = PHASES[..phase].iter().sum();
    let during = start + SETTLING..start + PHASES[phase];
    let rates = samples.iter().filter(|sample| during.contains(&sample.at));
    let (sum, count) = rates.fold((0.0, 0.0), |(sum, count), sample| {
        (sum + sample.rate, count + 1.0)
    });
    sum / count
}

impl Sharing {
    /// The part of its lone bandwidth that high has beside low.
    pub(crate) fn kept(&self) -> f64 {
        mean(&self.high, 1) / mean(&self.high, 0)
    }

    /// Both together, beside both together under another policy.
    pub(crate) fn total_to(&self, other: &Self) -> f64 {
        let total = |sharing: &Self| mean(&sharing.high, 1) + mean(&sharing.low, 1);
        total(self) / total(other)
    }
}

pub(crate) fn json(all: &[Sharing]) -> Value {
    let one = |sharing: &Sharing| {
        json!({
            "policy": sharing.policy,
            "high_to_alone": sharing.kept(),
            "total_to_none": all.first().map(|none| sharing.total_to(none)),
            "high": sharing.high,
            "low": sharing.low,
        })
    };
    all.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(rate: f64, from: f64, to: f64) -> Vec<Sample> {
        let times = (0..).map(|i| from + f64::from(i) / 4.0);
        let times = times.take_while(|at| *at < to);
        times.map(|at| Sample { at, rate }).collect()
    }

    #[test]
    fn line_is_parsed_and_errors_are_rejected() {
        let sample = Sample::parse(2.0, "500 1048576").unwrap();
        assert_eq!((sample.at, sample.rate), (2.0, 2.0));
        for line in ["", "500", "0 5", "x 1"] {
            assert!(Sample::parse(0.0, line).is_err(), "{line}");
        }
    }

    #[test]
    fn what_is_kept_is_of_what_it_had_alone() {
        let high = [steady(100.0, 0.0, 4.0), steady(90.0, 4.0, 14.0)].concat();
        let low = [steady(30.0, 4.0, 14.0), steady(120.0, 14.0, 18.0)].concat();
        let policy = "sw";
        let sharing = Sharing { policy, high, low };
        assert_eq!(sharing.kept(), 0.9);
        let mut other = sharing.clone();
        other.low = steady(60.0, 4.0, 14.0);
        assert_eq!(sharing.total_to(&other), 0.8);
        assert_eq!(json(&[sharing])[0]["total_to_none"], 1.0);
    }
}
