// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State file of a seed, which outlives its host's reboot: secret, epoch, node numbers and members.
//!
//! # Operation
//!
//! The file is replaced atomically: a new file is written and synced, and renamed. Then the directory is synced. Only
//! the user of the daemon and root have access, since the file contains the secret of the kernels.
//!
//! # Recovery
//!
//! A damaged file ends the daemon with an error that names the file. Without a file, the seed takes over secret and
//! numbers from members that reach it within 2 s, or creates a new cluster.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use crate::checkpoint::{decode_slot, encode_slot, FORMAT_VERSION};
use crate::membership::ClusterState;

/// Location of the state file of a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateLocation {
    /// This file.
    File(PathBuf),
    /// The file `kited-RNIC.state` in this directory.
    Directory(PathBuf),
}

impl StateLocation {
    /// Returns the path for an RNIC.
    fn path(self, rnic: &str) -> PathBuf {
        match self {
            Self::File(path) => path,
            Self::Directory(directory) => directory.join(format!("kited-{rnic}.state")),
        }
    }
}

/// State file of a seed.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
}

impl StateFile {
    /// Returns the file at a location for an RNIC.
    pub fn new(location: StateLocation, rnic: &str) -> Self {
        let path = location.path(rnic);
        Self { path }
    }

    /// Loads the state, if the file exists.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or has another version of the format.
    pub fn load(&self) -> Result<Option<ClusterState>> {
        let shown = self.path.display();
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).context(format!("cannot read state file {shown}")),
        };
        let decoded = decode(&bytes).with_context(|| {
            format!(
                "state file {shown} cannot be used: restore it from a backup, or delete it; without the file, the \
                 seed takes over the cluster from members that connect within 2 s, or creates a new cluster"
            )
        });
        decoded.map(Some)
    }

    /// Replaces the state. A crash leaves the old or the new state.
    ///
    /// # Errors
    /// If the file cannot be written. The old state remains, or the new one.
    pub fn save(&self, state: &ClusterState) -> Result<()> {
        let bytes = encode_slot(0, &postcard::to_stdvec(state)?);
        let written = self.replace(&bytes);
        written.with_context(|| format!("cannot write state file {}", self.path.display()))
    }

    fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        let parent = self.path.parent().filter(|p| !p.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }
}

fn decode(bytes: &[u8]) -> Result<ClusterState> {
    let slot = decode_slot(bytes).context("file is damaged")?;
    let version = slot.version;
    if version != FORMAT_VERSION {
        bail!("file has version {version}, this kited reads version {FORMAT_VERSION}");
    }
    postcard::from_bytes(&slot.snapshot).context("file cannot be decoded")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kited-state-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn saved_state_is_loaded_and_only_root_has_access() {
        let directory = directory("saved");
        let file = StateFile::new(StateLocation::Directory(directory.clone()), "rxe0");
        assert_eq!(file.load().unwrap(), None);
        for epoch in [5, 9] {
            file.save(&ClusterState::example(epoch)).unwrap();
            assert_eq!(file.load().unwrap(), Some(ClusterState::example(epoch)));
        }
        let path = directory.join("kited-rxe0.state");
        assert_eq!(
            fs::metadata(path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn damaged_file_is_an_error_with_the_way_out() {
        let directory = directory("damaged");
        let path = directory.join("state");
        let file = StateFile::new(StateLocation::File(path.clone()), "rxe0");
        file.save(&ClusterState::example(5)).unwrap();
        let intact = fs::read(&path).unwrap();
        let mut changed = intact.clone();
        changed[60] ^= 1;
        let mut other_version = intact.clone();
        other_version[40] ^= 64;
        for damaged in [
            &[][..],
            &intact[..intact.len() - 1],
            &changed,
            &other_version,
        ] {
            fs::write(&path, damaged).unwrap();
            let error = format!("{:#}", file.load().unwrap_err());
            assert!(error.contains("delete it"), "{error}");
            assert!(error.contains(&*path.to_string_lossy()), "{error}");
        }
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn failed_save_keeps_the_old_state() {
        let directory = directory("full");
        let path = directory.join("state");
        let file = StateFile::new(StateLocation::File(path.clone()), "rxe0");
        file.save(&ClusterState::example(5)).unwrap();
        // Writing to this device fails with ENOSPC.
        std::os::unix::fs::symlink("/dev/full", directory.join("state.new")).unwrap();
        let error = file.save(&ClusterState::example(9)).unwrap_err();
        assert!(format!("{error:#}").contains("No space"), "{error:#}");
        assert_eq!(file.load().unwrap(), Some(ClusterState::example(5)));
        fs::remove_dir_all(directory).unwrap();
    }
}
