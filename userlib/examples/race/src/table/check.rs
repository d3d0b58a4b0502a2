// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Checks a table that no worker changes: every hash has a segment, every slot a block with a correct checksum, and no
//! key occurs twice.

use std::collections::HashSet;

use serde::Serialize;

use crate::block::Block;
use crate::directory::Home;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::layout::{memory, segment_size, words, Entry, Header, Slot, BUCKET_WORDS, WORD};
use crate::transport::Transport;

use super::Table;

/// Content of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    /// Bits that the directory looks at.
    pub(crate) depth: u32,
    /// Segments that the directory has.
    pub(crate) segments: usize,
    /// Frozen segments: the worker that split them ended.
    pub(crate) frozen: usize,
    /// Slots of workers that ended before they knew whether their key was new.
    pub(crate) tentative: usize,
    /// Keys.
    pub(crate) keys: usize,
    /// Content of each memory.
    pub(crate) memories: Vec<Share>,
}

/// Content of a table in one memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Share {
    pub(crate) segments: usize,
    pub(crate) blocks: usize,
}

/// Finds keys that come twice.
type Seen = HashSet<Vec<u8>>;

impl<T: Transport> Table<T> {
    /// Checks all, and shows each key and value.
    ///
    /// # Errors
    /// [`Error::Damaged`] with the first inconsistency, [`Error::Lost`].
    pub(crate) fn check(&mut self, mut each: impl FnMut(&Block)) -> Result<Report> {
        self.refresh()?;
        let mut report = Report {
            depth: self.directory.depth(),
            memories: vec![Share::default(); self.transport.memories()],
            ..Report::default()
        };
        let mut seen = Seen::new();
        for index in 0..self.directory.entries().len() {
            let entry = self.directory.entries()[index];
            self.directory
                .find_index(index as u64)
                .ok_or_else(|| Error::Damaged(format!("the directory leads {index:#x} nowhere")))?;
            if entry != Entry::NONE {
                let home = Home {
                    index: index as u64,
                    entry,
                };
                self.check_segment(home, &mut report, &mut seen, &mut each)?;
            }
        }
        report.keys = seen.len();
        Ok(report)
    }

    fn check_segment(
        &mut self,
        home: Home,
        report: &mut Report,
        seen: &mut Seen,
        each: &mut impl FnMut(&Block),
    ) -> Result<()> {
        let mut read = vec![0; segment_size(self.groups) as usize];
        self.read(home.entry.segment(), &mut read)?;
        let words = words(&read);
        report.segments += 1;
        report.memories[memory(home.entry.segment())].segments += 1;
        report.frozen += usize::from(Header(words[0]).is_frozen());
        for (i, word) in words.into_iter().enumerate() {
            let place = (i * WORD) as u64;
            match (i % BUCKET_WORDS, Slot(word)) {
                (0, _) => check_header(home, Header(word))?,
                (_, slot) if slot.is_taken() => {
                    if let Some(block) = self.check_slot(home, place, slot)? {
                        report.memories[memory(slot.block())].blocks += 1;
                        each(&block);
                        if !seen.insert(block.key) {
                            return Err(Error::Damaged(format!("a key is twice, in {home:?}")));
                        }
                    }
                }
                (_, slot) => report.tentative += usize::from(slot.is_tentative()),
            }
        }
        Ok(())
    }

    /// The block of a slot, unless its key is in another segment already, because this one is half split.
    fn check_slot(&mut self, home: Home, place: u64, slot: Slot) -> Result<Option<Block>> {
        let block = self.block(slot)?;
        let hash = Hash::of(&block.key);
        let in_pair = hash.pairs(self.groups).into_iter().any(|pair| {
            let pair = pair.offset()..pair.offset() + super::PAIR as u64;
            pair.contains(&place)
        });
        let here = self.directory.find(hash) == Some(home);
        if !in_pair || slot.fingerprint() != hash.fingerprint() || !here && !slot.is_frozen() {
            return Err(Error::Damaged(format!(
                "a key that does not belong in {home:?}"
            )));
        }
        Ok(here.then_some(block))
    }
}

fn check_header(home: Home, header: Header) -> Result<()> {
    match header.thawed() == Header::new(home.entry.depth(), home.index) {
        true => Ok(()),
        false => Err(Error::Damaged(format!("a bucket that is not of {home:?}"))),
    }
}
