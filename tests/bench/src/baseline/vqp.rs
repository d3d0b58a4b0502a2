// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reads and writes by a virtual queue pair of kite: one pushed and popped, or many.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use kite::{Cluster, Memory, Registered, RemoteMemory, Rights, Verb, Vqp, Work};
use kite_bench::statistics::Times;

use crate::hello::{Hello, Link, Operation};
use crate::rdma::{times, Rate, OURS, THEIRS};
use crate::Timed;

/// Longer than anything takes.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// A queue pair to the node of the other side, and memory at both ends.
struct Connected {
    vqp: Vqp,
    local: Registered,
    remote: RemoteMemory,
    size: usize,
    /// The other side serves until this is closed.
    _link: Link,
}

impl Connected {
    fn to(timed: &Timed, node: u32) -> Result<Self> {
        let size = timed.what.size;
        let mut link = Link::to(&timed.what.address, &Hello::Memory { size })?;
        let (addr, key) = link.hear()?;
        let cluster = Cluster::open()?;
        let local = cluster.register_memory(Memory::new(size)?, Rights::empty())?;
        local.memory().store(0, &vec![OURS; size])?;
        Ok(Self {
            vqp: cluster.connect(node)?,
            local,
            remote: RemoteMemory { addr, key },
            size,
            _link: link,
        })
    }

    fn work(&self, operation: Operation) -> Work<'_> {
        let verb = match operation {
            Operation::Write => Verb::Write,
            Operation::Read => Verb::Read,
        };
        Work {
            tag: 0,
            verb,
            local: &self.local,
            at: 0,
            len: self.size,
            remote: self.remote,
            offset: 0,
            immediate: None,
            signalled: true,
            fenced: false,
        }
    }

    /// Waits for completions. Returns how many came.
    fn settle(&self, most: usize) -> Result<usize> {
        let done = self.vqp.pop(most, PATIENCE)?;
        for done in &done {
            done.result?;
        }
        Ok(done.len())
    }

    fn transfer(&self, operation: Operation) -> Result<()> {
        self.vqp.push(&[self.work(operation)])?;
        self.settle(1).map(drop)
    }

    /// Moves the memory `count` times, with `depth` requests under way.
    fn stream(&self, operation: Operation, count: usize, depth: usize) -> Result<()> {
        let works = vec![self.work(operation); depth];
        let (mut begun, mut done) = (0, 0);
        while done < count {
            let more = (count - begun).min(depth - (begun - done));
            if more != 0 {
                self.vqp.push(&works[..more])?;
                begun += more;
            }
            done += self.settle(depth)?;
        }
        Ok(())
    }

    /// Whether what the operation should have moved was moved.
    fn verify(&self, operation: Operation) -> Result<()> {
        let expected = match operation {
            Operation::Read => THEIRS,
            Operation::Write => {
                self.local.memory().store(0, &vec![0; self.size])?;
                self.transfer(Operation::Read)?;
                OURS
            }
        };
        let mut found = vec![0; self.size];
        self.local.memory().load(0, &mut found)?;
        ensure!(found.iter().all(|byte| *byte == expected), "wrong bytes");
        Ok(())
    }
}

pub(crate) fn measure(timed: &Timed, node: u32) -> Result<Times> {
    let operation = timed.what.operation;
    let connected = Connected::to(timed, node)?;
    let times = times(timed.iterations, || connected.transfer(operation))?;
    connected.verify(operation)?;
    Ok(times)
}

/// How many operations there are in a second, if `depth` are under way at a time.
pub(crate) fn rate(timed: &Timed, node: u32, depth: usize) -> Result<Rate> {
    let operation = timed.what.operation;
    let connected = Connected::to(timed, node)?;
    connected.stream(operation, timed.iterations / 10 + depth, depth)?;
    let start = Instant::now();
    connected.stream(operation, timed.iterations, depth)?;
    let rate = Rate::of(timed.iterations, start.elapsed());
    connected.verify(operation)?;
    Ok(rate)
}

/// Lends memory to virtual queue pairs until the other side hangs up.
pub(crate) fn serve(mut link: Link, size: usize) -> Result<()> {
    let memory = Memory::new(size)?;
    memory.store(0, &vec![THEIRS; size])?;
    let lent = Cluster::open()?.register_memory(memory, Rights::empty())?;
    link.say(&(lent.remote().addr, lent.remote().key))?;
    while link.hear_more::<()>()?.is_some() {}
    Ok(())
}
