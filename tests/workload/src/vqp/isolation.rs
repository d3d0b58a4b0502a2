// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp read-isolation`: requests to one node must not wait for another node that does not respond.

use std::path::PathBuf;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Rights, Vqp, WrOp};

use super::{wait_for_file, RemoteTarget, TIMEOUT};

/// Reads from an unresponsive node, and from another node at the same time
#[derive(Args, Clone, Debug)]
pub(crate) struct ReadIsolation {
    #[command(flatten)]
    target: RemoteTarget,
    /// Memory of the other node: node, address and key
    #[arg(long, num_args = 3, value_names = ["NODE", "ADDR", "KEY"])]
    other: Vec<u64>,
    /// Number of reads from the other node
    #[arg(long, default_value_t = 100)]
    operations: u32,
    /// Starts the concurrent reads once this file exists
    #[arg(long)]
    start_file: PathBuf,
}

impl ReadIsolation {
    /// Fails if the first read fails before the other reads complete, or does not fail.
    pub(crate) fn run(&self) -> Result<()> {
        let other = RemoteTarget {
            node: u32::try_from(self.other[0])?,
            addr: self.other[1],
            key: u32::try_from(self.other[2])?,
        };
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(8)?, Rights::empty())?;
        let (first, second) = (
            cluster.connect(self.target.node)?,
            cluster.connect(other.node)?,
        );
        let push =
            |vqp: &Vqp, target: &RemoteTarget| vqp.push(&[target.send_wr(WrOp::Read, &local)]);
        let read = |vqp: &Vqp, target: &RemoteTarget| -> Result<()> {
            push(vqp, target)?;
            vqp.pop(1, TIMEOUT)?[0].result?;
            Ok(())
        };
        read(&first, &self.target)?;
        read(&second, &other)?;
        println!("read");
        wait_for_file(&self.start_file)?;
        let failures = || cluster.stats().map(|stats| stats.dci_errors);
        let before = failures()?;
        push(&first, &self.target)?;
        for i in 0..self.operations {
            read(&second, &other)?;
            ensure!(
                failures()? == before,
                "read {i} waited for the unresponsive node"
            );
        }
        println!("{} concurrent reads", self.operations);
        let ended = first.pop(1, TIMEOUT)?[0].result;
        ensure!(
            ended.is_err(),
            "the read from the unresponsive node succeeded"
        );
        Ok(())
    }
}
