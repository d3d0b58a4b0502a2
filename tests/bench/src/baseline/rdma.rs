// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reads and writes by user-space verbs: one request posted and its completion polled for, or many.
//!
//! perftest reports half the round trip of a ping-pong as the time of a write. A caller that needs the acknowledgement
//! waits longer, as here and with kite.

use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite_bench::statistics::Times;
use plain_verbs::{Qp, QpAddress};
use serde::Serialize;

use crate::hello::{Direction, Hello, Link};
use crate::Timed;

/// Initial content of the buffers of the two sides.
pub(crate) const OURS: u8 = 0x55;
pub(crate) const THEIRS: u8 = 0xaa;

/// Bytes of the first of two writes: as many as a key has.
const FIRST: usize = 8;

/// Operations in a second.
#[derive(Serialize)]
pub(crate) struct Rate {
    operations_per_second: f64,
}

impl Rate {
    /// Returns the rate of a number of operations in this time.
    pub(crate) fn of(operations: usize, time: Duration) -> Self {
        Self {
            operations_per_second: operations as f64 / time.as_secs_f64(),
        }
    }
}

/// Two queue pairs that are connected.
struct ConnectedPair {
    qp: Qp,
    other: QpAddress,
    /// The other side serves until this is closed.
    _link: Link,
}

impl ConnectedPair {
    fn to(timed: &Timed, size: usize) -> Result<Self> {
        let qp = Qp::new(&timed.device, size)?;
        qp.memory().fill(OURS);
        let hello = Hello::Rdma {
            size,
            end: qp.address().clone(),
        };
        let mut link = Link::to(&timed.what.address, &hello)?;
        let other: QpAddress = link.hear()?;
        qp.connect(&other)?;
        Ok(Self {
            qp,
            other,
            _link: link,
        })
    }

    fn transfer(&self, operation: Direction, len: usize) -> Result<()> {
        self.qp
            .transfer(operation.into(), self.other.remote_addr, len)
    }

    /// Checks that the operation has moved its bytes.
    fn verify(&self, operation: Direction, size: usize) -> Result<()> {
        let expected = match operation {
            Direction::Read => THEIRS,
            Direction::Write => {
                self.qp.memory().fill(0);
                self.transfer(Direction::Read, size)?;
                OURS
            }
        };
        ensure!(self.qp.memory().matches(expected), "wrong bytes");
        Ok(())
    }
}

/// Returns the operations of the warm-up, which is long enough for any number of iterations.
pub(crate) fn warm_up(iterations: usize) -> usize {
    (iterations / 10).clamp(1, 1000)
}

/// Returns all operations of [`times`], the warm-up included.
pub(crate) fn with_warm_up(iterations: usize) -> usize {
    warm_up(iterations) + iterations
}

/// Times what `once` does.
pub(crate) fn times(iterations: usize, once: impl Fn() -> Result<()>) -> Result<Times> {
    let timed = || -> Result<Duration> {
        let start = Instant::now();
        once()?;
        Ok(start.elapsed())
    };
    for _ in iterations..with_warm_up(iterations) {
        once()?;
    }
    let times = (0..iterations).map(|_| timed());
    Times::of(times.collect::<Result<Vec<_>>>()?).context("nothing was measured")
}

pub(crate) fn measure(timed: &Timed) -> Result<Times> {
    let (operation, size) = (timed.what.operation, timed.what.size);
    let connected = ConnectedPair::to(timed, size)?;
    let times = times(timed.iterations, || connected.transfer(operation, size))?;
    connected.verify(operation, size)?;
    Ok(times)
}

/// Times the two writes that a call consists of, without its other work.
pub(crate) fn two_writes(timed: &Timed) -> Result<Times> {
    let size = timed.what.size.max(FIRST);
    let connected = ConnectedPair::to(timed, size)?;
    let times = times(timed.iterations, || {
        connected.transfer(Direction::Write, FIRST)?;
        connected.transfer(Direction::Write, timed.what.size)
    })?;
    connected.verify(Direction::Write, size)?;
    Ok(times)
}

/// Returns the operations per second with `depth` in flight.
pub(crate) fn rate(timed: &Timed, depth: usize) -> Result<Rate> {
    let (operation, size) = (timed.what.operation, timed.what.size);
    let connected = ConnectedPair::to(timed, size)?;
    let stream = |count| {
        let ConnectedPair { qp, other, .. } = &connected;
        qp.stream(operation.into(), other.remote_addr, count, depth)
    };
    stream(warm_up(timed.iterations) + depth)?;
    let start = Instant::now();
    stream(timed.iterations)?;
    let rate = Rate::of(timed.iterations, start.elapsed());
    connected.verify(operation, size)?;
    Ok(rate)
}

/// Lends a buffer until the other side hangs up.
pub(crate) fn serve(mut link: Link, size: usize, device: &str, end: &QpAddress) -> Result<()> {
    let qp = Qp::new(device, size)?;
    qp.memory().fill(THEIRS);
    qp.connect(end)?;
    link.say(qp.address())?;
    link.reader().read_to_end(&mut Vec::new())?;
    Ok(())
}
