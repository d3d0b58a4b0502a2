// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A machine of a cluster: commands, files, kernel log, module, power, network and RNIC.

mod power;
pub(crate) mod process;
mod remote;
mod rnic;
pub(crate) mod ssh;

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::error::{Context, Error, Result};
use crate::fabric::connectx::Connectx;
use crate::machine::accel::Accel;
use crate::machine::guarded::Guarded;
use crate::machine::kernel::{patience, Kernel};
use crate::machine::qemu::{Machine, Plan};
use crate::machine::qmp::Qmp;
use crate::machine::snapshot::snapshot;
use crate::report::console::Console;
use crate::report::leaks::{self, Leaks, Symbols};

pub use remote::{Remote, COMMAND_LIMIT};
use ssh::Ssh;

/// Maximum lag of the console behind a responsive node.
const CONSOLE_LAG: Duration = Duration::from_secs(5);

/// First message of `guest/init`.
const INIT: &str = "kite: init";

/// Maximum time in which kmemleak scans all memory.
const SCANS: Duration = Duration::from_secs(60);

const FIND_LEAKS: &str = include_str!("../../guest/find-leaks");

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
    // Dropped in this order: QEMU must end before its helpers.
    qemu: Mutex<Guarded>,
    _helpers: Vec<Guarded>,
    /// RNICs of all nodes, with software ConnectXs. The last node to end drops the process.
    network: Option<Arc<Connectx>>,
}

impl Node {
    /// Boots a machine. If an emulated machine fails before `guest/init` runs, it is started once more, and the first
    /// console is kept under another name.
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
        let snapshot = snapshot(&plan)?;
        let Machine { mut qemu, helpers } = plan.start(snapshot.is_some())?;
        let console = Console::new(plan.file("console"));
        let talk = Qmp::new(qemu.child()).and_then(|mut qmp| {
            let port = qmp.forwarded_port()?;
            run(&plan, &mut qmp, snapshot.as_deref())?;
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

    /// Returns `node1`, `node2` and so on, which is also the host name.
    pub fn name(&self) -> String {
        self.plan.name()
    }

    /// Returns the address in the private network.
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, self.plan.number as u8)
    }

    /// Returns the file of the console.
    pub fn console_log(&self) -> &Path {
        self.console.path()
    }

    /// Returns the configuration with which `ssh -F` connects to this node by its name.
    pub fn ssh_config(&self) -> &Path {
        self.ssh.config()
    }

    /// Returns the console since the boot, also of a node that does not respond.
    pub fn kernel_log(&self) -> String {
        self.console.since(0)
    }

    /// Loads the modules that kite depends on, then kite with `parameters` ("a=1 b=2").
    pub fn insmod_kite(&self, parameters: &str) -> Result<()> {
        let module = "/run/kite/build/kite.ko";
        self.sh(&format!(
            "set -e; needs=$(modinfo -F depends {module} | tr , ' '); \
             [ -z \"$needs\" ] || modprobe -a $needs; insmod {module} {parameters}"
        ))?;
        Ok(())
    }

    /// Unloads a module if it is loaded. Fails if a reference to it exists.
    pub fn unload(&self, module: &str) -> Result<()> {
        self.sh(&format!(
            "! grep '^{module} ' /proc/modules >&2 || rmmod {module}"
        ))?;
        Ok(())
    }

    /// Unloads `module` for the last time. On a debug kernel, then checks that lockdep is still enabled, and that the
    /// module leaked no memory.
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

    /// Returns the kernel's faults since the last call, with the node's name.
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

    /// Writes a mark to the kernel's log and waits until the console shows it, and so all earlier lines. Does nothing
    /// for a node that does not respond: its console is checked as it is.
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

    fn qmp(&self, command: &str, arguments: serde_json::Value) -> Result<()> {
        let mut qmp = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        qmp.execute(command, arguments).map(drop)
    }

    fn qemu(&self) -> MutexGuard<'_, Guarded> {
        self.qemu.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Restores the snapshot in a stopped machine, adds its RNICs, and starts its processors.
fn run(plan: &Plan, qmp: &mut Qmp, snapshot: Option<&Path>) -> Result<()> {
    if let Some(state) = snapshot {
        qmp.migrate("migrate-incoming", state)?;
    }
    for rnic in plan.fabric.rnic_devices(plan) {
        qmp.execute("device_add", rnic)?;
    }
    qmp.execute("cont", json!({}))?;
    if snapshot.is_some() {
        plan.send_identity()?;
    }
    Ok(())
}
