// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Report as JSON. Ratios are written for other readers: [`Report::from_json`] computes them from the rounds.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

use super::{cpus, Report, Row};
use crate::cell::{Cell, Contender};
use crate::measure::alloc_scaling::{self, AllocPoint};
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::measure::node_memory::NodeMemory;
use crate::measure::rings;
use crate::measure::scale::{self, ScalePoint};
use crate::measure::scatter::{self, ScatterPoint};
use crate::measure::sharing::{self, Sharing};
use crate::rnic_work::{RnicWork, COUNTERS};

impl Row {
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

impl Report {
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

    /// Parses what [`Self::json`] returns.
    pub(crate) fn from_json(text: &str) -> Result<Self> {
        let parsed: ParsedReport = serde_json::from_str(text)?;
        let rows = parsed.rows.into_iter().map(ParsedRow::into_row);
        let scale = parsed.scale.into_iter();
        Ok(Self {
            fabric: parsed.fabric,
            rounds: parsed.rounds,
            load: [parsed.host_load_before, parsed.host_load_after],
            rows: rows.collect::<Result<_>>()?,
            alloc_scaling: parsed.alloc_scaling,
            sharing: parsed.sharing,
            scatter: parsed.scatter,
            rnic_work: parsed.counts_per_request,
            node_memory: parsed.bytes_per_node,
            mesh: parsed.mesh,
            lookup: parsed.lookup,
            scale: scale.map(|scale| scale.thousands_per_second).collect(),
            rings: parsed.rings,
        })
    }
}

/// Members of the JSON text that the report needs.
#[derive(Deserialize)]
struct ParsedReport {
    fabric: String,
    rounds: u32,
    host_load_before: Option<f64>,
    host_load_after: Option<f64>,
    rows: Vec<ParsedRow>,
    alloc_scaling: Vec<AllocPoint>,
    sharing: Vec<Sharing>,
    scatter: Vec<ScatterPoint>,
    counts_per_request: Vec<RnicWork>,
    bytes_per_node: Option<NodeMemory>,
    mesh: Option<Mesh>,
    lookup: Option<Lookup>,
    scale: Vec<ParsedScale>,
    rings: Vec<rings::RingUse>,
}

/// Members of a row that the report needs.
#[derive(Deserialize)]
struct ParsedRow {
    #[serde(flatten)]
    cell: Cell,
    operations_per_round: u64,
    contenders: BTreeMap<String, ParsedRounds>,
}

#[derive(Deserialize)]
struct ParsedRounds {
    rounds: Vec<f64>,
}

#[derive(Deserialize)]
struct ParsedScale {
    thousands_per_second: ScalePoint,
}

impl ParsedRow {
    fn into_row(self) -> Result<Row> {
        let Self {
            cell, contenders, ..
        } = self;
        let mut row = Row::new(cell, self.operations_per_round);
        for (name, ParsedRounds { rounds }) in contenders {
            let mut all = cell.metric.contenders().iter();
            let contender = all.find(|contender| contender.name() == name);
            let contender =
                contender.with_context(|| format!("{cell}: unknown contender {name}"))?;
            row.values.insert(*contender, rounds);
        }
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Metric;

    fn report() -> Report {
        let cell = Cell::of_metrics(&[Metric::Latency]).next().unwrap();
        let mut row = Row::new(cell, 100);
        for round in 1..=3 {
            row.add(Contender::Kite, f64::from(round) * 3.0);
            row.add(Contender::Verbs, f64::from(round) * 2.0);
        }
        Report {
            fabric: "rxe".into(),
            rounds: 3,
            load: [None, Some(1.5)],
            rows: vec![row],
            alloc_scaling: vec![AllocPoint::parse("1 2000").unwrap()],
            sharing: vec![Sharing {
                policy: "sw".into(),
                high: vec![sharing::Sample::parse(1.0, "250 1048576").unwrap()],
                low: Vec::new(),
            }],
            scale: vec![ScalePoint {
                nodes: 2,
                kite_calls: 4.0,
                tcp_calls: 2.0,
                kite_writes: 1.0,
                verbs_writes: 2.0,
            }],
            rings: rings::all().to_vec(),
            ..Report::default()
        }
    }

    #[test]
    fn json_contains_rounds_and_ratios() {
        let json: Value = serde_json::from_str(&report().json()).unwrap();
        assert_eq!(json["host_load_after"], 1.5);
        let row = &json["rows"][0];
        assert_eq!(row["contenders"]["kite"]["rounds"][2], 9.0);
        assert_eq!(row["contenders"]["verbs"]["spread"]["median"], 4.0);
        assert_eq!(row["kite_to_verbs"]["median"], 1.5);
        assert_eq!(row["kite_to_tcp"], Value::Null);
        assert_eq!(json["rings"][1]["sizes"], "values");
    }

    #[test]
    fn parsed_report_has_the_same_json() {
        let json = report().json();
        assert_eq!(Report::from_json(&json).unwrap().json(), json);
    }

    #[test]
    fn unknown_contender_and_missing_member_are_rejected() {
        let json = report().json();
        assert!(Report::from_json(&json.replace("\"verbs\"", "\"sockets\"")).is_err());
        assert!(Report::from_json(&json.replace("\"rounds\"", "\"turns\"")).is_err());
    }
}
