// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What both RNICs do for an operation. That depends little on how fast emulated machines are.
//!
//! Operations are done some times, and then more often. What the latter costs more is shared by so many more of them:
//! what is done once, before and after them, is in neither.

use anyhow::Result;
use serde::Serialize;

use crate::cell::{Cell, Contender, Kind, Operation};

/// Operations of the two runs. From the first number on the warm-up is the same.
const TIMES: [u64; 2] = [10_000, 50_000];

/// Counters of the model, by its names.
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
pub(crate) type Counts = [u64; COUNTERS.len()];

/// For one operation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Account {
    pub(crate) cell: Cell,
    pub(crate) contender: Contender,
    /// In the order of [`COUNTERS`].
    pub(crate) counts: Vec<f64>,
}

/// All that are looked at.
pub(crate) fn all() -> impl Iterator<Item = (Cell, Contender)> {
    let cell = |kind, operation| Cell {
        kind,
        operation,
        at: 8,
    };
    let cells = [
        cell(Kind::Latency, Operation::Read),
        cell(Kind::Latency, Operation::Write),
        cell(Kind::Rate, Operation::Read),
        cell(Kind::Echo, Operation::Echo),
    ];
    cells.into_iter().flat_map(|cell| {
        let contenders = cell.kind.contenders().iter().copied();
        let others = [Contender::Tcp, Contender::Perftest];
        contenders
            .filter(move |contender| !others.contains(contender))
            .map(move |contender| (cell, contender))
    })
}

impl Account {
    /// Measures a contender: `cost` executes a number of operations and returns their counts.
    pub(crate) fn of(
        (cell, contender): (Cell, Contender),
        cost: impl Fn(u64) -> Result<Counts>,
    ) -> Result<Self> {
        let [few, many] = TIMES;
        let (of_few, of_many) = (cost(few)?, cost(many)?);
        let each = |(more, less): (u64, u64)| (more as f64 - less as f64) / (many - few) as f64;
        Ok(Self {
            cell,
            contender,
            counts: of_many.into_iter().zip(of_few).map(each).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_once_does_not_count() {
        let which = all().next().unwrap();
        let account = Account::of(which, |times| {
            Ok(std::array::from_fn(|i| 1000 + i as u64 * times))
        });
        assert_eq!(account.unwrap().counts, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn contenders_include_verbs_and_exclude_tcp() {
        let names: Vec<_> = all().map(|(_, contender)| contender.name()).collect();
        assert!(
            names.contains(&"verbs") && !names.contains(&"TCP"),
            "{names:?}"
        );
    }
}
