// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Single steps of tests with several users and nodes: `attempt`, `fill`, `digest`, `await`, `anonymous` and
//! `open-handles`.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use clap::{Args, Subcommand};
use kite::{AllocOptions, Cluster, Rights};
use sha2::{Digest, Sha256};

use crate::support::abi::symbol;
use crate::support::random::Random;
use crate::support::signals::start_timer;

/// Maximum bytes of a transfer, so that slow machines meet the deadline. Odd, so that transfers cross chunks.
const PART: usize = 5_000_011;

/// Makes one request, and prints "OK" or the symbol of its errno. Always exits with success.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Attempt {
    /// Opens a session
    Open,
    /// Maps a region
    Map {
        /// Name of the region
        name: String,
        /// Letters of "rwm"
        rights: Rights,
    },
    /// Allocates a region, which is freed at exit unless it has a name
    Alloc {
        /// Length in bytes
        len: u64,
        /// Name of the region
        #[arg(long, default_value = "")]
        name: String,
        /// Nodes of the region
        #[arg(long, value_delimiter = ',')]
        nodes: Vec<u32>,
        /// Rights of others
        #[arg(long, default_value = "-", allow_hyphen_values = true)]
        others: Rights,
    },
    /// Maps a region and writes one page to it
    Write {
        /// Name of the region
        name: String,
        /// Deadline
        #[arg(long, default_value_t = 10_000)]
        timeout_ms: u64,
        /// Period of signals to this process, in ms
        #[arg(long)]
        signal_ms: Option<u64>,
    },
    /// Maps a region as a master and frees it
    Free {
        /// Name of the region
        name: String,
    },
    /// Lists the regions of a node
    List {
        /// Number of the node
        node: u32,
    },
}

impl Attempt {
    /// Makes the request.
    pub(crate) fn run(&self) {
        let start = Instant::now();
        let errno = self.attempt().map_or_else(kite::Error::errno, |()| 0);
        println!("{}", symbol(errno));
        eprintln!("{:?} after {:?}", self, start.elapsed());
    }

    fn attempt(&self) -> kite::Result<()> {
        let cluster = Cluster::open()?;
        match self {
            Attempt::Open => Ok(()),
            Attempt::Map { name, rights } => cluster.map(name, *rights).map(drop),
            Attempt::Alloc {
                len,
                name,
                nodes,
                others,
            } => {
                let options = AllocOptions::new(*len).name(name).nodes(nodes.clone());
                cluster.alloc(&options.other_rights(*others)).map(drop)
            }
            Attempt::Write {
                name,
                timeout_ms,
                signal_ms,
            } => {
                let region = cluster.map(name, Rights::WRITE)?;
                let region = region.with_timeout(Duration::from_millis(*timeout_ms));
                if let Some(ms) = signal_ms {
                    start_timer(Duration::from_millis(*ms)).map_err(|_| kite::Error::Invalid)?;
                }
                region.write_at(&[1; 4096][..region.len().min(4096) as usize], 0)
            }
            Attempt::Free { name } => cluster.map(name, Rights::MASTER)?.free(),
            Attempt::List { node } => cluster.regions(*node).try_for_each(|entry| entry.map(drop)),
        }
    }
}

/// Writes the bytes of a seed to a whole region, and prints their digest.
#[derive(Args, Clone, Debug)]
pub(crate) struct Fill {
    /// Name of the region
    name: String,
    /// Seed of the bytes
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Fill {
    /// Writes the region and prints the digest.
    pub(crate) fn run(&self) -> Result<()> {
        let region = Cluster::open()?.map(&self.name, Rights::WRITE)?;
        let mut bytes = vec![0; usize::try_from(region.len())?];
        Random::new(self.seed, 0).fill(&mut bytes);
        for (i, part) in bytes.chunks(PART).enumerate() {
            region.write_at(part, (i * PART) as u64)?;
        }
        print_digest(&bytes);
        Ok(())
    }
}

/// Prints the digest of a whole region.
#[derive(Args, Clone, Debug)]
pub(crate) struct DigestOf {
    /// Name of the region
    name: String,
    /// Fails unless each byte is zero
    #[arg(long)]
    zero: bool,
}

impl DigestOf {
    /// Reads the region and prints the digest.
    pub(crate) fn run(&self) -> Result<()> {
        let region = Cluster::open()?.map(&self.name, Rights::READ)?;
        let mut bytes = vec![0xa5; usize::try_from(region.len())?];
        for (i, part) in bytes.chunks_mut(PART).enumerate() {
            region.read_at(part, (i * PART) as u64)?;
        }
        let dirty = bytes.iter().filter(|byte| **byte != 0).count();
        ensure!(!self.zero || dirty == 0, "{dirty} bytes are not zero");
        print_digest(&bytes);
        Ok(())
    }
}

fn print_digest(bytes: &[u8]) {
    println!("{:x} {}", Sha256::digest(bytes), bytes.len());
}

/// Holds an anonymous region until it is killed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Anonymous {
    /// Length in bytes
    len: u64,
    /// Nodes of the region
    #[arg(long, value_delimiter = ',')]
    nodes: Vec<u32>,
}

