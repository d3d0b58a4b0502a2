// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Remote memory over TCP, without RDMA. A write sends the bytes, and receives one byte as acknowledgement. A read
//! sends a request, and receives the bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite_bench::statistics::Times;
use serde::Serialize;

use crate::link::{Direction, Link, PeerRequest};
use crate::rdma::warm_up_count;
use crate::{MeasureArgs, TransferArgs};

/// Bytes of a read request: an offset and a length.
const READ_REQUEST_BYTES: usize = 16;

/// Bytes of a read or write of the socket in streams.
const BLOCK_BYTES: usize = 64 << 10;

#[derive(Serialize)]
pub(crate) struct StreamResult {
    mib_per_second: f64,
}

/// Returns the times of single operations.
pub(crate) fn latency(args: &MeasureArgs) -> Result<Times> {
    let sizes = match args.transfer.operation {
        Direction::Write => [args.transfer.size, 1],
        Direction::Read => [READ_REQUEST_BYTES, args.transfer.size],
    };
    exchanges(&args.transfer.address, sizes, args.iterations)
}

/// Returns the times of exchanges of a request and a reply of these sizes.
pub(crate) fn exchanges(
    address: &str,
    [request, reply]: [usize; 2],
    iterations: usize,
) -> Result<Times> {
    let mut link = Link::connect(address, &PeerRequest::Reply { request, reply })?;
    let (request, mut reply) = (vec![1; request], vec![0; reply]);
    let mut exchange = || -> Result<Duration> {
        let start = Instant::now();
        link.writer().write_all(&request)?;
        link.reader().read_exact(&mut reply)?;
        Ok(start.elapsed())
    };
    for _ in 0..warm_up_count(iterations) {
        exchange()?;
    }
    let times = (0..iterations).map(|_| exchange());
    Times::from_durations(times.collect::<Result<Vec<_>>>()?).context("no iterations")
}

/// Returns the bandwidth of a stream of at least `bytes` bytes.
pub(crate) fn stream(transfer: &TransferArgs, bytes: u64) -> Result<StreamResult> {
    let block = vec![1; transfer.size.max(BLOCK_BYTES)];
    let (received, time) = match transfer.operation {
        Direction::Write => write_stream(
            Link::connect(&transfer.address, &PeerRequest::Sink)?,
            &block,
            bytes,
        )?,
        Direction::Read => {
            let mut link = Link::connect(&transfer.address, &PeerRequest::Source { bytes })?;
            let start = Instant::now();
            (drain(&mut link)?, start.elapsed())
        }
    };
    ensure!(received >= bytes, "received {received} of {bytes} bytes");
    Ok(StreamResult {
        mib_per_second: received as f64 / f64::from(1 << 20) / time.as_secs_f64(),
    })
}

fn write_stream(mut link: Link, block: &[u8], bytes: u64) -> Result<(u64, Duration)> {
    let start = Instant::now();
    send_blocks(&link, block, bytes)?;
    link.writer().shutdown(Shutdown::Write)?;
    Ok((link.receive()?, start.elapsed()))
}

/// Sends at least `bytes` bytes, in whole blocks.
fn send_blocks(link: &Link, block: &[u8], bytes: u64) -> std::io::Result<()> {
    let blocks = bytes.div_ceil(block.len() as u64);
    (0..blocks).try_for_each(|_| link.writer().write_all(block))
}

/// Receives until the end of the stream. Returns the number of bytes.
fn drain(link: &mut Link) -> Result<u64> {
    let (mut block, mut bytes) = (vec![0; BLOCK_BYTES], 0);
    loop {
        match link.reader().read(&mut block)? {
            0 => return Ok(bytes),
            count => bytes += count as u64,
        }
    }
}

pub(crate) fn reply(mut link: Link, request: usize, reply: usize) -> Result<()> {
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
    link.send(&bytes)
}

pub(crate) fn source(link: Link, bytes: u64) -> Result<()> {
    Ok(send_blocks(&link, &vec![1; BLOCK_BYTES], bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::accept_link;
    use std::net::TcpListener;
    use std::thread;

    /// Starts a server for one connection. Returns its address.
    fn start_server() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(
            move || match accept_link(listener.accept().unwrap().0).unwrap() {
                (PeerRequest::Reply { request, reply }, link) => self::reply(link, request, reply),
                (PeerRequest::Sink, link) => sink(link),
                (PeerRequest::Source { bytes }, link) => source(link, bytes),
                (request, _) => panic!("{request:?}"),
            },
        );
        address
    }

    fn transfer_args(operation: Direction) -> TransferArgs {
        TransferArgs {
            address: start_server(),
            operation,
            size: 100_000,
        }
    }

    #[test]
    fn each_direction_returns_valid_times() {
        for operation in [Direction::Write, Direction::Read] {
            let args = MeasureArgs {
                transfer: transfer_args(operation),
                iterations: 5,
                device: String::new(),
            };
            let times = latency(&args).unwrap();
            assert!(times.min_us > 0.0 && times.min_us <= times.p99_us);
        }
    }

    #[test]
    fn each_stream_direction_returns_a_rate() {
        for operation in [Direction::Write, Direction::Read] {
            let result = stream(&transfer_args(operation), 1 << 20).unwrap();
            assert!(result.mib_per_second > 0.0);
        }
    }
}
