// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Single reads and writes by user-space verbs: one request posted, its completion polled for.
//!
//! perftest times writes as one way of a ping-pong; a caller who has to know that the bytes arrived
//! waits longer, as here and with kite.

use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite_bench::statistics::Times;

use crate::hello::{Hello, Link, Operation};
use crate::verbs::{End, Pair};
use crate::Timed;

/// What the buffers of the two sides hold at first.
const OURS: u8 = 0x55;
const THEIRS: u8 = 0xaa;

pub(crate) fn measure(timed: &Timed) -> Result<Times> {
    let operation = timed.what.operation;
    let pair = Pair::new(&timed.device, timed.what.size)?;
    pair.memory.fill(OURS);
    let hello = Hello::Rdma {
        size: timed.what.size,
        end: pair.end().clone(),
    };
    let mut link = Link::to(&timed.what.address, &hello)?;
    let other: End = link.hear()?;
    pair.connect(&other)?;

    let transfer = || -> Result<Duration> {
        let start = Instant::now();
        pair.transfer(operation, &other)?;
        Ok(start.elapsed())
    };
    for _ in 0..timed.iterations / 10 + 1 {
        transfer()?;
    }
    let times = (0..timed.iterations).map(|_| transfer());
    let times = Times::of(times.collect::<Result<Vec<_>>>()?).context("nothing was measured")?;
    verify(&pair, operation, &other)?;
    Ok(times)
}

fn verify(pair: &Pair, operation: Operation, other: &End) -> Result<()> {
    let expected = match operation {
        Operation::Read => THEIRS,
        Operation::Write => {
            pair.memory.fill(0);
            pair.transfer(Operation::Read, other)?;
            OURS
        }
    };
    ensure!(pair.memory.holds(expected), "wrong bytes");
    Ok(())
}

/// Lends a buffer until the other side hangs up.
pub(crate) fn serve(mut link: Link, size: usize, device: &str, end: &End) -> Result<()> {
    let pair = Pair::new(device, size)?;
    pair.memory.fill(THEIRS);
    pair.connect(end)?;
    link.say(pair.end())?;
    link.reader().read_to_end(&mut Vec::new())?;
    Ok(())
}
