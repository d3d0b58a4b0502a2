// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The key that the daemons of a cluster share.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{ensure, Context, Result};
use sha2::{Digest, Sha256};

/// Least bytes of a key file.
const SIZE_MIN: usize = 32;

/// Most bytes of a key file: enough for any, and not all of a wrong file.
const SIZE_MAX: u64 = 64 * 1024;

/// What a handshake mixes in: the digest of the key file.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl Key {
    /// Reads a key file: any 32 or more bytes, the same on all nodes to the last byte.
    ///
    /// # Errors
    /// If others than its owner and group can reach the file, or it is too short or unreadable.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let file = File::open(path).with_context(|| format!("cannot open the key file {shown}"))?;
        let mode = file.metadata()?.mode();
        ensure!(
            mode & 0o007 == 0,
            "anybody can use the key file {shown}: chmod o= {shown}"
        );
        let mut bytes = Vec::new();
        file.take(SIZE_MAX)
            .read_to_end(&mut bytes)
            .with_context(|| format!("reading {shown}"))?;
        ensure!(
            bytes.len() >= SIZE_MIN,
            "the key file {shown} has fewer than {SIZE_MIN} bytes: \
             make one with: head -c 32 /dev/urandom > {shown}"
        );
        Ok(Self::new(&bytes))
    }

    /// The key of these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Never shows the key.
impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}
