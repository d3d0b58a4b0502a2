// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Remote memory as a program without RDMA would do it: a write is bytes and a byte that
//! acknowledges them, a read is a request and the bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite_bench::statistics::Times;
use serde::Serialize;

use crate::hello::{Direction, Hello, Link};
use crate::rdma::warm_up;
use crate::{Timed, TransferArgs};

/// Bytes of a request to read: as many as an offset and a length have.
const REQUEST: usize = 16;

/// Bytes of a block in streams without replies.
const BLOCK: usize = 64 << 10;

#[derive(Serialize)]
pub(crate) struct Stream {
    mib_per_second: f64,
}

pub(crate) fn measure(timed: &Timed) -> Result<Times> {
    let sizes = match timed.what.operation {
        Direction::Write => [timed.what.size, 1],
        Direction::Read => [REQUEST, timed.what.size],
    };
    exchanges(&timed.what.address, sizes, timed.iterations)
}

/// Times requests and replies of so many bytes.
pub(crate) fn exchanges(
    address: &str,
    [request, reply]: [usize; 2],
    iterations: usize,
) -> Result<Times> {
    let mut link = Link::to(address, &Hello::Answer { request, reply })?;
    let (request, mut reply) = (vec![1; request], vec![0; reply]);
    let mut exchange = || -> Result<Duration> {
        let start = Instant::now();
        link.writer().write_all(&request)?;
        link.reader().read_exact(&mut reply)?;
        Ok(start.elapsed())
    };
    for _ in 0..warm_up(iterations) {
        exchange()?;
    }
    let times = (0..iterations).map(|_| exchange());
    Times::of(times.collect::<Result<Vec<_>>>()?).context("nothing was measured")
}

pub(crate) fn stream(what: &TransferArgs, bytes: u64) -> Result<Stream> {
    let block = vec![1; what.size.max(BLOCK)];
    let (moved, time) = match what.operation {
        Direction::Write => write_stream(Link::to(&what.address, &Hello::Sink)?, &block, bytes)?,
        Direction::Read => {
            let mut link = Link::to(&what.address, &Hello::Source { bytes })?;
            let start = Instant::now();
            (drain(&mut link)?, start.elapsed())
        }
    };
    ensure!(moved >= bytes, "{moved} of {bytes} bytes arrived");
    Ok(Stream {
        mib_per_second: moved as f64 / f64::from(1 << 20) / time.as_secs_f64(),
    })
}

fn write_stream(mut link: Link, block: &[u8], bytes: u64) -> Result<(u64, Duration)> {
    let start = Instant::now();
    send(&link, block, bytes)?;
    link.writer().shutdown(Shutdown::Write)?;
    Ok((link.hear()?, start.elapsed()))
}

/// Sends at least so many bytes.
fn send(link: &Link, block: &[u8], bytes: u64) -> std::io::Result<()> {
    let blocks = bytes.div_ceil(block.len() as u64);
    (0..blocks).try_for_each(|_| link.writer().write_all(block))
}

/// Receives until the end of the stream. Returns the number of bytes.
fn drain(link: &mut Link) -> Result<u64> {
    let (mut block, mut bytes) = (vec![0; BLOCK], 0);
    loop {
        match link.reader().read(&mut block)? {
            0 => return Ok(bytes),
            count => bytes += count as u64,
        }
    }
}

pub(crate) fn answer(mut link: Link, request: usize, reply: usize) -> Result<()> {
    let (mut request, reply) = (vec![0; request], vec![1; reply]);
    loop {
        match link.reader().read_exact(&mut request) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        link.writer().write_all(&reply)?;
    }
}

pub(crate) fn sink(mut link: Link) -> Result<()> {
    let bytes = drain(&mut link)?;
    link.say(&bytes)
}

pub(crate) fn source(link: Link, bytes: u64) -> Result<()> {
    Ok(send(&link, &vec![1; BLOCK], bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hello::greeted;
    use std::net::TcpListener;
    use std::thread;

    /// An address that serves one connection.
    fn served() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(
            move || match greeted(listener.accept().unwrap().0).unwrap() {
                (Hello::Answer { request, reply }, link) => answer(link, request, reply),
                (Hello::Sink, link) => sink(link),
                (Hello::Source { bytes }, link) => source(link, bytes),
                (hello, _) => panic!("{hello:?}"),
            },
        );
        address
    }

    fn what(operation: Direction) -> TransferArgs {
        TransferArgs {
            address: served(),
            operation,
            size: 100_000,
        }
    }

    #[test]
    fn each_direction_returns_valid_times() {
        for operation in [Direction::Write, Direction::Read] {
            let timed = Timed {
                what: what(operation),
                iterations: 5,
                device: String::new(),
            };
            let times = measure(&timed).unwrap();
            assert!(times.min_us > 0.0 && times.min_us <= times.p99_us);
        }
    }

    #[test]
    fn each_stream_direction_returns_a_rate() {
        for operation in [Direction::Write, Direction::Read] {
            let done = stream(&what(operation), 1 << 20).unwrap();
            assert!(done.mib_per_second > 0.0);
        }
    }
}
