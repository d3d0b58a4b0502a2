// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connection setup until requests may be posted: virtual queue pairs of kite, and queue pairs of user-space verbs,
//! whose addresses are exchanged over TCP (KRCORE, figures 8 and 9).

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kite::Cluster;
use kite_bench::statistics::Times;
use plain_verbs::{Access, Buffer, Device, Qp, QpAddress};
use serde::Serialize;

use crate::hello::{Hello, Link};

/// Bytes that a queue pair may reach.
const SIZE: usize = 4096;

#[derive(clap::Args)]
pub(crate) struct Connect {
    /// Where the other sides listen, if not over kite
    #[arg(required_unless_present = "kite")]
    addresses: Vec<String>,
    /// Over kite, to these nodes
    #[arg(long, value_name = "NODES", value_delimiter = ',')]
    kite: Vec<u32>,
    /// Open the device once instead of for each connection, and register memory once
    #[arg(long)]
    keep: bool,
    /// Concurrent clients
    #[arg(long, default_value_t = 1)]
    clients: usize,
    /// Repetitions of each client
    #[arg(long, default_value_t = 1)]
    iterations: usize,
}

/// Results.
#[derive(Serialize)]
pub(crate) struct ConnectTimes {
    #[serde(flatten)]
    times: Times,
    /// Connections per second of all clients together. A client closes a connection before it sets up the next.
    per_second: f64,
}

/// Method of setup, with the objects that it reuses.
enum Maker<'a> {
    Kite(&'a [u32], Option<Cluster>),
    Verbs(Vec<Link>, Option<Arc<Buffer>>),
}

impl Maker<'_> {
    /// Times a connection to each.
    fn connect(&mut self) -> Result<Vec<Duration>> {
        match self {
            Self::Kite(nodes, kept) => {
                let times = nodes.iter().map(|node| by_kite(*node, kept.as_ref()));
                times.collect()
            }
            Self::Verbs(links, kept) => {
                let times = links.iter_mut().map(|link| by_verbs(link, kept.as_ref()));
                times.collect()
            }
        }
    }
}

fn by_kite(node: u32, kept: Option<&Cluster>) -> Result<Duration> {
    let start = Instant::now();
    let cluster = kept.map_or_else(Cluster::open, |kept| Ok(kept.clone()))?;
    let vqp = cluster.connect(node)?;
    let time = start.elapsed();
    drop(vqp);
    Ok(time)
}

/// Memory of a device that was just opened.
fn open(device: &str) -> Result<Arc<Buffer>> {
    Buffer::new(&Device::open(device, Access::Plain)?, SIZE)
}

fn by_verbs(link: &mut Link, kept: Option<&Arc<Buffer>>) -> Result<Duration> {
    let start = Instant::now();
    let buffer = kept.map_or_else(|| open(""), |kept| Ok(kept.clone()))?;
    let qp = Qp::with_buffer(&buffer)?;
    link.say(qp.address())?;
    let other: QpAddress = link.hear()?;
    qp.connect(&other)?;
    Ok(start.elapsed())
}

impl Connect {
    fn maker(&self) -> Result<Maker<'_>> {
        if !self.kite.is_empty() {
            let kept = self.keep.then(Cluster::open).transpose()?;
            return Ok(Maker::Kite(&self.kite, kept));
        }
        let link = |address: &String| Link::to(address, &Hello::Connections);
        let links = self.addresses.iter().map(link).collect::<Result<_>>()?;
        let kept = self.keep.then(|| open("")).transpose()?;
        Ok(Maker::Verbs(links, kept))
    }

    /// Waits at either barrier, also when it fails.
    fn client(&self, ready: &Barrier, done: &Barrier) -> Result<Vec<Duration>> {
        let maker = self.maker();
        ready.wait();
        let rounds = maker.and_then(|mut maker| {
            let rounds = (0..self.iterations).map(|_| maker.connect());
            rounds.collect::<Result<Vec<_>>>()
        });
        done.wait();
        Ok(rounds?.concat())
    }
}

/// Times connections of all clients, each from its beginning to where requests may be posted.
pub(crate) fn run(connect: &Connect) -> Result<ConnectTimes> {
    // All clients begin when each can.
    let (ready, done) = (
        Barrier::new(connect.clients + 1),
        Barrier::new(connect.clients + 1),
    );
    let (times, whole) = thread::scope(|scope| {
        let clients: Vec<_> = (0..connect.clients)
            .map(|_| scope.spawn(|| connect.client(&ready, &done)))
            .collect();
        ready.wait();
        let start = Instant::now();
        done.wait();
        let whole = start.elapsed();
        let ended = clients.into_iter().map(|client| client.join());
        let times = ended.map(|times| times.ok().context("a panic")?);
        times
            .collect::<Result<Vec<_>>>()
            .map(|times| (times.concat(), whole))
    })?;
    Ok(ConnectTimes {
        per_second: times.len() as f64 / whole.as_secs_f64(),
        times: Times::of(times).context("nothing was measured")?,
    })
}

/// Connects as often as the other side does: a server has opened its device, and registered its memory, long ago.
pub(crate) fn serve(mut link: Link, device: &str) -> Result<()> {
    let buffer = open(device)?;
    while let Some(other) = link.hear_more::<QpAddress>()? {
        let qp = Qp::with_buffer(&buffer)?;
        qp.connect(&other)?;
        link.say(qp.address())?;
    }
    Ok(())
}
