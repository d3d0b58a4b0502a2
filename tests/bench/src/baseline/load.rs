// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Calls by many clients at once, over kite or TCP, as fast as they go or at a given pace: how many there
//! are in a second, and what time of processors they take on both sides (LITE, figures 11, 13 and 14).

use std::io::{ErrorKind, Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite::{Cluster, Region, Rights};
use serde::Serialize;

use crate::hello::{Hello, Link};

/// Bytes of a request, and of a reply.
const SIZE: usize = 8;

#[derive(clap::Args)]
pub(crate) struct Load {
    /// Where the other side listens
    address: String,
    /// Call `kite bench serve` with this region instead of the other side
    #[arg(long, value_name = "REGION")]
    kite: Option<String>,
    /// Concurrent clients
    #[arg(long, default_value_t = 1)]
    clients: u32,
    /// Calls per second of all clients together [default: no limit]
    #[arg(long)]
    rate: Option<u32>,
    /// For how long
    #[arg(long)]
    seconds: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Done {
    calls_per_second: f64,
    /// Processor time of both sides.
    processor_us_per_call: f64,
}

/// For how long the processors of a node have run tasks, those of the kernel too, in nanoseconds.
fn busy() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/schedstat")?;
    busy_in(&text).context("reading /proc/schedstat")
}

fn busy_in(text: &str) -> Option<u64> {
    let processors = text.lines().filter(|line| line.starts_with("cpu"));
    // Six counts are between the name and the time.
    let times = processors.map(|line| line.split_whitespace().nth(7)?.parse::<u64>().ok());
    times.sum()
}

/// One that calls.
enum Client {
    Kite(Region),
    Tcp(Link),
}

impl Client {
    fn call(&mut self, mark: u8) -> Result<()> {
        let (request, mut reply) = ([mark; SIZE], [!mark; SIZE]);
        let expected = match self {
            Self::Kite(region) => {
                region.call(SIZE as u32, &request, &mut reply)?;
                mark
            }
            Self::Tcp(link) => {
                link.writer().write_all(&request)?;
                link.reader().read_exact(&mut reply)?;
                1
            }
        };
        ensure!(reply == [expected; SIZE], "a wrong reply");
        Ok(())
    }
}

impl Load {
    fn client(&self, region: Option<&Region>) -> Result<Client> {
        if let Some(region) = region {
            return Ok(Client::Kite(region.clone()));
        }
        let hello = Hello::Answer {
            request: SIZE,
            reply: SIZE,
        };
        Ok(Client::Tcp(Link::to(&self.address, &hello)?))
    }

    /// The time of a client between two calls, if there is a pace.
    fn interval(&self) -> Option<Duration> {
        let rate = self.rate?;
        Some(Duration::from_secs(1) * self.clients / rate.max(1))
    }
}

pub(crate) fn run(load: &Load) -> Result<Done> {
    let region = match &load.kite {
        Some(name) => Some(Cluster::open()?.map(name, Rights::WRITE)?),
        None => None,
    };
    let clients = (0..load.clients).map(|_| load.client(region.as_ref()));
    let mut clients = clients.collect::<Result<Vec<_>>>()?;
    for client in &mut clients {
        client.call(0)?;
    }
    let mut link = Link::to(&load.address, &Hello::Busy)?;
    let mut both = || -> Result<u64> {
        link.say(&())?;
        Ok(link.hear::<u64>()? + busy()?)
    };
    let (before, start) = (both()?, Instant::now());
    let calls = all_at_once(load, clients, start)?;
    let time = start.elapsed();
    let busy = both()? - before;
    ensure!(calls > 0, "no calls");
    Ok(Done {
        calls_per_second: calls as f64 / time.as_secs_f64(),
        processor_us_per_call: busy as f64 / 1e3 / calls as f64,
    })
}

/// Returns how many calls there were.
fn all_at_once(load: &Load, clients: Vec<Client>, start: Instant) -> Result<u64> {
    let end = start + Duration::from_secs_f64(load.seconds);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(clients)
            .map(|(number, client)| {
                // So that not all call at once.
                let shift = load
                    .interval()
                    .map(|interval| interval * number / load.clients);
                let first = start + shift.unwrap_or_default();
                scope.spawn(move || call_on(client, first, load.interval(), end))
            })
            .collect();
        threads.into_iter().try_fold(0, |sum, thread| {
            let calls = thread.join().ok().context("a panic")?;
            Ok(sum + calls?)
        })
    })
}

fn call_on(
    mut client: Client,
    first: Instant,
    pace: Option<Duration>,
    end: Instant,
) -> Result<u64> {
    let (mut calls, mut next) = (0, first);
    loop {
        if let Some(pace) = pace {
            thread::sleep(next.saturating_duration_since(Instant::now()));
            next += pace;
        }
        if Instant::now() >= end {
            return Ok(calls);
        }
        client.call(calls as u8)?;
        calls += 1;
    }
}

/// Sends the busy time of this node for each request.
pub(crate) fn tell_busy(mut link: Link) -> Result<()> {
    let mut line = [0; b"null\n".len()];
    loop {
        match link.reader().read_exact(&mut line) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        link.say(&busy()?)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hello::greeted;
    use crate::tcp;
    use std::net::TcpListener;

    #[test]
    fn busy_time_is_the_sum_of_all_processors() {
        let text =
            "version 17\ntimestamp 5\ncpu0 1 0 3 4 5 6 1000 8 9\ndomain0 MC 3 0 0 1 2 3 4 5\n\
                    cpu1 0 0 0 0 0 0 234 0 0\n";
        assert_eq!(busy_in(text), Some(1234));
        assert_eq!(busy_in("cpu0 1 2\n"), None);
    }

    #[test]
    fn calls_come_at_the_pace() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            for link in listener.incoming() {
                let (hello, link) = greeted(link.unwrap()).unwrap();
                thread::spawn(move || match hello {
                    Hello::Answer { request, reply } => tcp::answer(link, request, reply),
                    hello => panic!("{hello:?}"),
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
        let clients = (0..load.clients).map(|_| load.client(None).unwrap());
        let calls = all_at_once(&load, clients.collect(), Instant::now()).unwrap();
        // A late client catches up with the rate, and never exceeds it.
        assert!((1..=105).contains(&calls), "{calls}");
    }
}
