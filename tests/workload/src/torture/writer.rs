// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Numbered writes to a record, of which none that was acknowledged may be lost.

use anyhow::{ensure, Result};
use kite::Region;

use super::{unless_fault, until_healed, Worker, SECOND_NODE};

/// Bytes of a record.
const RECORD_BYTES: usize = 80_000;

/// Offset of the first record. The second one is in the memory of two nodes.
const RECORDS: u64 = SECOND_NODE - 120_000;

/// Writes its record again and again: all words are the number of the write.
pub(super) struct Writer {
    region: Region,
    offset: u64,
    /// Number of the last acknowledged write.
    acked: u64,
    /// Number of the last write.
    written: u64,
    /// Number of acknowledged writes.
    count: u64,
    /// `true` if a fault prevented the last read.
    is_unread: bool,
}

impl Writer {
    /// Returns the writer of a node.
    pub(super) fn new(region: Region, node: u64) -> Self {
        Writer {
            region,
            offset: RECORDS + (node - 1) * RECORD_BYTES as u64,
            acked: 0,
            written: 0,
            count: 0,
            is_unread: false,
        }
    }

    fn write(&mut self) -> Result<()> {
        self.written += 1;
        let record = self.written.to_ne_bytes().repeat(RECORD_BYTES / 8);
        if unless_fault(self.region.write_at(&record, self.offset))?.is_some() {
            self.acked = self.written;
            self.count += 1;
        }
        Ok(())
    }

    /// Reads the record: each word is the last acknowledged number, or that of a later write that failed. Returns
    /// `None` if the read fails.
    fn check(&self) -> Result<Option<()>> {
        let mut record = vec![0; RECORD_BYTES];
        let read = self.region.read_at(&mut record, self.offset);
        if unless_fault(read)?.is_none() {
            return Ok(None);
        }
        let possible = self.acked..=self.written;
        for (i, word) in record.chunks_exact(8).enumerate() {
            let number = u64::from_ne_bytes(word.try_into()?);
            ensure!(
                possible.contains(&number),
                "word {i} of the record at {} of region {} is {number}, expected {possible:?}",
                self.offset,
                self.region.id()
            );
        }
        Ok(Some(()))
    }
}

impl Worker for Writer {
    /// Writes the record, and reads it. After half of the faults, the next request to succeed is a read: the next
    /// write would replace what the last one lost.
    fn step(&mut self) -> Result<()> {
        if !self.is_unread || self.written % 2 == 0 {
            self.write()?;
        }
        self.is_unread = self.check()?.is_none();
        Ok(())
    }

    fn verify(&mut self) -> Result<u64> {
        until_healed(|| self.check())?;
        Ok(self.count)
    }
}
