// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Results of a run, and their ratios.

mod json;
pub(crate) mod picture;
pub(crate) mod table;

use std::collections::BTreeMap;

use kite_bench::statistics::Spread;

use crate::cell::{Cell, Contender, Metric};
use crate::measure::alloc_scaling::AllocPoint;
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::measure::node_memory::NodeMemory;
use crate::measure::rings;
use crate::measure::scale::ScalePoint;
use crate::measure::scatter;
use crate::measure::sharing::Sharing;
use crate::rnic_work::RnicWork;

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
