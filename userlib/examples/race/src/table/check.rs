// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Check of a table that no worker changes: every hash has a segment, every slot a block with a correct checksum, and
//! no key occurs twice.

use std::collections::HashSet;

use serde::Serialize;

use crate::block::Block;
use crate::directory::SegmentRef;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{
    memory_of, segment_size, words, Entry, Header, Slot, BUCKET_WORDS, WORD_BYTES,
};
use crate::transport::Transport;

use super::Table;

/// Content of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    /// Depth of the directory.
    pub(crate) depth: u32,
    /// Segments in the directory.
    pub(crate) segments: usize,
    /// Frozen segments: their workers ended during the split.
    pub(crate) frozen: usize,
    /// Tentative slots: their workers ended during the insert.
    pub(crate) tentative: usize,
    /// Keys.
    pub(crate) keys: usize,
    /// Content of each memory.
    pub(crate) memories: Vec<MemoryReport>,
}

/// Content of a table in one memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct MemoryReport {
    pub(crate) segments: usize,
    pub(crate) blocks: usize,
}

/// Keys found so far.
type Seen = HashSet<Vec<u8>>;

impl<T: Transport> Table<T> {
    /// Checks the table, and calls `each` with each block.
    ///
    /// # Errors
    /// - [`Error::Damaged`]: describes the first inconsistency.
    /// - [`Error::Transport`]: a memory cannot be reached.
    pub(crate) fn check(&mut self, mut each: impl FnMut(&Block)) -> Result<Report> {
        self.refresh()?;
        let mut report = Report {
            depth: self.directory.depth(),
            memories: vec![MemoryReport::default(); self.transport.memories()],
            ..Report::default()
        };
        let mut seen = Seen::new();
        for index in 0..self.directory.entries().len() {
            let entry = self.directory.entries()[index];
            self.directory.find_index(index as u64).ok_or_else(|| {
                Error::Damaged(format!("the directory has no segment for {index:#x}"))
            })?;
            if entry != Entry::NONE {
                let segment = SegmentRef {
                    index: index as u64,
                    entry,
                };
                self.check_segment(segment, &mut report, &mut seen, &mut each)?;
            }
        }
        report.keys = seen.len();
        Ok(report)
    }

    fn check_segment(
        &mut self,
        segment: SegmentRef,
        report: &mut Report,
        seen: &mut Seen,
        each: &mut impl FnMut(&Block),
    ) -> Result<()> {
        let mut read = vec![0; segment_size(self.groups) as usize];
        self.read(segment.entry.addr(), &mut read)?;
        let words = words(&read);
        report.segments += 1;
        report.memories[memory_of(segment.entry.addr())].segments += 1;
        report.frozen += usize::from(Header(words[0]).is_frozen());
        for (i, word) in words.into_iter().enumerate() {
            let offset = (i * WORD_BYTES) as u64;
            match (i % BUCKET_WORDS, Slot(word)) {
                (0, _) => check_header(segment, Header(word))?,
                (_, slot) if slot.is_taken() => {
                    if let Some(block) = self.check_slot(segment, offset, slot)? {
                        report.memories[memory_of(slot.block_addr())].blocks += 1;
                        each(&block);
                        if !seen.insert(block.key) {
                            let reason = format!("a key occurs twice, in {segment:?}");
                            return Err(Error::Damaged(reason));
                        }
                    }
                }
                (_, slot) => report.tentative += usize::from(slot.is_tentative()),
            }
        }
        Ok(())
    }

    /// Returns the block of a slot, or `None` if the directory has another segment for its key: this segment is then
    /// half split.
    fn check_slot(
        &mut self,
        segment: SegmentRef,
        offset: u64,
        slot: Slot,
    ) -> Result<Option<Block>> {
        let block = self.read_block(slot)?;
        let hash = Hash::of(&block.key);
        let in_pair = hash.pairs(self.groups).into_iter().any(|pair| {
            let pair = pair.offset()..pair.offset() + super::PAIR_BYTES as u64;
            pair.contains(&offset)
        });
        let in_segment = self.directory.find(hash) == Some(segment);
        let has_fingerprint = slot.fingerprint() == hash.fingerprint();
        if !in_pair || !has_fingerprint || !in_segment && !slot.is_frozen() {
            return Err(Error::Damaged(format!(
                "a key does not belong to {segment:?}"
            )));
        }
        Ok(in_segment.then_some(block))
    }
}

fn check_header(segment: SegmentRef, header: Header) -> Result<()> {
    match header.thawed() == Header::new(segment.entry.depth(), segment.index) {
        true => Ok(()),
        false => Err(Error::Damaged(format!(
            "a bucket does not belong to {segment:?}"
        ))),
    }
}
