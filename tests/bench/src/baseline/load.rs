// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RPC by concurrent clients over kite or TCP, at full speed or at a given rate: calls per second, and CPU time of both
//! nodes per call (LITE, figures 11, 13 and 14).

use std::io::{ErrorKind, Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite::{Cluster, Region, Rights};
use serde::Serialize;

use crate::link::{Link, PeerRequest};

/// Bytes of a request, and of a reply.
const MESSAGE_BYTES: usize = 8;

#[derive(clap::Args)]
pub(crate) struct Load {
    /// ADDRESS:PORT of the server
    address: String,
    /// Call `kite bench serve` of this region instead of the server
    #[arg(long, value_name = "REGION")]
    kite: Option<String>,
    /// Concurrent clients
    #[arg(long, default_value_t = 1)]
    clients: u32,
    /// Calls per second of all clients [default: no limit]
    #[arg(long)]
    rate: Option<u32>,
    /// Duration of the measurement in seconds
    #[arg(long)]
    seconds: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct LoadResult {
    calls_per_second: f64,
    /// CPU time of both nodes.
    cpu_us_per_call: f64,
}

/// Returns the time in nanoseconds for which the CPUs of the node have run tasks, kernel threads included.
fn cpu_time_ns() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/schedstat")?;
    parse_schedstat(&text).context("reading /proc/schedstat")
}

fn parse_schedstat(text: &str) -> Option<u64> {
    let cpus = text.lines().filter(|line| line.starts_with("cpu"));
    // The time is the eighth field.
    let times = cpus.map(|line| line.split_whitespace().nth(7)?.parse::<u64>().ok());
    times.sum()
}

/// Connection of a client.
enum Client {
    Kite(Region),
    Tcp(Link),
}

impl Client {
    fn call(&mut self, byte: u8) -> Result<()> {
        let (request, mut reply) = ([byte; MESSAGE_BYTES], [!byte; MESSAGE_BYTES]);
        let expected = match self {
            Self::Kite(region) => {
                region.call(MESSAGE_BYTES as u32, &request, &mut reply)?;
                byte
            }
            Self::Tcp(link) => {
                link.writer().write_all(&request)?;
                link.reader().read_exact(&mut reply)?;
                1
            }
        };
        ensure!(reply == [expected; MESSAGE_BYTES], "wrong reply");
        Ok(())
    }
}

impl Load {
    fn connect(&self, region: Option<&Region>) -> Result<Client> {
        if let Some(region) = region {
            return Ok(Client::Kite(region.clone()));
        }
        let request = PeerRequest::Reply {
            request: MESSAGE_BYTES,
            reply: MESSAGE_BYTES,
        };
        Ok(Client::Tcp(Link::connect(&self.address, &request)?))
    }

    /// Returns the time between two calls of a client, if the rate is limited.
    fn interval(&self) -> Option<Duration> {
        let rate = self.rate?;
        Some(Duration::from_secs(1) * self.clients / rate.max(1))
    }
}

pub(crate) fn run(load: &Load) -> Result<LoadResult> {
    let region = match &load.kite {
        Some(name) => Some(Cluster::open()?.map(name, Rights::WRITE)?),
        None => None,
    };
    let clients = (0..load.clients).map(|_| load.connect(region.as_ref()));
    let mut clients = clients.collect::<Result<Vec<_>>>()?;
    for client in &mut clients {
        client.call(0)?;
    }
    let mut link = Link::connect(&load.address, &PeerRequest::CpuTime)?;
    let mut total_cpu_time = || -> Result<u64> {
        link.send(&())?;
        Ok(link.receive::<u64>()? + cpu_time_ns()?)
    };
    let (before, start) = (total_cpu_time()?, Instant::now());
    let calls = run_clients(load, clients, start)?;
    let time = start.elapsed();
    let cpu_time = total_cpu_time()? - before;
    ensure!(calls > 0, "no calls");
    Ok(LoadResult {
        calls_per_second: calls as f64 / time.as_secs_f64(),
        cpu_us_per_call: cpu_time as f64 / 1e3 / calls as f64,
    })
}

/// Runs all clients until the end of the measurement. Returns the number of calls.
fn run_clients(load: &Load, clients: Vec<Client>, start: Instant) -> Result<u64> {
    let end = start + Duration::from_secs_f64(load.seconds);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(clients)
            .map(|(number, client)| {
                // Distribute the calls of the clients evenly over an interval.
                let shift = load
                    .interval()
                    .map(|interval| interval * number / load.clients);
                let first = start + shift.unwrap_or_default();
                scope.spawn(move || run_client(client, first, load.interval(), end))
            })
            .collect();
        threads.into_iter().try_fold(0, |sum, thread| {
            let calls = thread.join().ok().context("thread panicked")?;
            Ok(sum + calls?)
        })
    })
}

/// Calls from `first` until `end`. Returns the number of calls.
fn run_client(
    mut client: Client,
    first: Instant,
    interval: Option<Duration>,
    end: Instant,
) -> Result<u64> {
    let (mut calls, mut next) = (0, first);
    loop {
        if let Some(interval) = interval {
            thread::sleep(next.saturating_duration_since(Instant::now()));
            next += interval;
        }
        if Instant::now() >= end {
            return Ok(calls);
        }
        client.call(calls as u8)?;
        calls += 1;
    }
}

/// Sends the CPU time of this node for each line of the client.
pub(crate) fn serve_cpu_time(mut link: Link) -> Result<()> {
    let mut line = [0; b"null\n".len()];
    loop {
        match link.reader().read_exact(&mut line) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        link.send(&cpu_time_ns()?)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::accept_link;
    use crate::tcp;
    use std::net::TcpListener;

    #[test]
    fn cpu_time_is_the_sum_of_all_cpus() {
        let text =
            "version 17\ntimestamp 5\ncpu0 1 0 3 4 5 6 1000 8 9\ndomain0 MC 3 0 0 1 2 3 4 5\n\
                    cpu1 0 0 0 0 0 0 234 0 0\n";
        assert_eq!(parse_schedstat(text), Some(1234));
        assert_eq!(parse_schedstat("cpu0 1 2\n"), None);
    }

    #[test]
    fn limited_rate_is_not_exceeded() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            for link in listener.incoming() {
                let (request, link) = accept_link(link.unwrap()).unwrap();
                thread::spawn(move || match request {
                    PeerRequest::Reply { request, reply } => tcp::reply(link, request, reply),
                    request => panic!("{request:?}"),
                });
            }
        });
        let load = Load {
            address,
            kite: None,
            clients: 4,
            rate: Some(200),
            seconds: 0.5,
        };
        let clients = (0..load.clients).map(|_| load.connect(None).unwrap());
        let calls = run_clients(&load, clients.collect(), Instant::now()).unwrap();
        // A delayed client catches up, but does not exceed the rate.
        assert!((1..=105).contains(&calls), "{calls}");
    }
}
