// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `cluster`: boots a cluster and starts kite on it. Then offers a prompt that opens shells on its nodes, or runs one
//! command on all nodes and exits with the largest of their statuses.
//!
//! Ctrl-C needs no handler: the machines end with this process.

use std::io::{self, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use kite_cluster::{Cluster, Fabric, Node, Result, Setup};

/// Exit status for a failure of the cluster itself, as that of `timeout` and `docker`.
const FAILURE: u8 = 125;

/// Commands from the command line have no timeout.
const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Boots a cluster of virtual machines with an RDMA fabric between them, and starts kite on each.
#[derive(Parser)]
struct Options {
    /// Number of nodes
    #[arg(long, default_value_t = 2)]
    nodes: usize,
    /// RDMA fabric: connectx or rxe (default: the variable FABRIC)
    #[arg(long)]
    fabric: Option<Fabric>,
    /// Processors of each node
    #[arg(long, default_value_t = 2)]
    cpus: usize,
    /// Memory of each node, in MiB
    #[arg(long, default_value_t = 1024)]
    memory: usize,
    /// Name of the directory of its logs, target/cluster/NAME
    #[arg(long, default_value = "interactive")]
    name: String,
    /// Command to run on every node instead of the prompt
    #[arg(last = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match serve(&options) {
        Ok(status) => status.into(),
        Err(error) => {
            eprintln!("cluster: {error}");
            FAILURE.into()
        }
    }
}

fn serve(options: &Options) -> Result<u8> {
    let cluster = boot(options)?;
    let status = match options.command.is_empty() {
        true => prompt(&cluster),
        false => run_everywhere(&cluster, &options.command.join(" "))?,
    };
    cluster.shutdown()?;
    Ok(status)
}

fn boot(options: &Options) -> Result<Cluster> {
    let start = Instant::now();
    let mut builder = Cluster::builder()
        .name(&options.name)
        .nodes(options.nodes)
        .cpus(options.cpus)
        .memory(options.memory);
    if let Some(fabric) = options.fabric {
        builder = builder.fabric(fabric);
    }
    let cluster = builder.boot()?;
    cluster.start_kite(&Setup::default())?;
    let seconds = start.elapsed().as_secs_f32();
    eprintln!(
        "cluster: kite runs on {} nodes after {seconds:.1} s",
        options.nodes
    );
    Ok(cluster)
}

/// Opens shells until `exit` or the end of the input.
fn prompt(cluster: &Cluster) -> u8 {
    for (number, node) in (1..).zip(cluster.nodes()) {
        let config = node.ssh_config().display();
        println!(
            "{number}: {} {}   ssh -F {config} {}",
            node.name(),
            node.address(),
            node.name()
        );
    }
    println!("Logs: {}", cluster.artefacts().display());
    println!("On a node: kite status");
    loop {
        print!("node 1-{}, or exit> ", cluster.nodes().len());
        let mut line = String::new();
        let read = io::stdout()
            .flush()
            .and_then(|()| io::stdin().read_line(&mut line));
        match line.trim() {
            _ if !matches!(read, Ok(1..)) => return 0,
            "exit" | "quit" => return 0,
            "" => (),
            choice => enter(cluster, choice),
        }
    }
}

fn enter(cluster: &Cluster, choice: &str) {
    let number: Option<usize> = choice.trim_start_matches("node").parse().ok();
    match number.and_then(|number| cluster.nodes().get(number.wrapping_sub(1))) {
        Some(node) => {
            if let Err(error) = node.terminal().status() {
                eprintln!("cluster: ssh: {error}");
            }
        }
        None => println!("no such node: {choice}"),
    }
}

fn run_everywhere(cluster: &Cluster, line: &str) -> Result<u8> {
    thread::scope(|scope| {
        let run = |node| scope.spawn(move || run_on(node, line));
        let runs: Vec<_> = cluster.nodes().iter().map(run).collect();
        let statuses = runs
            .into_iter()
            .map(|run| run.join().unwrap_or(Ok(FAILURE)));
        statuses
            .collect::<Result<Vec<u8>>>()
            .map(|all| all.into_iter().max().unwrap_or(0))
    })
}

/// Runs `line`. Prints both its streams line by line, each line after the node's name.
fn run_on(node: &Node, line: &str) -> Result<u8> {
    let name = node.name();
    let mut process = node.spawn(&format!("exec 2>&1\n{line}"))?;
    while let Some(text) = process.read_line(NO_LIMIT)? {
        println!("{name}: {text}");
    }
    let status = process.wait(NO_LIMIT)?.status;
    Ok(u8::try_from(status).unwrap_or(FAILURE))
}
