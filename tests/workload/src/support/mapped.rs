// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A queue pair by bare requests, so that anything can be written to it.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::ensure;

use crate::support::abi::*;

pub(crate) const SQ_TAIL: usize = offset_of!(kite_ring_header, sq_tail);
pub(crate) const FLAGS: usize = offset_of!(kite_ring_header, flags);
pub(crate) const CQ_HEAD: usize = offset_of!(kite_ring_header, cq_head);
pub(crate) const CQ_TAIL: usize = offset_of!(kite_ring_header, cq_tail);

/// Words of a submission, and of a completion.
pub(crate) const SUBMISSION: usize = size_of::<kite_sqe>() / 4;
const COMPLETION: usize = size_of::<kite_cqe>() / 4;

/// A queue pair, and the memory that its requests use. It is never unmapped.
pub(crate) struct Mapped {
    pub(crate) number: u64,
    pub(crate) entries: u32,
    pub(crate) memory: Box<[u8]>,
    base: usize,
    len: usize,
}

impl Mapped {
    /// Makes one.
    pub(crate) fn new(device: &Device, entries: u32, memory: usize) -> anyhow::Result<Self> {
        let memory = vec![0; memory].into_boxed_slice();
        let mut queue = kite_create_queue {
            addr: memory.as_ptr() as u64,
            len: memory.len() as u64,
            entries,
            ..Default::default()
        };
        let errno = device.ask(KITE_IOC_CREATE_QUEUE_NR, &mut queue);
        ensure!(errno == 0, "a queue: {}", symbol(errno));
        let len = queue.size as usize;
        Ok(Self {
            number: queue.queue,
            entries,
            memory,
            base: device.map(queue.offset, len, libc::MAP_SHARED)?,
            len,
        })
    }

    /// Bytes that are shared with the kernel.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The word at `at`, a multiple of four that may be beyond the end, and is then taken modulo that.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: it is mapped for ever, and aligned, as mappings and structures of the ABI are.
        unsafe { AtomicU32::from_ptr((self.base + at % self.len) as *mut u32) }
    }

    /// Writes words.
    pub(crate) fn put(&self, at: usize, words: &[u32]) {
        for (i, word) in words.iter().enumerate() {
            self.word(at + 4 * i).store(*word, Ordering::Relaxed);
        }
    }

    /// Writes SQE `n` without publishing it.
    pub(crate) fn write(&self, n: u32, words: &[u32; SUBMISSION]) {
        let index = (n % self.entries) as usize;
        self.put(
            KITE_QUEUE_SQ_OFFSET as usize + 4 * SUBMISSION * index,
            words,
        );
    }

    /// Where the submissions end, and the completions begin.
    pub(crate) fn completions(&self) -> usize {
        KITE_QUEUE_SQ_OFFSET as usize + 4 * SUBMISSION * self.entries as usize
    }

    /// Submits, and waits for its completion: tag, value and error. Nothing else may be under way.
    pub(crate) fn ask(&self, device: &Device, words: &[u32; SUBMISSION]) -> (u64, u64, Errno) {
        let asked = self.ask_all(device, std::slice::from_ref(words));
        asked.map_or_else(|errno| (0, 0, errno), |all| all[0])
    }

    /// Submits several requests, at most as many as the queue has entries, and waits for them. See [`Self::ask`].
    pub(crate) fn ask_all(
        &self,
        device: &Device,
        all: &[[u32; SUBMISSION]],
    ) -> Result<Vec<(u64, u64, Errno)>, Errno> {
        let first = self.word(CQ_TAIL).load(Ordering::Acquire);
        let end = first.wrapping_add(all.len() as u32);
        let numbers = || (0..all.len() as u32).map(|i| first.wrapping_add(i));
        for (n, words) in numbers().zip(all) {
            self.write(n, words);
        }
        self.word(SQ_TAIL).store(end, Ordering::Release);
        let mut enter = kite_enter {
            queue: self.number,
            want: all.len() as u32,
            timeout_ms: 60_000,
            ..Default::default()
        };
        match device.ask(KITE_IOC_ENTER_NR, &mut enter) {
            0 => {}
            errno => return Err(errno),
        }
        let completions = numbers().map(|n| self.completion(n)).collect();
        self.word(CQ_HEAD).store(end, Ordering::Release);
        Ok(completions)
    }

    fn completion(&self, n: u32) -> (u64, u64, Errno) {
        let at = self.completions() + 4 * COMPLETION * (n % self.entries) as usize;
        let word = |i: usize| u64::from(self.word(at + 4 * i).load(Ordering::Relaxed));
        let long = |i: usize| word(i) | (word(i + 1) << 32);
        (long(0), long(2), word(4) as Errno)
    }
}
