// SPDX-License-Identifier: GPL-2.0

//! Splits the scatter-gather list of a buffer into work requests that the RNIC accepts.

use crate::verbs::work::Sge;

/// Limits of one work request.
#[derive(Clone, Copy)]
pub(crate) struct WrLimits {
    /// Maximum scatter-gather entries: from 1 to the size of the array passed to [`SglSplitter::next_sgl`].
    pub(crate) max_sges: usize,
    /// Maximum bytes, at least 1; `None` if unlimited.
    ///
    /// The bytes must fit in `max_sges - 2` whole-page entries. The byte limit is then always reached before
    /// the entry limit, also with partial first and last entries. [`Self::max_wrs`] relies on this order.
    pub(crate) max_bytes: Option<usize>,
}

impl WrLimits {
    /// Returns the maximum number of work requests for a buffer of `len` bytes in `sge_count` entries.
    pub(crate) fn max_wrs(&self, sge_count: usize, len: usize) -> usize {
        match self.max_bytes {
            Some(bytes) => len.div_ceil(bytes.max(1)),
            None => sge_count.div_ceil(self.max_sges.max(1)),
        }
    }
}

/// Splits the entries of `sges` into lists for one work request each.
pub(crate) struct SglSplitter<I> {
    sges: I,
    /// Remainder of an entry that exceeded the byte limit of the previous request.
    remainder: Option<Sge>,
    limits: WrLimits,
}

impl<I: Iterator<Item = Sge>> SglSplitter<I> {
    /// Creates a splitter for `sges`.
    pub(crate) fn new(sges: I, limits: WrLimits) -> Self {
        let remainder = None;
        Self {
            sges,
            remainder,
            limits,
        }
    }

    /// Stores the entries of the next request in `sgl`, and returns the used part. Returns an empty slice at
    /// the end.
    pub(crate) fn next_sgl<'r>(&mut self, sgl: &'r mut [Sge]) -> &'r [Sge] {
        let mut bytes_left = self.limits.max_bytes.unwrap_or(usize::MAX);
        let mut count = 0;
        for out in sgl.iter_mut().take(self.limits.max_sges) {
            let Some(sge) = self.remainder.take().or_else(|| self.sges.next()) else {
                break;
            };
            let (front, remainder) = sge.split_at(bytes_left);
            (*out, self.remainder) = (front, remainder);
            count += 1;
            bytes_left -= front.len() as usize;
            if bytes_left == 0 {
                break;
            }
        }
        &sgl[..count]
    }
}
