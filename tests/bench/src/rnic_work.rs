// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Operations of both RNICs per request: the difference of two runs, divided by the difference of their lengths.
//! One-time costs cancel. The result does not depend on the speed of the emulated machines.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::cell::{Cell, Contender, Metric, Operation};

/// Requests of the two runs. From 10,000 on the length of the warm-up is constant.
const RUN_LENGTHS: [u64; 2] = [10_000, 50_000];

/// Names of the counters of the software ConnectX.
pub(crate) const COUNTERS: [&str; 7] = [
    "doorbells",
    "wqes",
    "packets_sent",
    "cqes",
    "interrupts",
    "dma_reads",
    "dma_writes",
];

/// Value of each counter.
pub(crate) type CounterValues = [u64; COUNTERS.len()];

/// Operations of both RNICs per request of a contender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RnicWork {
    pub(crate) cell: Cell,
    pub(crate) contender: Contender,
    /// In the order of [`COUNTERS`].
    pub(crate) counts: Vec<f64>,
}

/// Returns the measured cells and contenders.
pub(crate) fn cases() -> impl Iterator<Item = (Cell, Contender)> {
    let cell = |metric, operation| Cell {
        metric,
        operation,
        point: 8,
    };
    let cells = [
        cell(Metric::Latency, Operation::Read),
        cell(Metric::Latency, Operation::Write),
        cell(Metric::Rate, Operation::Read),
        cell(Metric::Echo, Operation::Echo),
    ];
    cells.into_iter().flat_map(|cell| {
        let contenders = cell.metric.contenders().iter().copied();
        let excluded = [Contender::Tcp, Contender::Perftest];
        contenders
            .filter(move |contender| !excluded.contains(contender))
            .map(move |contender| (cell, contender))
    })
}

impl RnicWork {
    /// Measures a contender. `run` executes a number of requests, and returns the increase of the counters.
    pub(crate) fn measure(
        (cell, contender): (Cell, Contender),
        run: impl Fn(u64) -> Result<CounterValues>,
    ) -> Result<Self> {
        let [short, long] = RUN_LENGTHS;
        let (of_short, of_long) = (run(short)?, run(long)?);
        let per_request = |(long_count, short_count): (u64, u64)| {
            (long_count as f64 - short_count as f64) / (long - short) as f64
        };
        Ok(Self {
            cell,
            contender,
            counts: of_long.into_iter().zip(of_short).map(per_request).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_time_costs_are_excluded() {
        let case = cases().next().unwrap();
        let work = RnicWork::measure(case, |requests| {
            Ok(std::array::from_fn(|i| 1000 + i as u64 * requests))
        });
        assert_eq!(work.unwrap().counts, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn contenders_include_verbs_and_exclude_tcp() {
        let names: Vec<_> = cases().map(|(_, contender)| contender.name()).collect();
        assert!(
            names.contains(&"verbs") && !names.contains(&"TCP"),
            "{names:?}"
        );
    }
}
