// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Operation of the daemon on a host under pressure: locked memory, and the watchdog of the service manager.
//!
//! A daemon that waits for swapped pages is late, and its node seems silent. The watchdog restarts a daemon whose event
//! loop is stuck; the next process continues the membership from the checkpoint.

use std::time::Duration;

use rustix::mm::{mlockall, MlockAllFlags};
use sd_notify::NotifyState;

/// Locks present and future pages in memory as they are touched. Without permission the daemon runs unlocked: see
/// `LimitMEMLOCK=` in systemd.exec(5).
pub(crate) fn lock_memory() {
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(flags) {
        tracing::debug!(%error, "memory is not locked");
    }
}

/// Notifies the watchdog of the service manager, if there is one, while the event loop of this thread runs.
pub(crate) fn serve_watchdog() {
    let mut timeout = 0;
    if !sd_notify::watchdog_enabled(false, &mut timeout) {
        return;
    }
    let interval = Duration::from_micros(timeout) / 3;
    tokio::spawn(async move {
        loop {
            // A failed notification is repeated before the timeout.
            let _ = sd_notify::notify(false, &[NotifyState::Watchdog]);
            tokio::time::sleep(interval).await;
        }
    });
}
