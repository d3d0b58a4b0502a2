// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The directory of one cluster, `/kite/target/cluster/<name>`: console logs, QEMU's messages, keys
//! and sockets.
//!
//! The directory stays when the cluster ends, so that the logs can be read. It is emptied when the name is used again.
//! A lock distinguishes a live cluster from a dead one, so a crash needs no cleanup.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{flock, FlockOperation};

use crate::error::{Context, Error, Result};
use crate::TOP;

#[derive(Debug)]
pub(crate) struct Workdir {
    path: PathBuf,
    _lock: File,
}

impl Workdir {
    /// Locks the directory `name`, or `name-2` and so on while live clusters have the earlier ones.
    pub(crate) fn claim(name: &str) -> Result<Self> {
        let base = Path::new(TOP).join("target/cluster");
        let mut number = 1;
        loop {
            let path = match number {
                1 => base.join(name),
                _ => base.join(format!("{name}-{number}")),
            };
            if let Some(dir) = Self::take(path)? {
                dir.make_key("host_key")?;
                dir.make_key("key")?;
                return Ok(dir);
            }
            number += 1;
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn take(path: PathBuf) -> Result<Option<Self>> {
        let what = || format!("preparing {}", path.display());
        fs::create_dir_all(&path).context(what)?;
        let lock = File::create(path.join("lock")).context(what)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => empty(&path).context(what)?,
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error).context(what),
        }
        Ok(Some(Workdir { path, _lock: lock }))
    }

    fn make_key(&self, name: &str) -> Result<()> {
        let output = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "kite-cluster", "-f"])
            .arg(self.path.join(name))
            .output()
            .context(|| "starting ssh-keygen".into())?;
        match output.status.success() {
            true => Ok(()),
            false => Err(Error::Failed {
                node: "host".into(),
                command: "ssh-keygen".into(),
                status: output.status.code().unwrap_or(-1),
                output: String::from_utf8_lossy(&output.stderr).into(),
            }),
        }
    }
}

fn empty(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name() != "lock" {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workdir_name_is_unique_among_live_clusters_and_reused_later() {
        let first = Workdir::claim("unit").unwrap();
        let second = Workdir::claim("unit").unwrap();
        assert_ne!(first.path(), second.path());
        fs::write(first.path().join("node1.console"), "old").unwrap();
        let path = first.path().to_owned();
        drop(first);
        assert!(path.join("node1.console").exists());
        assert_eq!(Workdir::claim("unit").unwrap().path(), path);
        assert!(!path.join("node1.console").exists());
    }
}
