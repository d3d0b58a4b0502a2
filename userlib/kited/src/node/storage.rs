// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Storage of the state of a node: the checkpoint for the next process, and the state file of a seed.

use anyhow::Result;

use crate::checkpoint::Checkpoint;
use crate::membership::Snapshot;
use crate::state_file::StateFile;

/// Storage of the state of a node.
pub(super) struct Storage {
    checkpoint: Option<Checkpoint>,
    state_file: Option<StateFile>,
    /// Error of the last save, empty after a success. An error that repeats is logged once.
    last_error: String,
}

impl Storage {
    pub(super) fn new(checkpoint: Option<Checkpoint>, state_file: Option<StateFile>) -> Self {
        Self {
            checkpoint,
            state_file,
            last_error: String::new(),
        }
    }

    /// Returns `true` if another process can continue the membership.
    pub(super) fn has_checkpoint(&self) -> bool {
        self.checkpoint.is_some()
    }

    /// Saves the state, or that the node is in no cluster. Returns `true` on success.
    pub(super) fn save(&mut self, snapshot: Option<&Snapshot>) -> bool {
        match self.try_save(snapshot) {
            Ok(()) => {
                if !self.last_error.is_empty() {
                    tracing::info!("state saved again");
                }
                self.last_error.clear();
                true
            }
            Err(error) => {
                let error = format!("{error:#}");
                if error != self.last_error {
                    tracing::error!("{error}: membership changes wait (retrying)");
                }
                self.last_error = error;
                false
            }
        }
    }

    /// The state file keeps the cluster of a seed that leaves.
    fn try_save(&mut self, snapshot: Option<&Snapshot>) -> Result<()> {
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.save(snapshot)?;
        }
        if let (Some(file), Some(Snapshot::Seed(seed))) = (&self.state_file, snapshot) {
            file.save(seed)?;
        }
        Ok(())
    }
}
