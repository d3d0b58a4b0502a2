// SPDX-License-Identifier: GPL-2.0 OR MIT
//! kite on the nodes of a cluster: the module, its daemons, its command, and the test programs.
//!
//! Node 1 is the seed, and daemons join in order, so that kite's number of a node is the harness's.
//! The state is in the nodes alone: [`Cluster::start_kite`] brings any cluster to the same start,
//! also one that a failed test left in disorder.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::kernel::patience;
use crate::node::{Node, Remote};
use crate::process::Process;
use crate::wait::until;
use crate::{Cluster, TOP};

/// Maximum time for daemons to agree on a view.
const AGREEMENT: Duration = Duration::from_secs(60);

/// Maximum time for a daemon to leave and close the device.
const FAREWELL: Duration = Duration::from_secs(30);

const SCRIPT: &str = include_str!("../guest/start-kite");

/// Parameters of module and daemon.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Parameters of the module, "a=1 b=2".
    pub parameters: String,
    /// Milliseconds between heartbeats.
    pub heartbeat_ms: u32,
    /// Milliseconds of silence after which a node is dead.
    pub dead_ms: u32,
}

/// Slow machines do not take each other for dead, and tests of the dead do not take long.
impl Default for Setup {
    fn default() -> Self {
        let ms = |ms| patience(Duration::from_millis(ms)).as_millis() as u32;
        Setup {
            parameters: String::new(),
            heartbeat_ms: ms(500),
            dead_ms: ms(4000),
        }
    }
}

impl Setup {
    /// Returns parameters with which no node is removed for its silence. A suspected node has two heartbeats to reply.
    pub fn patient() -> Self {
        Setup {
            heartbeat_ms: 10_000,
            dead_ms: 300_000,
            ..Setup::default()
        }
    }
}

impl Cluster {
    /// Starts the module and the daemon on each node where they do not run with this set-up, and
    /// waits until each node's kernel acts on a view of all.
    ///
    /// # Errors
    ///
    /// If a node does not get there; the end of its daemon's log is in the message.
    pub fn start_kite(&self, setup: &Setup) -> Result<()> {
        if self.runs_kite(setup) {
            return Ok(());
        }
        for (number, node) in (1..).zip(self.nodes()) {
            node.start_kite(number, setup)?;
        }
        self.await_members(self.nodes().len())
    }

    /// Cuts the links of a node until a QP has failed, and restores them. There must be traffic from or to the node.
    /// The end that detects the failure depends on the operations in flight.
    ///
    /// # Errors
    ///
    /// If none fails within `limit`.
    pub fn cut(&self, number: usize, limit: Duration) -> Result<()> {
        // Of all at once: what is on the way may end meanwhile.
        let lost = || -> Result<u64> {
            let lost = |node: &Node| Ok(node.stats()?["qp_errors"]);
            thread::scope(|scope| {
                let nodes = self.nodes().iter();
                let looks: Vec<_> = nodes.map(|node| scope.spawn(move || lost(node))).collect();
                let looks = looks.into_iter().map(|look| look.join());
                looks.map(|look| look.unwrap_or(Ok(0))).sum()
            })
        };
        let before = lost()?;
        self.node(number).disconnect()?;
        until("a queue pair to fail", limit, || Ok(lost()? > before))?;
        self.node(number).reconnect()
    }

    /// Has all nodes lose this share of what they send while something is done.
    ///
    /// # Errors
    ///
    /// Those of `work`.
    ///
    /// # Panics
    ///
    /// If a node has lost nothing meanwhile.
    pub fn losing<T>(&self, percent: f64, work: impl FnOnce() -> Result<T>) -> Result<T> {
        for node in self.nodes() {
            node.loss(percent)?;
        }
        let done = work();
        let lost = self.nodes().iter().map(|node| {
            let lost = node.lost()?;
            node.loss(0.0)?;
            Ok((node.name(), lost))
        });
        let lost = lost.collect::<Result<Vec<_>>>()?;
        let done = done?;
        for (name, lost) in lost {
            assert!(lost > 0, "{name} lost nothing");
        }
        Ok(done)
    }

    /// Returns `true` if all nodes run kite with this setup, which is the usual case. One command per node, run
    /// concurrently, checks it.
    fn runs_kite(&self, setup: &Setup) -> bool {
        let members = self.nodes().len();
        let runs = |(number, node): (usize, &Node)| {
            let line = format!(
                "only_look=1\n{}\n{TOP}/target/release/kite-workload await --own {number} \
                 --members {members} --limit-ms 0",
                script(number, setup)
            );
            node.mend()
                .and_then(|()| node.run(&line))
                .is_ok_and(|output| output.success())
        };
        thread::scope(|scope| {
            let looks: Vec<_> = (1..)
                .zip(self.nodes())
                .map(|node| scope.spawn(move || runs(node)))
                .collect();
            // Wait for all threads, also after a failure of the first.
            looks
                .into_iter()
                .fold(true, |all, look| look.join().unwrap_or(false) && all)
        })
    }

    /// Waits until the view of each of the nodes 1 … `count` has `count` members.
    ///
    /// # Errors
    ///
    /// If that takes longer than a minute.
    pub fn await_members(&self, count: usize) -> Result<()> {
        let nodes = (1..).zip(self.nodes()).take(count);
        for (number, node) in nodes {
            node.await_view(number, count)?;
        }
        Ok(())
    }
}

