// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Small machines, and users who want more than they have.

use std::time::Duration;

use kite_cluster::{Cluster, Result, Setup};

const SOON: Duration = Duration::from_secs(30);

/// The gauges of a node on which nothing goes on: the sessions are kited's and the one that asks.
const IDLE: &str = "sessions=2 mappings=0 inflight=0 regions=0 lent_bytes=0";

/// A user who asks for more memory than there is does not get it, and nobody dies for it.
#[test]
fn a_region_larger_than_the_memory_is_refused_and_kills_nobody() -> Result<()> {
    let cluster = Cluster::builder().nodes(2).memory(512).boot()?;
    cluster.start_kite(&Setup::default())?;
    let (one, two) = (cluster.node(1), cluster.node(2));
    one.workload("errors huge").user("alice").sh()?;
    for nodes in ["1", "1,2", "2"] {
        let got = one.attempt("alice", &format!("alloc 3000000000 --nodes {nodes}"))?;
        assert_eq!(got, "ENOMEM", "on {nodes}");
        for node in [one, two] {
            let killed = node.sh("dmesg | grep -i 'out of memory\\|oom-kill' || true")?;
            assert_eq!(killed, "", "on {nodes}: {}", node.name());
            node.sh("pgrep -x kited")?;
        }
    }
    for node in [one, two] {
        node.await_gauges(IDLE, SOON)?;
    }
    assert_eq!(one.attempt("alice", "alloc 9000000 --nodes 1,2")?, "OK");
    cluster.shutdown()
}
