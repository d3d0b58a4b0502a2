// SPDX-License-Identifier: GPL-2.0 OR MIT
//! How a worker reaches the memories of the table: by one-sided requests, a few at a time.

pub(crate) mod over_kite;
pub(crate) mod over_verbs;

use anyhow::{ensure, Context, Result};

use crate::error::Lost;
use crate::layout::{memory, WORD};

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
        /// Receives the previous value.
        found: &'a mut u64,
    },
    FetchAdd {
        place: u64,
        operand: u64,
        /// Receives the previous value.
        found: &'a mut u64,
    },
}

/// A way to the memories.
///
/// A word is read and written in one step, and no more than a word is.
pub(crate) trait Transport {
    /// Returns the number of memories.
    fn memories(&self) -> usize;

    /// Does a batch of requests, at most [`BATCH`] of at most [`BYTES`] together, and returns when all are done. Those
    /// of one memory are done in their order, but a write may overtake what is before it.
    ///
    /// # Errors
    /// [`Lost`]: any of them may have been done, and none is from then on.
    fn run(&mut self, batch: &mut [Request<'_>]) -> std::result::Result<(), Lost>;
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn memories(&self) -> usize {
        (**self).memories()
    }

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

    /// Where in the memories of the table.
    pub(crate) fn place(&self) -> u64 {
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

/// A queue of requests to one memory, and the local memory whose bytes they move.
trait Queue {
    fn store(&self, at: usize, from: &[u8]) -> Result<()>;
    fn load(&self, at: usize, into: &mut [u8]) -> Result<()>;

    /// Posts requests, each with the offset of its local bytes.
    fn post(&self, batch: &[(&Request<'_>, usize)]) -> Result<()>;

    /// Returns when all that were begun are done.
    fn wait(&self) -> Result<()>;
}

/// Transport by queues, one to each memory, until one fails. After a failure late completions may arrive, and a later
/// batch would take them for its own.
#[derive(Debug)]
struct Ways<Q> {
    queues: Vec<Q>,
    is_lost: bool,
}

impl<Q: Queue> Ways<Q> {
    fn by(queues: Vec<Q>) -> Self {
        Self {
            queues,
            is_lost: false,
        }
    }

    fn queue(&self, request: &Request<'_>) -> Result<&Q> {
        let queue = self.queues.get(memory(request.place()));
        queue.context("it is in a memory that the table does not have")
    }

    fn go(&self, batch: &mut [Request<'_>]) -> Result<()> {
        ensure!(!self.is_lost, "an operation before was not answered");
        let locals = locals(batch);
        for (request, &at) in batch.iter().zip(&locals) {
            let queue = self.queue(request)?;
            if let Request::Write { from, .. } = request {
                queue.store(at, from)?;
            }
        }
        self.exchange(batch, &locals)?;
        for (request, &at) in batch.iter_mut().zip(&locals) {
            let queue = self.queue(request)?;
            request.accept(|into| queue.load(at, into))?;
        }
        Ok(())
    }

    /// Does requests in all memories at a time.
    fn exchange(&self, batch: &[Request<'_>], locals: &[usize]) -> Result<()> {
        let mut busy = Vec::with_capacity(self.queues.len());
        for (i, queue) in self.queues.iter().enumerate() {
            let all = batch.iter().zip(locals.iter().copied());
            let here: Vec<_> = all
                .filter(|(request, _)| memory(request.place()) == i)
                .collect();
            if !here.is_empty() {
                queue.post(&here)?;
                busy.push(queue);
            }
        }
        busy.into_iter().try_for_each(Q::wait)
    }
}

impl<Q: Queue> Transport for Ways<Q> {
    fn memories(&self) -> usize {
        self.queues.len()
    }

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
    use crate::layout::start;
    use std::cell::Cell;

    /// Has answers, of its own number, for some batches, and then none for one.
    struct Failing(u8, Cell<u32>);

    impl Queue for Failing {
        fn store(&self, _: usize, _: &[u8]) -> Result<()> {
            Ok(())
        }

        fn load(&self, _: usize, into: &mut [u8]) -> Result<()> {
            into.fill(self.0);
            Ok(())
        }

        fn post(&self, _: &[(&Request<'_>, usize)]) -> Result<()> {
            Ok(())
        }

        fn wait(&self) -> Result<()> {
            let left = self.1.get();
            self.1.set(left.wrapping_sub(1));
            ensure!(left != 0, "no answer");
            Ok(())
        }
    }

    fn ways(left: &[u32]) -> Ways<Failing> {
        let queue = |(i, &left)| Failing(i, Cell::new(left));
        Ways::by((0..).zip(left).map(queue).collect())
    }

    /// Reads a byte of each of these memories.
    fn read(ways: &mut Ways<Failing>, memories: &[usize]) -> std::result::Result<Vec<u8>, Lost> {
        let mut bytes = vec![[0]; memories.len()];
        let reads = memories.iter().zip(&mut bytes);
        let mut reads: Vec<_> = reads
            .map(|(&memory, into)| Request::Read {
                place: start(memory),
                into,
            })
            .collect();
        ways.run(&mut reads)?;
        Ok(bytes.concat())
    }

    #[test]
    fn what_has_failed_is_not_used_again() {
        let mut ways = ways(&[1]);
        assert_eq!(read(&mut ways, &[0]).unwrap(), [0]);
        assert_eq!(read(&mut ways, &[0]).unwrap_err().why, "no answer");
        let why = "an operation before was not answered";
        assert_eq!(read(&mut ways, &[0]).unwrap_err().why, why);
        assert_eq!(read(&mut ways, &[0]).unwrap_err().why, why);
    }

    #[test]
    fn each_memory_is_asked_for_what_it_has() {
        let mut ways = ways(&[2, 1, 1]);
        assert_eq!(ways.memories(), 3);
        assert_eq!(read(&mut ways, &[2, 0, 1, 0]).unwrap(), [2, 0, 1, 0]);
        // The others would have no answer.
        assert_eq!(read(&mut ways, &[0]).unwrap(), [0]);
        assert_eq!(read(&mut ways, &[1]).unwrap_err().why, "no answer");
    }

    #[test]
    fn a_memory_that_is_not_of_the_table_is_noticed() {
        let why = read(&mut ways(&[9, 9]), &[0, 2]).unwrap_err().why;
        assert_eq!(why, "it is in a memory that the table does not have");
    }
}
