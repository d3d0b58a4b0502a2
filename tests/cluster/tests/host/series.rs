// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Clusters of nodes that run different kernel series, as during an upgrade of the hosts' kernels.

use std::time::Duration;

use kite_cluster::{Cluster, Kernel, Result, Setup};

const LONG: Duration = Duration::from_secs(120);

/// Fills a region of each node that is on the next node, and reads it on all nodes.
fn exchange(cluster: &Cluster) -> Result<()> {
    let count = cluster.nodes().len();
    let workload = |node: usize, line: &str| cluster.node(node).workload(line).limit(LONG).sh();
    for writer in 1..=count {
        let name = format!("series-{writer}");
        let home = writer % count + 1;
        cluster
            .node(writer)
            .kite(&format!("alloc {name} 5000001 --node {home}"))?;
        let written = workload(writer, &format!("fill {name} --seed {writer}"))?;
        for reader in 1..=count {
            let read = workload(reader, &format!("digest {name}"))?;
            assert_eq!(
                read, written,
                "node {reader} reads what node {writer} wrote"
            );
        }
        cluster.node(writer).kite(&format!("free {name}"))?;
    }
    Ok(())
}

/// Node 1 runs the default series, nodes 2 and 3 the other one. The shutdown unloads the modules, and fails if a
/// kernel has reported a fault.
#[test]
#[ignore = "long"]
fn nodes_of_different_kernel_series_exchange_data() -> Result<()> {
    for other in Kernel::others()? {
        let cluster = Cluster::builder()
            .name(format!("series-{}", other.release()?))
            .nodes(3)
            .kernel(2, other)
            .kernel(3, other)
            .boot()?;
        for node in 2..=3 {
            assert_eq!(cluster.node(node).sh("uname -r")?.trim(), other.release()?);
        }
        cluster.start_kite(&Setup::patient())?;
        exchange(&cluster)?;
        cluster.shutdown()?;
    }
    Ok(())
}
