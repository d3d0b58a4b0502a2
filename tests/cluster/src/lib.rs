// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Clusters of virtual machines for kite's tests: stock kernels, an RDMA fabric between them, and control over
//! power, network and RNIC of each machine.
//!
//! Machines run the stock kernel on the build root, read-only, with the checkout at `/kite`. Their writes go to
//! memory. A kernel that reports a fault fails the test that uses its cluster.
//!
//! ```no_run
//! # fn main() -> kite_cluster::Result<()> {
//! let cluster = kite_cluster::Cluster::builder().nodes(2).boot()?;
//! let [one, two] = cluster.nodes() else { unreachable!() };
//! one.sh(&format!("ping -c 1 {}", two.address()))?;
//! cluster.shutdown()
//! # }
//! ```

mod builder;
mod error;
mod etcd;
mod fabric;
mod kited;
mod machine;
mod node;
pub mod preload;
mod report;
mod shared;
pub mod vqp;
mod wait;

use std::path::Path;
use std::thread;

pub use builder::Builder;
pub use error::{Error, Result};
pub use fabric::Fabric;
pub use kited::Setup;
pub use machine::hosts::Hosts;
pub use machine::image::ImageMachine;
pub use machine::kernel::Kernel;
pub use node::process::{outputs, Output, Process};
pub use node::{Node, Remote, COMMAND_LIMIT};
pub use shared::{SharedCluster, Turn};
pub use wait::until;

use machine::workdir::Workdir;

/// Path of the checkout in the build root and on each node.
const TOP: &str = "/kite";

/// The module that is unloaded when a cluster ends.
const MODULE: &str = "kite";

/// Script that fails if more than the daemon has a reference to the module.
const COUNT_REFERENCES: &str = include_str!("../guest/count-references");

/// Running nodes and their network. Drop ends them, after the checks of [`Cluster::shutdown`]. A failed check
/// panics, unless the thread is panicking.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    dir: Workdir,
    checked_out: bool,
}

impl Cluster {
    /// Returns the plan of a cluster of two nodes, of 2 processors and 1 GiB each.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn new(nodes: Vec<Node>, dir: Workdir) -> Self {
        Cluster {
            nodes,
            dir,
            checked_out: false,
        }
    }

    /// Returns all nodes, in order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the node with this number, counted from 1 as in its name and address.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn node(&self, number: usize) -> &Node {
        &self.nodes[number - 1]
    }

    /// Starts two processes of kite-workload with these arguments on each node.
    ///
    /// # Errors
    ///
    /// If one cannot be started.
    pub fn everywhere(&self, arguments: &str) -> Result<Vec<Process>> {
        let nodes = self.nodes().iter().flat_map(|node| [node, node]);
        nodes.map(|node| node.workload(arguments).spawn()).collect()
    }

    /// Returns the directory of console logs and QEMU's messages, which outlives the cluster.
    pub fn artefacts(&self) -> &Path {
        self.dir.path()
    }

    /// Fails if a kernel has reported a fault since the last check.
    pub fn check(&self) -> Result<()> {
        let reports: Vec<String> = self.nodes.iter().filter_map(Node::new_faults).collect();
        match reports.is_empty() {
            true => Ok(()),
            false => Err(Error::Fault(reports.join("\n\n"))),
        }
    }

    /// Fails if on any node more than the daemon has a reference to the module.
    fn check_references(&self) -> Result<()> {
        let check = |node: &Node| node.sh(COUNT_REFERENCES).map(drop);
        thread::scope(|scope| {
            let answering = self.nodes.iter().filter(|node| node.answers());
            let checks: Vec<_> = answering
                .map(|node| scope.spawn(move || check(node)))
                .collect();
            checks
                .into_iter()
                .try_for_each(|check| check.join().unwrap_or(Ok(())))
        })
    }

    /// Ends the cluster: stops its daemons, unloads kite where it is loaded, and checks the kernels a last time. The
    /// unload fails if a reference to the module exists. On a debug kernel, also checks for leaked memory.
    pub fn shutdown(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        self.checked_out = true;
        let answering = self.nodes.iter().filter(|node| node.answers());
        let unloaded = answering
            .map(|node| node.stop_kited().and_then(|()| node.retire(MODULE)))
            .collect::<Result<Vec<()>>>();
        // A fault explains more than the unload that failed because of it.
        self.check().and(unloaded.map(drop))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if thread::panicking() {
            if let Err(error) = self.check() {
                eprintln!("{error}");
            }
            eprintln!("the cluster's logs are in {}", self.artefacts().display());
        } else if !self.checked_out {
            if let Err(error) = self.finish() {
                panic!(
                    "{error}\nthe cluster's logs are in {}",
                    self.artefacts().display()
                );
            }
        }
    }
}
