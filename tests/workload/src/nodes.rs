// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `nodes`: what memory a kernel has for each other node of its view, and for each connection to one.
//!
//! The nodes do not exist: this program is the daemon of an RNIC, and adds them to the view. The kernel announces the
//! view to them by datagrams, and connects to owners of names: a QP of each with a higher number waits for its peer.
//! An unresponsive node needs slightly more memory than a real one.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use clap::Args;

use crate::support::abi::*;

/// Number of this node, in the middle of all numbers: the node with the lower number initiates connections.
const OWN: u32 = 2000;

/// Names for each node that is to keep some: that one gets none is as good as impossible.
const NAMES: u32 = 16;

/// Times that the nodes join and leave: other programs allocate and free memory meanwhile.
const TIMES: usize = 5;

/// Longer than anything takes.
const TRIES: u32 = 3000;
const PAUSE: Duration = Duration::from_millis(20);

/// Bytes that come and go while nothing happens.
const SETTLED: i64 = 64 << 10;

/// Prints the bytes for each node that is known alone, and those for each connection.
#[derive(Args, Clone, Debug)]
pub(crate) struct Nodes {
    /// So many that are known alone
    #[arg(long, default_value_t = 1000)]
    known: u32,
    /// So many that are connected to
    #[arg(long, default_value_t = 64)]
    connected: u32,
}

/// Session of the daemon, with its last epoch.
struct Daemon {
    device: Device,
    own: kite_member,
    epoch: u64,
    /// Queue pairs that are there without any other node.
    pairs: usize,
}

impl Nodes {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(
            self.known < OWN && self.known > 0 && self.connected > 0,
            "known nodes must be 1 to {}, connected nodes at least 1",
            OWN - 1
        );
        let mut daemon = Daemon::new()?;
        let known = daemon.cost(OWN - self.known..OWN, false)?;
        daemon.name(self.connected * NAMES)?;
        let connected = daemon.cost(OWN + 1..OWN + 1 + self.connected, true)?;
        println!("{known} {}", connected - known);
        Ok(())
    }
}

impl Daemon {
    fn new() -> Result<Self> {
        let device = Device::open_bound()?;
        let mut rnic = kite_query_rnic::default();
        done(
            device.ioctl(KITE_IOC_QUERY_RNIC_NR, &mut rnic),
            "describing",
        )?;
        let own = kite_member {
            node: OWN,
            incarnation: 1,
            address: rnic.address,
            ..Default::default()
        };
        let mut join = kite_join {
            node: own.node,
            incarnation: own.incarnation,
            ..Default::default()
        };
        done(device.ioctl(KITE_IOC_JOIN_NR, &mut join), "joining")?;
        let pairs = queue_pairs()?;
        Ok(Self {
            device,
            own,
            epoch: 0,
            pairs,
        })
    }

    /// Makes so many names, of regions of this node, which is alone.
    fn name(&mut self, count: u32) -> Result<()> {
        self.view(0..0)?;
        for i in 0..count {
            let mut alloc = kite_alloc {
                len: 1,
                name: name(&format!("nodes-{i}")),
                ..Default::default()
            };
            done(self.device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc), "a region")?;
        }
        Ok(())
    }

    /// Bytes for each of these nodes: the median of what is gone when they are there.
    fn cost(&mut self, nodes: std::ops::Range<u32>, connected: bool) -> Result<i64> {
        let mut costs = Vec::new();
        for _ in 0..TIMES {
            self.view(0..0)?;
            await_pairs(self.pairs)?;
            let before = settled_memory()?;
            self.view(nodes.clone())?;
            if connected {
                await_pairs(self.pairs + nodes.len())?;
            }
            costs.push((settled_memory()? - before) / i64::from(nodes.end - nodes.start));
        }
        costs.sort_unstable();
        Ok(costs[TIMES / 2])
    }

    /// Sets a view with these nodes, each with a new incarnation.
    fn view(&mut self, nodes: std::ops::Range<u32>) -> Result<()> {
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
        done(self.device.ioctl(KITE_IOC_SET_VIEW_NR, &mut view), "a view")
    }
}

fn done(errno: Errno, what: &str) -> Result<()> {
    ensure!(errno == 0, "{what}: {}", symbol(errno));
    Ok(())
}

/// Waits until this kernel has so many queue pairs.
fn await_pairs(count: usize) -> Result<()> {
    for _ in 0..TRIES {
        if queue_pairs()? == count {
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
    bail!("{} queue pairs instead of {count}", queue_pairs()?);
}

/// Returns the number of QPs of the RNIC, of all owners.
fn queue_pairs() -> Result<usize> {
    let mut count = 0;
    for device in std::fs::read_dir("/sys/kernel/debug/mlx5")? {
        count += std::fs::read_dir(device?.path().join("QPs"))?.count();
    }
    Ok(count)
}

/// As [`kernel_memory`], when the ways to nodes were found, and what was done for that is over.
fn settled_memory() -> Result<i64> {
    let mut before = kernel_memory()?;
    for _ in 0..TRIES {
        std::thread::sleep(5 * PAUSE);
        let now = kernel_memory()?;
        if (now - before).abs() <= SETTLED {
            return Ok(now);
        }
        before = now;
    }
    bail!("memory does not settle");
}

/// Bytes that are neither free nor those of programs, threads and files; of slabs those of objects.
fn kernel_memory() -> Result<i64> {
    let objects = objects()?;
    // Processors count for themselves, and now together.
    std::fs::write("/proc/sys/vm/stat_refresh", "1")?;
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let all = kib(&text, "MemTotal")?;
    let others = [
        "MemFree",
        "Buffers",
        "Cached",
        "AnonPages",
        "KernelStack",
        "Slab",
    ];
    let others = others
        .iter()
        .map(|name| kib(&text, name))
        .sum::<Result<i64>>()?;
    Ok(((all - others) << 10) - kept_pages()? * 4096 + objects)
}

/// Bytes of all objects in slabs.
fn objects() -> Result<i64> {
    for cache in std::fs::read_dir("/sys/kernel/slab")? {
        // What processors keep for themselves counts as objects. Some caches are being made or gone.
        let _ = std::fs::write(cache?.path().join("shrink"), "1");
    }
    let text = std::fs::read_to_string("/proc/slabinfo")?;
    let caches = text.lines().skip(2).map(|line| {
        let mut fields = line.split_whitespace().skip(1).map(str::parse::<i64>);
        let mut field = || fields.next().context("no such cache")?.map_err(Into::into);
        let (count, _, size): (_, Result<i64>, _) = (field(), field(), field());
        Ok(count? * size?)
    });
    caches.sum()
}

/// Free pages that processors keep for themselves.
fn kept_pages() -> Result<i64> {
    let text = std::fs::read_to_string("/proc/zoneinfo")?;
    let counts = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("count:"));
    let counts = counts.map(|count| Ok(count.trim().parse::<i64>()?));
    counts.sum()
}

fn kib(text: &str, name: &str) -> Result<i64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines
        .find(|(found, _)| *found == name)
        .context("no such memory")?;
    let number = value.split_whitespace().next().context("no number")?;
    Ok(number.parse()?)
}
