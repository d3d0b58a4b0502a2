// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The module as a whole: load, unload, leaks, and idle cost.
//!
//! A leak of one object per cycle shows in the slab caches: after many cycles one cache has more objects, by about
//! the number of cycles. Caches are shrunk before they are counted, so that only objects in use count. Cycles before
//! the first count fill permanent caches. Leaked pages show in memory that is neither free nor in a known use, leaked
//! mappings in the list of vmalloc areas.

use std::collections::HashMap;
use std::env;
use std::thread;
use std::time::Duration;

use kite_cluster::{until, Cluster, Kernel, Node, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("lifecycle").nodes(2));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(900);

/// Cycles before the counted ones.
const WARM_UP: u64 = 30;

/// Slab cache in which a checker of the debug kernel tracks objects. It keeps entries that it no longer needs, and
/// the tracked objects are counted themselves.
const NOTES: &str = "debug_objects_cache";

/// Returns the number of counted cycles of a test that takes 1/`factor` of the time of a module load for each cycle. It
/// is larger with `KITE_LONG`. The debug kernel takes long for each cycle, and its checkers find the first leak.
fn cycles(factor: u64) -> Result<u64> {
    let is_long = env::var("KITE_LONG").is_ok_and(|value| value == "1");
    Ok(match Kernel::from_env()? {
        Kernel::Debug => 200 * factor,
        Kernel::Stock | Kernel::Series(_) if is_long => 1000 * factor,
        Kernel::Stock | Kernel::Series(_) => 120 * factor.min(2),
    })
}

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

/// Memory in use by a kernel.
struct Usage {
    /// Objects of each slab cache.
    objects: HashMap<String, u64>,
    /// Memory that is free, also on the lists of processors, or in a use that has a counter of its own.
    known_kib: u64,
    vmalloc_areas: u64,
}

impl Usage {
    fn of(node: &Node) -> Result<Self> {
        let text = node.sh("sync; echo 3 >/proc/sys/vm/drop_caches; \
             for cache in /sys/kernel/slab/*/shrink; do echo 1 >$cache; done 2>/dev/null; \
             awk 'NR > 2 { print $1, $2 }' /proc/slabinfo; \
             awk '/^(MemFree|Buffers|Cached|AnonPages|Slab|KernelStack|PageTables|Percpu):/ \
                  { known += $2 } /^ *count: / { known += 4 * $2 } \
                  END { print \"known:\", known }' /proc/meminfo /proc/zoneinfo; \
             wc -l </proc/vmallocinfo | sed 's/^/vmalloc: /'")?;
        let words = |line: &str| -> Option<(String, u64)> {
            let (name, count) = line.split_once(' ')?;
            Some((name.into(), count.parse().ok()?))
        };
        let mut objects: HashMap<String, u64> = text.lines().filter_map(words).collect();
        let known_kib = objects.remove("known:").expect(&text);
        let vmalloc_areas = objects.remove("vmalloc:").expect(&text);
        Ok(Usage {
            objects,
            known_kib,
            vmalloc_areas,
        })
    }

    /// Returns the uses that grew since `before` by about one for each of `cycles`.
    fn grown(&self, before: &Usage, cycles: u64) -> Vec<String> {
        let bound = cycles * 3 / 4;
        let mut grown = Vec::new();
        for (cache, &now) in &self.objects {
            let then = before.objects.get(cache).copied().unwrap_or(0);
            if now > then + bound && cache != NOTES {
                grown.push(format!("{cache}: {then} objects, then {now}"));
            }
        }
        if self.vmalloc_areas > before.vmalloc_areas + bound {
            grown.push(format!(
                "vmalloc: {} areas, then {}",
                before.vmalloc_areas, self.vmalloc_areas
            ));
        }
        // A page for each cycle.
        if self.known_kib + cycles * 3 < before.known_kib {
            grown.push(format!(
                "free memory: {} KiB, then {}",
                before.known_kib, self.known_kib
            ));
        }
        grown
    }
}

/// Runs `cycle`, and fails if any of `nodes` then has more memory in use than before. Memory that is freed late has
/// 30 s.
fn leaks_nothing(nodes: &[&Node], cycles: u64, cycle: impl Fn(u64) -> Result<()>) -> Result<()> {
    cycle(WARM_UP)?;
    let before = nodes
        .iter()
        .map(|node| Usage::of(node))
        .collect::<Result<Vec<_>>>()?;
    cycle(cycles)?;
    let mut report = Vec::new();
    let settled = until("memory to be freed", SOON, || {
        report.clear();
        for (node, before) in nodes.iter().zip(&before) {
            for line in Usage::of(node)?.grown(before, cycles) {
                report.push(format!("{}: {line}", node.name()));
            }
        }
        Ok(report.is_empty())
    });
    assert!(
        settled.is_ok(),
        "after {cycles} cycles:\n{}",
        report.join("\n")
    );
    Ok(())
}

#[test]
fn device_file_is_owned_by_root_and_group_kite() -> Result<()> {
    let pair = pair()?;
    let mode = pair.node(1).sh("stat -c '%U %G %a' /dev/kite")?;
    assert_eq!(mode, "root kite 660");
    Ok(())
}

#[test]
fn module_unloads_cleanly_once_unused() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(2);
    node.stop_kited()?;
    let mut user = node.spawn("exec 3<>/dev/kite; echo open; exec sleep 600")?;
    user.read_until("open", SOON)?;
    let refused = node.unload("kite").unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    user.kill()?;
    until("the module to unload", SOON, || {
        Ok(node.unload("kite").is_ok())
    })?;
    let left = node.sh(
        "ls -d /sys/module/kite /dev/kite /sys/class/misc/kite 2>/dev/null; \
         ps -eo comm | grep '^kite'; grep -c '\\[kite\\]' /proc/vmallocinfo; true",
    )?;
    assert_eq!(left, "0", "after the module was unloaded");
    Ok(())
}

