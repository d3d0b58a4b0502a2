// SPDX-License-Identifier: GPL-2.0

//! Cuts the scatter list of a buffer into requests that the RNIC takes.

use crate::verbs::work::Sge;

/// What one request may have.
#[derive(Clone, Copy)]
pub(crate) struct WrLimits {
    /// Scatter-gather entries, at least one, and no more than there is room for.
    pub(crate) max_sges: usize,
    /// Bytes, at least one, if there is such a bound; more than fit in two entries less than there may be.
    pub(crate) max_bytes: Option<usize>,
}

impl WrLimits {
    /// Requests that a buffer of `len` bytes in so many entries needs at most.
    pub(crate) fn max_wrs(&self, sge_count: usize, len: usize) -> usize {
        match self.max_bytes {
            Some(bytes) => len.div_ceil(bytes.max(1)),
            None => sge_count.div_ceil(self.max_sges.max(1)),
        }
    }
}

/// Cuts `entries`.
pub(crate) struct SglSplitter<I> {
    sges: I,
    /// What is left of an entry that was too long.
    remainder: Option<Sge>,
    limits: WrLimits,
}

impl<I: Iterator<Item = Sge>> SglSplitter<I> {
    /// Begins.
    pub(crate) fn new(sges: I, limits: WrLimits) -> Self {
        let remainder = None;
        Self {
            sges,
            remainder,
            limits,
        }
    }

    /// Puts the entries of the next request into `room`; none if there is no other request.
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
