// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory of a kernel per node of its view, and per connection. `kite-workload nodes` announces simulated nodes, and
//! divides the decrease of free memory by their number.

use anyhow::{Context, Result};
use kite_cluster::Node;
use serde::{Deserialize, Serialize};

use crate::command::PROGRAM_DIR;
use crate::node_pair::TIMEOUT;

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeMemory {
    /// Memory per node without a connection.
    pub(crate) known: i64,
    /// Memory per connection. A node has one or more.
    pub(crate) connection: i64,
}

impl NodeMemory {
    /// Measures a node, which leaves its cluster.
    pub(crate) fn measure(node: &Node) -> Result<Self> {
        node.stop_kited()?;
        let line = format!("{PROGRAM_DIR}/kite-workload nodes");
        Self::parse(&node.command(line).limit(TIMEOUT).sh()?)
    }

    fn parse(line: &str) -> Result<Self> {
        let parse = || {
            let (known, connection) = line.trim().split_once(' ')?;
            Some(Self {
                known: known.parse().ok()?,
                connection: connection.parse().ok()?,
            })
        };
        parse().with_context(|| format!("unexpected output of kite-workload nodes: {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_parsed_and_errors_are_rejected() {
        let memory = NodeMemory::parse("6000 70000\n").unwrap();
        assert_eq!((memory.known, memory.connection), (6000, 70_000));
        for line in ["", "6000", "kite-workload: EBUSY"] {
            assert!(NodeMemory::parse(line).is_err(), "{line}");
        }
    }
}
