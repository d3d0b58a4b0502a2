// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp stream`: reads, each pushed alone, as many at a time as a queue pair takes, without end.

use anyhow::Result;
use clap::Args;
use kite::{Buffer, Cluster, Error, Priority, Rights, SendWr, WrOp, VQP_DEPTH};

use super::{To, PATIENCE};

/// Reads without end
#[derive(Args, Clone, Debug)]
pub(crate) struct Stream {
    #[command(flatten)]
    to: To,
    /// Bytes of each
    #[arg(long, default_value_t = 8)]
    len: usize,
    /// With low priority
    #[arg(long)]
    low: bool,
}

impl Stream {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        if self.low {
            cluster.set_priority(Priority::Low)?;
        }
        let local = cluster.reg_mr(Buffer::new(self.len)?, Rights::empty())?;
        let vqp = cluster.connect(self.to.node)?;
        loop {
            let read = SendWr {
                len: self.len,
                ..self.to.work(WrOp::Read, &local)
            };
            match vqp.push(&[read]) {
                Ok(()) => {}
                Err(Error::QueueFull) => {
                    for done in vqp.pop(VQP_DEPTH, PATIENCE)? {
                        done.result?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
