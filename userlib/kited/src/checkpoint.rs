// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Checkpoint of the daemon's state, in memory that outlives its process.
//!
//! # Operation
//!
//! The memory is a memfd, of which the service manager stores a descriptor. Two slots are written alternately, each
//! with a sequence number and a digest. Loading selects the newest intact slot.
//!
//! # Recovery
//!
//! A process that is killed during a write leaves one corrupt slot. The other slot holds the previous snapshot.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use anyhow::{ensure, Context, Result};
use rustix::fs::{memfd_create, MemfdFlags};
use sha2::{Digest, Sha256};

use crate::fd_store::{FdStore, StoredFds};
use crate::membership::Snapshot;

/// Name of the memory in the store.
const STORE_NAME: &str = "checkpoint";

/// Version of the format: a [`Snapshot`] as postcard encodes it. The state file has the same version.
pub(crate) const FORMAT_VERSION: u32 = 3;

/// Size of a slot in bytes. A snapshot with all node numbers has up to 2 MiB.
const SLOT_BYTES: u64 = 4 << 20;

/// Length of the header in bytes: digest of all that follows it, sequence number, version, length. All versions have
/// the same header.
const HEADER_BYTES: usize = 32 + 8 + 4 + 4;

/// Checkpoint of a daemon.
#[derive(Debug)]
pub struct Checkpoint {
    file: File,
    /// Sequence number of the newest slot; 0 if there is none.
    sequence: u64,
}

/// Intact slot.
pub(crate) struct Slot {
    sequence: u64,
    pub(crate) version: u32,
    pub(crate) snapshot: Vec<u8>,
}

impl Checkpoint {
    /// Returns the checkpoint that the store passed to this process, or creates one and stores its descriptor.
    ///
    /// # Errors
    /// If memory or descriptors are exhausted, or the service manager is unreachable.
    pub fn open(store: FdStore, received: &mut StoredFds) -> io::Result<Self> {
        if let Some(index) = received.iter().position(|(name, _)| name == STORE_NAME) {
            return Ok(Self::resume(received.swap_remove(index).1));
        }
        let checkpoint = Self::new()?;
        store.store_fd(STORE_NAME, checkpoint.as_fd())?;
        Ok(checkpoint)
    }

    /// Creates a checkpoint without a snapshot.
    ///
    /// # Errors
    /// If memory or descriptors are exhausted.
    pub fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL;
        let file = memfd_create("kited", flags)?.into();
        Ok(Self { file, sequence: 0 })
    }

    /// Returns the checkpoint of a previous process.
    pub fn resume(fd: OwnedFd) -> Self {
        let file = fd.into();
        Self { file, sequence: 0 }
    }

    /// Loads the last snapshot, if there is one.
    ///
    /// # Errors
    /// If the snapshot has another version of the format, or cannot be read.
    pub fn load(&mut self) -> Result<Option<Snapshot>> {
        let slots = [self.read_slot(0)?, self.read_slot(1)?];
        let Some(newest) = slots.into_iter().flatten().max_by_key(|s| s.sequence) else {
            return Ok(None);
        };
        self.sequence = newest.sequence;
        let version = newest.version;
        ensure!(
            version == FORMAT_VERSION,
            "checkpoint has version {version}, this kited reads version {FORMAT_VERSION}"
        );
        postcard::from_bytes(&newest.snapshot).context("checkpoint cannot be decoded")
    }

    /// Saves a snapshot, or `None` if the node is in no cluster. A process that is killed meanwhile leaves the old or
    /// the new snapshot.
    ///
    /// # Errors
    /// If memory is exhausted. The previous snapshot is kept.
    pub fn save(&mut self, snapshot: Option<&Snapshot>) -> Result<()> {
        let sequence = self.sequence + 1;
        let slot = encode_slot(sequence, &postcard::to_stdvec(&snapshot)?);
        ensure!(
            slot.len() as u64 <= SLOT_BYTES,
            "snapshot takes {} bytes, at most {SLOT_BYTES} fit",
            slot.len()
        );
        self.file
            .write_all_at(&slot, Self::slot_offset(sequence))
            .context("cannot write the checkpoint")?;
        self.sequence = sequence;
        Ok(())
    }

    fn slot_offset(sequence: u64) -> u64 {
        sequence % 2 * SLOT_BYTES
    }

    /// Reads the slot of even or odd sequence numbers. Returns `None` if the slot is not intact.
    fn read_slot(&self, parity: u64) -> io::Result<Option<Slot>> {
        let file_len = self.file.metadata()?.len();
        let start = Self::slot_offset(parity);
        let len = file_len.saturating_sub(start).min(SLOT_BYTES);
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(decode_slot(&bytes))
    }
}

