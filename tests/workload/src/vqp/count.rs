// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp count`: atomic increments of one word by several processes.

use anyhow::Result;
use clap::Args;
use kite::{Buffer, Cluster, Mr, Rights, SendWr, WrOp};

use super::pusher::{PushInterface, Pusher};
use super::{is_node_failure, RemoteTarget, TIMEOUT, WORD};

/// Increments the last word of the memory, and prints the sum of the previous values
#[derive(Args, Clone, Debug)]
pub(crate) struct Count {
    #[command(flatten)]
    target: RemoteTarget,
    /// Number of increments
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Stops when the node fails, and prints the number of increments instead
    #[arg(long)]
    until_node_failure: bool,
    #[command(flatten)]
    interface: PushInterface,
}

impl Count {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(8)?, Rights::empty())?;
        let vqp = cluster.connect(self.target.node)?;
        let mut vqp = self.interface.open(&cluster, &vqp)?;
        let mut sum = 0;
        for i in 0..self.operations {
            match self.increment(&mut vqp, &local, i % 2 != 0) {
                Ok(was) => sum += was,
                Err(error) if self.until_node_failure && is_node_failure(&error) => {
                    println!("{i}");
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        println!("{sum}");
        Ok(())
    }

    /// Adds 1, by fetch-and-add or by compare-and-swap in a loop. Returns the previous value.
    fn increment(&self, vqp: &mut Pusher<'_>, local: &Mr, by_compare_swap: bool) -> Result<u64> {
        if !by_compare_swap {
            return self.execute_atomic(vqp, local, WrOp::FetchAdd { operand: 1 });
        }
        let mut expected = self.execute_atomic(vqp, local, WrOp::FetchAdd { operand: 0 })?;
        loop {
            let new = expected + 1;
            let was = self.execute_atomic(vqp, local, WrOp::CompareSwap { expected, new })?;
            if was == expected {
                return Ok(was);
            }
            expected = was;
        }
    }

    fn execute_atomic(&self, vqp: &mut Pusher<'_>, local: &Mr, verb: WrOp) -> Result<u64> {
        vqp.push(&[SendWr {
            remote_offset: WORD,
            ..self.target.send_wr(verb, local)
        }])?;
        vqp.pop(1, TIMEOUT)?[0].result?;
        let mut word = [0; 8];
        local.buffer().load(0, &mut word)?;
        Ok(u64::from_ne_bytes(word))
    }
}
