// SPDX-License-Identifier: GPL-2.0 OR MIT
//! kite on the nodes of a cluster: the module, its daemons, its command, and the test programs.
//!
//! Node 1 is the seed, or the nodes have a store. Daemons join in order, so that the node numbers of kite and the harness
//! agree. The harness keeps no state: [`Cluster::start_kite`] restores the same initial state from any other, also after a failed test.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::etcd;
use crate::machine::kernel::patience;
use crate::node::process::Process;
use crate::node::{Node, Remote};
use crate::wait::until;
use crate::{Cluster, TOP};

/// Timeout of the agreement of daemons on a view.
const AGREEMENT: Duration = Duration::from_secs(60);

/// Timeout of a daemon's exit.
const FAREWELL: Duration = Duration::from_secs(30);

const SCRIPT: &str = include_str!("../guest/start-kite");

/// Configuration of module and daemons.
#[derive(Clone, Debug)]
pub struct Setup {
    /// File of the module in the folder of the modules for the kernel.
    pub module: &'static str,
    /// Parameters of the module, "a=1 b=2".
    pub parameters: String,
    /// Interval of heartbeats, in ms.
    pub heartbeat_ms: u32,
    /// Silence after which a node counts as dead, in ms.
    pub dead_ms: u32,
    /// `true` if the membership is in etcd, with a server on each of three nodes, `false` if node 1 is the seed.
    pub has_store: bool,
}

/// Long enough that slow machines do not count as dead, and short enough for tests of dead nodes.
impl Default for Setup {
    fn default() -> Self {
        let ms = |ms| patience(Duration::from_millis(ms)).as_millis() as u32;
        Setup {
            module: "kite.ko",
            parameters: String::new(),
            heartbeat_ms: ms(500),
            dead_ms: ms(4000),
            has_store: false,
        }
    }
}

impl Setup {
    /// Returns a configuration in which no silent node becomes unreachable during a test: a suspected node has two
    /// heartbeats to respond.
    pub fn patient() -> Self {
        Setup {
            heartbeat_ms: 10_000,
            dead_ms: 300_000,
            ..Setup::default()
        }
    }

    /// Returns a configuration with the module that `make older-module` builds.
    pub fn older() -> Self {
        Setup {
            module: "older/kite.ko",
            ..Setup::default()
        }
    }
}

impl Cluster {
    /// Starts the module and the daemon on each node where they do not run with this configuration, and waits until
    /// each node's kernel has a view of all nodes.
    ///
    /// # Errors
    ///
    /// A node does not get that view within 60 s. The end of its daemon's log is in the message.
    pub fn start_kite(&self, setup: &Setup) -> Result<()> {
        if self.runs_kite(setup) {
            return Ok(());
        }
        if setup.has_store {
            self.create_store()?;
        }
        for (number, node) in (1..).zip(self.nodes()) {
            node.start_kite(number, setup)?;
        }
        self.await_members(self.nodes().len())
    }

    /// Takes down the links of a node until a queue pair has failed, and brings them up again. Requests from or to the
    /// node must be in flight. A queue pair of either end may fail.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]: no queue pair fails within `limit`.
    pub fn cut(&self, number: usize, limit: Duration) -> Result<()> {
        // Read the counters of all nodes at once, while requests are in flight.
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

    /// Drops this share of the packets that each node sends while `work` runs.
    ///
    /// # Errors
    ///
    /// The errors of `work`.
    ///
    /// # Panics
    ///
    /// If a node lost no packet.
    pub fn with_loss<T>(&self, percent: f64, work: impl FnOnce() -> Result<T>) -> Result<T> {
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
            assert!(lost > 0, "{name} lost no packet");
        }
        Ok(done)
    }

    /// Returns `true` if kite runs with this configuration on all nodes. This is the usual case, and takes one command
    /// on each node, all at once.
    fn runs_kite(&self, setup: &Setup) -> bool {
        let members = self.nodes().len();
        let runs = |(number, node): (usize, &Node)| {
            let line = format!(
                "only_look=1\n{}\n{TOP}/target/release/kite-workload await --own {number} \
                 --members {members} --limit-ms 0",
                script(number, setup)
            );
            node.restore_links()
                .and_then(|()| node.run(&line))
                .is_ok_and(|output| output.success())
        };
        thread::scope(|scope| {
            let looks: Vec<_> = (1..)
                .zip(self.nodes())
                .map(|node| scope.spawn(move || runs(node)))
                .collect();
            // Join all threads, whatever the first returns.
            looks
                .into_iter()
                .fold(true, |all, look| look.join().unwrap_or(false) && all)
        })
    }

