// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp notify-writes` and `vqp verify-writes`: messages that follow writes. Writes to a busy node use RC, messages do
//! not, so the transport switches each time. The bytes must be written before the message arrives.

use std::io::Write;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Mr, RemoteMemory, Rights, SendWr, WrOp};

use super::{RemoteTarget, TIMEOUT};

/// Words of a round: enough consecutive writes to switch to RC.
const WORDS: usize = 4 * kite::PUSH_BATCH_MAX;

/// Bytes of a word, and of a message.
const WORD: usize = 8;

/// Prints the address and key of its memory, accepts a peer, and checks that the writes before each message are visible
#[derive(Args, Clone, Debug)]
pub(crate) struct VerifyWrites {
    /// The port
    port: u32,
}

/// Writes words repeatedly, and sends a message to a port of the node after each round
#[derive(Args, Clone, Debug)]
pub(crate) struct NotifyWrites {
    #[command(flatten)]
    target: RemoteTarget,
    /// The port
    #[arg(long)]
    port: u32,
    /// Number of rounds
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
}

/// Registers memory for all words and a message.
fn reg_words(cluster: &Cluster) -> Result<Mr> {
    let memory = Buffer::new((WORDS + 1) * WORD)?;
    Ok(cluster.reg_mr(memory, Rights::empty())?)
}

/// Returns a message with the last word.
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

fn load_word(local: &Mr, number: usize) -> Result<u64> {
    let mut word = [0; WORD];
    local.buffer().load(number * WORD, &mut word)?;
    Ok(u64::from_ne_bytes(word))
}

impl VerifyWrites {
    /// Checks messages until the peer closes.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let (local, listener) = (reg_words(&cluster)?, cluster.listen(self.port)?);
        let RemoteMemory { addr, rkey: key } = local.remote_memory();
        println!("{addr} {key}");
        std::io::stdout().flush()?;
        let (vqp, _) = listener.accept(TIMEOUT)?;
        while vqp.receive(&local, WORDS * WORD, WORD, TIMEOUT).is_ok() {
            let round_number = load_word(&local, WORDS)?;
            for number in 0..WORDS {
                let found = load_word(&local, number)?;
                ensure!(
                    found == round_number,
                    "ORDER: word {number} is {found}, expected {round_number}"
                );
            }
            vqp.push(&[message(&local)])?;
            vqp.pop(1, TIMEOUT)?[0].result?;
        }
        Ok(())
    }
}

impl NotifyWrites {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = reg_words(&cluster)?;
        let vqp = cluster.connect_to(self.target.node, self.port)?;
        for round in 1..=self.rounds {
            for number in 0..=WORDS {
                local.buffer().store(number * WORD, &round.to_ne_bytes())?;
            }
            let writes: Vec<_> = (0..WORDS)
                .map(|number| self.write_wr(&local, number))
                .collect();
            for part in writes.chunks(kite::PUSH_BATCH_MAX) {
                vqp.push(part)?;
            }
            vqp.push(&[message(&local)])?;
            vqp.receive(&local, WORDS * WORD, WORD, TIMEOUT)?;
            vqp.pop(1, TIMEOUT)?[0].result?;
            let round_number = load_word(&local, WORDS)?;
            ensure!(
                round_number == round,
                "reply to round {round} has the value {round_number}"
            );
        }
        Ok(())
    }

    fn write_wr<'a>(&self, local: &'a Mr, number: usize) -> SendWr<'a> {
        let at = number * WORD;
        SendWr {
            local_offset: at,
            remote_offset: at as u64,
            signaled: false,
            ..self.target.send_wr(WrOp::Write, local)
        }
    }
}
