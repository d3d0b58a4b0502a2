// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp count`: a word to which many add, one at a time.

use anyhow::Result;
use clap::Args;
use kite::{Buffer, Cluster, Mr, Rights, SendWr, WrOp};

use super::pusher::{Pusher, Way};
use super::{died, To, PATIENCE, WORD};

/// Adds 1 to the last word, one at a time, and prints the sum of what was there
#[derive(Args, Clone, Debug)]
pub(crate) struct Count {
    #[command(flatten)]
    to: To,
    /// So many times
    #[arg(long, default_value_t = 100)]
    operations: u64,
    /// Until the node does not answer any more; prints how many times that was instead
    #[arg(long)]
    until_it_dies: bool,
    #[command(flatten)]
    way: Way,
}

impl Count {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(8)?, Rights::empty())?;
        let vqp = cluster.connect(self.to.node)?;
        let mut vqp = self.way.of(&cluster, &vqp)?;
        let mut sum = 0;
        for i in 0..self.operations {
            match self.add(&mut vqp, &local, i % 2 != 0) {
                Ok(was) => sum += was,
                Err(error) if self.until_it_dies && died(&error) => {
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
    fn add(&self, vqp: &mut Pusher<'_>, local: &Mr, by_trying: bool) -> Result<u64> {
        if !by_trying {
            return self.word(vqp, local, WrOp::FetchAdd { operand: 1 });
        }
        let mut expected = self.word(vqp, local, WrOp::FetchAdd { operand: 0 })?;
        loop {
            let new = expected + 1;
            let was = self.word(vqp, local, WrOp::CompareSwap { expected, new })?;
            if was == expected {
                return Ok(was);
            }
            expected = was;
        }
    }

    fn word(&self, vqp: &mut Pusher<'_>, local: &Mr, verb: WrOp) -> Result<u64> {
        vqp.push(&[SendWr {
            remote_offset: WORD,
            ..self.to.work(verb, local)
        }])?;
        vqp.pop(1, PATIENCE)?[0].result?;
        let mut word = [0; 8];
        local.buffer().load(0, &mut word)?;
        Ok(u64::from_ne_bytes(word))
    }
}
