// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What regions cost besides reads and writes: to make one and to end it, and to fill one (LITE, figures 8
//! and 17).

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite::{AllocOptions, Cluster};
use kite_bench::statistics::Times;
use plain_verbs::Qp;

/// Byte that fills a region.
const FILLING: u8 = 0x5a;

#[derive(clap::Args)]
pub(crate) struct Lend {
    /// By kite instead of verbs
    #[arg(long)]
    kite: bool,
    #[command(flatten)]
    often: Often,
}

#[derive(clap::Args)]
pub(crate) struct Fill {
    /// The node with the region
    #[arg(long)]
    node: u32,
    #[command(flatten)]
    often: Often,
}

#[derive(clap::Args)]
struct Often {
    /// Bytes of a region
    #[arg(long)]
    size: usize,
    /// Repetitions
    #[arg(long)]
    iterations: usize,
}

impl Often {
    fn times(&self, mut once: impl FnMut() -> Result<()>) -> Result<Times> {
        once()?;
        let mut timed = || -> Result<Duration> {
            let start = Instant::now();
            once()?;
            Ok(start.elapsed())
        };
        let times = (0..self.iterations).map(|_| timed());
        Times::of(times.collect::<Result<Vec<_>>>()?).context("nothing was measured")
    }
}

/// Times memory that others may reach, from nothing to its end.
pub(crate) fn lend(lend: &Lend) -> Result<Times> {
    let Often { size, .. } = lend.often;
    if lend.kite {
        let cluster = Cluster::open()?;
        let options = AllocOptions::new(size as u64);
        lend.often.times(|| Ok(cluster.alloc(&options)?.free()?))
    } else {
        let qp = Qp::new("", 1)?;
        lend.often.times(|| qp.alloc_mr(size).map(drop))
    }
}

/// Times filling a region of another node, which that node does.
pub(crate) fn fill(fill: &Fill) -> Result<Times> {
    let Often { size, .. } = fill.often;
    let cluster = Cluster::open()?;
    let region = cluster.alloc(&AllocOptions::new(size as u64).nodes([fill.node]))?;
    let times = fill
        .often
        .times(|| Ok(region.fill(FILLING, 0, size as u64)?))?;
    let mut found = vec![0; size];
    region.read_at(&mut found, 0)?;
    ensure!(found.iter().all(|&byte| byte == FILLING), "wrong bytes");
    Ok(times)
}
