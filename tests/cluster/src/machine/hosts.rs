// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Root file systems of Debian hosts, for tests of packages.
//!
//! Each host is an overlay on the minimal Debian that `scripts/setup.d/packaging` makes. Writes of a machine go to a
//! directory of the host, which outlives the machine. So a host can be booted again with another kernel. The mounts
//! end with the namespace of `scripts/in-root` at the latest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};
use crate::TOP;

/// The minimal Debian: `scripts/setup.d/packaging`.
const BASE: &str = "/var/lib/kite-machine";

/// Freshly installed hosts, each with systemd and a tested kernel.
#[derive(Debug)]
pub struct Hosts {
    dir: PathBuf,
    count: usize,
}

impl Hosts {
    /// Makes `count` hosts in the directory `target/hosts/NAME`, which is emptied first.
    ///
    /// # Errors
    ///
    /// - [`Error::NoMachine`]: the set-up has not made the minimal Debian.
    /// - [`Error::Io`]: a directory or an overlay cannot be made.
    pub fn fresh(name: &str, count: usize) -> Result<Self> {
        if !Path::new(BASE).exists() {
            return Err(Error::NoMachine);
        }
        let dir = Path::new(TOP).join("target/hosts").join(name);
        let hosts = Hosts { dir, count };
        let _ = fs::remove_dir_all(&hosts.dir);
        for number in 1..=count {
            hosts.mount(number)?;
        }
        Ok(hosts)
    }

    /// Number of hosts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The root of a host, counted from 1. The files may be read while its machine runs.
    pub fn root(&self, number: usize) -> PathBuf {
        self.part(number, "root")
    }

    /// Paths of all files and directories of a host, sorted.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]: the files cannot be listed.
    pub fn files(&self, number: usize) -> Result<Vec<String>> {
        let output = Command::new("find")
            .arg(self.root(number))
            .args(["-mindepth", "1", "-printf", "/%P\n"])
            .output()
            .context(|| "listing the files of a host".into())?;
        let list = String::from_utf8_lossy(&output.stdout);
        let mut files: Vec<_> = list.lines().map(String::from).collect();
        files.sort_unstable();
        Ok(files)
    }

    fn part(&self, number: usize, name: &str) -> PathBuf {
        self.dir.join(format!("{number}/{name}"))
    }

    fn mount(&self, number: usize) -> Result<()> {
        let [upper, work, root] = ["upper", "work", "root"].map(|name| self.part(number, name));
        for directory in [&upper, &work, &root] {
            fs::create_dir_all(directory)
                .context(|| format!("creating {}", directory.display()))?;
        }
        let options = format!(
            "lowerdir={BASE},upperdir={},workdir={}",
            upper.display(),
            work.display()
        );
        let mut command = Command::new("mount");
        command
            .args(["-t", "overlay", "overlay", "-o", &options])
            .arg(&root);
        run(command, || format!("mounting {}", root.display()))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for number in 1..=self.count {
            // A mount that is in use ends with the mount namespace.
            let _ = Command::new("umount").arg(self.root(number)).output();
        }
    }
}

/// Runs a command that must succeed. `what` returns the action, for the error.
pub(crate) fn run(mut command: Command, what: impl Fn() -> String) -> Result<()> {
    let output = command.output().context(&what)?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_string();
    Err(std::io::Error::other(why)).context(what)
}
