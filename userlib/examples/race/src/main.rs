// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RACE hashing: a hash table in the memory of some nodes, which workers search and change by one-sided verbs alone
//! (Zuo et al., USENIX ATC 2021). KRCORE (figure 14) starts workers when there is much to do: over kite's virtual
//! queue pairs these are connected as soon as they run.
//!
//! `README.md` describes its commands.

mod block;
mod check;
mod directory;
mod error;
mod figures;
mod hash;
mod hit;
mod layout;
mod link;
mod load;
#[cfg(test)]
mod model;
mod place;
mod serve;
mod spike;
mod table;
mod transport;
mod work;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    about = "A hash table in other nodes' memory, by one-sided verbs",
    version
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lend memory with an empty table, until killed
    Serve(serve::Serve),
    /// Insert, search, update and delete, and check the results
    Work(work::Work),
    /// Start many workers at a moment, and measure how soon they work
    Spike(spike::Spike),
    /// Be one of these
    Hit(hit::Hit),
    /// Check the whole table, while no worker changes it
    Check(check::Check),
}

fn run() -> Result<()> {
    match &Args::parse().command {
        Command::Serve(serve) => serve::run(serve),
        Command::Work(work) => work::run(work),
        Command::Spike(spike) => spike::run(spike),
        Command::Hit(hit) => hit::run(hit),
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