impl AsFd for Checkpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Encodes a snapshot with its header.
pub(crate) fn encode_slot(sequence: u64, snapshot: &[u8]) -> Vec<u8> {
    let len = snapshot.len() as u32;
    let mut body = Vec::with_capacity(HEADER_BYTES + snapshot.len());
    body.extend_from_slice(&sequence.to_le_bytes());
    body.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    body.extend_from_slice(&len.to_le_bytes());
    body.extend_from_slice(snapshot);
    let digest = Sha256::digest(&body);
    [digest.as_slice(), &body].concat()
}

/// Decodes a slot. Returns `None` if it is not intact.
pub(crate) fn decode_slot(slot: &[u8]) -> Option<Slot> {
    let (digest, body) = slot.split_first_chunk::<32>()?;
    let (sequence, remaining) = body.split_first_chunk()?;
    let (version, remaining) = remaining.split_first_chunk()?;
    let (len, remaining) = remaining.split_first_chunk()?;
    let len = u32::from_le_bytes(*len) as usize;
    let snapshot = remaining.get(..len)?;
    let body = &body[..HEADER_BYTES - digest.len() + len];
    (Sha256::digest(body).as_slice() == digest).then(|| Slot {
        sequence: u64::from_le_bytes(*sequence),
        version: u32::from_le_bytes(*version),
        snapshot: snapshot.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::FollowerSnapshot;

    fn snapshot(incarnation: u64) -> Snapshot {
        Snapshot::Follower(FollowerSnapshot::example(incarnation))
    }

    /// Loads the checkpoint as the next process does.
    fn reload(checkpoint: &Checkpoint) -> Result<Option<Snapshot>> {
        Checkpoint::resume(checkpoint.as_fd().try_clone_to_owned()?).load()
    }

    #[test]
    fn load_in_a_new_process_returns_the_last_snapshot() {
        let mut checkpoint = Checkpoint::new().unwrap();
        assert_eq!(reload(&checkpoint).unwrap(), None);
        for incarnation in 1..5 {
            checkpoint.save(Some(&snapshot(incarnation))).unwrap();
            let loaded = reload(&checkpoint).unwrap();
            assert_eq!(loaded, Some(snapshot(incarnation)));
        }
        checkpoint.save(None).unwrap();
        assert_eq!(reload(&checkpoint).unwrap(), None);
    }

    #[test]
    fn save_in_a_new_process_overwrites_the_older_slot() {
        let mut checkpoint = Checkpoint::new().unwrap();
        checkpoint.save(Some(&snapshot(1))).unwrap();
        let mut next = Checkpoint::resume(checkpoint.as_fd().try_clone_to_owned().unwrap());
        next.load().unwrap();
        next.save(Some(&snapshot(2))).unwrap();
        assert_eq!(reload(&checkpoint).unwrap(), Some(snapshot(2)));
    }

    #[test]
    fn truncated_write_leaves_the_old_snapshot() {
        let mut checkpoint = Checkpoint::new().unwrap();
        checkpoint.save(None).unwrap();
        checkpoint.save(Some(&snapshot(2))).unwrap();
        let new = encode_slot(3, &postcard::to_stdvec(&Some(snapshot(3))).unwrap());
        for len in 0..new.len() {
            checkpoint
                .file
                .write_all_at(&new[..len], Checkpoint::slot_offset(3))
                .unwrap();
            assert_eq!(reload(&checkpoint).unwrap(), Some(snapshot(2)), "{len}");
        }
    }

    #[test]
    fn checkpoint_of_another_version_is_rejected() {
        let checkpoint = Checkpoint::new().unwrap();
        let mut slot = encode_slot(1, b"whatever");
        slot[40] = 7;
        let digest = Sha256::digest(&slot[32..]);
        slot[..32].copy_from_slice(&digest);
        checkpoint.file.write_all_at(&slot, SLOT_BYTES).unwrap();
        let error = reload(&checkpoint).unwrap_err().to_string();
        assert!(error.contains("version 7"), "{error}");
    }
}