#[test]
fn module_load_logs_no_warning() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(2);
    node.stop_kited()?;
    node.unload("kite")?;
    node.sh("dmesg --clear")?;
    node.insmod_kite("")?;
    let log = node.sh("dmesg --level=emerg,alert,crit,err,warn")?;
    // Warnings of the kernel about any such module, and of the RDMA core about any user of a global key.
    let usual = [
        "loading out-of-tree module taints kernel",
        "module verification failed",
        "enabling unsafe global rkey",
    ];
    let unusual: Vec<&str> = log
        .lines()
        .filter(|line| !usual.iter().any(|usual| line.contains(usual)))
        .collect();
    assert!(unusual.is_empty(), "{}", unusual.join("\n"));
    let ready = format!("infiniband {}: kite: ready", node.rnic()?);
    assert!(node.sh("dmesg")?.contains(&ready));
    node.unload("kite")?;
    let log = node.sh("dmesg --level=emerg,alert,crit,err")?;
    assert_eq!(log, "");
    Ok(())
}

/// Uses a machine of its own: this test takes as long as all others together.
#[test]
#[ignore = "long"]
fn repeated_load_and_unload_leaks_nothing() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).cpus(1).boot()?;
    let node = cluster.node(1);
    // Debug information takes most of the load time.
    node.sh("strip -g -o /tmp/kite.ko /run/kite/build/kite.ko")?;
    leaks_nothing(&[node], cycles(1)?, |cycles| {
        let line =
            format!("set -e; for i in $(seq {cycles}); do insmod /tmp/kite.ko; rmmod kite; done");
        node.command(line).limit(LONG).sh().map(drop)
    })?;
    cluster.shutdown()
}

#[test]
#[ignore = "long"]
fn repeated_open_and_close_leaks_nothing() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    leaks_nothing(&[node], cycles(5)?, |cycles| {
        let line = format!("churn open {cycles}");
        node.workload(&line).limit(LONG).sh().map(drop)
    })
}

#[test]
fn repeated_alloc_and_free_leaks_nothing() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for options in ["", "--name cycle-"] {
        leaks_nothing(&[one, two], cycles(2)?, |cycles| {
            let line = format!("churn alloc {cycles} --nodes 1,2 {options}");
            one.workload(&line).limit(LONG).sh().map(drop)
        })?;
    }
    two.await_gauges("lent_bytes=0", SOON)?;
    one.await_gauges("regions=0 open_handles=0 sessions=2", SOON)?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn repeated_map_and_unmap_leaks_nothing() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    two.kite("alloc mapped 100000 --node 1 --node 2")?;
    leaks_nothing(&[one, two], cycles(3)?, |cycles| {
        let line = format!("churn map {cycles} mapped");
        one.workload(&line).limit(LONG).sh().map(drop)
    })?;
    two.kite("free mapped")?;
    one.await_gauges("open_handles=0 sessions=2", SOON)?;
    Ok(())
}

/// Virtual queue pairs, all of one session.
#[test]
#[ignore = "long"]
fn repeated_vqp_connect_and_close_leaks_nothing() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    leaks_nothing(&[one, two], cycles(10)?, |cycles| {
        let line = format!("vqp connect 2 --times {cycles}");
        one.workload(&line).limit(LONG).sh().map(drop)
    })?;
    assert_eq!(one.kite("vqps --json")?, "[]");
    Ok(())
}

/// Virtual queue pairs to the other node, which accepts each connection and replies.
#[test]
#[ignore = "long"]
fn repeated_vqp_messages_and_close_leaks_nothing() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let mut answers = two.workload("vqp serve-number 7 2000").spawn()?;
    answers.read_until("ready", SOON)?;
    leaks_nothing(&[one, two], cycles(2)?, |cycles| {
        let line = format!("vqp query-number 7 2 --times {cycles}");
        let stdout = one.workload(&line).limit(LONG).sh()?;
        assert_eq!(stdout, format!("{cycles} replies, {{}}; last {{2: 2000}}"));
        Ok(())
    })?;
    answers.kill()?;
    for node in [one, two] {
        assert_eq!(node.kite("vqps --json")?, "[]");
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn idle_node_uses_little_cpu_time() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    // The two nodes have had traffic, so all objects of a connection exist.
    one.kite("alloc used 100000 --node 2")?;
    one.kite("free used")?;
    let ticks = |node: &Node| -> Result<(u64, u64)> {
        let text = node.sh(
            "cd /proc; for p in [0-9]*; do case $(cat $p/comm 2>/dev/null) in \
             kite/*|kite-conn*) cat $p/stat;; esac; done",
        )?;
        let times = text.lines().map(|line| -> u64 {
            let fields: Vec<&str> = line
                .rsplit(')')
                .next()
                .unwrap_or_default()
                .split(' ')
                .collect();
            fields[12..14]
                .iter()
                .map(|ticks| ticks.parse::<u64>().expect(line))
                .sum()
        });
        Ok((text.lines().count() as u64, times.sum()))
    };
    let before = [ticks(one)?, ticks(two)?];
    let seconds = 10;
    thread::sleep(Duration::from_secs(seconds));
    for (node, (threads, before)) in [one, two].into_iter().zip(before) {
        let (now_threads, now) = ticks(node)?;
        assert_eq!((threads, now_threads), (2, 2), "threads of {}", node.name());
        // 100 ticks are 1 s.
        assert!(
            now - before < seconds,
            "{} ticks in {seconds} s",
            now - before
        );
    }
    Ok(())
}
