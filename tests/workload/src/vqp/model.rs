// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `check`: random reads and writes of a part of the remote memory, compared with a model.

use anyhow::{bail, ensure, Context, Result};
use clap::Args;
use kite::{Buffer, Cluster, Error, Mr, Rights, SendWr, Vqp, WrOp};

use super::pusher::{Pusher, Way};
use super::{died, To, LEN, PATIENCE, WORD};
use crate::support::random::Random;
use crate::support::threads::run_threads;

/// Random requests against a model.
#[derive(Args, Clone, Debug)]
pub(crate) struct Check {
    #[command(flatten)]
    to: To,
    /// So many pushes
    #[arg(long, default_value_t = 100)]
    operations: u32,
    /// Parts that the memory is cut into
    #[arg(long, default_value_t = 1)]
    parts: usize,
    /// The part that is this program's
    #[arg(long, default_value_t = 0)]
    part: usize,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Ends without an error when the node does not answer any more
    #[arg(long)]
    until_it_dies: bool,
    #[command(flatten)]
    way: Way,
    /// This part by system calls, and the next by a queue, at once by one queue pair
    #[arg(long)]
    both: bool,
}

/// A part of the remote memory, what is in it, and where it is copied to and from.
struct Part<'a> {
    check: &'a Check,
    local: &'a Mr,
    start: u64,
    model: Vec<u8>,
}

/// Expected result of a read.
struct Expected {
    at: usize,
    bytes: Vec<u8>,
}

impl Check {
    pub(super) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let vqp = cluster.connect(self.to.node)?;
        if !self.both {
            return self.check(&cluster, &vqp, self.part, self.way);
        }
        run_threads(2, 1, |i, _| {
            let way = [Way::CALLS, Way::QUEUE][i as usize];
            self.check(&cluster, &vqp, self.part + i as usize, way)
        })
    }

    fn check(&self, cluster: &Cluster, vqp: &Vqp, number: usize, way: Way) -> Result<()> {
        let local = cluster.reg_mr(Buffer::new(LEN)?, Rights::empty())?;
        let mut vqp = way.of(cluster, vqp)?;
        let len = (WORD as usize) / self.parts;
        let mut part = Part {
            check: self,
            local: &local,
            start: (len * number) as u64,
            model: vec![0; len],
        };
        part.learn(&mut vqp)?;
        let mut random = Random::new(self.seed, number as u64);
        for push in 0..self.operations {
            match part
                .push(&mut vqp, &mut random)
                .with_context(|| format!("push {push}"))
            {
                Err(error) if self.until_it_dies && died(&error) => break,
                done => done?,
            }
        }
        Ok(())
    }
}

impl Part<'_> {
    /// Reads the values that an earlier run has left.
    fn learn(&mut self, vqp: &mut Pusher<'_>) -> Result<()> {
        vqp.push(&[SendWr {
            len: self.model.len(),
            remote_offset: self.start,
            ..self.check.to.work(WrOp::Read, self.local)
        }])?;
        self.settle(vqp, vec![1])?;
        Ok(self.local.buffer().load(0, &mut self.model)?)
    }

    /// Pushes a few writes and reads, of which some have no completion, and looks at what they did.
    fn push(&mut self, vqp: &mut Pusher<'_>, random: &mut Random) -> Result<()> {
        let count = 1 + random.below(kite::PUSH_BATCH_MAX as u64) as usize;
        let room = LEN / kite::PUSH_BATCH_MAX;
        let (mut works, mut expected) = (Vec::new(), Vec::new());
        for i in 0..count {
            let len = 1 + random.size(room.min(self.model.len()) as u64 - 1) as usize;
            let offset = random.below((self.model.len() - len + 1) as u64) as usize;
            let (at, reads) = (i * room, random.below(2) == 0);
            if reads {
                let bytes = self.model[offset..offset + len].to_vec();
                let wrong: Vec<_> = bytes.iter().map(|byte| !byte).collect();
                self.local.buffer().store(at, &wrong)?;
                expected.push(Expected { at, bytes });
            } else {
                random.fill(&mut self.model[offset..offset + len]);
                self.local
                    .buffer()
                    .store(at, &self.model[offset..offset + len])?;
            }
            works.push(SendWr {
                tag: i as u64,
                op: if reads { WrOp::Read } else { WrOp::Write },
                local_offset: at,
                len,
                remote_offset: self.start + offset as u64,
                signaled: i + 1 == count || random.below(3) == 0,
                fence: !reads,
                ..self.check.to.work(WrOp::Read, self.local)
            });
        }
        vqp.push(&works)?;
        let signalled = works.iter().filter(|work| work.signaled);
        self.settle(vqp, signalled.map(|work| work.tag).collect())?;
        self.compare(&expected)
    }

    /// Waits for completions with these tags, in their order.
    fn settle(&self, vqp: &mut Pusher<'_>, tags: Vec<u64>) -> Result<()> {
        let mut tags = tags.into_iter();
        while tags.len() != 0 {
            for done in vqp.pop(tags.len(), PATIENCE)? {
                done.result?;
                ensure!(
                    tags.next() == Some(done.tag),
                    "completion {} is not in order",
                    done.tag
                );
            }
        }
        match vqp.pop(1, None) {
            Err(Error::WouldBlock) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(more) => bail!("one too many: {more:?}"),
        }
    }

    fn compare(&self, expected: &[Expected]) -> Result<()> {
        for Expected { at, bytes } in expected {
            let mut found = vec![0; bytes.len()];
            self.local.buffer().load(*at, &mut found)?;
            ensure!(found == *bytes, "CORRUPT: a read of {} bytes", bytes.len());
        }
        Ok(())
    }
}
