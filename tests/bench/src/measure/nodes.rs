// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What memory a kernel has for each other node that it knows, and for each connection to one:
//! that which is gone, on average, when there are many. `kite-workload nodes` makes them up.

use anyhow::{Context, Result};
use kite_cluster::Node;
use serde::Serialize;

use crate::command::PROGRAMS;
use crate::pair::PATIENCE;

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Nodes {
    /// Memory for a node without a connection.
    pub(crate) known: i64,
    /// Memory for a connection, of which a node has one or more.
    pub(crate) connection: i64,
}

impl Nodes {
    /// Measures a node, which leaves its cluster.
    pub(crate) fn of(node: &Node) -> Result<Self> {
        node.stop_kited()?;
        let line = format!("{PROGRAMS}/kite-workload nodes");
        Self::parse(&node.command(line).limit(PATIENCE).sh()?)
    }

    fn parse(line: &str) -> Result<Self> {
        let parse = || {
            let (known, connection) = line.trim().split_once(' ')?;
            Some(Self {
                known: known.parse().ok()?,
                connection: connection.parse().ok()?,
            })
        };
        parse().with_context(|| format!("no measurement: {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_parsed_and_errors_are_rejected() {
        let nodes = Nodes::parse("6000 70000\n").unwrap();
        assert_eq!((nodes.known, nodes.connection), (6000, 70_000));
        for line in ["", "6000", "kite-workload: EBUSY"] {
            assert!(Nodes::parse(line).is_err(), "{line}");
        }
    }
}
