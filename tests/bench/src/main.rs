// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite-bench`: compares kite with user-space verbs and TCP on the same two nodes.
//!
//! Contenders alternate within a round in rotating order, so that host load affects all equally.

mod cell;
mod command;
mod measure;
mod node_pair;
mod parse;
mod report;
mod rnic_work;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Error, Result};
use clap::Parser;
use kite_cluster::Fabric;

use cell::{Cell, Contender, Metric};
use measure::alloc_scaling::{AllocPoint, COUNTS};
use measure::rings;
use measure::scale::{self, ConnectCosts, ScalePoint};
use measure::scatter::{self, SHAPES};
use measure::sharing::{Sharing, POLICIES};
use node_pair::NodePair;
use report::{picture, table, Report, Row};
use rnic_work::RnicWork;

/// Maximum time of a measurement of the slowest contender, in multiples of the intended time.
const SLOWDOWN_MAX: u64 = 3;

/// Measures kite, user-space verbs and TCP on two virtual machines.
#[derive(Parser)]
struct Args {
    /// Number of rounds, each of which measures all contenders
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Count instructions instead of time, with two nodes in one machine whose clock is the instruction count
    #[arg(long)]
    instructions: bool,
    /// Directory for the results: bench.json, bench.svg and pictures/, or instructions.json and .svg
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
    /// Draw the pictures of the documents from this JSON file to the directory, and measure nothing
    #[arg(long, value_name = "JSON")]
    render: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(json) = &args.render {
        return draw_documents(&read(json)?, &args.output);
    }
    let load = report::host_load();
    let mut report = measure(&args)?;
    report.load = [load, report::host_load()];
    print!("{}", table::render(&report));
    save(&report, &args)
}

/// Boots the nodes, and measures everything.
fn measure(args: &Args) -> Result<Report> {
    log("booting two nodes");
    let (pair, metrics) = match args.instructions {
        false => (NodePair::boot()?, &Metric::TIMED[..]),
        true => (NodePair::boot_one_kernel()?, &[Metric::Instructions][..]),
    };
    let mut rows = warm_up(&pair, metrics)?;
    for round in 1..=args.rounds {
        run_round(&pair, &mut rows, round, args.rounds)?;
    }
    let mut report = Report {
        fabric: pair.fabric().to_string(),
        rounds: args.rounds,
        rows,
        ..Report::default()
    };
    match args.instructions {
        true => {
            report.alloc_scaling = measure_alloc_scaling(&pair)?;
            pair.shutdown()?;
        }
        false => measure_once(pair, &mut report)?,
    }
    Ok(report)
}

/// Makes the measurements that have no rounds, the last of them on six nodes.
fn measure_once(pair: NodePair, report: &mut Report) -> Result<()> {
    let fabric = pair.fabric();
    report.sharing = measure_sharing(&pair)?;
    report.scatter = measure_scatter(&pair)?;
    if fabric == Fabric::Connectx {
        report.rnic_work = measure_rnic_work(&pair)?;
    }
    if Contender::KiteVqp.is_supported_on(fabric) {
        log("memory of nodes and connections");
        report.node_memory = Some(pair.measure_node_memory()?);
    }
    pair.shutdown()?;
    let (connect_costs, scale) = measure_scale(fabric)?;
    (report.mesh, report.lookup) = connect_costs.unzip();
    report.scale = scale;
    report.rings = rings::all().into();
    Ok(())
}

/// Measures each cell once, briefly, to estimate the number of operations of a measurement.
fn warm_up(pair: &NodePair, metrics: &[Metric]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for cell in Cell::of_metrics(metrics) {
        let (mut count, mut max_count) = (cell.first_count(), u64::MAX);
        for contender in contenders(pair, cell) {
            let value = pair.measure(cell, contender, cell.first_count())?;
            max_count = max_count.min(SLOWDOWN_MAX * cell.count(value));
            if contender == cell.metric.reference() {
                count = cell.count(value);
            }
        }
        let count = count.min(max_count);
        log(&format!(
            "warming up: {cell}, {count} operations per measurement"
        ));
        rows.push(Row::new(cell, count));
    }
    Ok(rows)
}

