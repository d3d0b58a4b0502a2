// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Worker of a spike: connects, searches until the end of the spike, and prints the times of its operations.

use anyhow::{ensure, Result};
use rustix::time::{clock_gettime, ClockId};
use serde::{Deserialize, Serialize};

use crate::member::TableArgs;
use crate::table::Table;
use crate::workload::{Key, KeyChooser};

/// Nanoseconds of a tick.
pub(crate) const TICK_NS: u64 = 1_000_000;

/// Options of `kite-race args`.
#[derive(clap::Args)]
pub(crate) struct SpikeWorkerArgs {
    #[command(flatten)]
    table: TableArgs,
    /// Number of keys in the table
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Start of the spike, in nanoseconds of CLOCK_MONOTONIC
    #[arg(long)]
    began: u64,
    /// Duration in milliseconds
    #[arg(long)]
    ticks: usize,
}

/// Log of a worker. Times are in nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WorkerLog {
    /// Start of `main`, arguments parsed.
    pub(crate) began: u64,
    /// Connected.
    pub(crate) connected: u64,
    /// Result of the first operation.
    pub(crate) first_result: u64,
    /// Completed operations in each tick of the spike.
    pub(crate) ticks: Vec<u64>,
}

/// Returns the time of CLOCK_MONOTONIC in nanoseconds, which is the same for all processes of a machine.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Runs the worker, and prints its log.
///
/// # Errors
/// A key is not in the table, or the table cannot be reached.
pub(crate) fn run(args: &SpikeWorkerArgs) -> Result<()> {
    let began = now();
    let transport = args.table.connect()?;
    let connected = now();
    let mut table = Table::open(transport)?;
    let mut chooser = KeyChooser::new(args.keys, began);
    let mut search = || -> Result<u64> {
        let key = Key {
            owner: 0,
            number: chooser.next_key(),
        };
        let value = table.search(&key.bytes())?;
        ensure!(
            value.is_some_and(|value| key.has_value(&value)),
            "{key:?} is not in the table"
        );
        Ok(now())
    };
    let first_result = search()?;
    let mut ticks = vec![0; args.ticks];
    let mut ended = first_result;
    while let Some(tick) = ticks.get_mut(((ended - args.began) / TICK_NS) as usize) {
        *tick += 1;
        ended = search()?;
    }
    let log = WorkerLog {
        began,
        connected,
        first_result,
        ticks,
    };
    println!("{}", serde_json::to_string(&log)?);
    Ok(())
}
