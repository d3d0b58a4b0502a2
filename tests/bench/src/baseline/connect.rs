// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connection setup until requests can be posted (KRCORE, figures 8 and 9): VQPs of kite, and QPs of user-space verbs,
//! which exchange their addresses over TCP.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kite::Cluster;
use kite_bench::statistics::Times;
use plain_verbs::{Access, Buffer, Device, Qp, QpAddress};
use serde::Serialize;

use crate::link::{Link, PeerRequest};

/// Bytes of the buffer of a QP.
const BUFFER_BYTES: usize = 4096;

#[derive(clap::Args)]
pub(crate) struct Connect {
    /// ADDRESS:PORT of the servers, without --kite
    #[arg(required_unless_present = "kite")]
    addresses: Vec<String>,
    /// Connect VQPs to these nodes instead of QPs of verbs
    #[arg(long, value_name = "NODES", value_delimiter = ',')]
    kite: Vec<u32>,
    /// Open the device or session, and register memory, once instead of for each connection
    #[arg(long)]
    keep: bool,
    /// Concurrent clients
    #[arg(long, default_value_t = 1)]
    clients: usize,
    /// Connections of each client to each server
    #[arg(long, default_value_t = 1)]
    iterations: usize,
}

/// Result of [`run`].
#[derive(Serialize)]
pub(crate) struct ConnectTimes {
    #[serde(flatten)]
    times: Times,
    /// Connections per second of all clients. A client closes each connection before it sets up the next one.
    per_second: f64,
}

/// Kind of connections, with the objects that are reused.
enum Connector<'a> {
    Kite(&'a [u32], Option<Cluster>),
    Verbs(Vec<Link>, Option<Arc<Buffer>>),
}

impl Connector<'_> {
    /// Connects to each server, and returns the times.
    fn connect_all(&mut self) -> Result<Vec<Duration>> {
        match self {
            Self::Kite(nodes, reused) => {
                let times = nodes.iter().map(|node| connect_vqp(*node, reused.as_ref()));
                times.collect()
            }
            Self::Verbs(links, reused) => {
                let times = links
                    .iter_mut()
                    .map(|link| connect_qp(link, reused.as_ref()));
                times.collect()
            }
        }
    }
}

fn connect_vqp(node: u32, reused: Option<&Cluster>) -> Result<Duration> {
    let start = Instant::now();
    let cluster = reused.map_or_else(Cluster::open, |reused| Ok(reused.clone()))?;
    let vqp = cluster.connect(node)?;
    let time = start.elapsed();
    drop(vqp);
    Ok(time)
}

/// Opens a device, and registers a buffer.
fn open_buffer(device: &str) -> Result<Arc<Buffer>> {
    Buffer::new(&Device::open(device, Access::Plain)?, BUFFER_BYTES)
}

fn connect_qp(link: &mut Link, reused: Option<&Arc<Buffer>>) -> Result<Duration> {
    let start = Instant::now();
    let buffer = reused.map_or_else(|| open_buffer(""), |reused| Ok(reused.clone()))?;
    let qp = Qp::with_buffer(&buffer)?;
    link.send(qp.address())?;
    let peer: QpAddress = link.receive()?;
    qp.connect(&peer)?;
    Ok(start.elapsed())
}

impl Connect {
    fn connector(&self) -> Result<Connector<'_>> {
        if !self.kite.is_empty() {
            let reused = self.keep.then(Cluster::open).transpose()?;
            return Ok(Connector::Kite(&self.kite, reused));
        }
        let link = |address: &String| Link::connect(address, &PeerRequest::Connect);
        let links = self.addresses.iter().map(link).collect::<Result<_>>()?;
        let reused = self.keep.then(|| open_buffer("")).transpose()?;
        Ok(Connector::Verbs(links, reused))
    }

    /// Runs one client. Waits at both barriers even after a failure, so that the other clients do not block.
    fn run_client(&self, ready: &Barrier, done: &Barrier) -> Result<Vec<Duration>> {
        let connector = self.connector();
        ready.wait();
        let rounds = connector.and_then(|mut connector| {
            let rounds = (0..self.iterations).map(|_| connector.connect_all());
            rounds.collect::<Result<Vec<_>>>()
        });
        done.wait();
        Ok(rounds?.concat())
    }
}

/// Measures the connections of concurrent clients, each from its start until requests can be posted.
pub(crate) fn run(connect: &Connect) -> Result<ConnectTimes> {
    // The clock starts when all clients are ready.
    let (ready, done) = (
        Barrier::new(connect.clients + 1),
        Barrier::new(connect.clients + 1),
    );
    let (times, elapsed) = thread::scope(|scope| {
        let clients: Vec<_> = (0..connect.clients)
            .map(|_| scope.spawn(|| connect.run_client(&ready, &done)))
            .collect();
        ready.wait();
        let start = Instant::now();
        done.wait();
        let elapsed = start.elapsed();
        let results = clients.into_iter().map(|client| client.join());
        let times = results.map(|times| times.ok().context("thread panicked")?);
        times
            .collect::<Result<Vec<_>>>()
            .map(|times| (times.concat(), elapsed))
    })?;
    Ok(ConnectTimes {
        per_second: times.len() as f64 / elapsed.as_secs_f64(),
        times: Times::from_durations(times).context("no iterations")?,
    })
}

/// Connects one QP for each address that the client sends. The device is opened, and memory registered, before.
pub(crate) fn serve(mut link: Link, device: &str) -> Result<()> {
    let buffer = open_buffer(device)?;
    while let Some(peer) = link.receive_next::<QpAddress>()? {
        let qp = Qp::with_buffer(&buffer)?;
        qp.connect(&peer)?;
        link.send(qp.address())?;
    }
    Ok(())
}