impl Anonymous {
    /// Allocates, prints a line, and waits.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let region = cluster.alloc(&AllocOptions::new(self.len).nodes(self.nodes.clone()))?;
        let mut bytes = vec![7; usize::try_from(self.len)?];
        region.read_at(&mut bytes, 0)?;
        ensure!(
            bytes.iter().all(|byte| *byte == 0),
            "the memory is not zeroed"
        );
        region.write_at(&vec![7; bytes.len()], 0)?;
        println!("holding {}", region.id());
        loop {
            sleep(Duration::from_secs(3600));
        }
    }
}

/// Opens handles of a region, and keeps them open until the process is killed.
#[derive(Args, Clone, Debug)]
pub(crate) struct OpenHandles {
    /// Existing region
    name: String,
    /// Number of handles
    count: usize,
}

impl OpenHandles {
    /// Opens the handles, prints a line, and waits.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let open = |_| cluster.map(&self.name, Rights::READ);
        let regions = (0..self.count).map(open).collect::<Result<Vec<_>, _>>()?;
        println!("holding {}", regions.len());
        loop {
            sleep(Duration::from_secs(3600));
        }
    }
}

/// Waits until gauges or counters have values, and the view has a number of reachable members.
#[derive(Args, Clone, Debug)]
pub(crate) struct Await {
    /// NAME=VALUE of a counter or gauge
    gauges: Vec<String>,
    /// Reachable members of the view
    #[arg(long)]
    members: Option<usize>,
    /// Number of this node
    #[arg(long)]
    own: Option<u32>,
    /// Fails after this time
    #[arg(long, default_value_t = 60_000)]
    limit_ms: u64,
}

impl Await {
    /// Waits, and prints the duration in milliseconds.
    pub(crate) fn run(&self) -> Result<()> {
        let start = Instant::now();
        let limit = Duration::from_millis(self.limit_ms);
        loop {
            let missing = self.unmet_conditions()?;
            if missing.is_empty() {
                println!("{}", start.elapsed().as_millis());
                return Ok(());
            }
            ensure!(
                start.elapsed() < limit,
                "conditions not met within {limit:?}: {}",
                missing.join(", ")
            );
            sleep(Duration::from_millis(20));
        }
    }

    fn unmet_conditions(&self) -> Result<Vec<String>> {
        let cluster = Cluster::open()?;
        let (stats, view) = (cluster.stats()?, cluster.view()?);
        let mut missing = Vec::new();
        for wanted in &self.gauges {
            let (name, value) = wanted.split_once('=').context("NAME=VALUE")?;
            let value: u64 = value.parse()?;
            let mut entries = stats.entries();
            let (_, found, _) = entries
                .find(|entry| entry.0 == name)
                .with_context(|| format!("no counter {name}"))?;
            if found != value {
                missing.push(format!("{name} is {found}, expected {value}"));
            }
        }
        let reachable = view.members.iter().filter(|m| m.is_reachable()).count();
        if self.members.is_some_and(|wanted| wanted != reachable) {
            missing.push(format!("{reachable} members"));
        }
        if self.own.is_some_and(|wanted| wanted != view.local_node) {
            missing.push(format!("local node is {}", view.local_node));
        }
        Ok(missing)
    }
}
