// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transport of one-sided requests to the memories of the table, in batches.

pub(crate) mod verbs;
pub(crate) mod vqp;

use anyhow::{ensure, Context, Result};

use crate::error::TransportError;
use crate::layout::{memory_of, WORD_BYTES};

/// Maximum requests of a batch.
pub(crate) const BATCH_MAX: usize = 32;

/// Maximum bytes that the requests of a batch read and write.
pub(crate) const BATCH_BYTES_MAX: usize = 32 << 10;

/// One-sided request. Addresses are those of `layout`.
#[derive(Debug)]
pub(crate) enum Request<'a> {
    Read {
        addr: u64,
        into: &'a mut [u8],
    },
    Write {
        addr: u64,
        from: &'a [u8],
    },
    /// Replaces a word by `new` if it is `expected`.
    CompareSwap {
        addr: u64,
        expected: u64,
        new: u64,
        /// Receives the previous value.
        old_value: &'a mut u64,
    },
    FetchAdd {
        addr: u64,
        operand: u64,
        /// Receives the previous value.
        old_value: &'a mut u64,
    },
}

/// Connection to the memories of a table.
///
/// Words are read and written atomically, larger ranges are not.
pub(crate) trait Transport {
    /// Returns the number of memories.
    fn memories(&self) -> usize;

    /// Executes a batch of at most [`BATCH_MAX`] requests and [`BATCH_BYTES_MAX`] bytes. Returns when all requests have
    /// completed. The requests to one memory execute in order, but a write may overtake earlier reads and atomic
    /// operations.
    ///
    /// # Errors
    /// Some requests may have been executed. All later batches fail.
    fn run(&mut self, batch: &mut [Request<'_>]) -> std::result::Result<(), TransportError>;
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn memories(&self) -> usize {
        (**self).memories()
    }

    fn run(&mut self, batch: &mut [Request<'_>]) -> std::result::Result<(), TransportError> {
        (**self).run(batch)
    }
}

impl Request<'_> {
    /// Returns the bytes that the request reads or writes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Read { into, .. } => into.len(),
            Self::Write { from, .. } => from.len(),
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => WORD_BYTES,
        }
    }

    /// Returns the address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        match self {
            Self::Read { addr, .. }
            | Self::Write { addr, .. }
            | Self::CompareSwap { addr, .. }
            | Self::FetchAdd { addr, .. } => *addr,
        }
    }

    /// Stores the result of a completed request, which `load` copies from local memory.
    fn store_result(&mut self, load: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        match self {
            Self::Read { into, .. } => load(into),
            Self::Write { .. } => Ok(()),
            Self::CompareSwap { old_value, .. } | Self::FetchAdd { old_value, .. } => {
                let mut word = [0; WORD_BYTES];
                load(&mut word)?;
                **old_value = u64::from_ne_bytes(word);
                Ok(())
            }
        }
    }
}

/// Send queue to one memory, with the local memory of its requests.
trait Queue {
    fn store(&self, offset: usize, from: &[u8]) -> Result<()>;
    fn load(&self, offset: usize, into: &mut [u8]) -> Result<()>;

