// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A worker that a spike starts: it connects, searches until the end, and prints the times of its operations.

use anyhow::{ensure, Result};
use rustix::time::{clock_gettime, ClockId};
use serde::{Deserialize, Serialize};

use crate::load::{Chooser, Key};
use crate::place::Place;
use crate::table::Table;

/// Nanoseconds of a tick.
pub(crate) const TICK: u64 = 1_000_000;

/// Options of `kite-race hit`.
#[derive(clap::Args)]
pub(crate) struct Hit {
    #[command(flatten)]
    place: Place,
    /// Keys that are in the table
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// When the spike began, in nanoseconds of CLOCK_MONOTONIC
    #[arg(long)]
    began: u64,
    /// Duration in milliseconds
    #[arg(long)]
    ticks: usize,
}

/// When what was done, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Log {
    /// The process runs, and has read its arguments.
    pub(crate) began: u64,
    /// It is connected.
    pub(crate) connected: u64,
    /// It has the result of its first operation.
    pub(crate) first: u64,
    /// Operations that ended in each tick of the spike.
    pub(crate) ticks: Vec<u64>,
}

/// Returns the time, the same for all processes of this machine.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Searches, and prints its log.
///
/// # Errors
/// If a key is not there, or the table cannot be reached.
pub(crate) fn run(hit: &Hit) -> Result<()> {
    let began = now();
    let transport = hit.place.connect()?;
    let connected = now();
    let mut table = Table::open(transport)?;
    let mut chooser = Chooser::new(hit.keys, began);
    let mut search = || -> Result<u64> {
        let key = Key {
            owner: 0,
            number: chooser.key(),
        };
        let value = table.search(&key.bytes())?;
        ensure!(
            value.is_some_and(|value| key.has(&value)),
            "{key:?} is not there"
        );
        Ok(now())
    };
    let first = search()?;
    let mut ticks = vec![0; hit.ticks];
    let mut ended = first;
    while let Some(tick) = ticks.get_mut(((ended - hit.began) / TICK) as usize) {
        *tick += 1;
        ended = search()?;
    }
    let log = Log {
        began,
        connected,
        first,
        ticks,
    };
    println!("{}", serde_json::to_string(&log)?);
    Ok(())
}
