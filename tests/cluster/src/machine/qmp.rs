// SPDX-License-Identifier: GPL-2.0 OR MIT
//! QEMU's control protocol (QMP) over the standard streams of its process: JSON, one object a line.
//!
//! Ten commands need no client crate. QEMU replies to requests in order; events between the replies are ignored.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout};
use std::thread;
use std::time::Duration;

use serde_json::{json, Value};

use crate::error::{Error, Result};

#[derive(Debug)]
pub(crate) struct Qmp {
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Qmp {
    /// Takes the pipes of a QEMU process started with `-qmp stdio`, and negotiates capabilities.
    pub(crate) fn new(qemu: &mut Child) -> Result<Self> {
        let (Some(to), Some(from)) = (qemu.stdin.take(), qemu.stdout.take()) else {
            return Err(refused("talk", "its standard streams are not pipes"));
        };
        let mut qmp = Qmp {
            to,
            from: BufReader::new(from),
        };
        qmp.receive("talk")?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes `command`. Returns the reply of QEMU.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.to, "{request}").map_err(|error| refused(command, error))?;
        loop {
            let mut answer = self.receive(command)?;
            if let Some(error) = answer.get("error") {
                return Err(refused(command, error));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Returns the host's port that is forwarded to the guest's sshd. QEMU chooses the port; only its monitor shows it.
    pub(crate) fn forwarded_port(&mut self) -> Result<u16> {
        let command = "human-monitor-command";
        let table = self.execute(command, json!({ "command-line": "info usernet" }))?;
        let table = table.as_str().unwrap_or_default();
        parse_port(table).ok_or_else(|| refused(command, table))
    }

    /// Saves the state of the machine to a file, or restores it: `command` is `migrate` or `migrate-incoming`. Each page
    /// has its place in the file, so that pages of zeros stay untouched.
    pub(crate) fn migrate(&mut self, command: &str, state: &Path) -> Result<()> {
        let mapped = json!([{ "capability": "mapped-ram", "state": true }]);
        self.execute(
            "migrate-set-capabilities",
            json!({ "capabilities": mapped }),
        )?;
        self.execute(
            command,
            json!({ "uri": format!("file:{}", state.display()) }),
        )?;
        self.await_migration()
    }

    fn await_migration(&mut self) -> Result<()> {
        const COMMAND: &str = "query-migrate";
        loop {
            let migration = self.execute(COMMAND, json!({}))?;
            match migration["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => return Err(refused(COMMAND, migration)),
                _ => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn receive(&mut self, command: &str) -> Result<Value> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(0) => Err(refused(command, "connection closed")),
            Ok(_) => serde_json::from_str(&line).map_err(|error| refused(command, error)),
            Err(error) => Err(refused(command, error)),
        }
    }
}

fn refused(command: &str, why: impl ToString) -> Error {
    Error::Qemu {
        command: command.into(),
        why: why.to_string(),
    }
}

/// Finds the port in a line such as `TCP[HOST_FORWARD]  12  127.0.0.1 40123  10.0.2.15 22 …`.
fn parse_port(table: &str) -> Option<u16> {
    let line = table.lines().find(|line| line.contains("HOST_FORWARD"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn forwarded_ssh_port_is_parsed() {
        let table = "Hub -1 (ssh):\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\n  TCP[HOST_FORWARD]  14       127.0.0.1 41223       10.0.2.15    22     0     0\n";
        assert_eq!(super::parse_port(table), Some(41223));
        assert_eq!(super::parse_port(""), None);
    }
}
