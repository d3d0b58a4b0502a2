// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Priorities and limits: which requests are throttled, for how long, and that no others are.

mod limits;
mod priorities;
mod throttling;

use std::time::Duration;

use kite_cluster::{Cluster, Node, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("qos").nodes(2));
const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Returns two nodes without limits, and with a region "shared" on node 2.
fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::patient())?;
    let one = pair.node(1);
    one.sh("kite=/kite/target/release/kite; $kite free shared 2>/dev/null || true")?;
    one.kite("qos --policy sw")?;
    one.kite("limit --user $(id -u alice) --remove")?;
    one.kite("alloc shared 64M --node 2 --other-rights rw")?;
    Ok(pair)
}

/// Runs a command with `--json`. Returns the parsed output.
fn json(node: &Node, arguments: &str) -> Result<serde_json::Value> {
    let text = node.kite(&format!("{arguments} --json"))?;
    Ok(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// Returns the counters of the only limit.
fn used(node: &Node) -> Result<serde_json::Value> {
    let limits = json(node, "limit")?;
    assert_eq!(limits.as_array().map(Vec::len), Some(1), "{limits}");
    Ok(limits[0]["used"].clone())
}

/// Parses the output of `requests`: number of requests, milliseconds, and the first error.
fn parse_requests(output: &str) -> (u64, u64, String) {
    let line = output.lines().last().unwrap_or_default();
    let (done, error) = line.split_once(", then ").unwrap_or((line, ""));
    let mut words = done.split_whitespace();
    let mut number = || words.find_map(|word| word.parse().ok());
    match (number(), number()) {
        (Some(count), Some(ms)) => (count, ms, error.to_owned()),
        _ => panic!("{output}"),
    }
}

fn requests(node: &Node, user: &str, line: &str) -> Result<String> {
    let requests = node.workload(&format!("requests {line}"));
    requests.user(user).limit(LONG).sh()
}
