// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp order`: writes to one word, each followed by a read, with an atomic operation between some of them, which RC
//! does not carry. The transport therefore switches repeatedly. Each request must see the effect of the one before.

use std::collections::VecDeque;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Mr, Rights, SendWr, WrOp};

use super::pusher::{PushInterface, Pusher};
use super::{RemoteTarget, TIMEOUT};

/// Bytes of local memory of a request.
const WORD: usize = 8;

/// Maximum number of requests in flight before a pair is pushed.
const IN_FLIGHT_MAX: usize = kite::VQP_DEPTH - kite::PUSH_BATCH_MAX;

/// Writes and reads of one word, in order.
#[derive(Args, Clone, Debug)]
pub(crate) struct Order {
    #[command(flatten)]
    target: RemoteTarget,
    /// Number of rounds of pairs and an atomic operation
    #[arg(long, default_value_t = 1)]
    rounds: u64,
    /// Pairs per round
    #[arg(long, default_value_t = 100)]
    pairs: u64,
    #[command(flatten)]
    interface: PushInterface,
}

/// Pushed requests with their expected results.
struct OrderedStream<'a> {
    target: &'a RemoteTarget,
    vqp: Pusher<'a>,
    local: &'a Mr,
    /// Expected value of the word after all pushed requests.
    word: u64,
    pushed: u64,
    in_flight: VecDeque<(u64, Option<u64>)>,
}

impl Order {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let memory = Buffer::new(kite::VQP_DEPTH * WORD)?;
        let local = cluster.reg_mr(memory, Rights::empty())?;
        let vqp = cluster.connect(self.target.node)?;
        let mut stream = OrderedStream {
            target: &self.target,
            vqp: self.interface.open(&cluster, &vqp)?,
            local: &local,
            word: 0,
            pushed: 0,
            in_flight: VecDeque::new(),
        };
        for _ in 0..self.rounds {
            stream.push_round(self.pairs)?;
        }
        stream.check_completions(0)?;
        println!("{}", stream.pushed);
        Ok(())
    }
}

impl<'a> OrderedStream<'a> {
    fn push_round(&mut self, pairs: u64) -> Result<()> {
        for _ in 0..pairs {
            self.check_completions(IN_FLIGHT_MAX)?;
            self.word += 1;
            let write = self.next_wr(WrOp::Write, None);
            self.local
                .buffer()
                .store(write.local_offset, &self.word.to_ne_bytes())?;
            let read = self.next_wr(WrOp::Read, Some(self.word));
            self.vqp.push(&[write, read])?;
        }
        let add = self.next_wr(WrOp::FetchAdd { operand: 1 }, Some(self.word));
        self.word += 1;
        Ok(self.vqp.push(&[add])?)
    }

    /// Returns the next request. A read must return `expected`. The fence orders the request after earlier reads.
    fn next_wr(&mut self, verb: WrOp, expected: Option<u64>) -> SendWr<'a> {
        let tag = self.pushed;
        self.pushed += 1;
        self.in_flight.push_back((tag, expected));
        SendWr {
            tag,
            local_offset: local_offset_of(tag),
            len: WORD,
            fence: true,
            ..self.target.send_wr(verb, self.local)
        }
    }

    /// Checks completions until at most `left` requests are in flight.
    fn check_completions(&mut self, left: usize) -> Result<()> {
        while self.in_flight.len() > left {
            for done in self.vqp.pop(kite::PUSH_BATCH_MAX, TIMEOUT)? {
                done.result?;
                let (tag, expected) = self.in_flight.pop_front().unwrap_or_default();
                ensure!(done.tag == tag, "completion {} is not {tag}", done.tag);
                let mut word = [0; WORD];
                self.local.buffer().load(local_offset_of(tag), &mut word)?;
                let found = u64::from_ne_bytes(word);
                ensure!(
                    expected.is_none_or(|expected| expected == found),
                    "ORDER: request {tag} read {found}, expected {expected:?}"
                );
            }
        }
        Ok(())
    }
}

fn local_offset_of(tag: u64) -> usize {
    tag as usize % kite::VQP_DEPTH * WORD
}
