// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Endless programs. `vqp stream`: reads, each pushed alone, with a full VQP. `vqp poll-empty`: polls without messages.

use std::io::Write;
use std::thread;

use anyhow::Result;
use clap::Args;
use kite::{Buffer, Cluster, Error, Mr, Priority, Rights, SendWr, Vqp, WrOp, VQP_DEPTH};

use super::{RemoteTarget, TIMEOUT};

/// Bytes of the buffer of a message that `poll-empty` waits for.
const BUFFER_BYTES: usize = 4096;

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

/// Polls for messages that never arrive, until it is killed
#[derive(Args, Clone, Debug)]
pub(crate) struct PollEmpty {
    /// Node of the peer
    node: u32,
    /// Port of the peer
    port: u32,
    /// Number of threads, with a VQP each
    #[arg(long, default_value_t = 4)]
    threads: usize,
}

impl PollEmpty {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let connect = |_| cluster.connect_to(self.node, self.port);
        let vqps: Vec<Vqp> = (0..self.threads).map(connect).collect::<Result<_, _>>()?;
        let local = cluster.reg_mr(Buffer::new(BUFFER_BYTES)?, Rights::READ)?;
        println!("ready");
        std::io::stdout().flush()?;
        thread::scope(|scope| {
            let local = &local;
            let poll = |vqp| scope.spawn(move || poll(vqp, local));
            let mut threads = vqps.iter().map(poll).collect::<Vec<_>>().into_iter();
            threads.try_for_each(|thread| thread.join().expect("a polling thread"))
        })
    }
}

/// Polls until an error.
fn poll(vqp: &Vqp, local: &Mr) -> Result<()> {
    loop {
        match vqp.receive(local, 0, BUFFER_BYTES, None) {
            Err(Error::WouldBlock) => {}
            received => drop(received?),
        }
    }
}
