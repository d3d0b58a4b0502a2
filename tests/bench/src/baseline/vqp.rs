// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Latency and rate of reads and writes by a VQP of kite, with DC or with RC as transport.
//!
//! kite promotes a node to RC after enough requests. A warm-up causes the promotion, and the statistics must show that
//! all measured requests used the given transport.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};
use clap::ValueEnum;
use kite::{Buffer, Cluster, IoQueue, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};
use kite_bench::statistics::Times;

use crate::link::{Direction, Link, PeerRequest};
use crate::rdma::{time_each, warm_up_count, Rate, CLIENT_SEED, SERVER_SEED};
use crate::MeasureArgs;

/// Maximum time of a completion.
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));

/// Maximum bytes of a push: kite executes larger ones by DC.
const PUSH_BYTES_MAX: usize = 1 << 20;

/// Warm-up before measurements by RC: requests of a batch, their maximum size in bytes, and their number in flight.
/// kite promotes the node after one or two batches.
const WARM_UP_REQUESTS: usize = 1024;
const WARM_UP_BYTES: usize = 8;
const WARM_UP_DEPTH: usize = 32;

/// Batches after which the warm-up fails.
const WARM_UP_BATCHES_MAX: usize = 100;

/// Transport of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// DC, which needs a module with `max_promoted=0`
    Dc,
    /// RC
    Rc,
}

/// VQP to the node of the server, and memory of both nodes.
struct ConnectedVqp {
    cluster: Cluster,
    vqp: Vqp,
    local: Mr,
    remote: RemoteMemory,
    size: usize,
    /// The server deregisters its memory when this connection is closed.
    _link: Link,
}

impl ConnectedVqp {
    fn new(args: &MeasureArgs, node: u32) -> Result<Self> {
        let size = args.transfer.size;
        let mut link = Link::connect(&args.transfer.address, &PeerRequest::VqpMemory { size })?;
        let (addr, rkey) = link.receive()?;
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(size)?, Rights::empty())?;
        local.buffer().store(0, &vec![CLIENT_SEED; size])?;
        Ok(Self {
            vqp: cluster.connect(node)?,
            cluster,
            local,
            remote: RemoteMemory { addr, rkey },
            size,
            _link: link,
        })
    }

    /// Returns a signaled request for the whole buffer.
    fn send_wr(&self, operation: Direction) -> SendWr<'_> {
        let op = match operation {
            Direction::Write => WrOp::Write,
            Direction::Read => WrOp::Read,
        };
        SendWr {
            tag: 0,
            op,
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

    /// Waits for up to `max` completions. Returns their number.
    fn pop(&self, max: usize) -> Result<usize> {
        let completions = self.vqp.pop(max, TIMEOUT)?;
        for completion in &completions {
            completion.result?;
        }
        Ok(completions.len())
    }

    fn transfer(&self, operation: Direction) -> Result<()> {
        self.vqp.push(&[self.send_wr(operation)])?;
        self.pop(1).map(drop)
    }

    /// Executes a request `count` times, with `depth` in flight.
    fn stream(&self, wr: SendWr<'_>, count: usize, depth: usize) -> Result<()> {
        let batch = vec![wr; depth.min(PUSH_BYTES_MAX / wr.len)];
        let (mut pushed, mut completed) = (0, 0);
        while completed < count {
            let remaining = (count - pushed).min(depth - (pushed - completed));
            let len = remaining.min(batch.len());
            if len != 0 {
                self.vqp.push(&batch[..len])?;
                pushed += len;
            }
            completed += self.pop(depth)?;
        }
        Ok(())
    }

    /// Like [`Self::stream`], but submits by an I/O queue.
    fn stream_by_queue(
        &self,
        queue: &mut IoQueue,
        wr: SendWr<'_>,
        count: usize,
        depth: usize,
    ) -> Result<()> {
        let depth = depth.min(PUSH_BYTES_MAX / wr.len);
        let (mut pushed, mut completed) = (0, 0);
        while completed < count {
            while pushed < count.min(completed + depth) {
                queue.push(&self.vqp, &wr)?;
                pushed += 1;
            }
            queue.submit()?;
            queue.wait()?.result?;
            completed += 1;
            while let Some(completion) = queue.try_next()? {
                completion.result?;
                completed += 1;
            }
        }
        Ok(())
    }

    /// Returns the number of VQP requests that this node has executed by RC.
    fn vqp_rc_requests(&self) -> Result<usize> {
        Ok(usize::try_from(self.cluster.stats()?.vqp_rc_requests)?)
    }

    /// Executes requests until they use the given transport.
    fn warm_up(&self, transport: Transport, operation: Direction) -> Result<()> {
        let small = SendWr {
            len: WARM_UP_BYTES.min(self.size),
            ..self.send_wr(operation)
        };
        for _ in 0..WARM_UP_BATCHES_MAX {
            let before = self.vqp_rc_requests()?;
            self.stream(small, WARM_UP_REQUESTS, WARM_UP_DEPTH)?;
            let by_rc = self.vqp_rc_requests()? - before;
            if transport == Transport::Dc || by_rc >= WARM_UP_REQUESTS {
                return Ok(());
            }
        }
        bail!("node was not promoted to RC");
    }

    /// Runs `measure`, which executes at least `count` requests. Fails unless all of them use the given transport.
    fn measure_on<T>(
        &self,
        transport: Transport,
        args: &MeasureArgs,
        measure: impl FnOnce(usize) -> Result<T>,
    ) -> Result<T> {
        let count = args.iterations;
        self.warm_up(transport, args.transfer.operation)?;
        let before = self.vqp_rc_requests()?;
        let result = measure(count)?;
        let by_rc = self.vqp_rc_requests()? - before;
        let is_expected = match transport {
            Transport::Dc => by_rc == 0,
            Transport::Rc => by_rc >= count,
        };
        ensure!(is_expected, "{by_rc} of {count} requests used RC");
        Ok(result)
    }

    /// Checks that the operations have transferred their bytes.
    fn verify(&self, operation: Direction) -> Result<()> {
        let expected = match operation {
            Direction::Read => SERVER_SEED,
            Direction::Write => {
                self.local.buffer().store(0, &vec![0; self.size])?;
                self.transfer(Direction::Read)?;
                CLIENT_SEED
            }
        };
        let mut content = vec![0; self.size];
        self.local.buffer().load(0, &mut content)?;
        ensure!(
            content.iter().all(|byte| *byte == expected),
            "buffer has wrong bytes"
        );
        Ok(())
    }
}

