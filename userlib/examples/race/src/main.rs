// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RACE hashing: a hash table in the memory of other nodes, which workers access by one-sided verbs only (Zuo et al.,
//! USENIX ATC 2021). KRCORE (figure 14) starts workers at a load spike. Over virtual queue pairs of kite a worker sends
//! its first request without connection setup.
//!
//! `README.md` describes its commands.

mod block;
mod check;
mod directory;
mod error;
mod hash;
mod layout;
mod link;
mod member;
#[cfg(test)]
mod model;
mod serve;
mod spike;
mod spike_worker;
mod statistics;
mod table;
mod transport;
mod work;
mod workload;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    about = "Hash table in the memory of other nodes, accessed by one-sided verbs",
    version
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Register memory with an empty table, and serve it until killed
    Serve(serve::ServeArgs),
    /// Insert, search, update and delete keys, and check the results
    Work(work::WorkArgs),
    /// Start many workers at one time, and measure when they complete operations
    Spike(spike::SpikeArgs),
    /// Run as a worker of `spike`
    Hit(spike_worker::SpikeWorkerArgs),
    /// Check the whole table, which no worker may change meanwhile
    Check(check::CheckArgs),
}

fn run() -> Result<()> {
    match &Args::parse().command {
        Command::Serve(serve) => serve::run(serve),
        Command::Work(work) => work::run(work),
        Command::Spike(spike) => spike::run(spike),
        Command::Hit(hit) => spike_worker::run(hit),
        Command::Check(check) => check::run(check),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kite-race: {error:#}");
            ExitCode::FAILURE
        }
    }
}
