// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Random schedules of faults of daemons, machines, networks and etcd, under writes, locks and calls of all nodes. No
//! incarnation ends, no acknowledged byte is lost, no lock has two owners, and no call is executed twice.
//!
//! `KITE_SCHEDULES` is the number of schedules, and `KITE_FIRST_SCHEDULE` the number of the first.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use kite_cluster::{until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("schedules").nodes(3));

/// Schedules of one run.
const SCHEDULES: u64 = 3;

/// Duration of the faults of a schedule.
const FAULTS: Duration = Duration::from_secs(60);

const SOON: Duration = Duration::from_secs(120);

/// Delay of each RDMA packet, so that a cut finds packets in flight, and requests that are executed and not acknowledged.
const DELAY: Duration = Duration::from_millis(10);

/// Maximum time after the last fault until all nodes are reachable. A node that became unreachable repeatedly is
/// admitted after a delay.
const ADMITTED: Duration = Duration::from_secs(600);

/// A fault of one node.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// TCP is cut.
    Tcp,
    /// RDMA is cut.
    Rdma,
    /// Both networks are cut.
    Both,
    /// The machine is paused, and its RNIC does not respond.
    Pause,
    /// The machine is paused, and its RNIC responds.
    Stall,
    /// The daemon is stopped.
    Stop,
    /// The daemon is killed and starts again at once.
    Kill,
    /// The etcd server is killed, and starts again afterwards.
    KillEtcd,
}

/// A fault with its times, in ms.
#[derive(Clone, Copy, Debug)]
struct Event {
    fault: Fault,
    /// Time between the end of the previous fault of the node and the fault.
    after_ms: u64,
    for_ms: u64,
}

impl Fault {
    /// All faults. The last one requires a store.
    const ALL: [Self; 8] = [
        Self::Tcp,
        Self::Rdma,
        Self::Both,
        Self::Pause,
        Self::Stall,
        Self::Stop,
        Self::Kill,
        Self::KillEtcd,
    ];

    /// Returns the faults that are possible.
    fn possible(setup: &Setup) -> &'static [Self] {
        match setup.has_store {
            true => &Self::ALL,
            false => &Self::ALL[..Self::ALL.len() - 1],
        }
    }

    /// Returns the maximum duration, in ms.
    fn max_ms(self, setup: &Setup) -> u64 {
        match self {
            Self::Tcp | Self::Rdma | Self::Both | Self::KillEtcd => 20_000,
            Self::Pause | Self::Stall | Self::Stop => u64::from(setup.dead_ms) * 3,
            Self::Kill => 1,
        }
    }

    /// Causes the fault for `for_ms`. A remote command may take longer than the fault, so the node itself stops and
    /// continues its daemon.
    fn run(self, node: &Node, for_ms: u64) -> Result<()> {
        match self {
            Self::Tcp => node.disconnect_network()?,
            Self::Rdma => node.disconnect_rnic()?,
            Self::Both => node.disconnect()?,
            Self::Pause => node.pause()?,
            Self::Stall => node.stall()?,
            Self::Stop => {
                let seconds = Duration::from_millis(for_ms).as_secs_f64();
                let line = format!("pkill -STOP -x kited; sleep {seconds}; pkill -CONT -x kited");
                return node.sh(&line).map(drop);
            }
            Self::Kill => return node.sh("pkill -KILL -x kited").map(drop),
            Self::KillEtcd => node.kill_etcd()?,
        }
        // The duration of the fault, which these tests are about.
        thread::sleep(Duration::from_millis(for_ms));
        match self {
            Self::Pause | Self::Stall => node.resume(),
            Self::KillEtcd => node.start_etcd(),
            _ => node.reconnect(),
        }
    }
}

/// Returns the faults of a node in a schedule.
fn plan(schedule: u64, node: u64, setup: &Setup) -> Vec<Event> {
    let mut random = SmallRng::seed_from_u64((schedule << 8) | node);
    let mut events = Vec::new();
    let mut rest = FAULTS.as_millis() as u64;
    loop {
        let fault = *Fault::possible(setup).choose(&mut random).expect("faults");
        let after_ms = random.random_range(500..15_000);
        // Half of the faults end before a node becomes unreachable: its requests continue on new QPs.
        let shorter = [1, 5].choose(&mut random).expect("factors");
        let for_ms = random.random_range(1..=fault.max_ms(setup).div_ceil(*shorter));
        if after_ms + for_ms > rest {
            return events;
        }
        rest -= after_ms + for_ms;
        events.push(Event {
            fault,
            after_ms,
            for_ms,
        });
    }
}

/// Causes the faults of a node one after the other.
fn apply(node: &Node, events: &[Event]) -> Result<()> {
    for event in events {
        thread::sleep(Duration::from_millis(event.after_ms));
        event.fault.run(node, event.for_ms)?;
    }
    Ok(())
}

