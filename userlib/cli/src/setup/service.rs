// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The service `kited` of systemd.

use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Context, Result};

const UNIT: &str = "kited.service";

/// Returns `true` if systemd is the init of this system, see sd_booted(3).
pub(super) fn is_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Has the service started now, without a wait, and at each boot.
pub(super) fn start() -> Result<()> {
    systemctl(&["enable", "--quiet", UNIT])?;
    systemctl(&["start", "--no-block", UNIT])
}

/// Has the daemon leave the cluster, and so end.
pub(super) fn request_leave() -> Result<()> {
    systemctl(&["kill", "--kill-whom=main", "--signal=SIGINT", UNIT])
}

/// Does not have the service started at boot any longer.
pub(super) fn disable() -> Result<()> {
    systemctl(&["disable", "--quiet", UNIT])
}

/// The end of the log of the service, as far as it can be read.
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
        "{command_line} failed; when the cause is gone, run this again"
    );
    Ok(())
}
