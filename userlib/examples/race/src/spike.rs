// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Load spike: starts workers as processes at one time, and measures when they complete operations (KRCORE, figure 14).

use std::collections::BTreeMap;
use std::env;
use std::io::Read;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use anyhow::{ensure, Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::error::Error;
use crate::member::{request_members, Member, TableArgs, TransportKind};
use crate::spike_worker::{now, WorkerLog, TICK_NS};
use crate::statistics::{plateau, Percentiles, Plateau};
use crate::workload::Key;

/// Options of `kite-race spike`.
#[derive(clap::Args)]
pub(crate) struct SpikeArgs {
    /// TCP address of the kite-race serve with the table, ADDRESS:PORT
    server: SocketAddr,
    /// Transport to the memories
    #[arg(long, default_value = "both")]
    over: TransportKinds,
    /// Number of workers
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
    /// Keys in the table
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Duration in milliseconds
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    ms: u32,
    /// Print JSON, which includes the operations of each millisecond
    #[arg(long)]
    json: bool,
}

/// Transports to the memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransportKinds {
    /// Virtual queue pairs of kite
    Kite,
    /// Queue pairs of user-space verbs
    Verbs,
    /// Both, one after the other
    Both,
}

/// Results. All times are in milliseconds.
#[derive(Serialize)]
struct SpikeReport {
    workers: usize,
    /// From the start of a process to the start of its `main`, arguments parsed.
    running: Percentiles,
    /// From then until the worker is connected.
    connecting: Percentiles,
    /// From the start of a process to the result of its first operation.
    first_operation: Percentiles,
    /// Plateau of all workers together. Tick 0 is the start of the first process.
    plateau: Option<Plateau>,
    /// Operations in each millisecond.
    ticks: Vec<u64>,
}

/// Runs a spike for each transport, and prints the results.
///
/// # Errors
/// A worker fails.
pub(crate) fn run(spike: &SpikeArgs) -> Result<()> {
    let kinds: &[(&str, TransportKind)] = match spike.over {
        TransportKinds::Kite => &[("kite", TransportKind::Kite)],
        TransportKinds::Verbs => &[("verbs", TransportKind::Verbs)],
        TransportKinds::Both => &[
            ("kite", TransportKind::Kite),
            ("verbs", TransportKind::Verbs),
        ],
    };
    let members = request_members(spike.server)?;
    spike.insert_keys(TableArgs {
        server: spike.server,
        over: kinds[0].1,
        members: members.clone(),
    })?;
    let mut reports = BTreeMap::new();
    for (kind, _) in kinds {
        reports.insert(*kind, spike.run_workers(kind, &members)?);
    }
    match spike.json {
        true => println!("{}", serde_json::to_string(&reports)?),
        false => reports
            .iter()
            .for_each(|(kind, report)| print_report(kind, report)),
    }
    Ok(())
}

impl SpikeArgs {
    /// Inserts all keys that are not in the table.
    fn insert_keys(&self, table: TableArgs) -> Result<()> {
        let mut table = table.open()?;
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
    fn run_workers(&self, kind: &str, members: &[Member]) -> Result<SpikeReport> {
        let began = now();
        let start = |_| Ok((now(), self.start_worker(kind, members, began)?));
        let started = (0..self.workers).map(start).collect::<Result<Vec<_>>>()?;
        let logs = started
            .into_iter()
            .map(|(start, worker)| Ok((start, wait_worker(worker)?)));
        let logs: Vec<(u64, WorkerLog)> = logs.collect::<Result<_>>()?;
        SpikeReport::new(&logs).context("no worker was started")
    }

    /// Starts a worker. `began` is the start of the spike.
    fn start_worker(&self, kind: &str, members: &[Member], began: u64) -> Result<Child> {
        let mut command = Command::new(env::current_exe()?);
        command
            .args(["hit", &self.server.to_string(), "--over", kind])
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

/// Waits for the end of a worker. Returns its log. The worker prints its own errors.
fn wait_worker(mut worker: Child) -> Result<WorkerLog> {
    let mut log = String::new();
    worker
        .stdout
        .take()
        .context("no output")?
        .read_to_string(&mut log)?;
    ensure!(worker.wait()?.success(), "a worker failed");
    Ok(serde_json::from_str(&log)?)
}

impl SpikeReport {
    /// Returns the report of the logs, each with the start of its process. Returns `None` without logs.
    fn new(logs: &[(u64, WorkerLog)]) -> Option<Self> {
        let times =
            |time: fn(&(u64, WorkerLog)) -> u64| Percentiles::of(logs.iter().map(time).collect());
        let len = logs.iter().map(|(_, log)| log.ticks.len()).max()?;
        let sum = |tick: usize| logs.iter().filter_map(|(_, log)| log.ticks.get(tick)).sum();
        let ticks: Vec<u64> = (0..len).map(sum).collect();
        Some(Self {
            workers: logs.len(),
            running: times(|(start, log)| log.began - start)?,
            connecting: times(|(_, log)| log.connected - log.began)?,
            first_operation: times(|(start, log)| log.first_result - start)?,
            plateau: plateau(&ticks),
            ticks,
        })
    }
}

fn print_report(kind: &str, report: &SpikeReport) {
    println!(
        "{kind}, {} workers (ms)      min   median      p99",
        report.workers
    );
    for (name, times) in [
        ("start to running", report.running),
        ("running to connected", report.connecting),
        ("start to first result", report.first_operation),
    ] {
        let Percentiles { min, median, p99 } = times;
        println!("  {name:21} {min:8.3} {median:8.3} {p99:8.3}");
    }
    match report.plateau {
        Some(Plateau { tick, rate }) => {
            let rate = rate * 1e9 / TICK_NS as f64;
            println!("  all: {rate:.0} searches in a second, from {tick} ms on");
        }
        None => println!("  all: no plateau; increase --ms"),
    }
}
