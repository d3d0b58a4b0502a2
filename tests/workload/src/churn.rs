// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `churn`: repeats one cycle, for tests of leaks.

use anyhow::{ensure, Result};
use clap::Subcommand;
use kite::{AllocOptions, Cluster, Rights};

use crate::support::abi::Device;

/// Repeats one cycle
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Churn {
    /// Opens and closes bound and unbound sessions
    Open {
        /// Repetitions
        count: u64,
    },
    /// Allocates and frees regions
    Alloc {
        /// Repetitions
        count: u64,
        /// Bytes
        #[arg(long, default_value_t = 20_000)]
        len: u64,
        /// Nodes of the region
        #[arg(long, value_delimiter = ',')]
        nodes: Vec<u32>,
        /// Prefix of the names [default: anonymous regions]
        #[arg(long, default_value = "")]
        name: String,
    },
    /// Allocates regions with numbered names
    Populate {
        /// Number of regions
        count: u64,
        /// Prefix of their names
        prefix: String,
    },
    /// Frees the regions of `populate`
    Clear {
        /// Number of regions
        count: u64,
        /// Prefix of their names
        prefix: String,
    },
    /// Maps and unmaps a region, reading a byte of it
    Map {
        /// Repetitions
        count: u64,
        /// Name of the region
        name: String,
    },
}

impl Churn {
    /// Runs the cycles.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Churn::Open { count } => open(*count),
            Churn::Alloc {
                count,
                len,
                nodes,
                name,
            } => alloc(
                *count,
                &AllocOptions::new(*len).nodes(nodes.clone()),
                name,
                nodes,
            ),
            Churn::Populate { count, prefix } => populate(*count, prefix),
            Churn::Clear { count, prefix } => clear(*count, prefix),
            Churn::Map { count, name } => map(*count, name),
        }
    }
}

fn open(count: u64) -> Result<()> {
    for _ in 0..count {
        drop(Device::open()?);
        drop(Device::open_bound()?);
    }
    Ok(())
}

fn alloc(count: u64, options: &AllocOptions, prefix: &str, nodes: &[u32]) -> Result<()> {
    let cluster = Cluster::open()?;
    for i in 0..count {
        let named = match prefix.is_empty() {
            true => options.clone(),
            false => options.clone().name(format!("{prefix}{i}")),
        };
        let region = cluster.alloc(&named)?;
        region.write_at(&[1], region.len() - 1)?;
        match prefix.is_empty() {
            true => drop(region),
            false => region.free()?,
        }
    }
    let members = cluster.view()?.members;
    for node in nodes {
        let stayed = members.iter().any(|member| member.node == *node);
        ensure!(stayed, "node {node} left the cluster");
    }
    Ok(())
}

fn populate(count: u64, prefix: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    for i in 0..count {
        cluster.alloc(&AllocOptions::new(i + 1).name(format!("{prefix}{i}")))?;
    }
    Ok(())
}

fn clear(count: u64, prefix: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    for i in 0..count {
        cluster
            .map(&format!("{prefix}{i}"), Rights::MASTER)?
            .free()?;
    }
    Ok(())
}

fn map(count: u64, name: &str) -> Result<()> {
    let cluster = Cluster::open()?;
    for _ in 0..count {
        cluster.map(name, Rights::READ)?.read_at(&mut [0], 0)?;
    }
    Ok(())
}
