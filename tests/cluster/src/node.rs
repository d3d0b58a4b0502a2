// SPDX-License-Identifier: GPL-2.0 OR MIT
//! One machine of a cluster: commands, files, the kernel's log and module, and what can happen to a
//! machine: pauses, resets, death, a cut or lossy network.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::accel::Accel;
use crate::builder::boot_limit;
use crate::connectx::Connectx;
use crate::console::Console;
use crate::error::{Context, Error, Result};
use crate::fabric::LINK;
use crate::guarded::Guarded;
use crate::kernel::{patience, Kernel};
use crate::leaks::{self, Leaks, Symbols};
use crate::process::{Output, Process};
use crate::qemu::{Machine, Plan};
use crate::qmp::Qmp;
use crate::ssh::Ssh;

/// Limit of a command without [`Remote::limit`].
pub const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// Maximum delay of the console after a response of the node.
const CONSOLE_LAG: Duration = Duration::from_secs(5);

/// Maximum time of the removal of an RNIC in use.
const REMOVAL: Duration = Duration::from_secs(30);

/// First line of the init script.
const INIT: &str = "kite: init";

/// Maximum time of a scan of kmemleak.
const SCANS: Duration = Duration::from_secs(60);

const FIND_LEAKS: &str = include_str!("../guest/find-leaks");

/// A node of a cluster.
#[derive(Debug)]
pub struct Node {
    plan: Plan,
    ssh: Arc<Ssh>,
    qmp: Mutex<Qmp>,
    console: Console,
    /// Length of the console at the last start of the machine.
    started_at: AtomicU64,
    paused: AtomicBool,
    // In this order: QEMU has to die before those that serve it.
    qemu: Mutex<Guarded>,
    _helpers: Vec<Guarded>,
    /// The network of all nodes, unless that is only frames. It ends after the last of them.
    network: Option<Arc<Connectx>>,
}

/// A command for a node, before it is started.
#[derive(Clone, Debug)]
#[must_use = "nothing happens until `run` or `spawn`"]
pub struct Remote<'a> {
    node: &'a Node,
    line: String,
    user: String,
    limit: Duration,
}

impl Node {
    /// Boots a machine. One that emulation let down before the kernel came to our init is started once
    /// more, and its console is kept under another name.
    pub(crate) fn boot(plan: &Plan, network: Option<Arc<Connectx>>) -> Result<Self> {
        let node = Node::start(plan.clone(), network.clone())?;
        let Err(error) = node.wait_ready() else {
            return Ok(node);
        };
        if plan.accel != Accel::Tcg || node.kernel_log().contains(INIT) {
            return Err(error);
        }
        drop(node);
        let (console, kept) = (plan.file("console"), plan.file("console.failed"));
        fs::rename(&console, &kept).context(|| format!("keeping {}", console.display()))?;
        eprintln!(
            "{}: the kernel did not boot ({}); starting it again",
            plan.name(),
            kept.display()
        );
        let node = Node::start(plan.clone(), network)?;
        node.wait_ready()?;
        Ok(node)
    }

    fn start(plan: Plan, network: Option<Arc<Connectx>>) -> Result<Self> {
        let Machine { mut qemu, helpers } = plan.start()?;
        let console = Console::new(plan.file("console"));
        let talk = Qmp::new(qemu.child()).and_then(|mut qmp| {
            let port = qmp.forwarded_port()?;
            Ok((qmp, Ssh::new(&plan, port)?))
        });
        let (qmp, ssh) = talk.map_err(|error| Error::Boot {
            node: plan.name(),
            why: error.to_string(),
            log: fs::read_to_string(plan.file("qemu.log")).unwrap_or_default(),
            console: plan.file("qemu.log"),
        })?;
        Ok(Node {
            plan,
            ssh: Arc::new(ssh),
            qmp: Mutex::new(qmp),
            console,
            started_at: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            qemu: Mutex::new(qemu),
            _helpers: helpers,
            network,
        })
    }

    /// `node1`, `node2` and so on; also its host name.
    pub fn name(&self) -> String {
        self.plan.name()
    }