    /// Waits until the view of each of the nodes 1 … `count` has `count` reachable members.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] after 60 s.
    pub fn await_members(&self, count: usize) -> Result<()> {
        let nodes = (1..).zip(self.nodes()).take(count);
        for (number, node) in nodes {
            node.await_view(number, count)?;
        }
        Ok(())
    }
}

impl Node {
    /// Starts the module and the daemon of node `number` unless they run with this configuration, and restores links
    /// that a test took down.
    ///
    /// # Errors
    ///
    /// The module cannot be loaded.
    pub fn start_kite(&self, number: usize, setup: &Setup) -> Result<()> {
        self.restore_links()?;
        self.sh(&script(number, setup)).map(drop)
    }

    /// Waits until this node is `number` in a view of `members` reachable nodes.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] after 60 s.
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

    /// Sends SIGTERM to the daemon, which then leaves the cluster, and waits for its end. Does nothing without a
    /// daemon.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`]: the daemon does not end within 30 s.
    pub fn stop_kited(&self) -> Result<()> {
        self.end_kited("TERM")
    }

    /// Kills the daemon, and waits for its end. Does nothing without a daemon.
    ///
    /// # Errors
    ///
    /// See [`Node::stop_kited`].
    pub fn kill_kited(&self) -> Result<()> {
        self.end_kited("KILL")
    }

    /// Replaces the running daemon by one with a file descriptor store that outlives it, and waits until the daemon is
    /// ready. The store starts the daemon again when it ends, until it leaves the cluster (SIGINT).
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]: the daemon is not ready within 60 s.
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

    /// Runs the command `kite`, which must succeed. Returns its output.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`]: the command fails.
    pub fn kite(&self, arguments: &str) -> Result<String> {
        self.sh(&format!("{TOP}/target/release/kite {arguments}"))
    }

    /// Prepares to run the test program.
    pub fn workload(&self, arguments: &str) -> Remote<'_> {
        self.command(format!(
            "exec {TOP}/target/release/kite-workload {arguments}"
        ))
    }

    /// Runs one request by the test program. Returns "OK" or the symbol of the errno.
    ///
    /// # Errors
    ///
    /// The program fails or does not end.
    pub fn attempt(&self, user: &str, what: &str) -> Result<String> {
        self.workload(&format!("attempt {what}")).user(user).sh()
    }

    /// Returns counters and gauges.
    ///
    /// # Errors
    ///
    /// The module is not loaded, or the node has no RNIC.
    pub fn stats(&self) -> Result<HashMap<String, u64>> {
        let json = self.kite("stats --json")?;
        serde_json::from_str(&json).map_err(|error| Error::Io {
            what: format!("{}: reading {json}", self.name()),
            source: error.into(),
        })
    }

    /// Waits until gauges have values, "a=1 b=2". Returns the elapsed time.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] after `limit`.
    pub fn await_gauges(&self, gauges: &str, limit: Duration) -> Result<Duration> {
        let line = format!("await {gauges} --limit-ms {}", patience(limit).as_millis());
        let ms = self.workload(&line).limit(limit * 2 + FAREWELL).sh()?;
        Ok(Duration::from_millis(ms.parse().unwrap_or_default()))
    }
}

fn script(number: usize, setup: &Setup) -> String {
    let arguments = arguments(number, setup);
    let (module, parameters) = (setup.module, &setup.parameters);
    format!(
        "number={number}\n\
         module=/run/kite/build/{module}\n\
         parameters='{parameters}'\n\
         arguments='{arguments}'\n\
         {SCRIPT}"
    )
}

/// Returns the options of the daemon.
fn arguments(number: usize, setup: &Setup) -> String {
    let role = match (setup.has_store, number) {
        (true, _) => format!("--store {}", etcd::url()),
        (false, 1) => "--listen 10.77.0.1:7700".into(),
        (false, _) => "--join 10.77.0.1:7700".into(),
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

/// Adds the end of the daemon's log to a failure.
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