/// Returns the times of single operations.
pub(crate) fn latency(args: &MeasureArgs, node: u32, transport: Transport) -> Result<Times> {
    let operation = args.transfer.operation;
    let connected = ConnectedVqp::new(args, node)?;
    let times = connected.measure_on(transport, args, |count| {
        time_each(count, || connected.transfer(operation))
    })?;
    connected.verify(operation)?;
    Ok(times)
}

/// Returns the operations per second with a number in flight, by an I/O queue or by system calls.
pub(crate) fn rate(
    args: &MeasureArgs,
    node: u32,
    transport: Transport,
    (depth, by_queue): (usize, bool),
) -> Result<Rate> {
    let operation = args.transfer.operation;
    let connected = ConnectedVqp::new(args, node)?;
    let create = || connected.cluster.create_queue(depth as u32, 1);
    let mut queue = by_queue.then(create).transpose()?;
    let wr = connected.send_wr(operation);
    let mut stream = |count| match &mut queue {
        Some(queue) => connected.stream_by_queue(queue, wr, count, depth),
        None => connected.stream(wr, count, depth),
    };
    let rate = connected.measure_on(transport, args, |count| {
        stream(warm_up_count(count) + depth)?;
        let start = Instant::now();
        stream(count)?;
        Ok(Rate::new(count, start.elapsed()))
    })?;
    connected.verify(operation)?;
    Ok(rate)
}

/// Registers memory for VQPs until the client closes the connection.
pub(crate) fn serve(mut link: Link, size: usize) -> Result<()> {
    let memory = Buffer::new(size)?;
    memory.store(0, &vec![SERVER_SEED; size])?;
    let mr = Cluster::open()?.reg_mr(memory, Rights::empty())?;
    link.send(&(mr.remote_memory().addr, mr.remote_memory().rkey))?;
    while link.receive_next::<()>()?.is_some() {}
    Ok(())
}
