// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What kite is compared with: the same reads, writes and messages by user-space verbs, and over TCP; and where the
//! work is more than one request, the same work by kite, too.
//!
//! One node serves, the other measures and prints JSON. A write is done when it is known to have
//! arrived, and a read when its bytes are here, as with kite.

mod connect;
mod echo;
mod hello;
mod load;
mod manage;
mod rdma;
mod scatter;
mod tcp;
mod vqp;

use std::net::TcpListener;
use std::thread;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use hello::{greeted, Direction, Hello};

#[derive(Parser)]
struct BaselineArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Be the other side of all the others
    Serve {
        /// Where to listen
        address: String,
        /// RDMA device [default: the first]
        #[arg(long, default_value = "")]
        device: String,
    },
    /// Time one-sided verbs, one after the other
    Verbs(Timed),
    /// Time two one-sided writes, one after the other: of eight bytes, and of the given size
    TwoWrites(Timed),
    /// Count one-sided verbs, many at a time
    Rate {
        #[command(flatten)]
        timed: Timed,
        /// Operations in flight
        #[arg(long)]
        depth: usize,
    },
    /// Time one-sided verbs by a virtual queue pair of kite, one after the other or many at a time
    Vqp {
        #[command(flatten)]
        timed: Timed,
        /// The node of the other side
        #[arg(long)]
        node: u32,
        /// By which way all have to go
        #[arg(long)]
        way: vqp::Way,
        /// Count them, so many at a time
        #[arg(long)]
        depth: Option<usize>,
        /// By a queue instead of system calls
        #[arg(long, requires = "depth")]
        queue: bool,
    },
    /// Time requests and answers over TCP, one after the other
    Tcp(Timed),
    /// Stream over TCP
    Stream {
        #[command(flatten)]
        what: TransferArgs,
        /// Number of bytes
        #[arg(long)]
        bytes: u64,
    },
    /// Time small writes to places at random, one after the other
    Scatter(scatter::Scatter),
    /// Time lending memory, and taking it back
    Lend(manage::Lend),
    /// Time filling memory of another node, by kite
    Fill(manage::Fill),
    /// Time messages that the other side sends back, one after the other
    Echo(echo::Echo),
    /// Time connections
    Connect(connect::Connect),
    /// Count calls of many clients
    Load(load::Load),
}

/// Operation, size and peer.
#[derive(clap::Args)]
struct TransferArgs {
    /// Where the other side listens
    address: String,
    /// Which way the bytes go
    #[arg(long)]
    operation: Direction,
    /// Bytes of each operation
    #[arg(long)]
    size: usize,
}

#[derive(clap::Args)]
struct Timed {
    #[command(flatten)]
    what: TransferArgs,
    /// Number of operations
    #[arg(long)]
    iterations: usize,
    /// RDMA device [default: the first]
    #[arg(long, default_value = "")]
    device: String,
}

fn main() -> Result<()> {
    match BaselineArgs::parse().command {
        Command::Serve { address, device } => serve(&address, &device),
        Command::Verbs(timed) => show(&rdma::measure(&timed)?),
        Command::TwoWrites(timed) => show(&rdma::two_writes(&timed)?),
        Command::Rate { timed, depth } => show(&rdma::rate(&timed, depth)?),
        Command::Vqp {
            timed,
            node,
            way,
            depth: None,
            ..
        } => show(&vqp::measure(&timed, node, way)?),
        Command::Vqp {
            timed,
            node,
            way,
            depth: Some(depth),
            queue,
        } => show(&vqp::rate(&timed, node, way, (depth, queue))?),
        Command::Tcp(timed) => show(&tcp::measure(&timed)?),
        Command::Stream { what, bytes } => show(&tcp::stream(&what, bytes)?),
        Command::Scatter(scatter) => show(&scatter::run(&scatter)?),
        Command::Lend(lend) => show(&manage::lend(&lend)?),
        Command::Fill(fill) => show(&manage::fill(&fill)?),
        Command::Echo(echo) => show(&echo::run(&echo)?),
        Command::Connect(connect) => show(&connect::run(&connect)?),
        Command::Load(load) => show(&load::run(&load)?),
    }
}

fn show(value: &impl serde::Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(value)?);
    Ok(())
}

fn serve(address: &str, device: &str) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    println!("ready");
    for link in listener.incoming() {
        let link = link?;
        let device = device.to_owned();
        thread::spawn(move || {
            let served = greeted(link).and_then(|(hello, link)| match hello {
                Hello::Answer { request, reply } => tcp::answer(link, request, reply),
                Hello::Sink => tcp::sink(link),
                Hello::Source { bytes } => tcp::source(link, bytes),
                Hello::Rdma { size, end } => rdma::serve(link, size, &device, &end),
                Hello::Regions { count, len, end } => {
                    scatter::serve(link, count, len, &device, &end)
                }
                Hello::Memory { size } => vqp::serve(link, size),
                Hello::Messages { size } => echo::serve_kite(link, size),
                Hello::Echo { size, count, end } => {
                    echo::serve_verbs(link, (size, count), &device, &end)
                }
                Hello::Connections => connect::serve(link, &device),
                Hello::Busy => load::tell_busy(link),
            });
            if let Err(error) = served {
                eprintln!("kite-baseline: {error:#}");
            }
        });
    }
    Ok(())
}
