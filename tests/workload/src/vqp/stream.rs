// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp stream`: reads, each pushed alone, as many at a time as a queue pair takes, without end.

use anyhow::Result;
use clap::Args;
use kite::{Cluster, Error, Memory, Rights, Verb, VQP_DEPTH};

use super::{To, PATIENCE};

/// Reads without end
#[derive(Args, Clone, Debug)]
pub(crate) struct Stream {
    #[command(flatten)]
    to: To,
}

impl Stream {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.register_memory(Memory::new(8)?, Rights::empty())?;
        let vqp = cluster.connect(self.to.node)?;
        loop {
            match vqp.push(&[self.to.work(Verb::Read, &local)]) {
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
