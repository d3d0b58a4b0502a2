// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Single steps for tests that play several users and nodes against each other: `attempt`, `fill`,
//! `digest`, `await` and `anonymous`.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use clap::{Args, Subcommand};
use kite::{AllocOptions, Cluster, Rights};
use sha2::{Digest, Sha256};

use crate::support::abi::symbol;
use crate::support::random::Random;
use crate::support::signals::start_timer;

/// Most bytes of one transfer: slow machines move them long before the deadline. Odd, so that
/// chunks are straddled.
const PART: usize = 5_000_011;

/// Tries one thing and prints "OK" or the errno's symbol; always succeeds.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Attempt {
    /// Opens a session
    Open,
    /// Maps a region
    Map {
        /// Its name
        name: String,
        /// Letters of "rwm"
        rights: Rights,
    },
    /// Allocates a region, which ends with this program unless it has a name
    Alloc {
        /// Its length
        len: u64,
        /// Its name
        #[arg(long, default_value = "")]
        name: String,
        /// Its nodes
        #[arg(long, value_delimiter = ',')]
        nodes: Vec<u32>,
        /// Rights of others
        #[arg(long, default_value = "-", allow_hyphen_values = true)]
        others: Rights,
    },
    /// Maps a region and writes one page to it
    Write {
        /// Its name
        name: String,
        /// The deadline
        #[arg(long, default_value_t = 10_000)]
        timeout_ms: u64,
        /// Sends itself a signal that often
        #[arg(long)]
        signal_ms: Option<u64>,
    },
    /// Maps a region as a master and frees it
    Free {
        /// Its name
        name: String,
    },
    /// Lists the regions of a node
    List {
        /// Its number
        node: u32,
    },
}

impl Attempt {
    /// Tries it.
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
    /// Its name
    name: String,
    /// Seed of the bytes
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Fill {
    /// Writes and prints.
    pub(crate) fn run(&self) -> Result<()> {
        let region = Cluster::open()?.map(&self.name, Rights::WRITE)?;
        let mut bytes = vec![0; usize::try_from(region.len())?];
        Random::new(self.seed, 0).fill(&mut bytes);
        for (i, part) in bytes.chunks(PART).enumerate() {
            region.write_at(part, (i * PART) as u64)?;
        }
        say_digest(&bytes);
        Ok(())
    }
}

/// Prints the digest of a whole region.
#[derive(Args, Clone, Debug)]
pub(crate) struct DigestOf {
    /// Its name
    name: String,
    /// Also demands that each byte is zero
    #[arg(long)]
    zero: bool,
}

impl DigestOf {
    /// Reads and prints.
    pub(crate) fn run(&self) -> Result<()> {
        let region = Cluster::open()?.map(&self.name, Rights::READ)?;
        let mut bytes = vec![0xa5; usize::try_from(region.len())?];
        for (i, part) in bytes.chunks_mut(PART).enumerate() {
            region.read_at(part, (i * PART) as u64)?;
        }
        let dirty = bytes.iter().filter(|byte| **byte != 0).count();
        ensure!(!self.zero || dirty == 0, "{dirty} bytes are not zero");
        say_digest(&bytes);
        Ok(())
    }
}

fn say_digest(bytes: &[u8]) {
    println!("{:x} {}", Sha256::digest(bytes), bytes.len());
}

/// Holds an anonymous region until it is killed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Anonymous {
    /// Its length
    len: u64,
    /// Its nodes
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
        ensure!(bytes.iter().all(|byte| *byte == 0), "not zeroed");
        region.write_at(&vec![7; bytes.len()], 0)?;
        println!("holding {}", region.id());
        loop {
            sleep(Duration::from_secs(3600));
        }
    }
}

/// Opens a region many times, and keeps it open until killed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Maps {
    /// A region that exists
    name: String,
    /// Number of handles
    count: usize,
}

impl Maps {
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

/// Waits until gauges or counters have values, and the view has so many members.
#[derive(Args, Clone, Debug)]
pub(crate) struct Await {
    /// NAME=VALUE of a counter or gauge
    gauges: Vec<String>,
    /// Members of the view
    #[arg(long)]
    members: Option<usize>,
    /// This node's number
    #[arg(long)]
    own: Option<u32>,
    /// Gives up after so long
    #[arg(long, default_value_t = 60_000)]
    limit_ms: u64,
}

impl Await {
    /// Waits, and prints how long it took in milliseconds.
    pub(crate) fn run(&self) -> Result<()> {
        let start = Instant::now();
        let limit = Duration::from_millis(self.limit_ms);
        loop {
            let missing = self.missing()?;
            if missing.is_empty() {
                println!("{}", start.elapsed().as_millis());
                return Ok(());
            }
            ensure!(
                start.elapsed() < limit,
                "not within {limit:?}: {}",
                missing.join(", ")
            );
            sleep(Duration::from_millis(20));
        }
    }

    fn missing(&self) -> Result<Vec<String>> {
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
                missing.push(format!("{name} is {found}, not {value}"));
            }
        }
        if self
            .members
            .is_some_and(|wanted| wanted != view.members.len())
        {
            missing.push(format!("{} members", view.members.len()));
        }
        if self.own.is_some_and(|wanted| wanted != view.local_node) {
            missing.push(format!("this is node {}", view.local_node));
        }
        Ok(missing)
    }
}
