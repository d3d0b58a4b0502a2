// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A spike of load: workers are started, all at one moment, as processes of their own, and it is measured how soon they
//! work (KRCORE, figure 14).

use std::collections::BTreeMap;
use std::env;
use std::io::Read;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use anyhow::{ensure, Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::error::Error;
use crate::figures::{plateau, Plateau, Times};
use crate::hit::{now, Log, TICK};
use crate::load::Key;
use crate::place::{ask, Member, Over, Place};

/// Options of `kite-race spike`.
#[derive(clap::Args)]
pub(crate) struct Spike {
    /// Where kite-race serve listens that has the table, ADDRESS:PORT
    server: SocketAddr,
    /// Transport to the memories
    #[arg(long, default_value = "both")]
    over: Ways,
    /// Number of workers
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
    /// Keys in the table
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Duration in milliseconds
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    ms: u32,
    /// Print JSON, which also has what was done in each millisecond
    #[arg(long)]
    json: bool,
}

/// Transports to the memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Ways {
    /// By virtual queue pairs of kite
    Kite,
    /// By queue pairs of user-space verbs
    Verbs,
    /// One after the other
    Both,
}

/// Results. All times are in milliseconds.
#[derive(Serialize)]
struct Report {
    workers: usize,
    /// From the start of a process until it runs and has read its arguments.
    running: Times,
    /// From there until it is connected.
    connecting: Times,
    /// From the start of a process until it has the result of its first operation.
    first_operation: Times,
    /// Plateau of all workers together, from the start of the first process on.
    plateau: Option<Plateau>,
    /// Operations in each millisecond.
    ticks: Vec<u64>,
}

/// Runs spikes, and prints their results.
///
/// # Errors
/// If a worker fails.
pub(crate) fn run(spike: &Spike) -> Result<()> {
    let ways: &[(&str, Over)] = match spike.over {
        Ways::Kite => &[("kite", Over::Kite)],
        Ways::Verbs => &[("verbs", Over::Verbs)],
        Ways::Both => &[("kite", Over::Kite), ("verbs", Over::Verbs)],
    };
    let members = ask(spike.server)?;
    spike.fill(Place {
        server: spike.server,
        over: ways[0].1,
        members: members.clone(),
    })?;
    let mut reports = BTreeMap::new();
    for (way, _) in ways {
        reports.insert(*way, spike.hit(way, &members)?);
    }
    match spike.json {
        true => println!("{}", serde_json::to_string(&reports)?),
        false => reports.iter().for_each(|(way, report)| show(way, report)),
    }
    Ok(())
}

impl Spike {
    /// Sees that all keys are there.
    fn fill(&self, place: Place) -> Result<()> {
        let mut table = place.open()?;
        for number in 0..self.keys {
            let key = Key { owner: 0, number };
            match table.insert(&key.bytes(), &key.value(0)) {
                Ok(()) | Err(Error::Exists) => (),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Starts all workers, and waits for their end.
    fn hit(&self, way: &str, members: &[Member]) -> Result<Report> {
        let began = now();
        let start = |_| Ok((now(), self.start(way, members, began)?));
        let started = (0..self.workers).map(start).collect::<Result<Vec<_>>>()?;
        let logs = started
            .into_iter()
            .map(|(start, worker)| Ok((start, end(worker)?)));
        let logs: Vec<(u64, Log)> = logs.collect::<Result<_>>()?;
        Report::of(&logs).context("no worker was started")
    }

    fn start(&self, way: &str, members: &[Member], began: u64) -> Result<Child> {
        let mut command = Command::new(env::current_exe()?);
        command
            .args(["hit", &self.server.to_string(), "--over", way])
            .args(["--keys", &self.keys.to_string()])
            .args([
                "--began",
                &began.to_string(),
                "--ticks",
                &self.ms.to_string(),
            ]);
        for member in members {
            command.args(["--member", &member.to_string()]);
        }
        command
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a worker")
    }
}

/// Waits for the end of a worker, which prints its own errors.
fn end(mut worker: Child) -> Result<Log> {
    let mut log = String::new();
    worker
        .stdout
        .take()
        .context("no output")?
        .read_to_string(&mut log)?;
    ensure!(worker.wait()?.success(), "a worker failed");
    Ok(serde_json::from_str(&log)?)
}

impl Report {
    /// Returns the times since the start of the processes, from their logs.
    fn of(logs: &[(u64, Log)]) -> Option<Self> {
        let times = |time: fn(&(u64, Log)) -> u64| Times::of(logs.iter().map(time).collect());
        let len = logs.iter().map(|(_, log)| log.ticks.len()).max()?;
        let all = |tick: usize| logs.iter().filter_map(|(_, log)| log.ticks.get(tick)).sum();
        let ticks: Vec<u64> = (0..len).map(all).collect();
        Some(Self {
            workers: logs.len(),
            running: times(|(start, log)| log.began - start)?,
            connecting: times(|(_, log)| log.connected - log.began)?,
            first_operation: times(|(start, log)| log.first - start)?,
            plateau: plateau(&ticks),
            ticks,
        })
    }
}

fn show(way: &str, report: &Report) {
    println!(
        "{way}, {} workers (ms)      min   median      p99",
        report.workers
    );
    for (what, times) in [
        ("start to running", report.running),
        ("running to connected", report.connecting),
        ("start to first result", report.first_operation),
    ] {
        let Times { min, median, p99 } = times;
        println!("  {what:21} {min:8.3} {median:8.3} {p99:8.3}");
    }
    match report.plateau {
        Some(Plateau { tick, rate }) => {
            let rate = rate * 1e9 / TICK as f64;
            println!("  all: {rate:.0} searches in a second, from {tick} ms on");
        }
        None => println!("  all: too short for a plateau; see --ms"),
    }
}