/// Returns the contenders of a cell that the fabric supports.
fn contenders(pair: &NodePair, cell: Cell) -> Vec<Contender> {
    let all = cell.metric.contenders().iter().copied();
    all.filter(|contender| contender.is_supported_on(pair.fabric()))
        .collect()
}

fn run_round(pair: &NodePair, rows: &mut [Row], round: u32, rounds: u32) -> Result<()> {
    let start = Instant::now();
    for row in rows {
        let mut contenders = contenders(pair, row.cell);
        let first = round as usize % contenders.len();
        contenders.rotate_left(first);
        for contender in contenders {
            let value = pair.measure(row.cell, contender, row.count)?;
            row.add(contender, value);
        }
        log(&format!("round {round} of {rounds}: {}", row.last()));
    }
    let seconds = start.elapsed().as_secs();
    log(&format!("round {round} of {rounds} took {seconds} s"));
    Ok(())
}

fn measure_sharing(pair: &NodePair) -> Result<Vec<Sharing>> {
    let mut all = Vec::new();
    for policy in POLICIES {
        log(&format!(
            "sharing of the RNIC by two priorities, policy {policy}"
        ));
        all.push(pair.measure_sharing(policy)?);
    }
    Ok(all)
}

fn measure_scatter(pair: &NodePair) -> Result<Vec<scatter::ScatterPoint>> {
    let mut points = Vec::new();
    for shape in SHAPES {
        let point =
            scatter::ScatterPoint::measure(shape, |kite| pair.measure_scatter(shape, kite))?;
        let (name, ratio) = (shape.name(), point.ratio());
        log(&format!(
            "writes to random offsets, {name}: kite/verbs {ratio:.2}"
        ));
        points.push(point);
    }
    Ok(points)
}

fn measure_rnic_work(pair: &NodePair) -> Result<Vec<RnicWork>> {
    let rnic_work = rnic_work::cases().map(|(cell, contender)| {
        log(&format!(
            "operations of the RNICs: {cell}, {}",
            contender.name()
        ));
        pair.measure_rnic_work((cell, contender))
    });
    rnic_work.collect()
}

fn measure_scale(fabric: Fabric) -> Result<(Option<ConnectCosts>, Vec<ScalePoint>)> {
    log("booting six nodes");
    let mut all = Vec::new();
    let connect_costs = scale::measure(fabric, |scale| {
        let (calls, writes) = (scale.calls_ratio(), scale.writes_ratio());
        log(&format!(
            "{} nodes: calls kite/TCP {calls:.2}, writes kite/verbs {writes:.2}",
            scale.nodes
        ));
        all.push(scale);
    })?;
    Ok((connect_costs, all))
}

fn measure_alloc_scaling(pair: &NodePair) -> Result<Vec<AllocPoint>> {
    let mut points = Vec::new();
    log(&format!(
        "allocating up to {} regions",
        COUNTS[COUNTS.len() - 1]
    ));
    pair.measure_alloc_scaling(|point| {
        let AllocPoint { regions, value } = point;
        log(&format!(
            "{regions} regions: {value:.1}×10³ instructions per allocation and free"
        ));
        points.push(point);
    })?;
    Ok(points)
}

/// Reads the results of an earlier run.
fn read(json: &Path) -> Result<Report> {
    let text = std::fs::read_to_string(json);
    let report = text
        .map_err(Error::from)
        .and_then(|text| Report::from_json(&text));
    report.with_context(|| format!("reading {}", json.display()))
}

/// Draws the pictures of the documents to a directory.
fn draw_documents(report: &Report, directory: &Path) -> Result<()> {
    let count = picture::documents::write(report, directory)?;
    log(&format!("drew {count} pictures to {}", directory.display()));
    Ok(())
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
    std::fs::write(&svg, picture::draw(report)?)
        .with_context(|| format!("writing {}", svg.display()))?;
    log(&format!("wrote {} and {}", json.display(), svg.display()));
    match args.instructions {
        false => draw_documents(report, &args.output.join("pictures")),
        true => Ok(()),
    }
}

/// Prints progress to standard error. Standard output has the report only.
fn log(message: &str) {
    eprintln!("bench: {message}");
}
