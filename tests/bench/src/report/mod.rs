// SPDX-License-Identifier: GPL-2.0 OR MIT
//! All that was measured, and what it comes to.

pub(crate) mod picture;
pub(crate) mod table;

use std::collections::BTreeMap;

use kite_bench::statistics::Spread;
use serde::Serialize;
use serde_json::{json, Value};

use crate::account::{Account, COUNTERS};
use crate::cell::{Cell, Contender, Kind};
use crate::measure::alloc_scaling::{self, AllocPoint};
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::measure::nodes::Nodes;
use crate::measure::rings;
use crate::measure::scale::{self, Scale};
use crate::measure::scatter;
use crate::measure::sharing::{self, Sharing};

/// The values of one cell, a round after the other.
pub(crate) struct Row {
    pub(crate) cell: Cell,
    /// Operations of each value.
    pub(crate) count: u64,
    values: BTreeMap<Contender, Vec<f64>>,
}

impl Row {
    pub(crate) fn new(cell: Cell, count: u64) -> Self {
        Row {
            cell,
            count,
            values: BTreeMap::new(),
        }
    }

    pub(crate) fn add(&mut self, contender: Contender, value: f64) {
        self.values.entry(contender).or_default().push(value);
    }

    fn values(&self, contender: Contender) -> &[f64] {
        self.values.get(&contender).map_or(&[], Vec::as_slice)
    }

    /// Returns the spread of the rounds of a contender.
    pub(crate) fn spread(&self, contender: Contender) -> Option<Spread> {
        Spread::of(self.values(contender).iter().copied())
    }

    /// Returns the spread of the ratios of two contenders.
    pub(crate) fn ratio(&self, contender: Contender, to: Contender) -> Option<Spread> {
        Spread::of_ratios(self.values(contender), self.values(to))
    }

    /// The last round in a line.
    pub(crate) fn last(&self) -> String {
        let mut line = format!("{} ({}):", self.cell, self.cell.kind.unit());
        for (contender, values) in &self.values {
            if let Some(value) = values.last() {
                line += &format!(" {} {value:.1}", contender.name());
            }
        }
        line
    }

    fn json(&self) -> Value {
        let contenders: BTreeMap<_, _> = self
            .values
            .iter()
            .map(|(contender, rounds)| {
                let spread = self.spread(*contender);
                (
                    contender.name(),
                    json!({ "rounds": rounds, "spread": spread }),
                )
            })
            .collect();
        json!({
            "kind": self.cell.kind,
            "unit": self.cell.kind.unit(),
            "operation": self.cell.operation,
            "axis": self.cell.kind.axis(),
            "at": self.cell.at,
            "operations_per_round": self.count,
            "contenders": contenders,
            "kite_to_verbs": self.ratio(Contender::Kite, Contender::Verbs),
            "kite_to_tcp": self.ratio(Contender::Kite, Contender::Tcp),
            "kite_to_verbs_in_kernel": self.ratio(Contender::KiteKernel, Contender::VerbsKernel),
            "kite_queue_to_verbs": self.ratio(Contender::KiteQueue, Contender::Verbs),
            "kite_rc_to_verbs": self.ratio(Contender::KiteRc, Contender::Verbs),
            "kite_dc_to_verbs": self.ratio(Contender::KiteDc, Contender::Verbs),
            "kite_vqp_to_verbs": self.ratio(Contender::KiteVqp, Contender::Verbs),
            "kite_vqp_to_tcp": self.ratio(Contender::KiteVqp, Contender::Tcp),
            "kite_vqp_to_kernel_rc": self.ratio(Contender::KiteVqp, Contender::KernelRc),
            "kite_vqp_to_verbs_kept": self.ratio(Contender::KiteVqp, Contender::VerbsKept),
            "kite_opened_to_verbs": self.ratio(Contender::KiteOpened, Contender::Verbs),
            "kite_to_two_writes": self.ratio(Contender::Kite, Contender::TwoWrites),
            "kite_threads_to_verbs": self.ratio(Contender::KiteThreads, Contender::Verbs),
        })
    }
}

