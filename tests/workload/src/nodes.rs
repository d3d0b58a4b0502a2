// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `nodes`: kernel memory for each other node of the view, and for each connection.
//!
//! The nodes do not exist: this program is the daemon of an RNIC, and adds them to the view. The kernel announces the
//! view to them by datagrams, and connects to owners of names: a QP of each with a higher number waits for its peer.
//! An unresponsive node needs slightly more memory than a real one.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use clap::Args;

use crate::support::abi::*;

/// Number of this node, in the middle of all numbers: the node with the lower number initiates connections.
const LOCAL_NODE: u32 = 2000;

/// Names per connected node: each node owns a name with near certainty.
const NAMES_PER_NODE: u32 = 16;

/// Measured rounds of joins and leaves. The median excludes allocations of other programs.
const ROUNDS: usize = 5;

/// Maximum number of polls.
const TRIES: u32 = 3000;
const PAUSE: Duration = Duration::from_millis(20);

/// Bytes that change on an idle node.
const NOISE_BYTES: i64 = 64 << 10;

/// Prints the bytes per node without a connection, and the bytes per connection
#[derive(Args, Clone, Debug)]
pub(crate) struct Nodes {
    /// Nodes without a connection
    #[arg(long, default_value_t = 1000)]
    known: u32,
    /// Connected nodes
    #[arg(long, default_value_t = 64)]
    connected: u32,
}

/// Session of the daemon, with its last epoch.
struct Daemon {
    device: Device,
    own: kite_member,
    epoch: u64,
    /// QPs without any other node.
    idle_qps: usize,
}

impl Nodes {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(
            self.known < LOCAL_NODE && self.known > 0 && self.connected > 0,
            "known nodes must be 1 to {}, connected nodes at least 1",
            LOCAL_NODE - 1
        );
        let mut daemon = Daemon::new()?;
        let known = daemon.memory_per_node(LOCAL_NODE - self.known..LOCAL_NODE, false)?;
        daemon.create_names(self.connected * NAMES_PER_NODE)?;
        let connected =
            daemon.memory_per_node(LOCAL_NODE + 1..LOCAL_NODE + 1 + self.connected, true)?;
        println!("{known} {}", connected - known);
        Ok(())
    }
}

impl Daemon {
    fn new() -> Result<Self> {
        let device = Device::open_bound()?;
        let mut rnic = kite_query_rnic::default();
        check_errno(
            device.ioctl(KITE_IOC_QUERY_RNIC_NR, &mut rnic),
            "query_rnic",
        )?;
        let own = kite_member {
            node: LOCAL_NODE,
            incarnation: 1,
            address: rnic.address,
            ..Default::default()
        };
        let mut join = kite_join {
            node: own.node,
            incarnation: own.incarnation,
            ..Default::default()
        };
        check_errno(device.ioctl(KITE_IOC_JOIN_NR, &mut join), "join")?;
        let idle_qps = count_qps()?;
        Ok(Self {
            device,
            own,
            epoch: 0,
            idle_qps,
        })
    }

    /// Allocates `count` named regions on this node, without other nodes.
    fn create_names(&mut self, count: u32) -> Result<()> {
        self.set_view(0..0)?;
        for i in 0..count {
            let mut alloc = kite_alloc {
                len: 1,
                name: name(&format!("nodes-{i}")),
                ..Default::default()
            };
            check_errno(self.device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc), "alloc")?;
        }
        Ok(())
    }

    /// Returns the memory per node: the median of the increase after the nodes joined.
    fn memory_per_node(&mut self, nodes: std::ops::Range<u32>, connected: bool) -> Result<i64> {
        let mut costs = Vec::new();
        for _ in 0..ROUNDS {
            self.set_view(0..0)?;
            await_qps(self.idle_qps)?;
            let before = settled_memory()?;
            self.set_view(nodes.clone())?;
            if connected {
                await_qps(self.idle_qps + nodes.len())?;
            }
            costs.push((settled_memory()? - before) / i64::from(nodes.end - nodes.start));
        }
        costs.sort_unstable();
        Ok(costs[ROUNDS / 2])
    }

    /// Sets a view with `nodes`, each with a new incarnation.
    fn set_view(&mut self, nodes: std::ops::Range<u32>) -> Result<()> {
        self.epoch += 1;
        let other = |node| kite_member {
            node,
            incarnation: self.epoch,
            ..self.own
        };
        let mut members: Vec<_> = nodes.map(other).chain([self.own]).collect();
        members.sort_unstable_by_key(|member| member.node);
        let mut view = kite_set_view {
            epoch: self.epoch,
            count: u32::try_from(members.len())?,
            members: members.as_ptr() as u64,
            ..Default::default()
        };
        check_errno(
            self.device.ioctl(KITE_IOC_SET_VIEW_NR, &mut view),
            "set_view",
        )
    }
}

