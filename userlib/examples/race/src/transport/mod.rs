// SPDX-License-Identifier: GPL-2.0 OR MIT
//! How a worker reaches the memory of the table: by one-sided requests, a few at a time.

pub(crate) mod over_kite;
pub(crate) mod over_verbs;

use anyhow::{ensure, Result};

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
    /// [`Lost`]: any of them may have been done, and none is from then on.
    fn run(&mut self, batch: &mut [Request<'_>]) -> std::result::Result<(), Lost>;
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn run(&mut self, batch: &mut [Request<'_>]) -> std::result::Result<(), Lost> {
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
    fn accept(&mut self, load: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
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

/// A queue of requests, and the local memory whose bytes they move.
trait Queue {
    fn store(&self, at: usize, from: &[u8]) -> Result<()>;
    fn load(&self, at: usize, into: &mut [u8]) -> Result<()>;

    /// Does requests, each of which has its local bytes at one of `locals`, and returns when all are done.
    fn exchange(&self, batch: &[Request<'_>], locals: &[usize]) -> Result<()>;
}

/// The way by a queue, until it fails: then completions may still come that nobody waits for, and a later batch would
/// take them for its own.
#[derive(Debug)]
struct Way<Q> {
    queue: Q,
    is_lost: bool,
}

impl<Q: Queue> Way<Q> {
    fn by(queue: Q) -> Self {
        Self {
            queue,
            is_lost: false,
        }
    }

    fn go(&self, batch: &mut [Request<'_>]) -> Result<()> {
        ensure!(!self.is_lost, "an operation before was not answered");
        let locals = locals(batch);
        for (request, &at) in batch.iter().zip(&locals) {
            if let Request::Write { from, .. } = request {
                self.queue.store(at, from)?;
            }
        }
        self.queue.exchange(batch, &locals)?;
        let mut answers = batch.iter_mut().zip(&locals);
        answers.try_for_each(|(request, &at)| request.accept(|into| self.queue.load(at, into)))
    }
}

impl<Q: Queue> Transport for Way<Q> {
    fn run(&mut self, batch: &mut [Request<'_>]) -> std::result::Result<(), Lost> {
        let done = self.go(batch);
        self.is_lost |= done.is_err();
        done.map_err(|error| Lost::because(format!("{error:#}")))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Has answers for some batches, and then none for one.
    struct Failing(Cell<u32>);

    impl Queue for Failing {
        fn store(&self, _: usize, _: &[u8]) -> Result<()> {
            Ok(())
        }

        fn load(&self, _: usize, into: &mut [u8]) -> Result<()> {
            into.fill(7);
            Ok(())
        }

        fn exchange(&self, _: &[Request<'_>], _: &[usize]) -> Result<()> {
            let left = self.0.get();
            self.0.set(left.wrapping_sub(1));
            ensure!(left != 0, "no answer");
            Ok(())
        }
    }

    #[test]
    fn what_has_failed_is_not_used_again() {
        let mut way = Way::by(Failing(Cell::new(1)));
        let mut read = || {
            let mut byte = [0];
            let into = &mut byte;
            let read = Request::Read { place: 0, into };
            way.run(&mut [read]).map(|()| byte)
        };
        assert_eq!(read().unwrap(), [7]);
        assert_eq!(read().unwrap_err().why, "no answer");
        let why = "an operation before was not answered";
        assert_eq!(read().unwrap_err().why, why);
        assert_eq!(read().unwrap_err().why, why);
    }
}
