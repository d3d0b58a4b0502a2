// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Access to a node: the host's ssh, over one master connection, so that a command costs a round trip and no key
//! exchange.
//!
//! ssh offers exit statuses, separate streams, terminals and file copies, which an agent of kite's own would have to
//! implement. vsock would need a module on the host, and QEMU's guest agent has no streams.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::machine::guarded::Guarded;
use crate::machine::kernel::patience;
use crate::machine::qemu::Plan;

/// Timeout of a key exchange.
const HANDSHAKE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Ssh {
    node: String,
    config: PathBuf,
    control: PathBuf,
    log: PathBuf,
    master: Mutex<Option<Guarded>>,
    /// Number of closed connections.
    connection: AtomicU64,
}

impl Ssh {
    /// Writes the configuration for a node whose sshd is behind `port`. Does not connect.
    pub(crate) fn new(plan: &Plan, port: u16) -> Result<Self> {
        let ssh = Ssh {
            node: plan.name(),
            config: plan.file("ssh_config"),
            control: plan.file("ssh"),
            log: plan.file("ssh.log"),
            master: Mutex::new(None),
            connection: AtomicU64::new(0),
        };
        let text = configuration(plan, &ssh, port);
        fs::write(&ssh.config, text).context(|| format!("writing {}", ssh.config.display()))?;
        Ok(ssh)
    }

    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    pub(crate) fn config(&self) -> &PathBuf {
        &self.config
    }

    /// Opens the master connection. Retries until `deadline`, since sshd may not be ready.
    pub(crate) fn connect(&self, deadline: Instant) -> Result<()> {
        self.disconnect();
        loop {
            let mut master = self.start_master()?;
            while master.status().is_none() {
                if self.control.exists() {
                    *self.master() = Some(master);
                    return Ok(());
                }
                if Instant::now() > deadline {
                    return Err(self.unreachable());
                }
                thread::sleep(Duration::from_millis(10));
            }
            if Instant::now() > deadline {
                return Err(self.unreachable());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Closes the master connection, which ends all commands that use it.
    pub(crate) fn disconnect(&self) {
        *self.master() = None;
        self.connection.fetch_add(1, Ordering::Relaxed);
        // A killed master does not remove its socket.
        let _ = fs::remove_file(&self.control);
    }

    /// Returns the number of the master connection, which changes when that is closed.
    pub(crate) fn connection(&self) -> u64 {
        self.connection.load(Ordering::Relaxed)
    }

    pub(crate) fn connected(&self) -> bool {
        self.master()
            .as_mut()
            .is_some_and(|master| master.status().is_none())
    }

    /// Returns an error with the last message of ssh.
    pub(crate) fn unreachable(&self) -> Error {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let why = log.lines().last().unwrap_or("ssh connection closed").into();
        Error::Unreachable {
            node: self.node.clone(),
            why,
        }
    }

    /// Returns `ssh` or `scp` with this node's configuration.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command.arg("-F").arg(&self.config);
        command
    }

    fn start_master(&self) -> Result<Guarded> {
        let log = File::create(&self.log).context(|| format!("creating {}", self.log.display()))?;
        let mut command = self.program("ssh");
        command
            .args(["-M", "-N", &self.node])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        Guarded::spawn(command).context(|| "starting ssh".into())
    }

    fn master(&self) -> MutexGuard<'_, Option<Guarded>> {
        self.master.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the configuration. Host keys are not checked: they live as long as the machines, and the port is local.
fn configuration(plan: &Plan, ssh: &Ssh, port: u16) -> String {
    format!(
        "Host {}\n\
         \tHostName 127.0.0.1\n\
         \tPort {port}\n\
         \tUser root\n\
         \tIdentityFile {}\n\
         \tIdentitiesOnly yes\n\
         \tStrictHostKeyChecking no\n\
         \tUserKnownHostsFile {}\n\
         \tControlPath {}\n\
         \tBatchMode yes\n\
         \tConnectTimeout {}\n\
         \tLogLevel ERROR\n",
        ssh.node,
        plan.dir.join("key").display(),
        plan.dir.join("known_hosts").display(),
        ssh.control.display(),
        patience(HANDSHAKE).as_secs(),
    )
}

/// Quotes `text` as one word for a shell.
pub(crate) fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
