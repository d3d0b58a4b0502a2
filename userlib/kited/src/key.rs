// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Key shared by the daemons of a cluster.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{ensure, Context, Result};
use sha2::{Digest, Sha256};

/// Minimum length of a key file in bytes.
const KEY_FILE_MIN_BYTES: usize = 32;

/// Maximum length of a key file in bytes. It bounds the read of a wrong file.
const KEY_FILE_MAX_BYTES: u64 = 64 * 1024;

/// Pre-shared key of the handshake: the SHA-256 digest of the key file.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl Key {
    /// Reads a key file: 32 bytes to 64 KiB, identical on all nodes.
    ///
    /// # Errors
    /// If users other than owner and group have access to the file, or if it is too short, too long or unreadable.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let file = File::open(path).with_context(|| format!("cannot open key file {shown}"))?;
        let mode = file.metadata()?.mode();
        ensure!(
            mode & 0o007 == 0,
            "key file {shown} is accessible to other users: chmod o= {shown}"
        );
        let mut bytes = Vec::new();
        file.take(KEY_FILE_MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .with_context(|| format!("reading {shown}"))?;
        ensure!(
            bytes.len() >= KEY_FILE_MIN_BYTES,
            "key file {shown} has fewer than {KEY_FILE_MIN_BYTES} bytes: \
             create one with: (umask 077; head -c 32 /dev/urandom >{shown})"
        );
        ensure!(
            bytes.len() as u64 <= KEY_FILE_MAX_BYTES,
            "key file {shown} has more than {KEY_FILE_MAX_BYTES} bytes"
        );
        Ok(Self::new(&bytes))
    }

    /// Derives the key from the contents of a key file.
    pub fn new(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Returns a key for one purpose, from which the key of the cluster cannot be computed.
    pub(crate) fn derive(&self, purpose: &[u8]) -> [u8; 32] {
        Sha256::new()
            .chain_update(self.0)
            .chain_update(purpose)
            .finalize()
            .into()
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Hides the key in logs.
impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    /// Reads a key file of this content and mode.
    fn read_key_file(name: &str, content: &[u8], mode: u32) -> Result<Key> {
        let path: PathBuf =
            std::env::temp_dir().join(format!("kited-key-{name}-{}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let key = Key::read(&path);
        std::fs::remove_file(&path).unwrap();
        key
    }

    #[test]
    fn files_that_differ_in_the_last_byte_make_different_keys() {
        let mut content = vec![7; KEY_FILE_MAX_BYTES as usize];
        let key = read_key_file("last", &content, 0o600).unwrap();
        content[KEY_FILE_MAX_BYTES as usize - 1] = 8;
        let other = read_key_file("last", &content, 0o640).unwrap();
        assert_ne!(key.bytes(), other.bytes());
    }

    #[test]
    fn file_of_wrong_length_or_mode_is_rejected() {
        for (len, mode) in [
            (31, 0o600),
            (KEY_FILE_MAX_BYTES as usize + 1, 0o600),
            (32, 0o604),
        ] {
            assert!(
                read_key_file("refused", &vec![7; len], mode).is_err(),
                "{len} {mode:o}"
            );
        }
    }
}
