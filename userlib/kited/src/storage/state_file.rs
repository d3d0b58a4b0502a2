// SPDX-License-Identifier: GPL-2.0 OR MIT
//! State file of a seed, which outlives restarts of its host: secret, epoch, numbers and members.
//!
//! # Operation
//!
//! The file is replaced atomically before the seed acts on a new state: a temporary file is written and synchronized,
//! renamed, and the directory synchronized. Only root can read the file, because of the secret. The format is that of
//! the [`checkpoint`](crate::storage::checkpoint).
//!
//! # Recovery
//!
//! A missing file begins a new cluster, or recovers one from the members that connect first. A damaged file is an
//! error: with another secret, the members of the cluster would be rejected.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::membership::SeedSnapshot;
use crate::storage::checkpoint::{decode_slot, encode_slot};

/// Access mode of the file: for the owner only.
const MODE: u32 = 0o600;

/// State file of a seed.
#[derive(Clone, Debug)]
pub struct StateFile {
    path: PathBuf,
}

impl StateFile {
    /// Returns the file at this path, which need not exist.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Loads the state, or returns `None` if there is no file.
    ///
    /// # Errors
    /// If the file cannot be read, or is damaged.
    pub fn load(&self) -> Result<Option<SeedSnapshot>> {
        let bytes = match std::fs::read(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes.with_context(|| self.describe("cannot be read"))?,
        };
        let slot = decode_slot(&bytes).with_context(|| {
            self.describe(
                "is damaged; restore it from a backup, or remove it: the seed then recovers the cluster from the \
                 members that connect within 2 s",
            )
        })?;
        let state = slot.decode();
        state
            .with_context(|| self.describe("is not usable"))
            .map(Some)
    }

    /// Replaces the state. A crash leaves the old or the new state.
    ///
    /// # Errors
    /// If the file cannot be written. The previous state is kept.
    pub fn save(&self, state: &SeedSnapshot) -> Result<()> {
        let bytes = encode_slot(0, &postcard::to_stdvec(state)?);
        self.replace(&bytes)
            .with_context(|| self.describe("cannot be written"))
    }

    fn replace(&self, bytes: &[u8]) -> std::io::Result<()> {
        let temporary = self.path.with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(MODE);
        let mut file = options.open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, &self.path)?;
        let directory = self
            .path
            .parent()
            .filter(|path| !path.as_os_str().is_empty());
        File::open(directory.unwrap_or(".".as_ref()))?.sync_all()
    }

    fn describe(&self, what: &str) -> String {
        format!("state file {} {what}", self.path.display())
    }
}