/// The result of a run.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) fabric: String,
    pub(crate) rounds: u32,
    pub(crate) load: [Option<f64>; 2],
    pub(crate) rows: Vec<Row>,
    /// Empty if it was not measured.
    pub(crate) alloc_scaling: Vec<AllocPoint>,
    /// Likewise, and so are the next.
    pub(crate) sharing: Vec<Sharing>,
    pub(crate) scatter: Vec<scatter::ScatterPoint>,
    pub(crate) accounts: Vec<Account>,
    pub(crate) nodes: Option<Nodes>,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) lookup: Option<Lookup>,
    pub(crate) scale: Vec<Scale>,
    pub(crate) rings: Vec<rings::Use>,
}

impl Report {
    /// The kinds that were measured.
    pub(crate) fn kinds(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = self.rows.iter().map(|row| row.cell.kind).collect();
        kinds.dedup();
        kinds
    }

    pub(crate) fn json(&self) -> String {
        #[derive(Serialize)]
        struct Whole<'a> {
            fabric: &'a str,
            rounds: u32,
            host_load_before: Option<f64>,
            host_load_after: Option<f64>,
            host_processors: Option<usize>,
            rows: Vec<Value>,
            regions: Value,
            sharing: Value,
            scatter: Value,
            counters: [&'static str; COUNTERS.len()],
            counted_for_an_operation: &'a [Account],
            bytes_per_node: Option<Nodes>,
            mesh: Option<Mesh>,
            lookup: Option<Lookup>,
            scale: Value,
            rings: &'a [rings::Use],
        }
        let [host_load_before, host_load_after] = self.load;
        let whole = Whole {
            fabric: &self.fabric,
            rounds: self.rounds,
            host_load_before,
            host_load_after,
            host_processors: processors(),
            rows: self.rows.iter().map(Row::json).collect(),
            regions: alloc_scaling::json(&self.alloc_scaling),
            sharing: sharing::json(&self.sharing),
            scatter: scatter::json(&self.scatter),
            counters: COUNTERS,
            counted_for_an_operation: &self.accounts,
            bytes_per_node: self.nodes,
            mesh: self.mesh,
            lookup: self.lookup,
            scale: scale::json(&self.scale),
            rings: &self.rings,
        };
        format!("{:#}\n", json!(whole))
    }
}

/// Returns the number of processors that the machines share.
pub(crate) fn processors() -> Option<usize> {
    std::thread::available_parallelism().ok().map(usize::from)
}

/// The average number of runnable tasks of the last minute.
pub(crate) fn host_load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_rounds_and_ratios() {
        let cell = Cell::of(&[Kind::Latency]).next().unwrap();
        let mut row = Row::new(cell, 100);
        for round in 1..=3 {
            row.add(Contender::Kite, f64::from(round) * 3.0);
            row.add(Contender::Verbs, f64::from(round) * 2.0);
        }
        let report = Report {
            fabric: "rxe".into(),
            rounds: 3,
            load: [None, Some(1.5)],
            rows: vec![row],
            alloc_scaling: Vec::new(),
            sharing: Vec::new(),
            scatter: Vec::new(),
            accounts: Vec::new(),
            nodes: None,
            mesh: None,
            lookup: None,
            scale: Vec::new(),
            rings: rings::all().to_vec(),
        };
        let json: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["host_load_after"], 1.5);
        let row = &json["rows"][0];
        assert_eq!(row["contenders"]["kite"]["rounds"][2], 9.0);
        assert_eq!(row["contenders"]["verbs"]["spread"]["median"], 4.0);
        assert_eq!(row["kite_to_verbs"]["median"], 1.5);
        assert_eq!(row["kite_to_tcp"], Value::Null);
        assert_eq!(json["rings"][1]["what"], "values");
    }
}
