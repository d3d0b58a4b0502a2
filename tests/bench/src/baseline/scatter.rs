// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Small writes to random offsets of one large region or of many small ones. Measures the cost of address translation
//! in the RNIC (LITE, figures 4 and 5).

use std::io::{stdin, Read};
use std::time::Instant;

use anyhow::{bail, ensure, Context, Result};
use kite::{AllocOptions, Cluster, Region};
use kite_bench::statistics::Times;
use plain_verbs::{Qp, QpAddress, RemoteAddr};

use crate::link::{Direction, Link, PeerRequest};

/// Bytes of a write.
const WRITE_BYTES: usize = 64;

#[derive(clap::Args)]
pub(crate) struct Scatter {
    /// ADDRESS:PORT of the server, without --kite
    #[arg(required_unless_present = "kite")]
    address: Option<String>,
    /// Write to regions of this node by kite instead of verbs
    #[arg(long, value_name = "NODE")]
    kite: Option<u32>,
    /// Number of regions
    #[arg(long, default_value_t = 1)]
    regions: usize,
    /// Bytes of each region
    #[arg(long, default_value_t = 4096)]
    len: usize,
    /// Number of writes
    #[arg(long)]
    writes: usize,
    /// Print "ready" after the set-up, and start after a line on standard input
    #[arg(long)]
    wait: bool,
}

/// Writes a pattern to regions.
trait Writer {
    /// Sets the pattern of the next writes.
    fn set_pattern(&mut self, pattern: u8);
    /// Writes the pattern.
    fn write(&self, region: usize, offset: usize) -> Result<()>;
    /// Reads the bytes. Returns `true` if they are the pattern.
    fn verify(&mut self, region: usize, offset: usize) -> Result<bool>;
}

pub(crate) fn run(scatter: &Scatter) -> Result<Times> {
    match (scatter.kite, &scatter.address) {
        (Some(node), _) => measure(scatter, &mut KiteWriter::new(node, scatter)?),
        (None, Some(address)) => measure(scatter, &mut VerbsWriter::new(address, scatter)?),
        (None, None) => bail!("ADDRESS or --kite is required"),
    }
}

fn measure(scatter: &Scatter, writer: &mut impl Writer) -> Result<Times> {
    ensure!(
        scatter.regions > 0 && scatter.len >= WRITE_BYTES,
        "regions must have at least {WRITE_BYTES} bytes"
    );
    if scatter.wait {
        println!("ready");
        stdin().read_line(&mut String::new())?;
    }
    // The seed is fixed: all contenders write to the same offsets.
    let mut random = fastrand::Rng::with_seed(1);
    let mut last = (0, 0);
    let mut times = Vec::with_capacity(scatter.writes);
    for count in 0..scatter.writes {
        last = (
            random.usize(..scatter.regions),
            WRITE_BYTES * random.usize(..scatter.len / WRITE_BYTES),
        );
        writer.set_pattern(count as u8);
        let start = Instant::now();
        writer.write(last.0, last.1)?;
        times.push(start.elapsed());
    }
    ensure!(writer.verify(last.0, last.1)?, "region has wrong bytes");
    Times::from_durations(times).context("no iterations")
}

struct KiteWriter {
    regions: Vec<Region>,
    data: [u8; WRITE_BYTES],
}

impl KiteWriter {
    fn new(node: u32, scatter: &Scatter) -> Result<Self> {
        let cluster = Cluster::open()?;
        let options = AllocOptions::new(scatter.len as u64).nodes([node]);
        let regions = (0..scatter.regions).map(|_| cluster.alloc(&options));
        Ok(Self {
            regions: regions.collect::<Result<_, _>>()?,
            data: [0; WRITE_BYTES],
        })
    }
}

impl Writer for KiteWriter {
    fn set_pattern(&mut self, pattern: u8) {
        self.data.fill(pattern);
    }

    fn write(&self, region: usize, offset: usize) -> Result<()> {
        Ok(self.regions[region].write_at(&self.data, offset as u64)?)
    }

    fn verify(&mut self, region: usize, offset: usize) -> Result<bool> {
        let mut content = [0; WRITE_BYTES];
        self.regions[region].read_at(&mut content, offset as u64)?;
        Ok(content == self.data)
    }
}

struct VerbsWriter {
    qp: Qp,
    pattern: u8,
    remote_addrs: Vec<RemoteAddr>,
    /// The server deregisters the regions when this connection is closed.
    _link: Link,
}

impl VerbsWriter {
    fn new(address: &str, scatter: &Scatter) -> Result<Self> {
        let qp = Qp::new("", WRITE_BYTES)?;
        let request = PeerRequest::VerbsRegions {
            count: scatter.regions,
            len: scatter.len,
            client: qp.address().clone(),
        };
        let mut link = Link::connect(address, &request)?;
        let peer: QpAddress = link.receive()?;
        qp.connect(&peer)?;
        Ok(Self {
            qp,
            pattern: 0,
            remote_addrs: link.receive()?,
            _link: link,
        })
    }

    fn transfer(&self, operation: Direction, region: usize, offset: usize) -> Result<()> {
        let remote_addr = self.remote_addrs[region].offset_by(offset);
        self.qp.transfer(operation.into(), remote_addr, WRITE_BYTES)
    }
}

impl Writer for VerbsWriter {
    fn set_pattern(&mut self, pattern: u8) {
        self.pattern = pattern;
        self.qp.memory().fill(pattern);
    }

    fn write(&self, region: usize, offset: usize) -> Result<()> {
        self.transfer(Direction::Write, region, offset)
    }

    fn verify(&mut self, region: usize, offset: usize) -> Result<bool> {
        self.qp.memory().fill(!self.pattern);
        self.transfer(Direction::Read, region, offset)?;
        Ok(self.qp.memory().matches(self.pattern))
    }
}

/// Connects a QP, and registers regions until the client closes the connection.
pub(crate) fn serve(
    mut link: Link,
    count: usize,
    len: usize,
    device: &str,
    peer: &QpAddress,
) -> Result<()> {
    let qp = Qp::new(device, WRITE_BYTES)?;
    qp.connect(peer)?;
    link.send(qp.address())?;
    let regions = (0..count).map(|_| qp.alloc_mr(len));
    let regions = regions.collect::<Result<Vec<_>>>()?;
    let remote_addrs: Vec<RemoteAddr> = regions.iter().map(|region| region.remote_addr()).collect();
    link.send(&remote_addrs)?;
    link.reader().read_to_end(&mut Vec::new())?;
    Ok(())
}
