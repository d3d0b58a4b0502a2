// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Migration of regions in use: no data is lost, also if processes or nodes die meanwhile.

mod data;
mod failure;

use std::time::Duration;

use kite_cluster::{Cluster, Node, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("moves").nodes(3));
const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// Gauges of an idle node. The sessions are those of kited and of the reader.
const IDLE: &str = "sessions=2 open_handles=0 inflight=0";

/// Frees the regions of an earlier test that failed.
fn free_all_regions(trio: &Cluster) -> Result<()> {
    let free = "kite=/kite/target/release/kite; \
                for name in $($kite regions | awk 'NR > 1 { print $1 }'); do $kite free $name; done";
    trio.node(1).sh(free).map(drop)
}

/// Returns three nodes, none of which is removed for its silence.
fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    free_all_regions(&trio)?;
    Ok(trio)
}

/// Asserts that all lent memory is freed.
fn assert_idle(node: &Node) -> Result<()> {
    node.await_gauges(&format!("lent_bytes=0 regions=0 {IDLE}"), SOON)?;
    Ok(())
}
