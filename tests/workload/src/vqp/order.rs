// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp order`: writes to one word, each followed by a read, with an atomic operation between some of them, which RC
//! does not carry. The transport therefore switches repeatedly. Each request must see the effect of the one before.

use std::collections::VecDeque;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Mr, Rights, SendWr, WrOp};

use super::pusher::{Pusher, Way};
use super::{To, PATIENCE};

/// Bytes of local memory for each request under way, most of which may be.
const WORD: usize = 8;
const UNDER_WAY: usize = kite::VQP_DEPTH - kite::PUSH_BATCH_MAX;

/// Writes and reads of one word, in order.
#[derive(Args, Clone, Debug)]
pub(crate) struct Order {
    #[command(flatten)]
    to: To,
    /// So many times pairs and an atomic operation
    #[arg(long, default_value_t = 1)]
    rounds: u64,
    /// So many pairs each time
    #[arg(long, default_value_t = 100)]
    pairs: u64,
    #[command(flatten)]
    way: Way,
}

/// Pushed requests with their expected results.
struct Stream<'a> {
    to: &'a To,
    vqp: Pusher<'a>,
    local: &'a Mr,
    /// The word, after all that was pushed.
    word: u64,
    pushed: u64,
    under_way: VecDeque<(u64, Option<u64>)>,
}

impl Order {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let memory = Buffer::new(kite::VQP_DEPTH * WORD)?;
        let local = cluster.reg_mr(memory, Rights::empty())?;
        let vqp = cluster.connect(self.to.node)?;
        let mut stream = Stream {
            to: &self.to,
            vqp: self.way.of(&cluster, &vqp)?,
            local: &local,
            word: 0,
            pushed: 0,
            under_way: VecDeque::new(),
        };
        for _ in 0..self.rounds {
            stream.round(self.pairs)?;
        }
        stream.take(0)?;
        println!("{}", stream.pushed);
        Ok(())
    }
}

impl<'a> Stream<'a> {
    fn round(&mut self, pairs: u64) -> Result<()> {
        for _ in 0..pairs {
            self.take(UNDER_WAY)?;
            self.word += 1;
            let write = self.work(WrOp::Write, None);
            self.local
                .buffer()
                .store(write.local_offset, &self.word.to_ne_bytes())?;
            let read = self.work(WrOp::Read, Some(self.word));
            self.vqp.push(&[write, read])?;
        }
        let add = self.work(WrOp::FetchAdd { operand: 1 }, Some(self.word));
        self.word += 1;
        Ok(self.vqp.push(&[add])?)
    }

    /// The next request, which is to find `expected` if it reads. It waits for reads before it, which it would overtake.
    fn work(&mut self, verb: WrOp, expected: Option<u64>) -> SendWr<'a> {
        let tag = self.pushed;
        self.pushed += 1;
        self.under_way.push_back((tag, expected));
        SendWr {
            tag,
            local_offset: place(tag),
            len: WORD,
            fence: true,
            ..self.to.work(verb, self.local)
        }
    }

    /// Looks at what was found, until no more than `left` are under way.
    fn take(&mut self, left: usize) -> Result<()> {
        while self.under_way.len() > left {
            for done in self.vqp.pop(kite::PUSH_BATCH_MAX, PATIENCE)? {
                done.result?;
                let (tag, expected) = self.under_way.pop_front().unwrap_or_default();
                ensure!(done.tag == tag, "completion {} is not {tag}", done.tag);
                let mut word = [0; WORD];
                self.local.buffer().load(place(tag), &mut word)?;
                let found = u64::from_ne_bytes(word);
                ensure!(
                    expected.is_none_or(|expected| expected == found),
                    "ORDER: request {tag} found {found} and not {expected:?}"
                );
            }
        }
        Ok(())
    }
}

fn place(tag: u64) -> usize {
    tag as usize % kite::VQP_DEPTH * WORD
}
