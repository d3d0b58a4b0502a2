// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reads and writes by a virtual queue pair of kite: one pushed and popped, or many. They go by DC, or by a connection
//! once the other node gets enough requests; which it was is looked at.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};
use clap::ValueEnum;
use kite::{Buffer, Cluster, IoQueue, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};
use kite_bench::statistics::Times;

use crate::hello::{Direction, Hello, Link};
use crate::rdma::{times, warm_up, Rate, OURS, THEIRS};
use crate::Timed;

/// Longer than anything takes.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Bytes that are pushed together at most: more do not go by a connection.
const PUSH_BYTES: usize = 1 << 20;

/// Requests of a stretch, bytes of each, and how many are under way: one or two stretches make a node worth a connection.
const STRETCH: usize = 1024;
const SMALL: usize = 8;
const DEPTH: usize = 32;

/// Stretches until it has long been worth one.
const STRETCHES: usize = 100;

/// By which way requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    /// By DC, which is for good where the module may promote no node
    Dynamic,
    /// By a connection
    Connected,
}

/// A queue pair to the node of the other side, and memory at both ends.
struct ConnectedVqp {
    cluster: Cluster,
    vqp: Vqp,
    local: Mr,
    remote: RemoteMemory,
    size: usize,
    /// The other side serves until this is closed.
    _link: Link,
}

impl ConnectedVqp {
    fn to(timed: &Timed, node: u32) -> Result<Self> {
        let size = timed.what.size;
        let mut link = Link::to(&timed.what.address, &Hello::Memory { size })?;
        let (addr, key) = link.hear()?;
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(size)?, Rights::empty())?;
        local.buffer().store(0, &vec![OURS; size])?;
        Ok(Self {
            vqp: cluster.connect(node)?,
            cluster,
            local,
            remote: RemoteMemory { addr, rkey: key },
            size,
            _link: link,
        })
    }

    fn work(&self, operation: Direction) -> SendWr<'_> {
        let verb = match operation {
            Direction::Write => WrOp::Write,
            Direction::Read => WrOp::Read,
        };
        SendWr {
            tag: 0,
            op: verb,
            local: &self.local,
            local_offset: 0,
            len: self.size,
            remote: self.remote,
            remote_offset: 0,
            immediate: None,
            signaled: true,
            fence: false,
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

    fn transfer(&self, operation: Direction) -> Result<()> {
        self.vqp.push(&[self.work(operation)])?;
        self.settle(1).map(drop)
    }

    /// Makes a request `count` times, with `depth` under way.
    fn stream(&self, work: SendWr<'_>, count: usize, depth: usize) -> Result<()> {
        let works = vec![work; depth.min(PUSH_BYTES / work.len)];
        let (mut begun, mut done) = (0, 0);
        while done < count {
            let room = (count - begun).min(depth - (begun - done));
            let more = room.min(works.len());
            if more != 0 {
                self.vqp.push(&works[..more])?;
                begun += more;
            }
            done += self.settle(depth)?;
        }
        Ok(())
    }

    /// As [`Self::stream`], by a queue that is shared with the kernel, which pushes together what it finds there.
    fn stream_by(
        &self,
        queue: &mut IoQueue,
        work: SendWr<'_>,
        count: usize,
        depth: usize,
    ) -> Result<()> {
        let depth = depth.min(PUSH_BYTES / work.len);
        let (mut begun, mut done) = (0, 0);
        while done < count {
            while begun < count.min(done + depth) {
                queue.push(&self.vqp, &work)?;
                begun += 1;
            }
            queue.submit()?;
            queue.wait()?.result?;
            done += 1;
            while let Some(one) = queue.try_next()? {
                one.result?;
                done += 1;
            }
        }
        Ok(())
    }

    /// Returns the requests of this node by RC.
    fn vqp_rc_requests(&self) -> Result<usize> {
        Ok(usize::try_from(self.cluster.stats()?.vqp_rc_requests)?)
    }

    /// Has requests go that way, which takes some until the other node is worth a connection.
    fn take(&self, way: Way, operation: Direction) -> Result<()> {
        let small = SendWr {
            len: SMALL.min(self.size),
            ..self.work(operation)
        };
        for _ in 0..STRETCHES {
            let before = self.vqp_rc_requests()?;
            self.stream(small, STRETCH, DEPTH)?;
            let connected = self.vqp_rc_requests()? - before;
            if way == Way::Dynamic || connected >= STRETCH {
                return Ok(());
            }
        }
        bail!("the other node gets no connection");
    }

    /// Times what makes `count` requests at least, all of which have to go that way.
    fn all_by<T>(
        &self,
        way: Way,
        timed: &Timed,
        time: impl FnOnce(usize) -> Result<T>,
    ) -> Result<T> {
        let count = timed.iterations;
        self.take(way, timed.what.operation)?;
        let before = self.vqp_rc_requests()?;
        let done = time(count)?;
        let connected = self.vqp_rc_requests()? - before;
        let went = match way {
            Way::Dynamic => connected == 0,
            Way::Connected => connected >= count,
        };
        ensure!(went, "{connected} of {count} requests went by connections");
        Ok(done)
    }

    /// Checks that the operation has moved its bytes.
    fn verify(&self, operation: Direction) -> Result<()> {
        let expected = match operation {
            Direction::Read => THEIRS,
            Direction::Write => {
                self.local.buffer().store(0, &vec![0; self.size])?;
                self.transfer(Direction::Read)?;
                OURS
            }
        };
        let mut found = vec![0; self.size];
        self.local.buffer().load(0, &mut found)?;
        ensure!(found.iter().all(|byte| *byte == expected), "wrong bytes");
        Ok(())
    }
}

pub(crate) fn measure(timed: &Timed, node: u32, way: Way) -> Result<Times> {
    let operation = timed.what.operation;
    let connected = ConnectedVqp::to(timed, node)?;
    let times = connected.all_by(way, timed, |count| {
        times(count, || connected.transfer(operation))
    })?;
    connected.verify(operation)?;
    Ok(times)
}

/// Returns the operations per second with `depth` in flight, by system calls or by an I/O queue.
pub(crate) fn rate(timed: &Timed, node: u32, way: Way, how: (usize, bool)) -> Result<Rate> {
    let (operation, (depth, by_queue)) = (timed.what.operation, how);
    let connected = ConnectedVqp::to(timed, node)?;
    let make = || connected.cluster.create_queue(depth as u32, 1);
    let mut queue = by_queue.then(make).transpose()?;
    let work = connected.work(operation);
    let mut stream = |count| match &mut queue {
        Some(queue) => connected.stream_by(queue, work, count, depth),
        None => connected.stream(work, count, depth),
    };
    let rate = connected.all_by(way, timed, |count| {
        stream(warm_up(count) + depth)?;
        let start = Instant::now();
        stream(count)?;
        Ok(Rate::of(count, start.elapsed()))
    })?;
    connected.verify(operation)?;
    Ok(rate)
}

/// Lends memory to virtual queue pairs until the other side hangs up.
pub(crate) fn serve(mut link: Link, size: usize) -> Result<()> {
    let memory = Buffer::new(size)?;
    memory.store(0, &vec![THEIRS; size])?;
    let lent = Cluster::open()?.reg_mr(memory, Rights::empty())?;
    link.say(&(lent.remote_memory().addr, lent.remote_memory().rkey))?;
    while link.hear_more::<()>()?.is_some() {}
    Ok(())
}
