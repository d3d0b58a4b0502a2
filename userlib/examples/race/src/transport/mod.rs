// SPDX-License-Identifier: GPL-2.0 OR MIT
//! How a worker reaches the memory of the table: by one-sided requests, a few at a time.

pub(crate) mod over_kite;
pub(crate) mod over_verbs;

use crate::error::Lost;
use crate::layout::WORD;

/// Most requests of a batch.
pub(crate) const BATCH: usize = 32;

/// Most bytes that the requests of a batch read and write.
pub(crate) const BYTES: usize = 32 << 10;

/// A request.
#[derive(Debug)]
pub(crate) enum Request<'a> {
    Read {
        place: u64,
        into: &'a mut [u8],
    },
    Write {
        place: u64,
        from: &'a [u8],
    },
    /// If a word is `expected`, it becomes `new`.
    CompareSwap {
        place: u64,
        expected: u64,
        new: u64,
        /// What it was.
        found: &'a mut u64,
    },
    FetchAdd {
        place: u64,
        operand: u64,
        /// What it was.
        found: &'a mut u64,
    },
}

/// A way to the memory.
///
/// A word is read and written in one step, and no more than a word is.
pub(crate) trait Transport {
    /// Does a batch of requests, at most [`BATCH`] of at most [`BYTES`] together, and returns when all are done. They
    /// are done in their order, but a write may overtake what is before it.
    ///
    /// # Errors
    /// [`Lost`]: any of them may have been done.
    fn run(&mut self, batch: &mut [Request<'_>]) -> Result<(), Lost>;
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn run(&mut self, batch: &mut [Request<'_>]) -> Result<(), Lost> {
        (**self).run(batch)
    }
}

impl Request<'_> {
    /// Bytes that it reads or writes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Read { into, .. } => into.len(),
            Self::Write { from, .. } => from.len(),
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => WORD,
        }
    }

    /// Where in the memory of the table.
    fn place(&self) -> u64 {
        match self {
            Self::Read { place, .. }
            | Self::Write { place, .. }
            | Self::CompareSwap { place, .. }
            | Self::FetchAdd { place, .. } => *place,
        }
    }

    /// Has `load` fetch what came back.
    fn accept<E>(&mut self, load: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
        match self {
            Self::Read { into, .. } => load(into),
            Self::Write { .. } => Ok(()),
            Self::CompareSwap { found, .. } | Self::FetchAdd { found, .. } => {
                let mut word = [0; WORD];
                load(&mut word)?;
                **found = u64::from_ne_bytes(word);
                Ok(())
            }
        }
    }
}

/// Bytes of local memory for a batch, and where there each request has its own.
const LOCAL: usize = BYTES + BATCH * WORD;

fn locals(batch: &[Request<'_>]) -> Vec<usize> {
    let mut next = 0;
    let local = |request: &Request<'_>| {
        let at = next;
        next += request.len().next_multiple_of(WORD);
        at
    };
    batch.iter().map(local).collect()
}
