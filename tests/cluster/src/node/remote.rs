// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands and file copies between the host and a node.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::error::Result;
use crate::node::process::{Output, Process};
use crate::node::Node;

/// Timeout of a command without [`Remote::limit`].
pub const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// A command for a node that is not started yet.
#[derive(Clone, Debug)]
#[must_use = "nothing happens until `run` or `spawn`"]
pub struct Remote<'a> {
    node: &'a Node,
    line: String,
    user: String,
    limit: Duration,
}

impl Node {
    /// Prepares a command that `sh` runs, as root without [`Remote::user`].
    pub fn command(&self, line: impl Into<String>) -> Remote<'_> {
        Remote {
            node: self,
            line: line.into(),
            user: "root".into(),
            limit: COMMAND_LIMIT,
        }
    }

    /// Runs a command as root, and waits for its end.
    pub fn run(&self, line: &str) -> Result<Output> {
        self.command(line).run()
    }

    /// Runs a command as root that must succeed. Returns its trimmed standard output.
    pub fn sh(&self, line: &str) -> Result<String> {
        self.command(line).sh()
    }

    /// Starts a command as root.
    pub fn spawn(&self, line: &str) -> Result<Process> {
        self.command(line).spawn()
    }

    /// Returns an interactive ssh on the caller's terminal.
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
    /// Runs the command as `name` (root, alice, bob or mallory), in that user's home directory.
    pub fn user(mut self, name: &str) -> Self {
        self.user = name.into();
        self
    }

    /// Sets the timeout of `run` and `sh`.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Starts the command.
    pub fn spawn(self) -> Result<Process> {
        Process::start(&self.node.ssh, &self.line, &self.user)
    }

    /// Runs the command to its end. At the timeout the command is killed.
    pub fn run(self) -> Result<Output> {
        let limit = self.limit;
        self.spawn()?.wait(limit)
    }

    /// Runs the command, which must succeed. Returns its trimmed standard output.
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
