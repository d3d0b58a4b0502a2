// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Cost of an allocation and a free with a growing number of regions. It must not grow: no table may be searched
//! linearly.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

/// Numbers of existing regions. The first is the baseline.
pub(crate) const COUNTS: [u64; 6] = [1, 10, 100, 1_000, 10_000, 100_000];

/// Cost of an allocation and a free with a number of regions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AllocPoint {
    pub(crate) regions: u64,
    /// Thousands of instructions of both nodes. The clock counts an idle nanosecond as one instruction.
    pub(crate) value: f64,
}

impl AllocPoint {
    /// Parses a line of `kite-workload alloc-scaling`: number of regions, and time in nanoseconds.
    pub(crate) fn parse(line: &str) -> Result<Self> {
        let parse = || {
            let (regions, ns) = line.split_once(' ')?;
            let value = ns.parse::<f64>().ok()? / 1e3;
            let regions = regions.parse().ok()?;
            Some(Self { regions, value })
        };
        parse().with_context(|| format!("unexpected output of kite-workload alloc-scaling: {line}"))
    }
}

/// Returns each point with the ratio of its value to that of the first one.
pub(crate) fn ratios(points: &[AllocPoint]) -> impl Iterator<Item = (AllocPoint, f64)> + '_ {
    let first = points.first().map_or(f64::NAN, |point| point.value);
    points
        .iter()
        .map(move |point| (*point, point.value / first))
}

pub(crate) fn json(points: &[AllocPoint]) -> Value {
    ratios(points)
        .map(|(point, ratio)| json!({ "regions": point.regions, "value": point.value, "ratio": ratio }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_parsed_and_errors_are_rejected() {
        let point = AllocPoint::parse("1000 250500").unwrap();
        assert_eq!((point.regions, point.value), (1000, 250.5));
        for line in ["", "1000", "kite-workload: ENOMEM", "1000 fast"] {
            assert!(AllocPoint::parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn ratios_are_relative_to_the_first_point() {
        let points = ["1 2000", "10 3000"].map(|line| AllocPoint::parse(line).unwrap());
        let all: Vec<f64> = ratios(&points).map(|(_, ratio)| ratio).collect();
        assert_eq!(all, [1.0, 1.5]);
        assert_eq!(json(&points)[1]["ratio"], 1.5);
        assert_eq!(json(&[]), json!([]));
    }
}
