// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Clusters of virtual machines for kite's tests: real kernels, an RDMA fabric between them, and
//! control over all that may happen to a machine.
//!
//! Machines run the stock kernel on the build root, read-only, with the checkout at `/kite`; what
//! they write goes to memory. A kernel that reports a fault fails the test that has its cluster.
//!
//! ```no_run
//! # fn main() -> kite_cluster::Result<()> {
//! let cluster = kite_cluster::Cluster::builder().nodes(2).boot()?;
//! let [one, two] = cluster.nodes() else { unreachable!() };
//! one.sh(&format!("ping -c 1 {}", two.address()))?;
//! cluster.shutdown()
//! # }
//! ```

mod accel;
mod builder;
mod connectx;
mod console;
mod error;
mod fabric;
mod faults;
mod firmware;
mod guarded;
mod hosts;
mod image;
mod kernel;
mod kited;
mod leaks;
mod node;
pub mod preload;
mod process;
mod qemu;
mod qmp;
mod shared;
mod ssh;
pub mod vqp;
mod wait;
mod workdir;

use std::path::Path;
use std::thread;

pub use builder::Builder;
pub use error::{Error, Result};
pub use fabric::Fabric;
pub use hosts::Hosts;
pub use image::ImageMachine;
pub use kernel::Kernel;
pub use kited::Setup;
pub use node::{Node, Remote, COMMAND_LIMIT};
pub use process::{outputs, Output, Process};
pub use shared::{SharedCluster, Turn};
pub use wait::until;

use workdir::Workdir;

/// Where the checkout is, in the build root and in each node.
const TOP: &str = "/kite";

/// The module that must have let go of everything when a cluster ends.
const MODULE: &str = "kite";

/// Finds what else holds the module.
const COUNT_REFERENCES: &str = include_str!("../guest/count-references");

/// Running nodes and their network. Dropping it ends them, after the checks of
/// [`Cluster::shutdown`]; a failed check panics, unless a panic is on its way already.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    dir: Workdir,
    checked_out: bool,
}

impl Cluster {
    /// Starts with two nodes, of 2 processors and 1 GiB each.
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

    /// All nodes, in order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node with this number, counted from 1 as in its name and address.
    ///
    /// # Panics
    ///
    /// If there is no such node.
    pub fn node(&self, number: usize) -> &Node {
        &self.nodes[number - 1]
    }

    /// Lets two processes on each node run kite-workload with these arguments.
    ///
    /// # Errors
    ///
    /// If one cannot be started.
    pub fn everywhere(&self, arguments: &str) -> Result<Vec<Process>> {
        let nodes = self.nodes().iter().flat_map(|node| [node, node]);
        nodes.map(|node| node.workload(arguments).spawn()).collect()
    }

    /// Where console logs and QEMU's messages are, also after the cluster's end.
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

    /// Fails if on any node more than the daemons holds the module.
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

    /// Ends the cluster: stops its daemons, unloads kite, which fails if the module is still in use, and checks the
    /// kernel logs a last time. On a debug kernel it also checks for leaks.
    pub fn shutdown(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        self.checked_out = true;
        let answering = self.nodes.iter().filter(|node| node.answers());
        let unloaded = answering
            .map(|node| node.stop_kited().and_then(|()| node.retire(MODULE)))
            .collect::<Result<Vec<()>>>();
        // A fault explains more than the unload that failed for it.
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
