// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp beside`: whether requests to one node wait for those to another, which does not answer.

use std::path::PathBuf;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Rights, Vqp, WrOp};

use super::{await_file, To, PATIENCE};

/// Reads from memory once; when a file is there, from it again and meanwhile, one at a time, from other memory
#[derive(Args, Clone, Debug)]
pub(crate) struct Beside {
    #[command(flatten)]
    to: To,
    /// The other memory: its node, address and key
    #[arg(long, num_args = 3, value_names = ["NODE", "ADDR", "KEY"])]
    other: Vec<u64>,
    /// So many times from that
    #[arg(long, default_value_t = 100)]
    operations: u32,
    /// The file
    #[arg(long)]
    when: PathBuf,
}

impl Beside {
    /// Fails if the RNIC gives up before the others have been done, or the read from the first memory does not fail.
    pub(crate) fn run(&self) -> Result<()> {
        let other = To {
            node: u32::try_from(self.other[0])?,
            addr: self.other[1],
            key: u32::try_from(self.other[2])?,
        };
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(8)?, Rights::empty())?;
        let (first, second) = (cluster.connect(self.to.node)?, cluster.connect(other.node)?);
        let push = |vqp: &Vqp, to: &To| vqp.push(&[to.work(WrOp::Read, &local)]);
        let read = |vqp: &Vqp, to: &To| -> Result<()> {
            push(vqp, to)?;
            vqp.pop(1, PATIENCE)?[0].result?;
            Ok(())
        };
        read(&first, &self.to)?;
        read(&second, &other)?;
        println!("read");
        await_file(&self.when)?;
        let failures = || cluster.stats().map(|stats| stats.dci_errors);
        let before = failures()?;
        push(&first, &self.to)?;
        for i in 0..self.operations {
            read(&second, &other)?;
            ensure!(failures()? == before, "read {i} waited for the first");
        }
        println!("{} went beside it", self.operations);
        let ended = first.pop(1, PATIENCE)?[0].result;
        ensure!(ended.is_err(), "the first was done");
        Ok(())
    }
}
