// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Ever more nodes, each of which calls the next and writes to it (LITE, figure 14). They share the
//! processors of one host, so what counts is kite beside the others among as many nodes.

use anyhow::{Context, Result};
use kite_cluster::{Cluster, Fabric, Node, Process};
use serde::Serialize;
use serde_json::{json, Value};

use crate::cell::Contender;
use crate::command::{number, PROGRAMS};
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::pair::{setup, Servers, PATIENCE, PORT};

/// Numbers of nodes.
pub(crate) const COUNTS: [usize; 3] = [2, 4, 6];

/// Writes of each node.
const WRITES: u32 = 3_000;

/// Thousands in a second, of all nodes together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Scale {
    pub(crate) nodes: usize,
    pub(crate) kite_calls: f64,
    pub(crate) tcp_calls: f64,
    pub(crate) kite_writes: f64,
    pub(crate) verbs_writes: f64,
}

impl Scale {
    pub(crate) fn calls_ratio(&self) -> f64 {
        self.kite_calls / self.tcp_calls
    }

    pub(crate) fn writes_ratio(&self) -> f64 {
        self.kite_writes / self.verbs_writes
    }
}

pub(crate) fn json(all: &[Scale]) -> Value {
    let one = |scale: &Scale| {
        json!({
            "nodes": scale.nodes,
            "thousands_per_second": scale,
            "kite_to_tcp": scale.calls_ratio(),
            "kite_to_verbs": scale.writes_ratio(),
        })
    };
    all.iter().map(one).collect()
}

/// Results of connections between all nodes, and of their lookups.
pub(crate) type ConnectCosts = (Mesh, Lookup);

/// Boots as many nodes as it takes, and calls `each` with what was measured of some of them. Returns how they
/// connected to each other before, and looked each other up after, if that is by DC.
pub(crate) fn measure(fabric: Fabric, mut each: impl FnMut(Scale)) -> Result<Option<ConnectCosts>> {
    let most = COUNTS[COUNTS.len() - 1];
    let builder = Cluster::builder().name("bench-scale").nodes(most);
    let cluster = builder.fabric(fabric).boot()?;
    cluster.start_kite(&setup())?;
    let servers =
        (1..=most).map(|number| Servers::start(cluster.node(number), &called(number), None));
    let servers = servers.collect::<Result<Vec<_>>>()?;
    let dynamic = Contender::KiteVqp.runs_on(fabric);
    let mesh = dynamic.then(|| Mesh::of(&cluster)).transpose()?;
    for nodes in COUNTS {
        each(measure_one(&cluster, nodes)?);
    }
    let looked_up = |mesh| Ok((mesh, Lookup::of(&cluster, &called(1))?));
    let both = mesh.map(looked_up).transpose();
    for server in servers {
        server.end()?;
    }
    cluster.shutdown()?;
    both
}

/// The region that a node is called by.
fn called(number: usize) -> String {
    format!("called-{number}")
}

fn measure_one(cluster: &Cluster, nodes: usize) -> Result<Scale> {
    // A ring of nodes.
    let each = |line: &dyn Fn(usize, &Node) -> String, rate: fn(&str) -> Result<f64>| {
        let start = |number: usize| {
            let next = number % nodes + 1;
            let line = line(next, cluster.node(next));
            Ok(cluster
                .node(number)
                .spawn(&format!("{PROGRAMS}/kite-baseline {line}"))?)
        };
        let processes = (1..=nodes).map(start).collect::<Result<Vec<_>>>()?;
        sum(processes, rate)
    };
    let load = |next: &Node, how: &str| {
        let address = next.address();
        format!("load {address}:{PORT} {how} --clients 2 --seconds 4")
    };
    let calls = |output: &str| Ok(number(output, "/calls_per_second")? / 1e3);
    let writes = |output: &str| Ok(1e3 / number(output, "/mean_us")?);
    Ok(Scale {
        nodes,
        kite_calls: each(
            &|next, node| load(node, &format!("--kite {}", called(next))),
            calls,
        )?,
        tcp_calls: each(&|_, node| load(node, ""), calls)?,
        kite_writes: each(
            &|next, _| format!("scatter --kite {next} --writes {WRITES}"),
            writes,
        )?,
        verbs_writes: each(
            &|_, node| format!("scatter {}:{PORT} --writes {WRITES}", node.address()),
            writes,
        )?,
    })
}

/// Returns the sum of all rates.
fn sum(processes: Vec<Process>, rate: fn(&str) -> Result<f64>) -> Result<f64> {
    processes.into_iter().try_fold(0.0, |sum, mut process| {
        let output = process.wait(PATIENCE)?;
        Ok(sum + rate(&output.stdout).with_context(|| output.stderr.clone())?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_as_many_nodes() {
        let scale = Scale {
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
