// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp tell` and `vqp written`: messages that follow writes. Writes to a busy node use RC, messages do not, so the
//! transport switches each time. The bytes must be written before the message arrives.

use std::io::Write;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Mr, RemoteMemory, Rights, SendWr, WrOp};

use super::{To, PATIENCE};

/// Words that are written each time: enough in a row for the last to go by a connection.
const WORDS: usize = 4 * kite::PUSH_BATCH_MAX;

/// Bytes of each, and of a message.
const WORD: usize = 8;

/// Accepts a peer, and checks that the writes before each of its messages are in memory of this process, whose address
/// and key are printed
#[derive(Args, Clone, Debug)]
pub(crate) struct Written {
    /// The port
    port: u32,
}

/// Writes words repeatedly, each followed by a message to a port of that node
#[derive(Args, Clone, Debug)]
pub(crate) struct Tell {
    #[command(flatten)]
    to: To,
    /// The port
    #[arg(long)]
    port: u32,
    /// So many times
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
}

/// Memory for all words, and for a message behind them.
fn memory(cluster: &Cluster) -> Result<Mr> {
    let memory = Buffer::new((WORDS + 1) * WORD)?;
    Ok(cluster.reg_mr(memory, Rights::empty())?)
}

/// A message of the last word.
fn message(local: &Mr) -> SendWr<'_> {
    SendWr {
        tag: 0,
        op: WrOp::Send,
        local,
        local_offset: WORDS * WORD,
        len: WORD,
        remote: RemoteMemory::default(),
        remote_offset: 0,
        immediate: None,
        signaled: true,
        fence: false,
    }
}

fn word(local: &Mr, number: usize) -> Result<u64> {
    let mut word = [0; WORD];
    local.buffer().load(number * WORD, &mut word)?;
    Ok(u64::from_ne_bytes(word))
}

impl Written {
    /// Runs until the peer closes.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let (local, listener) = (memory(&cluster)?, cluster.listen(self.port)?);
        let RemoteMemory { addr, rkey: key } = local.remote_memory();
        println!("{addr} {key}");
        std::io::stdout().flush()?;
        let (vqp, _) = listener.accept(PATIENCE)?;
        while vqp.receive(&local, WORDS * WORD, WORD, PATIENCE).is_ok() {
            let told = word(&local, WORDS)?;
            for number in 0..WORDS {
                let found = word(&local, number)?;
                ensure!(
                    found == told,
                    "ORDER: word {number} is {found}, expected {told}"
                );
            }
            vqp.push(&[message(&local)])?;
            vqp.pop(1, PATIENCE)?[0].result?;
        }
        Ok(())
    }
}

impl Tell {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = memory(&cluster)?;
        let vqp = cluster.connect_to(self.to.node, self.port)?;
        for round in 1..=self.rounds {
            for number in 0..=WORDS {
                local.buffer().store(number * WORD, &round.to_ne_bytes())?;
            }
            let writes: Vec<_> = (0..WORDS)
                .map(|number| self.write(&local, number))
                .collect();
            for part in writes.chunks(kite::PUSH_BATCH_MAX) {
                vqp.push(part)?;
            }
            vqp.push(&[message(&local)])?;
            vqp.receive(&local, WORDS * WORD, WORD, PATIENCE)?;
            vqp.pop(1, PATIENCE)?[0].result?;
            let told = word(&local, WORDS)?;
            ensure!(told == round, "reply to round {round} has the value {told}");
        }
        Ok(())
    }

    fn write<'a>(&self, local: &'a Mr, number: usize) -> SendWr<'a> {
        let at = number * WORD;
        SendWr {
            local_offset: at,
            remote_offset: at as u64,
            signaled: false,
            ..self.to.work(WrOp::Write, local)
        }
    }
}
