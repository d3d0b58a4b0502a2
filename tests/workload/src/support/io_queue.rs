// SPDX-License-Identifier: GPL-2.0 OR MIT
//! I/O queue of raw requests, whose ring memory can be written freely.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::ensure;

use crate::support::abi::*;

pub(crate) const SQ_TAIL: usize = offset_of!(kite_ring_header, sq_tail);
pub(crate) const FLAGS: usize = offset_of!(kite_ring_header, flags);
pub(crate) const CQ_HEAD: usize = offset_of!(kite_ring_header, cq_head);
pub(crate) const CQ_TAIL: usize = offset_of!(kite_ring_header, cq_tail);

/// Number of 32-bit words of an SQE.
pub(crate) const SQE_WORDS: usize = size_of::<kite_sqe>() / 4;
/// Number of 32-bit words of a CQE.
const CQE_WORDS: usize = size_of::<kite_cqe>() / 4;

/// I/O queue with the memory that its requests use. The ring mapping is never unmapped.
pub(crate) struct MappedQueue {
    pub(crate) number: u64,
    pub(crate) entries: u32,
    pub(crate) memory: Box<[u8]>,
    base: usize,
    len: usize,
}

impl MappedQueue {
    /// Creates a queue of `entries` entries, with `memory` bytes for data.
    pub(crate) fn new(device: &Device, entries: u32, memory: usize) -> anyhow::Result<Self> {
        let memory = vec![0; memory].into_boxed_slice();
        let mut queue = kite_create_queue {
            addr: memory.as_ptr() as u64,
            len: memory.len() as u64,
            entries,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_CREATE_QUEUE_NR, &mut queue);
        ensure!(errno == 0, "cannot create a queue: {}", symbol(errno));
        let len = queue.size as usize;
        Ok(Self {
            number: queue.queue,
            entries,
            memory,
            base: device.map(queue.offset, len, libc::MAP_SHARED)?,
            len,
        })
    }

    /// Returns the size in bytes of the ring mapping.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the word at `at` modulo the size of the mapping. `at` must be a multiple of 4.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the mapping is never unmapped. `at` and the size of the mapping are multiples of 4.
        unsafe { AtomicU32::from_ptr((self.base + at % self.len) as *mut u32) }
    }

    /// Stores `words` from `at` on.
    pub(crate) fn store_words(&self, at: usize, words: &[u32]) {
        for (i, word) in words.iter().enumerate() {
            self.word(at + 4 * i).store(*word, Ordering::Relaxed);
        }
    }

    /// Writes SQE `n` without publishing it.
    pub(crate) fn write_sqe(&self, n: u32, words: &[u32; SQE_WORDS]) {
        let index = (n % self.entries) as usize;
        self.store_words(KITE_QUEUE_SQ_OFFSET as usize + 4 * SQE_WORDS * index, words);
    }

    /// Returns the offset of the CQ, which follows the SQ.
    pub(crate) fn cq_offset(&self) -> usize {
        KITE_QUEUE_SQ_OFFSET as usize + 4 * SQE_WORDS * self.entries as usize
    }

    /// Submits one request and waits for its completion. Returns the tag, the value and the errno.
    ///
    /// No other request may be in flight.
    pub(crate) fn execute(&self, device: &Device, words: &[u32; SQE_WORDS]) -> (u64, u64, Errno) {
        let results = self.execute_all(device, std::slice::from_ref(words));
        results.map_or_else(|errno| (0, 0, errno), |all| all[0])
    }

    /// Submits the requests `all` and waits for them. See [`Self::execute`].
    ///
    /// The queue must have at least as many entries as requests.
    pub(crate) fn execute_all(
        &self,
        device: &Device,
        all: &[[u32; SQE_WORDS]],
    ) -> Result<Vec<(u64, u64, Errno)>, Errno> {
        let first = self.word(CQ_TAIL).load(Ordering::Acquire);
        let end = first.wrapping_add(all.len() as u32);
        let numbers = || (0..all.len() as u32).map(|i| first.wrapping_add(i));
        for (n, words) in numbers().zip(all) {
            self.write_sqe(n, words);
        }
        self.word(SQ_TAIL).store(end, Ordering::Release);
        let mut enter = kite_enter {
            queue: self.number,
            want: all.len() as u32,
            timeout_ms: 60_000,
            ..Default::default()
        };
        match device.ioctl(KITE_IOC_ENTER_NR, &mut enter) {
            0 => {}
            errno => return Err(errno),
        }
        let completions = numbers().map(|n| self.read_cqe(n)).collect();
        self.word(CQ_HEAD).store(end, Ordering::Release);
        Ok(completions)
    }

    fn read_cqe(&self, n: u32) -> (u64, u64, Errno) {
        let at = self.cq_offset() + 4 * CQE_WORDS * (n % self.entries) as usize;
        let word = |i: usize| u64::from(self.word(at + 4 * i).load(Ordering::Relaxed));
        let long = |i: usize| word(i) | (word(i + 1) << 32);
        (long(0), long(2), word(4) as Errno)
    }
}