impl Node {
    /// Starts the module and the daemon unless they run with this set-up, and repairs what a test
    /// may have left of the network; `number` is the node's.
    ///
    /// # Errors
    ///
    /// If the module does not load.
    pub fn start_kite(&self, number: usize, setup: &Setup) -> Result<()> {
        self.mend()?;
        self.sh(&script(number, setup)).map(drop)
    }

    /// Waits until this node is `number` in a view of `members`.
    ///
    /// # Errors
    ///
    /// If it is not within a minute.
    pub fn await_view(&self, number: usize, members: usize) -> Result<()> {
        let limit = patience(AGREEMENT).as_millis();
        let line = format!("await --own {number} --members {members} --limit-ms {limit}");
        let waited = self.workload(&line).limit(AGREEMENT * 2).sh();
        waited.map(drop).map_err(|error| {
            let log = self.run("tail -n 20 /tmp/kited.log");
            let log = log.map_or_else(|error| error.to_string(), |log| log.stdout);
            explain(error, &log)
        })
    }

    /// Asks the daemon to leave, if it runs, and waits for its end.
    ///
    /// # Errors
    ///
    /// If it does not end within half a minute.
    pub fn stop_kited(&self) -> Result<()> {
        self.end_kited("TERM")
    }

    /// Kills the daemon, if it runs, and waits for its end.
    ///
    /// # Errors
    ///
    /// As of [`Node::stop_kited`].
    pub fn kill_kited(&self) -> Result<()> {
        self.end_kited("KILL")
    }

    /// Starts the daemon in place of the one that runs, with a file descriptor store that outlives it, and waits until
    /// it is ready. It is started again when it ends, until it leaves the cluster (SIGINT).
    ///
    /// # Errors
    ///
    /// If it is not ready within a minute.
    pub fn keep_kited(&self, number: usize, setup: &Setup) -> Result<Process> {
        self.stop_kited()?;
        let arguments = arguments(number, setup);
        let line = format!(
            "exec {TOP}/tests/cluster/guest/fd-store {TOP}/target/release/kited {arguments}"
        );
        let mut daemon = self.spawn(&line)?;
        daemon.read_until("ready: ", AGREEMENT)?;
        Ok(daemon)
    }

    fn end_kited(&self, signal: &str) -> Result<()> {
        let seconds = patience(FAREWELL).as_secs();
        let line = format!(
            "pkill -{signal} -x kited || exit 0; timeout {seconds} pidwait -x kited; \
             pgrep -x kited >/dev/null || exit 0; echo 'kited does not end' >&2; \
             for task in /proc/$(pgrep -x kited)/task/*; do cat $task/comm $task/stack >&2; done; \
             tail -n 20 /tmp/kited.log >&2; dmesg | tail -n 20 >&2; exit 1"
        );
        self.command(line).limit(FAREWELL * 3).sh().map(drop)
    }

    /// Runs the command `kite`, which has to succeed, and returns what it prints.
    ///
    /// # Errors
    ///
    /// If it fails.
    pub fn kite(&self, arguments: &str) -> Result<String> {
        self.sh(&format!("{TOP}/target/release/kite {arguments}"))
    }

    /// Prepares to run the test program.
    pub fn workload(&self, arguments: &str) -> Remote<'_> {
        self.command(format!(
            "exec {TOP}/target/release/kite-workload {arguments}"
        ))
    }

    /// Executes an operation of the workload program. Returns "OK" or the symbol of the errno.
    ///
    /// # Errors
    ///
    /// If it does not end.
    pub fn attempt(&self, user: &str, what: &str) -> Result<String> {
        self.workload(&format!("attempt {what}")).user(user).sh()
    }

    /// Counters and gauges.
    ///
    /// # Errors
    ///
    /// If there is no module, or no RNIC.
    pub fn stats(&self) -> Result<HashMap<String, u64>> {
        let json = self.kite("stats --json")?;
        serde_json::from_str(&json).map_err(|error| Error::Io {
            what: format!("{}: reading {json}", self.name()),
            source: error.into(),
        })
    }

    /// Waits until gauges have values, "a=1 b=2", and returns how long it took.
    ///
    /// # Errors
    ///
    /// If that takes longer than `limit`.
    pub fn await_gauges(&self, gauges: &str, limit: Duration) -> Result<Duration> {
        let line = format!("await {gauges} --limit-ms {}", patience(limit).as_millis());
        let ms = self.workload(&line).limit(limit * 2 + FAREWELL).sh()?;
        Ok(Duration::from_millis(ms.parse().unwrap_or_default()))
    }
}

fn script(number: usize, setup: &Setup) -> String {
    let arguments = arguments(number, setup);
    let parameters = &setup.parameters;
    format!(
        "number={number}\n\
         parameters='{parameters}'\n\
         arguments='{arguments}'\n\
         {SCRIPT}"
    )
}

/// Options of the daemon.
fn arguments(number: usize, setup: &Setup) -> String {
    let role = match number {
        1 => "--listen 10.77.0.1:7700",
        _ => "--join 10.77.0.1:7700",
    };
    let Setup {
        heartbeat_ms,
        dead_ms,
        ..
    } = setup;
    format!(
        "{role} --insecure -v --heartbeat-interval-ms {heartbeat_ms} --dead-timeout-ms {dead_ms}"
    )
}

/// Adds the daemon's own words to a failure.
fn explain(error: Error, log: &str) -> Error {
    match error {
        Error::Failed {
            node,
            command,
            status,
            output,
        } => Error::Failed {
            node,
            command,
            status,
            output: format!("{output}\nkited's log ends:\n{log}"),
        },
        other => other,
    }
}
