// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp check`: random reads and writes of a part of the remote memory, compared with a model.

use anyhow::{bail, ensure, Context, Result};
use clap::Args;
use kite::{Buffer, Cluster, Error, Mr, Rights, SendWr, Vqp, WrOp};

use super::pusher::{PushInterface, Pusher};
use super::{is_node_failure, RemoteTarget, LEN, TIMEOUT, WORD};
use crate::support::random::Random;
use crate::support::threads::run_threads;

/// Pushes random requests, and compares the results with a model
#[derive(Args, Clone, Debug)]
pub(crate) struct VqpCheck {
    #[command(flatten)]
    target: RemoteTarget,
    /// Number of pushes
    #[arg(long, default_value_t = 100)]
    operations: u32,
    /// Number of parts of the memory
    #[arg(long, default_value_t = 1)]
    parts: usize,
    /// Part that this process uses
    #[arg(long, default_value_t = 0)]
    part: usize,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Exits with success when the node fails
    #[arg(long)]
    until_node_failure: bool,
    #[command(flatten)]
    interface: PushInterface,
    /// Uses this part through system calls and the next part through an I/O queue, concurrently on one VQP
    #[arg(long)]
    both: bool,
}

/// Part of the remote memory, its model, and the local buffer.
struct Part<'a> {
    check: &'a VqpCheck,
    local: &'a Mr,
    start: u64,
    model: Vec<u8>,
}

/// Expected result of a read.
struct ExpectedRead {
    at: usize,
    bytes: Vec<u8>,
}

impl VqpCheck {
    pub(super) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let vqp = cluster.connect(self.target.node)?;
        if !self.both {
            return self.check_part(&cluster, &vqp, self.part, self.interface);
        }
        run_threads(2, 1, |i, _| {
            let interface = [PushInterface::CALLS, PushInterface::QUEUE][i as usize];
            self.check_part(&cluster, &vqp, self.part + i as usize, interface)
        })
    }

    fn check_part(
        &self,
        cluster: &Cluster,
        vqp: &Vqp,
        number: usize,
        interface: PushInterface,
    ) -> Result<()> {
        let local = cluster.reg_mr(Buffer::new(LEN)?, Rights::empty())?;
        let mut vqp = interface.open(cluster, vqp)?;
        let len = (WORD as usize) / self.parts;
        let mut part = Part {
            check: self,
            local: &local,
            start: (len * number) as u64,
            model: vec![0; len],
        };
        part.load_model(&mut vqp)?;
        let mut random = Random::new(self.seed, number as u64);
        for push in 0..self.operations {
            match part
                .push(&mut vqp, &mut random)
                .with_context(|| format!("push {push}"))
            {
                Err(error) if self.until_node_failure && is_node_failure(&error) => break,
                done => done?,
            }
        }
        Ok(())
    }
}

impl Part<'_> {
    /// Reads the values that an earlier run left.
    fn load_model(&mut self, vqp: &mut Pusher<'_>) -> Result<()> {
        vqp.push(&[SendWr {
            len: self.model.len(),
            remote_offset: self.start,
            ..self.check.target.send_wr(WrOp::Read, self.local)
        }])?;
        self.await_completions(vqp, vec![1])?;
        Ok(self.local.buffer().load(0, &mut self.model)?)
    }

    /// Pushes writes and reads, some of them unsignaled, and checks their effects.
    fn push(&mut self, vqp: &mut Pusher<'_>, random: &mut Random) -> Result<()> {
        let count = 1 + random.below(kite::PUSH_BATCH_MAX as u64) as usize;
        let slot_bytes = LEN / kite::PUSH_BATCH_MAX;
        let (mut works, mut expected) = (Vec::new(), Vec::new());
        for i in 0..count {
            let len = 1 + random.size(slot_bytes.min(self.model.len()) as u64 - 1) as usize;
            let offset = random.below((self.model.len() - len + 1) as u64) as usize;
            let (at, is_read) = (i * slot_bytes, random.below(2) == 0);
            if is_read {
                let bytes = self.model[offset..offset + len].to_vec();
                let wrong: Vec<_> = bytes.iter().map(|byte| !byte).collect();
                self.local.buffer().store(at, &wrong)?;
                expected.push(ExpectedRead { at, bytes });
            } else {
                random.fill(&mut self.model[offset..offset + len]);
                self.local
                    .buffer()
                    .store(at, &self.model[offset..offset + len])?;
            }
            works.push(SendWr {
                tag: i as u64,
                op: if is_read { WrOp::Read } else { WrOp::Write },
                local_offset: at,
                len,
                remote_offset: self.start + offset as u64,
                signaled: i + 1 == count || random.below(3) == 0,
                fence: !is_read,
                ..self.check.target.send_wr(WrOp::Read, self.local)
            });
        }
        vqp.push(&works)?;
        let signalled = works.iter().filter(|work| work.signaled);
        self.await_completions(vqp, signalled.map(|work| work.tag).collect())?;
        self.compare_reads(&expected)
    }

    /// Waits for completions with `tags`, in this order.
    fn await_completions(&self, vqp: &mut Pusher<'_>, tags: Vec<u64>) -> Result<()> {
        let mut tags = tags.into_iter();
        while tags.len() != 0 {
            for done in vqp.pop(tags.len(), TIMEOUT)? {
                done.result?;
                ensure!(
                    tags.next() == Some(done.tag),
                    "completion {} out of order",
                    done.tag
                );
            }
        }
        match vqp.pop(1, None) {
            Err(Error::WouldBlock) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(more) => bail!("unexpected completion: {more:?}"),
        }
    }

    fn compare_reads(&self, expected: &[ExpectedRead]) -> Result<()> {
        for ExpectedRead { at, bytes } in expected {
            let mut found = vec![0; bytes.len()];
            self.local.buffer().load(*at, &mut found)?;
            ensure!(found == *bytes, "CORRUPT: a read of {} bytes", bytes.len());
        }
        Ok(())
    }
}