/// Causes the faults of a schedule, on all nodes at the same time, and waits until all nodes are reachable.
fn run_faults(trio: &Turn<'_>, schedule: u64, setup: &Setup) -> Result<()> {
    thread::scope(|scope| {
        let run = |(number, node)| {
            let events = plan(schedule, number, setup);
            println!("schedule {schedule}, node {number}: {events:?}");
            scope.spawn(move || apply(node, &events))
        };
        let nodes: Vec<_> = (1..).zip(trio.nodes()).map(run).collect();
        let joined = nodes.into_iter().map(|node| node.join().expect("no panic"));
        joined.collect::<Result<Vec<_>>>()
    })?;
    let all = || Ok(trio.await_members(3).is_ok());
    until("all nodes to be reachable", ADMITTED, all).map(drop)
}

/// Returns number and incarnation of each member.
fn incarnations(node: &Node) -> Result<Vec<String>> {
    let lines = node.kite("nodes")?;
    let words = lines.lines().skip(1).map(|line| {
        let words: Vec<&str> = line.split_whitespace().take(2).collect();
        words.join(" ")
    });
    Ok(words.collect())
}

/// Processes that use the regions torture-1 … torture-3, one on each node.
struct Torture(Vec<Process>);

impl Torture {
    /// Allocates the regions, each in the memory of two nodes, and starts the processes.
    fn start(trio: &Turn<'_>) -> Result<Self> {
        for home in 1..=3 {
            let next = home % 3 + 1;
            let line = format!("alloc torture-{home} 8M --node {home} --node {next}");
            trio.node(home).kite(&line)?;
        }
        let start = |node: &Node, number| node.workload(&format!("torture {number}")).spawn();
        let nodes = (1..).zip(trio.nodes());
        let mut processes = nodes
            .map(|(number, node): (u64, _)| start(node, number))
            .collect::<Result<Vec<_>>>()?;
        for process in &mut processes {
            process.read_until("running", SOON)?;
        }
        Ok(Torture(processes))
    }

    /// Verifies what was acknowledged, and ends the processes.
    fn verify(mut self) -> Result<()> {
        let mut holds: HashMap<String, Vec<[u64; 2]>> = HashMap::new();
        for process in &self.0 {
            process.signal("TERM")?;
        }
        for process in &mut self.0 {
            let counts = read_holds(process, &mut holds)?;
            println!("{counts}");
            let counts: Vec<&str> = counts.split(' ').collect();
            let ["verified", writes, holds, calls] = counts[..] else {
                panic!("not a verification: {counts:?}");
            };
            assert!(![writes, holds, calls].contains(&"0"), "no progress");
        }
        for process in &mut self.0 {
            process.signal("TERM")?;
            assert!(process.wait(SOON)?.success());
        }
        assert_eq!(holds.len(), 3, "regions with holds");
        for (region, mut holds) in holds {
            holds.sort_unstable();
            let overlap = holds.windows(2).find(|pair| pair[1][0] < pair[0][1]);
            assert_eq!(overlap, None, "the lock of {region} had two owners");
        }
        Ok(())
    }
}

/// Reads the holds of a process, and returns the line that follows them.
fn read_holds(process: &mut Process, holds: &mut HashMap<String, Vec<[u64; 2]>>) -> Result<String> {
    loop {
        let line = process.read_until("", SOON)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["hold", region, first, last] = words[..] else {
            return Ok(line);
        };
        let [first, last] = [first, last].map(|number| number.parse().expect("a number"));
        holds.entry(region.into()).or_default().push([first, last]);
    }
}

fn number_from_env(variable: &str, default: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value.map_or(default, |value| value.parse().expect(variable))
}

/// Runs the schedules of the environment on a cluster with this configuration.
fn run_schedules(setup: &Setup) -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(setup)?;
    let mut daemons = Vec::new();
    for (number, node) in (1..).zip(trio.nodes()) {
        daemons.push(node.keep_kited(number, setup)?);
    }
    trio.await_members(3)?;
    trio.node(1).delay_all(DELAY)?;
    let before = incarnations(trio.node(1))?;
    let first = number_from_env("KITE_FIRST_SCHEDULE", 0);
    for schedule in first..first + number_from_env("KITE_SCHEDULES", SCHEDULES) {
        let torture = Torture::start(&trio)?;
        run_faults(&trio, schedule, setup)?;
        torture.verify()?;
        for node in trio.nodes() {
            assert_eq!(incarnations(node)?, before, "schedule {schedule}");
        }
        for home in 1..=3 {
            trio.node(home).kite(&format!("free torture-{home}"))?;
        }
    }
    for (node, mut daemon) in trio.nodes().iter().zip(daemons) {
        node.sh("pkill -INT -x kited")?;
        assert!(daemon.wait(SOON)?.success());
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn random_faults_end_no_incarnation_and_lose_no_acknowledged_request() -> Result<()> {
    run_schedules(&Setup::default())
}

#[test]
#[ignore = "long"]
fn schedules_on_etcd_end_no_incarnation_and_lose_no_acknowledged_request() -> Result<()> {
    run_schedules(&Setup {
        has_store: true,
        ..Setup::default()
    })
}
