// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Latency and rate of reads and writes by user-space verbs.
//!
//! The latency of a write ends with its acknowledgement, as with kite. perftest reports half the round trip of a
//! ping-pong instead.

use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite_bench::statistics::Times;
use plain_verbs::{Qp, QpAddress};
use serde::Serialize;

use crate::link::{Direction, Link, PeerRequest};
use crate::MeasureArgs;

/// Seeds of the initial content of the buffers.
pub(crate) const CLIENT_SEED: u8 = 0x55;
pub(crate) const SERVER_SEED: u8 = 0xaa;

/// Bytes of the first of two writes, as many as a key of a table.
const FIRST_WRITE_BYTES: usize = 8;

/// Result of a measurement with several operations in flight.
#[derive(Serialize)]
pub(crate) struct Rate {
    operations_per_second: f64,
}

impl Rate {
    /// Returns the rate of a number of operations in a time.
    pub(crate) fn new(operations: usize, time: Duration) -> Self {
        Self {
            operations_per_second: operations as f64 / time.as_secs_f64(),
        }
    }
}

/// QP that is connected to a QP of the server.
struct ConnectedQp {
    qp: Qp,
    peer: QpAddress,
    /// The server destroys its QP when this connection is closed.
    _link: Link,
}

impl ConnectedQp {
    fn new(args: &MeasureArgs, size: usize) -> Result<Self> {
        let qp = Qp::new(&args.device, size)?;
        qp.memory().fill(CLIENT_SEED);
        let request = PeerRequest::VerbsMemory {
            size,
            client: qp.address().clone(),
        };
        let mut link = Link::connect(&args.transfer.address, &request)?;
        let peer: QpAddress = link.receive()?;
        qp.connect(&peer)?;
        Ok(Self {
            qp,
            peer,
            _link: link,
        })
    }

    fn transfer(&self, operation: Direction, len: usize) -> Result<()> {
        self.qp
            .transfer(operation.into(), self.peer.remote_addr, len)
    }

    /// Checks that the operations have transferred their bytes.
    fn verify(&self, operation: Direction, size: usize) -> Result<()> {
        let expected = match operation {
            Direction::Read => SERVER_SEED,
            Direction::Write => {
                self.qp.memory().fill(0);
                self.transfer(Direction::Read, size)?;
                CLIENT_SEED
            }
        };
        ensure!(self.qp.memory().matches(expected), "buffer has wrong bytes");
        Ok(())
    }
}

/// Returns the number of operations of the warm-up: a tenth of the iterations, from 1 to 1000.
pub(crate) fn warm_up_count(iterations: usize) -> usize {
    (iterations / 10).clamp(1, 1000)
}

/// Returns the number of operations of [`time_each`], the warm-up included.
pub(crate) fn with_warm_up(iterations: usize) -> usize {
    warm_up_count(iterations) + iterations
}

/// Measures each call of `operation`, after a warm-up.
pub(crate) fn time_each(iterations: usize, operation: impl Fn() -> Result<()>) -> Result<Times> {
    let measure = || -> Result<Duration> {
        let start = Instant::now();
        operation()?;
        Ok(start.elapsed())
    };
    for _ in iterations..with_warm_up(iterations) {
        operation()?;
    }
    let times = (0..iterations).map(|_| measure());
    Times::from_durations(times.collect::<Result<Vec<_>>>()?).context("no iterations")
}

/// Returns the times of single operations.
pub(crate) fn latency(args: &MeasureArgs) -> Result<Times> {
    let (operation, size) = (args.transfer.operation, args.transfer.size);
    let connected = ConnectedQp::new(args, size)?;
    let times = time_each(args.iterations, || connected.transfer(operation, size))?;
    connected.verify(operation, size)?;
    Ok(times)
}

/// Returns the times of the two writes that an RPC consists of.
pub(crate) fn two_writes(args: &MeasureArgs) -> Result<Times> {
    let size = args.transfer.size.max(FIRST_WRITE_BYTES);
    let connected = ConnectedQp::new(args, size)?;
    let times = time_each(args.iterations, || {
        connected.transfer(Direction::Write, FIRST_WRITE_BYTES)?;
        connected.transfer(Direction::Write, args.transfer.size)
    })?;
    connected.verify(Direction::Write, size)?;
    Ok(times)
}

/// Returns the operations per second with `depth` in flight.
pub(crate) fn rate(args: &MeasureArgs, depth: usize) -> Result<Rate> {
    let (operation, size) = (args.transfer.operation, args.transfer.size);
    let connected = ConnectedQp::new(args, size)?;
    let stream = |count| {
        let ConnectedQp { qp, peer, .. } = &connected;
        qp.stream(operation.into(), peer.remote_addr, count, depth)
    };
    stream(warm_up_count(args.iterations) + depth)?;
    let start = Instant::now();
    stream(args.iterations)?;
    let rate = Rate::new(args.iterations, start.elapsed());
    connected.verify(operation, size)?;
    Ok(rate)
}

/// Connects a QP with a buffer, until the client closes the connection.
pub(crate) fn serve(mut link: Link, size: usize, device: &str, peer: &QpAddress) -> Result<()> {
    let qp = Qp::new(device, size)?;
    qp.memory().fill(SERVER_SEED);
    qp.connect(peer)?;
    link.send(qp.address())?;
    link.reader().read_to_end(&mut Vec::new())?;
    Ok(())
}
