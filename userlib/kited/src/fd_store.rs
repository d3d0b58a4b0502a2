// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The file descriptor store of the service manager, which keeps descriptors open while the daemon is restarted.
//!
//! # Operation
//!
//! The daemon sends duplicates of its descriptors by sd_notify(3), each with a name. The manager passes them to the
//! next process of the service, see sd_listen_fds(3), and closes them when the service stops for good.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sd_notify::{notify_with_fds, NotifyState};

/// Minimum capacity of the store: a descriptor of the device and one of the checkpoint.
const MIN_STORED_FDS: u32 = 2;

/// Maximum time for the manager to process a notification.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// Descriptors that the manager passed to this process, by their names.
pub type StoredFds = Vec<(String, OwnedFd)>;

/// The store of this service.
#[derive(Clone, Copy, Debug)]
pub struct FdStore(());

impl FdStore {
    /// Returns the store and the descriptors that it passed to this process. Returns `None` unless the environment
    /// names a service manager with enough capacity. Removes the variables that count the descriptors.
    ///
    /// # Errors
    /// If the variables of the environment are inconsistent.
    pub fn from_env() -> io::Result<Option<(Self, StoredFds)>> {
        let capacity = std::env::var("FDSTORE").ok().and_then(|n| n.parse().ok());
        let has_capacity = capacity.is_some_and(|capacity: u32| capacity >= MIN_STORED_FDS);
        if !has_capacity || std::env::var_os("NOTIFY_SOCKET").is_none() {
            return Ok(None);
        }
        let passed = sd_notify::listen_fds_with_names(true)?;
        // SAFETY: the manager opened the descriptor for this process, and nothing else here owns it: the variables
        // that name it are gone, so no second call finds it.
        let to_owned_fd = |(fd, name)| (name, unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Some((Self(()), passed.map(to_owned_fd).collect())))
    }

    /// Stores a duplicate of a descriptor.
    ///
    /// # Errors
    /// If the manager cannot be reached.
    pub fn store_fd(self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        notify_with_fds(
            false,
            &[NotifyState::FdStore, NotifyState::FdName(name)],
            &[fd],
        )
    }

    /// Closes the stored descriptors of this name. The manager has closed them when the function returns.
    ///
    /// # Errors
    /// If the manager cannot be reached or does not react.
    pub fn remove_fds(self, name: &str) -> io::Result<()> {
        sd_notify::notify(
            false,
            &[NotifyState::FdStoreRemove, NotifyState::FdName(name)],
        )?;
        wait_processed()
    }
}

/// Waits until the manager has processed all earlier notifications: it closes the descriptor of a notification after
/// that.
fn wait_processed() -> io::Result<()> {
    let (mut reader, writer) = UnixStream::pair()?;
    reader.set_read_timeout(Some(NOTIFY_TIMEOUT))?;
    notify_with_fds(
        false,
        &[NotifyState::Custom("BARRIER=1")],
        &[writer.as_fd()],
    )?;
    drop(writer);
    reader.read(&mut [0]).map(drop)
}
