// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Access to user-space verbs on this host. A user of verbs can send packets to queue pairs of kite, and a guessed
//! sequence number then breaks a connection, or with a guessed key changes memory.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const DEVICES: &str = "/dev/infiniband";

/// Permission of all users to read or write.
const OTHERS: u32 = 0o006;

/// Logs a warning for each device of verbs that all users can open.
pub(crate) fn warn_of_open_devices() {
    for device in open_devices(Path::new(DEVICES)) {
        tracing::warn!(device = %device.display(), "all users can open a device of verbs");
    }
}

/// Returns the devices of verbs in a directory that all users can open.
fn open_devices(directory: &Path) -> Vec<PathBuf> {
    let is_open = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let metadata = fs::metadata(path);
        name.starts_with("uverbs") && metadata.is_ok_and(|m| m.permissions().mode() & OTHERS != 0)
    };
    // Without RDMA devices there is no directory.
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.map(|entry| entry.path()).filter(is_open).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;

    #[test]
    fn verbs_devices_that_all_users_can_open_are_found() {
        let directory = std::env::temp_dir().join(format!("kited-uverbs-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        for (name, mode) in [
            ("uverbs0", 0o666),
            ("uverbs1", 0o660),
            ("uverbs2", 0o604),
            ("rdma_cm", 0o666),
        ] {
            let path = directory.join(name);
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        }
        let found = ["uverbs0", "uverbs2"].map(|name| directory.join(name));
        assert_eq!(open_devices(&directory), found);
        fs::remove_dir_all(&directory).unwrap();
        assert!(open_devices(&directory).is_empty());
    }
}
