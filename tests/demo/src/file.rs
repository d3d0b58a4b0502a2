// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The file that the demonstration transfers: an archive of files of the host.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use kite_cluster::Node;

use crate::output::{command, detail};

/// Bytes of the file: more than any cache, and no multiple of a page.
const SIZE: u64 = (64 << 20) + 12345;

/// A file that node 1 can read.
pub(crate) struct File {
    pub(crate) path: &'static str,
    pub(crate) len: u64,
    /// SHA-256, in hexadecimal.
    pub(crate) sum: String,
}

impl File {
    /// Makes an archive of /usr/share on the host, cut to `SIZE`, at a path that nodes can read.
    pub(crate) fn on_host(one: &Node) -> Result<Self> {
        let path = "/kite/target/demo/share.tar";
        let dir = Path::new(path)
            .parent()
            .context("a file without a directory")?;
        fs::create_dir_all(dir)?;
        // tar fails when head closes the pipe, so only the status of head counts.
        let line = format!("tar -C / -c usr/share 2>/dev/null | head -c {SIZE} >{path}");
        let status = Command::new("sh").args(["-c", &line]).status()?;
        let len = fs::metadata(path)?.len();
        ensure!(
            status.success() && len == SIZE,
            "/usr/share has {len} bytes, of {SIZE}"
        );

        let line = format!("sha256sum {path}");
        command(&one.name(), &line);
        let text = one.sh(&line)?;
        detail(&text);
        let sum = text
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_string();
        ensure!(sum.len() == 64, "no checksum: {text}");
        detail(&format!("{len} bytes of an archive of /usr/share"));
        Ok(Self { path, len, sum })
    }

    /// Returns size, time and rate as text.
    pub(crate) fn rate(&self, time: Duration) -> String {
        let mib = self.len as f64 / f64::from(1 << 20);
        format!(
            "{mib:.1} MiB in {:.1} s ({:.1} MiB/s)",
            time.as_secs_f64(),
            mib / time.as_secs_f64()
        )
    }
}
