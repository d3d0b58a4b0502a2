// SPDX-License-Identifier: GPL-2.0 OR MIT
//! File that shows a frozen membership: this node has no coordinator, so its view does not change.
//!
//! # Operation
//!
//! The file is `RNIC.frozen` in the directory of the hosts files. It exists while the daemon is in no contact with a
//! coordinator, and has the reason. The seed has no such file. `Cluster::frozen_reason` of the crate `kite` reads it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::hosts_file::{create_directory, replace_file};
use crate::links::LinkEvent;
use crate::protocol::Message;

/// Reason from the start of the daemon until the first error or welcome.
const CONNECTING: &str = "connecting to the coordinator";

/// Reason after the end of a connection, until the next error or welcome.
const DISCONNECTED: &str = "connection to the coordinator lost";

/// File of an RNIC, or none. The file is removed on drop.
#[derive(Debug, Default)]
pub(super) struct FrozenFile {
    path: Option<PathBuf>,
    reason: Option<String>,
}

impl FrozenFile {
    /// Creates the file of an RNIC, in place of one that an earlier process left.
    pub(super) fn create(directory: &Path, rnic: &str) -> Self {
        let path = Some(directory.join(format!("{rnic}.frozen")));
        // The first write reports an error.
        let _ = create_directory(directory);
        let mut file = Self { path, reason: None };
        file.set(Some(CONNECTING.into()));
        file
    }

    /// Removes the file of an RNIC that an earlier process left.
    pub(super) fn remove(directory: &Path, rnic: &str) -> Self {
        // Usually there is no file.
        let _ = fs::remove_file(directory.join(format!("{rnic}.frozen")));
        Self::default()
    }

    /// Updates the file after an event of the connections.
    pub(super) fn on_event(&mut self, event: &LinkEvent) {
        match event {
            LinkEvent::Message(_, Message::Welcome { .. }) => self.set(None),
            LinkEvent::Message(_, Message::Rejected(reason)) => {
                self.set(Some(format!("coordinator rejects this node: {reason}")));
            }
            LinkEvent::Unavailable(reason) => self.set(Some(reason.clone())),
            LinkEvent::Closed(_) if self.reason.is_none() => self.set(Some(DISCONNECTED.into())),
            _ => {}
        }
    }

    fn set(&mut self, reason: Option<String>) {
        let Some(path) = self.path.as_ref().filter(|_| self.reason != reason) else {
            return;
        };
        let written = match &reason {
            Some(reason) => replace_file(path, &format!("{reason}\n")),
            None => fs::remove_file(path),
        };
        if let Err(error) = written {
            tracing::warn!(path = %path.display(), %error, "cannot write frozen file");
        }
        self.reason = reason;
    }
}

impl Drop for FrozenFile {
    fn drop(&mut self) {
        self.set(None);
    }
}
