// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Results of a run, and their ratios, as JSON.

pub(crate) mod picture;
pub(crate) mod table;

use std::collections::BTreeMap;

use kite_bench::statistics::Spread;
use serde::Serialize;
use serde_json::{json, Value};

use crate::cell::{Cell, Contender, Metric};
use crate::measure::alloc_scaling::{self, AllocPoint};
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::measure::node_memory::NodeMemory;
use crate::measure::rings;
use crate::measure::scale::{self, ScalePoint};
use crate::measure::scatter;
use crate::measure::sharing::{self, Sharing};
use crate::rnic_work::{RnicWork, COUNTERS};

/// Values of one cell in all rounds.
pub(crate) struct Row {
    pub(crate) cell: Cell,
    /// Operations per value.
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

    /// Adds the value of a round.
    pub(crate) fn add(&mut self, contender: Contender, value: f64) {
        self.values.entry(contender).or_default().push(value);
    }

    fn values(&self, contender: Contender) -> &[f64] {
        self.values.get(&contender).map_or(&[], Vec::as_slice)
    }

    /// Returns the spread of the rounds of a contender.
    pub(crate) fn spread(&self, contender: Contender) -> Option<Spread> {
        Spread::from_values(self.values(contender).iter().copied())
    }

    /// Returns the spread of the ratios of two contenders.
    pub(crate) fn ratio(&self, contender: Contender, base: Contender) -> Option<Spread> {
        Spread::from_ratios(self.values(contender), self.values(base))
    }

    /// Returns a line with the values of the last round.
    pub(crate) fn last(&self) -> String {
        let mut line = format!("{} ({}):", self.cell, self.cell.metric.unit());
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
            "metric": self.cell.metric,
            "unit": self.cell.metric.unit(),
            "operation": self.cell.operation,
            "axis": self.cell.metric.axis(),
            "point": self.cell.point,
            "operations_per_round": self.count,
            "contenders": contenders,
            "kite_to_verbs": self.ratio(Contender::Kite, Contender::Verbs),
            "kite_to_tcp": self.ratio(Contender::Kite, Contender::Tcp),
            "kite_to_verbs_in_kernel": self.ratio(Contender::KiteKernel, Contender::VerbsKernel),
            "kite_queue_to_verbs": self.ratio(Contender::KiteQueue, Contender::Verbs),
            "kite_rc_to_verbs": self.ratio(Contender::KiteVqpRc, Contender::Verbs),
            "kite_dc_to_verbs": self.ratio(Contender::KiteVqpDc, Contender::Verbs),
            "kite_vqp_to_verbs": self.ratio(Contender::KiteVqp, Contender::Verbs),
            "kite_vqp_to_tcp": self.ratio(Contender::KiteVqp, Contender::Tcp),
            "kite_vqp_to_kernel_rc": self.ratio(Contender::KiteVqp, Contender::KernelRc),
            "kite_vqp_to_verbs_kept": self.ratio(Contender::KiteVqp, Contender::VerbsKept),
            "kite_new_session_to_verbs": self.ratio(Contender::KiteNewSession, Contender::Verbs),
            "kite_to_two_writes": self.ratio(Contender::Kite, Contender::TwoWrites),
            "kite_threads_to_verbs": self.ratio(Contender::KiteThreads, Contender::Verbs),
        })
    }
}

/// Results of a run. Measurements that were not made are empty.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) fabric: String,
    pub(crate) rounds: u32,
    /// Load of the host before and after the run.
    pub(crate) load: [Option<f64>; 2],
    pub(crate) rows: Vec<Row>,
    pub(crate) alloc_scaling: Vec<AllocPoint>,
    pub(crate) sharing: Vec<Sharing>,
    pub(crate) scatter: Vec<scatter::ScatterPoint>,
    pub(crate) rnic_work: Vec<RnicWork>,
    pub(crate) node_memory: Option<NodeMemory>,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) lookup: Option<Lookup>,
    pub(crate) scale: Vec<ScalePoint>,
    pub(crate) rings: Vec<rings::RingUse>,
}

impl Report {
    /// Returns the measured metrics.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let mut metrics: Vec<Metric> = self.rows.iter().map(|row| row.cell.metric).collect();
        metrics.dedup();
        metrics
    }

    /// Returns the report as JSON.
    pub(crate) fn json(&self) -> String {
        #[derive(Serialize)]
        struct JsonReport<'a> {
            fabric: &'a str,
            rounds: u32,
            host_load_before: Option<f64>,
            host_load_after: Option<f64>,
            host_cpus: Option<usize>,
            rows: Vec<Value>,
            alloc_scaling: Value,
            sharing: Value,
            scatter: Value,
            counters: [&'static str; COUNTERS.len()],
            counts_per_request: &'a [RnicWork],
            bytes_per_node: Option<NodeMemory>,
            mesh: Option<Mesh>,
            lookup: Option<Lookup>,
            scale: Value,
            rings: &'a [rings::RingUse],
        }
        let [host_load_before, host_load_after] = self.load;
        let report = JsonReport {
            fabric: &self.fabric,
            rounds: self.rounds,
            host_load_before,
            host_load_after,
            host_cpus: cpus(),
            rows: self.rows.iter().map(Row::json).collect(),
            alloc_scaling: alloc_scaling::json(&self.alloc_scaling),
            sharing: sharing::json(&self.sharing),
            scatter: scatter::json(&self.scatter),
            counters: COUNTERS,
            counts_per_request: &self.rnic_work,
            bytes_per_node: self.node_memory,
            mesh: self.mesh,
            lookup: self.lookup,
            scale: scale::json(&self.scale),
            rings: &self.rings,
        };
        format!("{:#}\n", json!(report))
    }
}

/// Returns the number of CPUs of the host.
pub(crate) fn cpus() -> Option<usize> {
    std::thread::available_parallelism().ok().map(usize::from)
}

/// Returns the load average of the last minute.
pub(crate) fn host_load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_contains_rounds_and_ratios() {
        let cell = Cell::of_metrics(&[Metric::Latency]).next().unwrap();
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
            rnic_work: Vec::new(),
            node_memory: None,
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
        assert_eq!(json["rings"][1]["sizes"], "values");
    }
}
