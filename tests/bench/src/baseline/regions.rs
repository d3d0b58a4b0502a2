// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Times to register and deregister memory, and to fill a region of another node (LITE, figures 8 and 17).

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite::{AllocOptions, Cluster};
use kite_bench::statistics::Times;
use plain_verbs::Qp;

/// Value of all bytes of a filled region.
const FILL_BYTE: u8 = 0x5a;

#[derive(clap::Args)]
pub(crate) struct Register {
    /// Allocate and free a region of kite instead of an MR of verbs
    #[arg(long)]
    kite: bool,
    #[command(flatten)]
    repeat: RepeatArgs,
}

#[derive(clap::Args)]
pub(crate) struct Fill {
    /// Node that stores the region
    #[arg(long)]
    node: u32,
    #[command(flatten)]
    repeat: RepeatArgs,
}

#[derive(clap::Args)]
struct RepeatArgs {
    /// Bytes of a region
    #[arg(long)]
    size: usize,
    /// Repetitions
    #[arg(long)]
    iterations: usize,
}

impl RepeatArgs {
    /// Measures each of the repetitions, after one for warm-up.
    fn time_each(&self, mut operation: impl FnMut() -> Result<()>) -> Result<Times> {
        operation()?;
        let mut measure = || -> Result<Duration> {
            let start = Instant::now();
            operation()?;
            Ok(start.elapsed())
        };
        let times = (0..self.iterations).map(|_| measure());
        Times::from_durations(times.collect::<Result<Vec<_>>>()?).context("no iterations")
    }
}

/// Measures the allocation, registration, deregistration and free of memory.
pub(crate) fn register(register: &Register) -> Result<Times> {
    let RepeatArgs { size, .. } = register.repeat;
    if register.kite {
        let cluster = Cluster::open()?;
        let options = AllocOptions::new(size as u64);
        register
            .repeat
            .time_each(|| Ok(cluster.alloc(&options)?.free()?))
    } else {
        let qp = Qp::new("", 1)?;
        register.repeat.time_each(|| qp.alloc_mr(size).map(drop))
    }
}

/// Measures the fill of a region, which its node executes.
pub(crate) fn fill(fill: &Fill) -> Result<Times> {
    let RepeatArgs { size, .. } = fill.repeat;
    let cluster = Cluster::open()?;
    let region = cluster.alloc(&AllocOptions::new(size as u64).nodes([fill.node]))?;
    let times = fill
        .repeat
        .time_each(|| Ok(region.fill(FILL_BYTE, 0, size as u64)?))?;
    let mut content = vec![0; size];
    region.read_at(&mut content, 0)?;
    ensure!(
        content.iter().all(|&byte| byte == FILL_BYTE),
        "region has wrong bytes"
    );
    Ok(times)
}
