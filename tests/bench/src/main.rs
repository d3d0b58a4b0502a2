// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite-bench`: kite beside user-space verbs and TCP, between the same two nodes.
//!
//! All take turns within a round, and which one begins changes from round to round: machines that
//! share their host's processors are never quiet, but then they are loud for all alike.

mod account;
mod cell;
mod command;
mod measure;
mod pair;
mod report;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use kite_cluster::Fabric;

use account::Account;
use cell::{Cell, Contender, Kind};
use measure::alloc_scaling::{AllocPoint, COUNTS};
use measure::rings;
use measure::scale::{self, ConnectCosts, Scale};
use measure::scatter::{self, SHAPES};
use measure::sharing::{Sharing, POLICIES};
use pair::Pair;
use report::{picture, table, Report, Row};

/// A measurement of the slowest takes so many times as long as it should.
const SLOWER: u64 = 3;

/// Measured kinds.
const KINDS: [Kind; 11] = [
    Kind::Latency,
    Kind::Calls,
    Kind::Bandwidth,
    Kind::Rate,
    Kind::Clients,
    Kind::Pace,
    Kind::Lend,
    Kind::Fill,
    Kind::Echo,
    Kind::Connect,
    Kind::Connects,
];

/// Measures kite, user-space verbs and TCP on two virtual machines.
#[derive(Parser)]
struct Args {
    /// Rounds of all measurements
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Count instructions instead: two nodes in one machine, whose clock counts them
    #[arg(long)]
    instructions: bool,
    /// Directory for the results, bench.json and bench.svg, or instructions.json and .svg
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let load = report::host_load();
    say("booting");
    let (pair, kinds) = match args.instructions {
        false => (Pair::boot()?, &KINDS[..]),
        true => (Pair::boot_one_kernel()?, &[Kind::Instructions][..]),
    };
    let mut rows = warm_up(&pair, kinds)?;
    for round in 1..=args.rounds {
        run_round(&pair, &mut rows, round, args.rounds)?;
    }
    let mut report = Report {
        fabric: pair.fabric().to_string(),
        rounds: args.rounds,
        rows,
        ..Report::default()
    };
    if args.instructions {
        report.alloc_scaling = alloc_scaling_of(&pair)?;
        pair.shutdown()?;
    } else {
        report.sharing = sharing_of(&pair)?;
        report.scatter = scatter_of(&pair)?;
        let fabric = pair.fabric();
        if fabric == Fabric::Connectx {
            report.accounts = accounts_of(&pair)?;
        }
        if Contender::KiteVqp.runs_on(fabric) {
            say("nodes that are known, and connected to");
            report.nodes = Some(pair.nodes()?);
        }
        pair.shutdown()?;
        let (connected, scale) = scale_of(fabric)?;
        (report.mesh, report.lookup) = connected.unzip();
        report.scale = scale;
        report.rings = rings::all().into();
    }
    report.load = [load, report::host_load()];

    print!("{}", table::of(&report));
    save(&report, &args)
}

/// Measures everything once, briefly, to learn how many operations fit in a measurement.
fn warm_up(pair: &Pair, kinds: &[Kind]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for cell in Cell::of(kinds) {
        let (mut count, mut most) = (cell.first_count(), u64::MAX);
        for contender in contenders(pair, cell) {
            let value = pair.measure(cell, contender, cell.first_count())?;
            most = most.min(SLOWER * cell.count(value));
            if contender == cell.kind.yardstick() {
                count = cell.count(value);
            }
        }
        let count = count.min(most);
        say(&format!("warming up: {cell}, {count} operations at a time"));
        rows.push(Row::new(cell, count));
    }
    Ok(rows)
}

/// Returns the contenders on this fabric.
fn contenders(pair: &Pair, cell: Cell) -> Vec<Contender> {
    let all = cell.kind.contenders().iter().copied();
    all.filter(|contender| contender.runs_on(pair.fabric()))
        .collect()
}

fn run_round(pair: &Pair, rows: &mut [Row], round: u32, rounds: u32) -> Result<()> {
    let start = Instant::now();
    for row in rows {
        let mut contenders = contenders(pair, row.cell);
        let first = round as usize % contenders.len();
        contenders.rotate_left(first);
        for contender in contenders {
            let value = pair.measure(row.cell, contender, row.count)?;
            row.add(contender, value);
        }
        say(&format!("round {round} of {rounds}: {}", row.last()));
    }
    let seconds = start.elapsed().as_secs();
    say(&format!("round {round} of {rounds} took {seconds} s"));
    Ok(())
}

fn sharing_of(pair: &Pair) -> Result<Vec<Sharing>> {
    let mut all = Vec::new();
    for policy in POLICIES {
        say(&format!("two priorities share the RNIC, policy {policy}"));
        all.push(pair.share(policy)?);
    }
    Ok(all)
}

fn scatter_of(pair: &Pair) -> Result<Vec<scatter::ScatterPoint>> {
    let mut points = Vec::new();
    for shape in SHAPES {
        let point = scatter::ScatterPoint::of(shape, |kite| pair.scatter(shape, kite))?;
        let (name, ratio) = (shape.name(), point.ratio());
        say(&format!(
            "writes all over regions, {name}: kite/verbs {ratio:.2}"
        ));
        points.push(point);
    }
    Ok(points)
}

fn accounts_of(pair: &Pair) -> Result<Vec<Account>> {
    let accounts = account::all().map(|of| {
        say(&format!("what RNICs do: {} of {}", of.0, of.1.name()));
        pair.account(of)
    });
    accounts.collect()
}

fn scale_of(fabric: Fabric) -> Result<(Option<ConnectCosts>, Vec<Scale>)> {
    say("booting more nodes");
    let mut all = Vec::new();
    let connected = scale::measure(fabric, |scale| {
        let (calls, writes) = (scale.calls_ratio(), scale.writes_ratio());
        say(&format!(
            "{} nodes: calls kite/TCP {calls:.2}, writes kite/verbs {writes:.2}",
            scale.nodes
        ));
        all.push(scale);
    })?;
    Ok((connected, all))
}

fn alloc_scaling_of(pair: &Pair) -> Result<Vec<AllocPoint>> {
    let mut points = Vec::new();
    say(&format!(
        "allocating up to {} regions",
        COUNTS[COUNTS.len() - 1]
    ));
    pair.alloc_scaling(|point| {
        let AllocPoint { regions, value } = point;
        say(&format!(
            "{regions} regions: one more takes {value:.1}×10³ instructions"
        ));
        points.push(point);
    })?;
    Ok(points)
}

fn save(report: &Report, args: &Args) -> Result<()> {
    let name = match args.instructions {
        false => "bench",
        true => "instructions",
    };
    let json = args.output.join(format!("{name}.json"));
    let svg = args.output.join(format!("{name}.svg"));
    std::fs::create_dir_all(&args.output)
        .and_then(|()| std::fs::write(&json, report.json()))
        .with_context(|| format!("writing {}", json.display()))?;
    picture::draw(report, &svg).with_context(|| format!("drawing {}", svg.display()))?;
    say(&format!("wrote {} and {}", json.display(), svg.display()));
    Ok(())
}

/// Progress goes to standard error, results to standard output.
fn say(what: &str) {
    eprintln!("bench: {what}");
}
