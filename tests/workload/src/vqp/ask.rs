// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Checks that a connection to a node reaches that node: each node sends a number of its own.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

/// Maximum time of a reply. A node that left never replies.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(2));

/// Bytes of a question, and of an answer.
const LEN: usize = 8;

/// Replies with a number to each peer of a port, until it is killed
#[derive(Args, Clone, Debug)]
pub(crate) struct Say {
    /// The port
    port: u32,
    /// The number
    number: u64,
}

/// Queries one node after the other, by a new VQP each time, for a number of times or until a file exists. The numbers
/// of a node begin with a thousand times its own number, and never decrease
#[derive(Args, Clone, Debug)]
pub(crate) struct Ask {
    /// The port
    port: u32,
    /// The nodes
    #[arg(required = true)]
    nodes: Vec<u32>,
    /// So many times
    #[arg(long, default_value_t = 1)]
    times: u64,
    /// The file
    #[arg(long)]
    until: Option<PathBuf>,
}

fn send(local: &Mr) -> SendWr<'_> {
    SendWr {
        tag: 0,
        op: WrOp::Send,
        local,
        local_offset: 0,
        len: LEN,
        remote: RemoteMemory::default(),
        remote_offset: 0,
        immediate: None,
        signaled: true,
        fence: false,
    }
}

impl Say {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(2 * LEN)?, Rights::empty())?;
        local.buffer().store(0, &self.number.to_le_bytes())?;
        let listener = cluster.listen(self.port)?;
        println!("ready");
        std::io::stdout().flush()?;
        loop {
            if let Ok((vqp, _)) = listener.accept(PATIENCE) {
                // The client may have closed its end.
                let _ = answer(&vqp, &local);
            }
        }
    }
}

fn answer(vqp: &Vqp, local: &Mr) -> kite::Result<()> {
    vqp.receive(local, LEN, LEN, PATIENCE)?;
    vqp.push(&[send(local)])?;
    vqp.pop(1, PATIENCE).map(drop)
}

impl Ask {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(2 * LEN)?, Rights::empty())?;
        let mut said: BTreeMap<u32, u64> = self.nodes.iter().map(|node| (*node, 0)).collect();
        let (mut answers, mut errors) = (0, BTreeMap::new());
        for round in 1.. {
            for (node, last) in &mut said {
                match ask(&cluster, *node, self.port, &local) {
                    Ok(number) => {
                        let own = number / 1000 == u64::from(*node);
                        ensure!(own, "WRONG: node {node} says {number}");
                        ensure!(
                            *last <= number,
                            "STALE: node {node} says {number} after {last}"
                        );
                        *last = number;
                        answers += 1;
                    }
                    Err(
                        error @ (Error::HostDown
                        | Error::ConnectionRefused
                        | Error::ConnectionReset
                        | Error::TimedOut),
                    ) => *errors.entry(error.to_string()).or_insert(0) += 1,
                    Err(error) => return Err(error.into()),
                }
            }
            if self.is_enough(round) {
                break;
            }
        }
        println!("{answers} answers, {errors:?}; last {said:?}");
        Ok(())
    }

    fn is_enough(&self, rounds: u64) -> bool {
        match &self.until {
            Some(file) => file.exists(),
            None => rounds == self.times,
        }
    }
}

fn ask(cluster: &Cluster, node: u32, port: u32, local: &Mr) -> kite::Result<u64> {
    let vqp = cluster.connect_to(node, port)?;
    vqp.push(&[send(local)])?;
    vqp.receive(local, LEN, LEN, PATIENCE)?;
    let mut number = [0; LEN];
    local.buffer().load(LEN, &mut number)?;
    Ok(u64::from_le_bytes(number))
}
