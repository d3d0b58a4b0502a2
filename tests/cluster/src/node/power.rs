// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Power states of a node: killed, paused, stalled, reset.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::builder::boot_limit;
use crate::error::{Error, Result};
use crate::node::Node;

impl Node {
    /// Kills the machine, as a power failure does. A killed node cannot be started again.
    pub fn kill(&self) {
        self.qemu().kill();
        self.ssh.disconnect();
    }

    /// Returns `true` unless the machine was killed, panicked or powered off.
    pub fn is_alive(&self) -> bool {
        self.qemu().status().is_none()
    }

    /// Stops the processors, and cuts the links of the RNIC, which would otherwise respond without them.
    pub fn pause(&self) -> Result<()> {
        self.paused.store(true, Ordering::Relaxed);
        if let Some(connectx) = &self.network {
            connectx.silence(self.plan.number, true)?;
        }
        self.qmp("stop", json!({}))
    }

    /// Stops the processors of the machine. Its RNIC continues.
    pub fn stall(&self) -> Result<()> {
        self.paused.store(true, Ordering::Relaxed);
        self.qmp("stop", json!({}))
    }

    /// Resumes the machine after [`Node::pause`] or [`Node::stall`].
    pub fn resume(&self) -> Result<()> {
        self.qmp("cont", json!({}))?;
        if let Some(connectx) = &self.network {
            connectx.silence(self.plan.number, false)?;
        }
        self.paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Resets the machine. [`Node::wait_ready`] waits until the node has booted again.
    pub fn reset(&self) -> Result<()> {
        self.ssh.disconnect();
        self.pause()?;
        self.started_at.store(self.console.len(), Ordering::Relaxed);
        // By default a reset ends the machine, so that a crash is detected. The firmware may add a reset of its own,
        // so this action stays until the node is ready.
        self.qmp("set-action", json!({ "reboot": "reset" }))?;
        self.qmp("system_reset", json!({}))?;
        self.resume()
    }

    /// Waits until the node has booted and accepts commands.
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
}
