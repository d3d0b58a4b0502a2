// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite-baseline`: the workloads of `kite bench` by user-space verbs and over TCP, and workloads of kite that need a
//! server of their own.
//!
//! `kite-baseline serve` runs on one node. The other subcommands run on another node, and print their result as JSON.
//! As with kite, the time of a write ends with its acknowledgement, and that of a read when its bytes are received.

mod connect;
mod echo;
mod link;
mod load;
mod rdma;
mod regions;
mod scatter;
mod tcp;
mod vqp;

use std::net::TcpListener;
use std::thread;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use link::{accept_link, Direction, PeerRequest};

#[derive(Parser)]
struct BaselineArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the other subcommands
    Serve {
        /// ADDRESS:PORT to listen at
        address: String,
        /// RDMA device [default: first device]
        #[arg(long, default_value = "")]
        device: String,
    },
    /// Latency of one-sided verbs
    Verbs(MeasureArgs),
    /// Latency of two consecutive writes by verbs: of 8 bytes, and of the given size
    TwoWrites(MeasureArgs),
    /// Rate of one-sided verbs
    Rate {
        #[command(flatten)]
        args: MeasureArgs,
        /// Operations in flight
        #[arg(long)]
        depth: usize,
    },
    /// Latency of reads or writes by a VQP of kite, or their rate with --depth
    Vqp {
        #[command(flatten)]
        args: MeasureArgs,
        /// Node of the server
        #[arg(long)]
        node: u32,
        /// Transport that all requests must use
        #[arg(long)]
        transport: vqp::Transport,
        /// Operations in flight
        #[arg(long)]
        depth: Option<usize>,
        /// Submit by an I/O queue instead of system calls
        #[arg(long, requires = "depth")]
        queue: bool,
    },
    /// Latency of requests and replies over TCP
    Tcp(MeasureArgs),
    /// Bandwidth of a TCP stream
    Stream {
        #[command(flatten)]
        transfer: TransferArgs,
        /// Number of bytes
        #[arg(long)]
        bytes: u64,
    },
    /// Latency of small writes to random offsets of one or more regions
    Scatter(scatter::Scatter),
    /// Time to register and deregister memory
    Register(regions::Register),
    /// Time to fill a region of another node by kite
    Fill(regions::Fill),
    /// Round-trip time of messages
    Echo(echo::Echo),
    /// Time and rate of connection setup
    Connect(connect::Connect),
    /// Rate and CPU time of RPC by concurrent clients
    Load(load::Load),
}

/// Operation, size and server.
#[derive(clap::Args)]
struct TransferArgs {
    /// ADDRESS:PORT of the server
    address: String,
    /// Direction of the transfer
    #[arg(long)]
    operation: Direction,
    /// Bytes of each operation
    #[arg(long)]
    size: usize,
}

/// Transfer, and number of repetitions.
#[derive(clap::Args)]
struct MeasureArgs {
    #[command(flatten)]
    transfer: TransferArgs,
    /// Number of operations
    #[arg(long)]
    iterations: usize,
    /// RDMA device [default: first device]
    #[arg(long, default_value = "")]
    device: String,
}

fn main() -> Result<()> {
    match BaselineArgs::parse().command {
        Command::Serve { address, device } => serve(&address, &device),
        Command::Verbs(args) => print_json(&rdma::latency(&args)?),
        Command::TwoWrites(args) => print_json(&rdma::two_writes(&args)?),
        Command::Rate { args, depth } => print_json(&rdma::rate(&args, depth)?),
        Command::Vqp {
            args,
            node,
            transport,
            depth: None,
            ..
        } => print_json(&vqp::latency(&args, node, transport)?),
        Command::Vqp {
            args,
            node,
            transport,
            depth: Some(depth),
            queue,
        } => print_json(&vqp::rate(&args, node, transport, (depth, queue))?),
        Command::Tcp(args) => print_json(&tcp::latency(&args)?),
        Command::Stream { transfer, bytes } => print_json(&tcp::stream(&transfer, bytes)?),
        Command::Scatter(scatter) => print_json(&scatter::run(&scatter)?),
        Command::Register(register) => print_json(&regions::register(&register)?),
        Command::Fill(fill) => print_json(&regions::fill(&fill)?),
        Command::Echo(echo) => print_json(&echo::run(&echo)?),
        Command::Connect(connect) => print_json(&connect::run(&connect)?),
        Command::Load(load) => print_json(&load::run(&load)?),
    }
}

fn print_json(value: &impl serde::Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(value)?);
    Ok(())
}

fn serve(address: &str, device: &str) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    println!("ready");
    for stream in listener.incoming() {
        let stream = stream?;
        let device = device.to_owned();
        thread::spawn(move || {
            let result = accept_link(stream).and_then(|(request, link)| match request {
                PeerRequest::Reply { request, reply } => tcp::reply(link, request, reply),
                PeerRequest::Sink => tcp::sink(link),
                PeerRequest::Source { bytes } => tcp::source(link, bytes),
                PeerRequest::VerbsMemory { size, client } => {
                    rdma::serve(link, size, &device, &client)
                }
                PeerRequest::VerbsRegions { count, len, client } => {
                    scatter::serve(link, count, len, &device, &client)
                }
                PeerRequest::VqpMemory { size } => vqp::serve(link, size),
                PeerRequest::VqpEcho { size } => echo::serve_vqp(link, size),
                PeerRequest::VerbsEcho {
                    size,
                    count,
                    client,
                } => echo::serve_verbs(link, (size, count), &device, &client),
                PeerRequest::Connect => connect::serve(link, &device),
                PeerRequest::CpuTime => load::serve_cpu_time(link),
            });
            if let Err(error) = result {
                eprintln!("kite-baseline: {error:#}");
            }
        });
    }
    Ok(())
}
