// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The systemd service `kited`.

use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Context, Result};

const UNIT: &str = "kited.service";

/// Returns `true` if systemd is the init of this system, see sd_booted(3).
pub(super) fn is_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Enables the service at boot and starts it without waiting.
pub(super) fn start() -> Result<()> {
    systemctl(&["enable", "--quiet", UNIT])?;
    systemctl(&["start", "--no-block", UNIT])
}

/// Sends SIGINT to the daemon, which then leaves the cluster and exits.
pub(super) fn request_leave() -> Result<()> {
    systemctl(&["kill", "--kill-whom=main", "--signal=SIGINT", UNIT])
}

/// Disables the service at boot.
pub(super) fn disable() -> Result<()> {
    systemctl(&["disable", "--quiet", UNIT])
}

/// Returns the last 5 lines of the service's log, or an empty string if the log is not readable.
pub(super) fn recent_log() -> String {
    let mut journalctl = Command::new("journalctl");
    journalctl.args([
        "--unit",
        UNIT,
        "--lines",
        "5",
        "--output",
        "cat",
        "--no-pager",
    ]);
    let output = journalctl.output().map(|output| output.stdout);
    String::from_utf8_lossy(&output.unwrap_or_default()).into_owned()
}

fn systemctl(arguments: &[&str]) -> Result<()> {
    let command_line = format!("systemctl {}", arguments.join(" "));
    let status = Command::new("systemctl").args(arguments).status();
    let status = status.with_context(|| command_line.clone())?;
    ensure!(
        status.success(),
        "{command_line} failed; remove the cause and repeat the command"
    );
    Ok(())
}