    /// Posts requests, each with the offset of its bytes in the local memory.
    fn post(&self, batch: &[(&Request<'_>, usize)]) -> Result<()>;

    /// Waits until all posted requests have completed.
    fn wait(&self) -> Result<()>;
}

/// Transport by a queue for each memory.
///
/// After a failure no batch is executed: late completions could be taken for those of a later batch.
#[derive(Debug)]
struct QueueSet<Q> {
    queues: Vec<Q>,
    has_failed: bool,
}

impl<Q: Queue> QueueSet<Q> {
    fn new(queues: Vec<Q>) -> Self {
        Self {
            queues,
            has_failed: false,
        }
    }

    fn queue(&self, request: &Request<'_>) -> Result<&Q> {
        let queue = self.queues.get(memory_of(request.addr()));
        queue.context("address in a memory that the table does not have")
    }

    fn run_batch(&self, batch: &mut [Request<'_>]) -> Result<()> {
        ensure!(!self.has_failed, "an earlier batch failed");
        let offsets = local_offsets(batch);
        for (request, &offset) in batch.iter().zip(&offsets) {
            let queue = self.queue(request)?;
            if let Request::Write { from, .. } = request {
                queue.store(offset, from)?;
            }
        }
        self.post_and_wait(batch, &offsets)?;
        for (request, &offset) in batch.iter_mut().zip(&offsets) {
            let queue = self.queue(request)?;
            request.store_result(|into| queue.load(offset, into))?;
        }
        Ok(())
    }

    /// Posts the requests to all memories, then waits for their completion.
    fn post_and_wait(&self, batch: &[Request<'_>], offsets: &[usize]) -> Result<()> {
        let mut busy = Vec::with_capacity(self.queues.len());
        for (i, queue) in self.queues.iter().enumerate() {
            let requests = batch.iter().zip(offsets.iter().copied());
            let requests: Vec<_> = requests
                .filter(|(request, _)| memory_of(request.addr()) == i)
                .collect();
            if !requests.is_empty() {
                queue.post(&requests)?;
                busy.push(queue);
            }
        }
        busy.into_iter().try_for_each(Q::wait)
    }
}

impl<Q: Queue> Transport for QueueSet<Q> {
    fn memories(&self) -> usize {
        self.queues.len()
    }

    fn run(&mut self, batch: &mut [Request<'_>]) -> std::result::Result<(), TransportError> {
        let result = self.run_batch(batch);
        self.has_failed |= result.is_err();
        result.map_err(|error| TransportError::new(format!("{error:#}")))
    }
}

/// Bytes of local memory for a batch.
const LOCAL_BYTES: usize = BATCH_BYTES_MAX + BATCH_MAX * WORD_BYTES;

/// Returns the offset of the bytes of each request in the local memory.
fn local_offsets(batch: &[Request<'_>]) -> Vec<usize> {
    let mut next = 0;
    let offset = |request: &Request<'_>| {
        let offset = next;
        next += request.len().next_multiple_of(WORD_BYTES);
        offset
    };
    batch.iter().map(offset).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::memory_base;
    use std::cell::Cell;

    /// Queue that returns bytes of a value for a number of batches, and then fails once.
    struct FakeQueue(u8, Cell<u32>);

    impl Queue for FakeQueue {
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
            ensure!(left != 0, "no completion");
            Ok(())
        }
    }

    fn queues(left: &[u32]) -> QueueSet<FakeQueue> {
        let queue = |(i, &left)| FakeQueue(i, Cell::new(left));
        QueueSet::new((0..).zip(left).map(queue).collect())
    }

    /// Reads a byte of each memory, in one batch.
    fn read(
        queues: &mut QueueSet<FakeQueue>,
        memories: &[usize],
    ) -> std::result::Result<Vec<u8>, TransportError> {
        let mut bytes = vec![[0]; memories.len()];
        let reads = memories.iter().zip(&mut bytes);
        let mut reads: Vec<_> = reads
            .map(|(&memory, into)| Request::Read {
                addr: memory_base(memory),
                into,
            })
            .collect();
        queues.run(&mut reads)?;
        Ok(bytes.concat())
    }

    #[test]
    fn batch_after_a_failure_is_rejected() {
        let mut queues = queues(&[1]);
        assert_eq!(read(&mut queues, &[0]).unwrap(), [0]);
        assert_eq!(read(&mut queues, &[0]).unwrap_err().reason, "no completion");
        let reason = "an earlier batch failed";
        assert_eq!(read(&mut queues, &[0]).unwrap_err().reason, reason);
        assert_eq!(read(&mut queues, &[0]).unwrap_err().reason, reason);
    }

    #[test]
    fn request_uses_the_queue_of_its_memory_only() {
        let mut queues = queues(&[2, 1, 1]);
        assert_eq!(queues.memories(), 3);
        assert_eq!(read(&mut queues, &[2, 0, 1, 0]).unwrap(), [2, 0, 1, 0]);
        // A batch to the other memories would fail.
        assert_eq!(read(&mut queues, &[0]).unwrap(), [0]);
        assert_eq!(read(&mut queues, &[1]).unwrap_err().reason, "no completion");
    }

    #[test]
    fn address_in_an_unknown_memory_is_rejected() {
        let reason = read(&mut queues(&[9, 9]), &[0, 2]).unwrap_err().reason;
        assert_eq!(reason, "address in a memory that the table does not have");
    }
}