    /// Its address in the private network.
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, self.plan.number as u8)
    }

    /// Where its console is logged.
    pub fn console_log(&self) -> &Path {
        self.console.path()
    }

    /// The configuration with which `ssh -F` reaches this node under its name.
    pub fn ssh_config(&self) -> &Path {
        self.ssh.config()
    }

    /// All that its console has shown since it was booted, also if it no longer answers.
    pub fn kernel_log(&self) -> String {
        self.console.since(0)
    }

    /// Prepares a command that `sh` runs, by default as root.
    pub fn command(&self, line: impl Into<String>) -> Remote<'_> {
        Remote {
            node: self,
            line: line.into(),
            user: "root".into(),
            limit: COMMAND_LIMIT,
        }
    }

    /// Runs a command as root and waits for its end.
    pub fn run(&self, line: &str) -> Result<Output> {
        self.command(line).run()
    }

    /// Runs a command as root that has to succeed, and returns its standard output, trimmed.
    pub fn sh(&self, line: &str) -> Result<String> {
        self.command(line).sh()
    }

    /// Starts a command as root.
    pub fn spawn(&self, line: &str) -> Result<Process> {
        self.command(line).spawn()
    }

    /// An interactive ssh on the caller's terminal.
    pub fn terminal(&self) -> Command {
        let mut command = self.ssh.program("ssh");
        command.args(["-t", self.ssh.node()]);
        command
    }

    /// Copies a file or directory of the host to the node.
    pub fn push(&self, host: impl AsRef<Path>, guest: &str) -> Result<()> {
        let mut scp = self.scp();
        scp.arg(host.as_ref())
            .arg(format!("{}:{guest}", self.name()));
        self.copy(scp)
    }

    /// Copies a file or directory of the node to the host.
    pub fn pull(&self, guest: &str, host: impl AsRef<Path>) -> Result<()> {
        let mut scp = self.scp();
        scp.arg(format!("{}:{guest}", self.name()))
            .arg(host.as_ref());
        self.copy(scp)
    }

    /// Loads what kite depends on, then kite itself with `parameters` ("a=1 b=2").
    pub fn insmod_kite(&self, parameters: &str) -> Result<()> {
        let module = "/run/kite/build/kite.ko";
        self.sh(&format!(
            "set -e; needs=$(modinfo -F depends {module} | tr , ' '); \
             [ -z \"$needs\" ] || modprobe -a $needs; insmod {module} {parameters}"
        ))?;
        Ok(())
    }

    /// Unloads a module if it is loaded. Fails if something still holds it.
    pub fn unload(&self, module: &str) -> Result<()> {
        self.sh(&format!(
            "! grep '^{module} ' /proc/modules >&2 || rmmod {module}"
        ))?;
        Ok(())
    }

    /// Unloads `module` for the last time. A debug kernel is then asked whether its checkers still work,
    /// and what was leaked.
    pub(crate) fn retire(&self, module: &str) -> Result<()> {
        if self.plan.kernel != Kernel::Debug {
            return self.unload(module);
        }
        let symbols = self.sh(&format!("grep -F '[{module}]' /proc/kallsyms || true"))?;
        self.unload(module)?;
        let report = self.command(FIND_LEAKS).limit(SCANS).sh()?;
        let Leaks { ours, others } = leaks::sort(&report, &Symbols::new(&symbols));
        let file = self.plan.file("leaks");
        fs::write(&file, others).context(|| format!("writing {}", file.display()))?;
        match ours.is_empty() {
            true => Ok(()),
            false => Err(Error::Leak {
                node: self.name(),
                objects: ours,
            }),
        }
    }

    /// Kills the machine, as a power failure does. For good: a killed node does not come back.
    pub fn kill(&self) {
        self.qemu().kill();
        self.ssh.disconnect();
    }

    /// Returns `true` if the machine runs: it was not killed, and did not panic or power off.
    pub fn is_alive(&self) -> bool {
        self.qemu().status().is_none()
    }

    /// Stops the processors of the machine, and drops the packets of its RNIC, which continues without them.
    pub fn pause(&self) -> Result<()> {
        self.paused.store(true, Ordering::Relaxed);
        if let Some(connectx) = &self.network {
            connectx.silence(self.plan.number, true)?;
        }
        self.qmp("stop", json!({}))
    }

    /// Stops the processors of the machine: its RNIC goes on.
    pub fn stall(&self) -> Result<()> {
        self.paused.store(true, Ordering::Relaxed);
        self.qmp("stop", json!({}))
    }

    /// Lets the machine go on after [`Node::pause`] or [`Node::stall`].
    pub fn resume(&self) -> Result<()> {
        self.qmp("cont", json!({}))?;
        if let Some(connectx) = &self.network {
            connectx.silence(self.plan.number, false)?;
        }
        self.paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Lets the RNIC refuse so many times to make a target of DC.
    pub fn refuse_targets(&self, times: u32) -> Result<()> {
        self.connectx()?.refuse_targets(self.plan.number, times)
    }

    /// Resets the machine. [`Node::wait_ready`] waits for its boot.
    pub fn reset(&self) -> Result<()> {
        self.ssh.disconnect();
        self.pause()?;
        self.started_at.store(self.console.len(), Ordering::Relaxed);
        // Otherwise a reset ends the machine, so that a crash is seen; this one is wanted. The
        // firmware may add a reset of its own, so this holds until the node is ready.
        self.qmp("set-action", json!({ "reboot": "reset" }))?;
        self.qmp("system_reset", json!({}))?;
        self.resume()
    }

    /// Waits until the node has booted and takes commands.
    pub fn wait_ready(&self) -> Result<()> {
        let deadline = Instant::now() + boot_limit();
        let from = self.started_at.load(Ordering::Relaxed);
        loop {
            if !self.is_alive() {
                return Err(self.not_booted("its machine ended"));
            }
            if self.console.since(from).contains("Server listening") {
                break;
            }
            if Instant::now() > deadline {
                let limit = boot_limit().as_secs();
                return Err(self.not_booted(&format!("not within {limit} s (KITE_BOOT_SECONDS)")));
            }
            thread::sleep(Duration::from_millis(50));
        }
        self.qmp("set-action", json!({ "reboot": "shutdown" }))?;
        self.ssh
            .connect(deadline)
            .map_err(|error| self.not_booted(&error.to_string()))
    }

    /// Pulls the cables out: that of the private network, and that of the RNIC if it has its own.
    pub fn disconnect(&self) -> Result<()> {
        self.set_links(false)
    }

    /// Pulls the cable of the RNIC out, and leaves that of the private network in.
    ///
    /// # Errors
    ///
    /// If it is no software ConnectX: no other RNIC has a cable of its own.
    pub fn disconnect_rnic(&self) -> Result<()> {
        self.connectx()?.set_port(self.plan.number, false)
    }

    /// Plugs the cables in again.
    pub fn reconnect(&self) -> Result<()> {
        self.set_links(true)
    }

    /// Undoes what a test may have left of `disconnect` and, where nothing in the node knows of it, `loss`.
    pub(crate) fn mend(&self) -> Result<()> {
        if let Some(connectx) = &self.network {
            connectx.lose(self.plan.number, 0.0)?;
        }
        self.reconnect()
    }

    fn set_links(&self, up: bool) -> Result<()> {
        if let Some(connectx) = &self.network {
            connectx.set_port(self.plan.number, up)?;
        }
        self.qmp("set_link", json!({ "name": LINK, "up": up }))
    }

    /// The name of its RNIC.
    pub fn rnic(&self) -> Result<String> {
        self.sh("cd /sys/class/infiniband && echo *")
    }

    /// Takes the RNIC from the node, whatever uses it. [`Node::start_kite`] brings it back.
    ///
    /// # Errors
    ///
    /// If that takes longer than half a minute.
    pub fn remove_rnic(&self) -> Result<()> {
        let removal = self.command(self.plan.fabric.removal()).limit(REMOVAL);
        removal.sh().map(drop)
    }

    /// Kills the RNIC as a hardware failure does: it sends no packets, and its registers read as ones.
    ///
    /// # Errors
    ///
    /// If it is no software ConnectX.
    pub fn kill_rnic(&self) -> Result<()> {
        self.connectx()?.kill(self.plan.number)
    }

    /// Gives a dead RNIC the state that it has after power-on.
    ///
    /// # Errors
    ///
    /// If it is no software ConnectX.
    pub fn revive_rnic(&self) -> Result<()> {
        self.connectx()?.revive(self.plan.number)
    }

    /// Unplugs the RNIC by surprise: from now on its registers read as ones. [`Node::remove_rnic`] then notifies the
    /// kernel.
    ///
    /// # Errors
    ///
    /// If it is no software ConnectX.
    pub fn pull_rnic(&self) -> Result<()> {
        self.connectx()?.pull(self.plan.number)
    }

    /// Gives the RNIC a cache of so many page translations, of which none was missed yet.
    ///
    /// # Errors
    ///
    /// If it is no software ConnectX.
    pub fn cache_translations(&self, entries: usize) -> Result<()> {
        self.connectx()?
            .cache_translations(self.plan.number, entries)
    }

    /// Returns the misses of the RNIC in its cache of page translations.
    ///
    /// # Errors
    ///
    /// If it is no software ConnectX.
    pub fn missed_translations(&self) -> Result<u64> {
        self.connectx()?.missed_translations(self.plan.number)
    }

    /// Returns counters of the RNIC, by names of `Count` and `Statement` in `tests/connectx/src/cost.rs`.
    ///
    /// # Errors
    ///
    /// If it is no software ConnectX, or counts no such thing.
    pub fn rnic_counts<const N: usize>(&self, names: [&str; N]) -> Result<[u64; N]> {
        self.connectx()?.counts(self.plan.number, names)
    }

    fn connectx(&self) -> Result<&Connectx> {
        self.network.as_deref().ok_or(Error::NotConnectx)
    }

    /// Makes the node lose this share of what it sends, frames and packets of RDMA; 0 ends that.
    pub fn loss(&self, percent: f64) -> Result<()> {
        if let Some(connectx) = &self.network {
            connectx.lose(self.plan.number, percent / 100.0)?;
        }
        let line = match percent > 0.0 {
            true => format!("tc qdisc replace dev eth0 root netem loss {percent}%"),
            false => "tc qdisc del dev eth0 root 2>&1 || true".into(),
        };
        self.sh(&line)?;
        Ok(())
    }

    /// Delays what its software ConnectX sends to that of another node, until the cluster is another test's.
    /// What it lost by chance comes again.
    pub fn delay(&self, to: &Node, by: Duration) -> Result<()> {
        self.connectx()?.delay(self.plan.number, to.plan.number, by)
    }

    /// Returns the RDMA packets lost since [`Node::loss`] was called; on Soft-RoCE the frames.
    pub fn lost(&self) -> Result<u64> {
        if let Some(connectx) = &self.network {
            return connectx.lost(self.plan.number);
        }
        let count =
            self.sh("tc -s qdisc show dev eth0 | sed -n 's/.*(dropped \\([0-9]*\\),.*/\\1/p'")?;
        Ok(count.parse().expect(&count))
    }

    /// The kernel's faults since the last call, with the node's name.
    pub(crate) fn new_faults(&self) -> Option<String> {
        self.flush_console();
        let excerpt = self.console.new_faults(self.plan.accel.honest_time())?;
        Some(format!(
            "{} ({}):\n{excerpt}",
            self.name(),
            self.console.path().display()
        ))
    }

    pub(crate) fn answers(&self) -> bool {
        !self.paused.load(Ordering::Relaxed) && self.is_alive() && self.ssh.connected()
    }

    /// Sends a mark through the kernel's log and awaits it: then the console shows all before it. A
    /// node that does not answer is judged by what its console has.
    fn flush_console(&self) {
        if !self.answers() {
            return;
        }
        let from = self.console.len();
        let mark = format!("kite: console checked at {from}");
        let write = self
            .command(format!("echo '<6>{mark}' >/dev/kmsg"))
            .limit(CONSOLE_LAG)
            .run();
        let deadline = Instant::now() + patience(CONSOLE_LAG);
        while write.is_ok()
            && Instant::now() < deadline
            && !self.console.since(from).contains(&mark)
        {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn not_booted(&self, why: &str) -> Error {
        Error::Boot {
            node: self.name(),
            why: why.into(),
            log: self
                .console
                .reason(self.started_at.load(Ordering::Relaxed), 30),
            console: self.console.path().into(),
        }
    }

    fn qmp(&self, command: &str, arguments: serde_json::Value) -> Result<()> {
        let mut qmp = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        qmp.execute(command, arguments).map(drop)
    }

    fn qemu(&self) -> MutexGuard<'_, Guarded> {
        self.qemu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn scp(&self) -> Command {
        let mut scp = self.ssh.program("scp");
        scp.args(["-q", "-r", "-p"]);
        scp
    }

    fn copy(&self, scp: Command) -> Result<()> {
        let words: Vec<_> = scp
            .get_args()
            .skip(5)
            .map(|arg| arg.to_string_lossy())
            .collect();
        let label = format!("scp {}", words.join(" "));
        let mut process = Process::adopt(&self.ssh, scp, &label, None)?;
        let output = process.wait(COMMAND_LIMIT)?;
        match output.success() {
            true => Ok(()),
            false => Err(process.failed(output)),
        }
    }
}

impl Remote<'_> {
    /// Runs it as `name` (root, alice, bob or mallory), in that user's home directory.
    pub fn user(mut self, name: &str) -> Self {
        self.user = name.into();
        self
    }

    /// Sets how long `run` and `sh` wait.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Starts it.
    pub fn spawn(self) -> Result<Process> {
        Process::start(&self.node.ssh, &self.line, &self.user)
    }

    /// Runs it to its end; at the limit it is killed.
    pub fn run(self) -> Result<Output> {
        let limit = self.limit;
        self.spawn()?.wait(limit)
    }

    /// Runs it, demands that it succeeds, and returns its standard output, trimmed.
    pub fn sh(self) -> Result<String> {
        let limit = self.limit;
        let mut process = self.spawn()?;
        let output = process.wait(limit)?;
        match output.success() {
            true => Ok(output.stdout.trim().into()),
            false => Err(process.failed(output)),
        }
    }
}