fn check_errno(errno: Errno, what: &str) -> Result<()> {
    ensure!(errno == 0, "{what}: {}", symbol(errno));
    Ok(())
}

/// Waits until this kernel has `count` QPs.
fn await_qps(count: usize) -> Result<()> {
    for _ in 0..TRIES {
        if count_qps()? == count {
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
    bail!("{} QPs, expected {count}", count_qps()?);
}

/// Returns the number of QPs of the RNIC, of all owners.
fn count_qps() -> Result<usize> {
    let mut count = 0;
    for device in std::fs::read_dir("/sys/kernel/debug/mlx5")? {
        count += std::fs::read_dir(device?.path().join("QPs"))?.count();
    }
    Ok(count)
}

/// Returns [`kernel_memory`] once it is stable.
fn settled_memory() -> Result<i64> {
    let mut before = kernel_memory()?;
    for _ in 0..TRIES {
        std::thread::sleep(5 * PAUSE);
        let now = kernel_memory()?;
        if (now - before).abs() <= NOISE_BYTES {
            return Ok(now);
        }
        before = now;
    }
    bail!("kernel memory does not become stable");
}

/// Returns the used bytes without those of programs, threads and files. Of slabs only the objects count.
fn kernel_memory() -> Result<i64> {
    let slab_bytes = slab_bytes()?;
    // Adds the counters of all processors.
    std::fs::write("/proc/sys/vm/stat_refresh", "1")?;
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let all = read_kib(&text, "MemTotal")?;
    let excluded = [
        "MemFree",
        "Buffers",
        "Cached",
        "AnonPages",
        "KernelStack",
        "Slab",
    ];
    let excluded = excluded
        .iter()
        .map(|name| read_kib(&text, name))
        .sum::<Result<i64>>()?;
    Ok(((all - excluded) << 10) - cached_free_pages()? * 4096 + slab_bytes)
}

/// Returns the bytes of all objects in slabs.
fn slab_bytes() -> Result<i64> {
    for cache in std::fs::read_dir("/sys/kernel/slab")? {
        // Free objects in caches of processors count as objects. A cache may disappear concurrently.
        let _ = std::fs::write(cache?.path().join("shrink"), "1");
    }
    let text = std::fs::read_to_string("/proc/slabinfo")?;
    let caches = text.lines().skip(2).map(|line| {
        let mut fields = line.split_whitespace().skip(1).map(str::parse::<i64>);
        let mut field = || {
            fields
                .next()
                .context("missing field in slabinfo")?
                .map_err(Into::into)
        };
        let (count, _, size): (_, Result<i64>, _) = (field(), field(), field());
        Ok(count? * size?)
    });
    caches.sum()
}

/// Returns the number of free pages in the caches of processors.
fn cached_free_pages() -> Result<i64> {
    let text = std::fs::read_to_string("/proc/zoneinfo")?;
    let counts = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("count:"));
    let counts = counts.map(|count| Ok(count.trim().parse::<i64>()?));
    counts.sum()
}

fn read_kib(text: &str, name: &str) -> Result<i64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines
        .find(|(found, _)| *found == name)
        .context("missing field in meminfo")?;
    let number = value.split_whitespace().next().context("no number")?;
    Ok(number.parse()?)
}
