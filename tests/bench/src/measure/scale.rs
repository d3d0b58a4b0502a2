// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Growing number of nodes, each of which calls the next one and writes to it (LITE, figure 14). The nodes share the
//! CPUs of one host, so only contenders on the same number of nodes are comparable.

use anyhow::{Context, Result};
use kite_cluster::{Cluster, Fabric, Node, Process};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

use crate::cell::Contender;
use crate::command::PROGRAM_DIR;
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::node_pair::{setup, Servers, BASELINE_PORT, TIMEOUT};
use crate::parse::number;

/// Numbers of nodes.
pub(crate) const COUNTS: [usize; 3] = [2, 4, 6];

/// Number of writes of each node.
const WRITES: u32 = 3_000;

/// Thousands of operations per second of all nodes together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScalePoint {
    pub(crate) nodes: usize,
    pub(crate) kite_calls: f64,
    pub(crate) tcp_calls: f64,
    pub(crate) kite_writes: f64,
    pub(crate) verbs_writes: f64,
}

impl ScalePoint {
    pub(crate) fn calls_ratio(&self) -> f64 {
        self.kite_calls / self.tcp_calls
    }

    pub(crate) fn writes_ratio(&self) -> f64 {
        self.kite_writes / self.verbs_writes
    }
}

pub(crate) fn json(all: &[ScalePoint]) -> Value {
    let point_json = |scale: &ScalePoint| {
        json!({
            "nodes": scale.nodes,
            "thousands_per_second": scale,
            "kite_to_tcp": scale.calls_ratio(),
            "kite_to_verbs": scale.writes_ratio(),
        })
    };
    all.iter().map(point_json).collect()
}

/// Results of connections between all nodes, and of their lookups.
pub(crate) type ConnectCosts = (Mesh, Lookup);

/// Boots six nodes, and measures the first 2, 4 and 6 of them. Calls `on_point` after each number. On a fabric with DC,
/// also measures and returns the full mesh, before, and lookups, after.
pub(crate) fn measure(
    fabric: Fabric,
    mut on_point: impl FnMut(ScalePoint),
) -> Result<Option<ConnectCosts>> {
    let max_nodes = COUNTS[COUNTS.len() - 1];
    let builder = Cluster::builder().name("bench-scale").nodes(max_nodes);
    let cluster = builder.fabric(fabric).boot()?;
    cluster.start_kite(&setup())?;
    let servers = (1..=max_nodes)
        .map(|number| Servers::start(cluster.node(number), &rpc_region(number), None));
    let servers = servers.collect::<Result<Vec<_>>>()?;
    let has_dc = Contender::KiteVqp.is_supported_on(fabric);
    let mesh = has_dc.then(|| Mesh::measure(&cluster)).transpose()?;
    for nodes in COUNTS {
        on_point(measure_nodes(&cluster, nodes)?);
    }
    let measure_lookup = |mesh| Ok((mesh, Lookup::measure(&cluster, &rpc_region(1))?));
    let connect_costs = mesh.map(measure_lookup).transpose();
    for server in servers {
        server.stop()?;
    }
    cluster.shutdown()?;
    connect_costs
}

/// Returns the name of the region for RPCs to a node.
fn rpc_region(number: usize) -> String {
    format!("rpc-{number}")
}

fn measure_nodes(cluster: &Cluster, nodes: usize) -> Result<ScalePoint> {
    // Runs a program on each node. Its server is the next node of a ring.
    let run_on_each = |arguments: &dyn Fn(usize, &Node) -> String,
                       rate: fn(&str) -> Result<f64>| {
        let start = |number: usize| {
            let next = number % nodes + 1;
            let arguments = arguments(next, cluster.node(next));
            Ok(cluster
                .node(number)
                .spawn(&format!("{PROGRAM_DIR}/kite-baseline {arguments}"))?)
        };
        let processes = (1..=nodes).map(start).collect::<Result<Vec<_>>>()?;
        sum(processes, rate)
    };
    let load = |next: &Node, option: &str| {
        let address = next.address();
        format!("load {address}:{BASELINE_PORT} {option} --clients 2 --seconds 4")
    };
    let calls = |output: &str| Ok(number(output, "/calls_per_second")? / 1e3);
    let writes = |output: &str| Ok(1e3 / number(output, "/mean_us")?);
    Ok(ScalePoint {
        nodes,
        kite_calls: run_on_each(
            &|next, node| load(node, &format!("--kite {}", rpc_region(next))),
            calls,
        )?,
        tcp_calls: run_on_each(&|_, node| load(node, ""), calls)?,
        kite_writes: run_on_each(
            &|next, _| format!("scatter --kite {next} --writes {WRITES}"),
            writes,
        )?,
        verbs_writes: run_on_each(
            &|_, node| {
                format!(
                    "scatter {}:{BASELINE_PORT} --writes {WRITES}",
                    node.address()
                )
            },
            writes,
        )?,
    })
}

/// Waits for the processes. Returns the sum of their rates.
fn sum(processes: Vec<Process>, rate: fn(&str) -> Result<f64>) -> Result<f64> {
    processes.into_iter().try_fold(0.0, |sum, mut process| {
        let output = process.wait(TIMEOUT)?;
        Ok(sum + rate(&output.stdout).with_context(|| output.stderr.clone())?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_between_contenders_on_the_same_nodes() {
        let scale = ScalePoint {
            nodes: 4,
            kite_calls: 3.0,
            tcp_calls: 2.0,
            kite_writes: 1.0,
            verbs_writes: 4.0,
        };
        let json = json(&[scale]);
        assert_eq!(
            (&json[0]["kite_to_tcp"], &json[0]["kite_to_verbs"]),
            (&1.5.into(), &0.25.into())
        );
    }
}
