// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Key of the cluster and options of kited, in `/etc/kite`.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};

/// Length limits of a key in bytes, as in kited.
const KEY_MIN_BYTES: usize = 32;
pub(super) const KEY_MAX_BYTES: usize = 64 * 1024;

/// Configuration directory.
pub(super) struct ConfigFiles(PathBuf);

impl ConfigFiles {
    /// Returns the files that the systemd unit uses.
    pub(super) fn system() -> Self {
        Self("/etc/kite".into())
    }

    pub(super) fn key_path(&self) -> PathBuf {
        self.0.join("key")
    }

    fn options_path(&self) -> PathBuf {
        self.0.join("kited.env")
    }

    /// Creates a random key, or checks the existing key.
    pub(super) fn create_key(&self) -> Result<()> {
        if let Some(key) = read_if_exists(&self.key_path())? {
            return self.check_key(&key);
        }
        let mut key = [0; KEY_MIN_BYTES];
        getrandom::fill(&mut key).context("cannot read random bytes")?;
        self.create(&self.key_path(), &key, 0o600)
    }

    /// Checks that a valid key exists.
    pub(super) fn require_key(&self) -> Result<()> {
        let path = self.key_path();
        let key = read_if_exists(&path)?.with_context(|| {
            let path = path.display();
            format!("no cluster key; copy {path} from the seed, or use --key-file")
        })?;
        self.check_key(&key)
    }

    /// Installs a key. Fails if the file holds another key.
    pub(super) fn install_key(&self, key: &[u8]) -> Result<()> {
        self.check_key(key)?;
        let path = self.key_path();
        match read_if_exists(&path)? {
            Some(same) if same == key => Ok(()),
            Some(_) => bail!(
                "another key is in {0}; to replace it: rm {0}",
                path.display()
            ),
            None => self.create(&path, key, 0o600),
        }
    }

    fn check_key(&self, key: &[u8]) -> Result<()> {
        ensure!(
            (KEY_MIN_BYTES..=KEY_MAX_BYTES).contains(&key.len()),
            "key has {} bytes; a key has {KEY_MIN_BYTES} to {KEY_MAX_BYTES}",
            key.len()
        );
        Ok(())
    }

    /// Returns `true` if the file has these options, and `false` if it does not exist. Fails if it has other options.
    pub(super) fn check_options(&self, options: &str) -> Result<bool> {
        let path = self.options_path();
        let Some(text) = read_if_exists(&path)? else {
            return Ok(false);
        };
        let text = String::from_utf8_lossy(&text);
        let wanted_line = env_line(options);
        ensure!(
            text.lines().any(|line| line == wanted_line),
            "other options of kited are in {0}; to replace them: kite leave; rm {0}",
            path.display()
        );
        Ok(true)
    }

    /// Writes the options, unless the file has them already.
    pub(super) fn write_options(&self, options: &str) -> Result<()> {
        if self.check_options(options)? {
            return Ok(());
        }
        let text = format!(
            "# Options of kited(8), written by kite(1)\n{}\n",
            env_line(options)
        );
        self.create(&self.options_path(), text.as_bytes(), 0o644)
    }

    /// Creates a file atomically. Fails if the file exists.
    fn create(&self, path: &Path, content: &[u8], mode: u32) -> Result<()> {
        let new = path.with_extension("new");
        let written = DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.0)
            .and_then(|()| write_exclusive(&new, content, mode))
            .and_then(|()| fs::hard_link(&new, path));
        // Fails if there is no temporary file; `written` reports why.
        let _ = fs::remove_file(&new);
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

fn env_line(options: &str) -> String {
    format!("KITED_OPTIONS={options}")
}

fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn write_exclusive(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    // A temporary file of a killed process may have another mode.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Returns files in a directory that does not exist yet.
    fn files(name: &str) -> ConfigFiles {
        let name = format!("kite-setup-{name}-{}", std::process::id());
        ConfigFiles(std::env::temp_dir().join(name).join("etc"))
    }

    fn remove(files: &ConfigFiles) {
        fs::remove_dir_all(files.0.parent().unwrap()).unwrap();
    }

    #[test]
    fn create_key_twice_keeps_the_key_with_mode_0600() {
        let files = files("key");
        files.create_key().unwrap();
        let key = fs::read(files.key_path()).unwrap();
        let mode = fs::metadata(files.key_path()).unwrap().permissions().mode();
        assert_eq!((key.len(), mode & 0o777), (32, 0o600));
        files.create_key().unwrap();
        files.install_key(&key).unwrap();
        assert!(files.install_key(&[1; 32]).is_err());
        assert_eq!(
            fs::read(files.key_path()).unwrap(),
            key,
            "never overwritten"
        );
        remove(&files);
    }

    #[test]
    fn key_of_wrong_length_is_not_installed() {
        let files = files("length");
        for len in [0, 31, KEY_MAX_BYTES + 1] {
            assert!(files.install_key(&vec![1; len]).is_err(), "{len}");
        }
        assert!(files.require_key().is_err());
        assert!(!files.0.exists(), "no file is created");
    }

    #[test]
    fn write_options_with_other_options_fails() {
        let files = files("options");
        for _ in 0..2 {
            files.write_options("--join a:1").unwrap();
        }
        assert!(files.write_options("--join a:12").is_err());
        let left: Vec<_> = fs::read_dir(&files.0).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file: {left:?}");
        remove(&files);
    }

    #[test]
    fn leftover_temporary_file_is_replaced() {
        let files = files("temporary");
        fs::create_dir_all(&files.0).unwrap();
        fs::write(files.0.join("key.new"), "half").unwrap();
        files.create_key().unwrap();
        let mode = fs::metadata(files.key_path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        remove(&files);
    }
}
