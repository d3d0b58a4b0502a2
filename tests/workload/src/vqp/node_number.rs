// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp serve-number` and `vqp query-number`: check that a connection to a node reaches that node.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

/// Maximum time of a reply. A node that left never replies.
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(2));

/// Bytes of a query, and of a reply.
const LEN: usize = 8;

/// Sends a number to each client of a port, until the process is killed
#[derive(Args, Clone, Debug)]
pub(crate) struct ServeNumber {
    /// The port
    port: u32,
    /// The number
    number: u64,
}

/// Queries the number of each node in turn, with a new VQP each time. Number N of a node is at least 1000 N, less than
/// 1000 (N + 1), and never decreases
#[derive(Args, Clone, Debug)]
pub(crate) struct QueryNumber {
    /// The port
    port: u32,
    /// The nodes
    #[arg(required = true)]
    nodes: Vec<u32>,
    /// Number of rounds
    #[arg(long, default_value_t = 1)]
    times: u64,
    /// Runs until this file exists
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

impl ServeNumber {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(2 * LEN)?, Rights::empty())?;
        local.buffer().store(0, &self.number.to_le_bytes())?;
        let listener = cluster.listen(self.port)?;
        println!("ready");
        std::io::stdout().flush()?;
        loop {
            if let Ok((vqp, _)) = listener.accept(TIMEOUT) {
                // The client may have closed its end.
                let _ = reply_number(&vqp, &local);
            }
        }
    }
}

fn reply_number(vqp: &Vqp, local: &Mr) -> kite::Result<()> {
    vqp.receive(local, LEN, LEN, TIMEOUT)?;
    vqp.push(&[send(local)])?;
    vqp.pop(1, TIMEOUT).map(drop)
}

impl QueryNumber {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(2 * LEN)?, Rights::empty())?;
        let mut numbers: BTreeMap<u32, u64> = self.nodes.iter().map(|node| (*node, 0)).collect();
        let (mut replies, mut errors) = (0, BTreeMap::new());
        for round in 1.. {
            for (node, last) in &mut numbers {
                match query_number(&cluster, *node, self.port, &local) {
                    Ok(number) => {
                        let own = number / 1000 == u64::from(*node);
                        ensure!(own, "WRONG: node {node} sent {number}");
                        ensure!(
                            *last <= number,
                            "STALE: node {node} sent {number} after {last}"
                        );
                        *last = number;
                        replies += 1;
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
            if self.is_done(round) {
                break;
            }
        }
        println!("{replies} replies, {errors:?}; last {numbers:?}");
        Ok(())
    }

    fn is_done(&self, rounds: u64) -> bool {
        match &self.until {
            Some(file) => file.exists(),
            None => rounds == self.times,
        }
    }
}

fn query_number(cluster: &Cluster, node: u32, port: u32, local: &Mr) -> kite::Result<u64> {
    let vqp = cluster.connect_to(node, port)?;
    vqp.push(&[send(local)])?;
    vqp.receive(local, LEN, LEN, TIMEOUT)?;
    let mut number = [0; LEN];
    local.buffer().load(LEN, &mut number)?;
    Ok(u64::from_le_bytes(number))
}
