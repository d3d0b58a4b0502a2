// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Small writes all over memory that is one large region or many small ones, to see what it costs an RNIC
//! to find its way there (LITE, figures 4 and 5).

use std::io::{stdin, Read};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use kite::{AllocOptions, Cluster, Region};
use kite_bench::statistics::Times;
use plain_verbs::{Qp, QpAddress, RemoteAddr};

use crate::hello::{Direction, Hello, Link};

/// Bytes of a write.
const SIZE: usize = 64;

#[derive(clap::Args)]
pub(crate) struct Scatter {
    /// Where the other side listens, if not over kite
    #[arg(required_unless_present = "kite")]
    address: Option<String>,
    /// Over kite, to memory of this node
    #[arg(long, value_name = "NODE")]
    kite: Option<u32>,
    /// Number of regions
    #[arg(long, default_value_t = 1)]
    regions: usize,
    /// Bytes of each
    #[arg(long, default_value_t = 4096)]
    len: usize,
    /// Number of writes
    #[arg(long)]
    writes: usize,
    /// Print "ready" when there are the regions, and begin when a line comes
    #[arg(long)]
    wait: bool,
}

/// Interface that writes marks to memory.
trait Writer {
    /// Makes the next bytes this mark.
    fn mark(&mut self, mark: u8);
    fn write(&self, region: usize, offset: usize) -> Result<()>;
    /// Returns `true` if these bytes are the mark.
    fn verify(&mut self, region: usize, offset: usize) -> Result<bool>;
}

pub(crate) fn run(scatter: &Scatter) -> Result<Times> {
    match (scatter.kite, &scatter.address) {
        (Some(node), _) => time(scatter, &mut OverKite::to(node, scatter)?),
        (None, Some(address)) => time(scatter, &mut OverVerbs::to(address, scatter)?),
        (None, None) => bail!("neither an address nor a node"),
    }
}

fn time(scatter: &Scatter, writer: &mut impl Writer) -> Result<Times> {
    ensure!(scatter.regions > 0 && scatter.len >= SIZE, "no memory");
    if scatter.wait {
        println!("ready");
        stdin().read_line(&mut String::new())?;
    }
    // The same places for all.
    let mut random = fastrand::Rng::with_seed(1);
    let mut last = (0, 0);
    let mut times = Vec::with_capacity(scatter.writes);
    for count in 0..scatter.writes {
        last = (
            random.usize(..scatter.regions),
            SIZE * random.usize(..scatter.len / SIZE),
        );
        writer.mark(count as u8);
        let start = Instant::now();
        writer.write(last.0, last.1)?;
        times.push(start.elapsed());
    }
    ensure!(writer.verify(last.0, last.1)?, "wrong bytes");
    summary(times)
}

fn summary(times: Vec<Duration>) -> Result<Times> {
    Times::of(times).context("nothing was measured")
}

struct OverKite {
    regions: Vec<Region>,
    data: [u8; SIZE],
}

impl OverKite {
    fn to(node: u32, scatter: &Scatter) -> Result<Self> {
        let cluster = Cluster::open()?;
        let options = AllocOptions::new(scatter.len as u64).nodes([node]);
        let regions = (0..scatter.regions).map(|_| cluster.alloc(&options));
        Ok(Self {
            regions: regions.collect::<Result<_, _>>()?,
            data: [0; SIZE],
        })
    }
}

impl Writer for OverKite {
    fn mark(&mut self, mark: u8) {
        self.data.fill(mark);
    }

    fn write(&self, region: usize, offset: usize) -> Result<()> {
        Ok(self.regions[region].write_at(&self.data, offset as u64)?)
    }

    fn verify(&mut self, region: usize, offset: usize) -> Result<bool> {
        let mut found = [0; SIZE];
        self.regions[region].read_at(&mut found, offset as u64)?;
        Ok(found == self.data)
    }
}

struct OverVerbs {
    qp: Qp,
    mark: u8,
    remote_addrs: Vec<RemoteAddr>,
    /// The other side lends until this is closed.
    _link: Link,
}

impl OverVerbs {
    fn to(address: &str, scatter: &Scatter) -> Result<Self> {
        let qp = Qp::new("", SIZE)?;
        let hello = Hello::Regions {
            count: scatter.regions,
            len: scatter.len,
            end: qp.address().clone(),
        };
        let mut link = Link::to(address, &hello)?;
        let other: QpAddress = link.hear()?;
        qp.connect(&other)?;
        Ok(Self {
            qp,
            mark: 0,
            remote_addrs: link.hear()?,
            _link: link,
        })
    }

    fn transfer(&self, operation: Direction, region: usize, offset: usize) -> Result<()> {
        let remote_addr = self.remote_addrs[region].offset_by(offset);
        self.qp.transfer(operation.into(), remote_addr, SIZE)
    }
}

impl Writer for OverVerbs {
    fn mark(&mut self, mark: u8) {
        self.mark = mark;
        self.qp.memory().fill(mark);
    }

    fn write(&self, region: usize, offset: usize) -> Result<()> {
        self.transfer(Direction::Write, region, offset)
    }

    fn verify(&mut self, region: usize, offset: usize) -> Result<bool> {
        self.qp.memory().fill(!self.mark);
        self.transfer(Direction::Read, region, offset)?;
        Ok(self.qp.memory().matches(self.mark))
    }
}

/// Lends regions until the other side hangs up.
pub(crate) fn serve(
    mut link: Link,
    count: usize,
    len: usize,
    device: &str,
    end: &QpAddress,
) -> Result<()> {
    let qp = Qp::new(device, SIZE)?;
    qp.connect(end)?;
    link.say(qp.address())?;
    let lent = (0..count).map(|_| qp.alloc_mr(len));
    let lent = lent.collect::<Result<Vec<_>>>()?;
    let remote_addrs: Vec<RemoteAddr> = lent.iter().map(|lent| lent.remote_addr()).collect();
    link.say(&remote_addrs)?;
    link.reader().read_to_end(&mut Vec::new())?;
    Ok(())
}
