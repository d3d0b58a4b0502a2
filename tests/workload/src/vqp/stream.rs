// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp stream`: endless reads, each pushed alone, with a full VQP.

use anyhow::Result;
use clap::Args;
use kite::{Buffer, Cluster, Error, Priority, Rights, SendWr, WrOp, VQP_DEPTH};

use super::{RemoteTarget, TIMEOUT};

/// Reads until the process is killed
#[derive(Args, Clone, Debug)]
pub(crate) struct ReadStream {
    #[command(flatten)]
    target: RemoteTarget,
    /// Bytes of each read
    #[arg(long, default_value_t = 8)]
    len: usize,
    /// Uses low priority
    #[arg(long)]
    low: bool,
}

impl ReadStream {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        if self.low {
            cluster.set_priority(Priority::Low)?;
        }
        let local = cluster.reg_mr(Buffer::new(self.len)?, Rights::empty())?;
        let vqp = cluster.connect(self.target.node)?;
        loop {
            let read = SendWr {
                len: self.len,
                ..self.target.send_wr(WrOp::Read, &local)
            };
            match vqp.push(&[read]) {
                Ok(()) => {}
                Err(Error::QueueFull) => {
                    for done in vqp.pop(VQP_DEPTH, TIMEOUT)? {
                        done.result?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
