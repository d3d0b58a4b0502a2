// SPDX-License-Identifier: GPL-2.0

//! Cuts the scatter list of a buffer into requests that the RNIC takes.

use crate::verbs::work::Sge;

/// What one request may have.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// Scatter-gather entries, at least one, and no more than there is room for.
    pub(crate) entries: usize,
    /// Bytes, at least one, if there is such a bound; more than fit in two entries less than there may be.
    pub(crate) bytes: Option<usize>,
}

impl Bounds {
    /// Requests that a buffer of `len` bytes in so many entries needs at most.
    pub(crate) fn requests(&self, entries: usize, len: usize) -> usize {
        match self.bytes {
            Some(bytes) => len.div_ceil(bytes.max(1)),
            None => entries.div_ceil(self.entries.max(1)),
        }
    }
}

/// Cuts `entries`.
pub(crate) struct Cutter<I> {
    entries: I,
    /// What is left of an entry that was too long.
    rest: Option<Sge>,
    bounds: Bounds,
}

impl<I: Iterator<Item = Sge>> Cutter<I> {
    /// Begins.
    pub(crate) fn new(entries: I, bounds: Bounds) -> Self {
        let rest = None;
        Self {
            entries,
            rest,
            bounds,
        }
    }

    /// Puts the entries of the next request into `room`; none if there is no other request.
    pub(crate) fn next<'r>(&mut self, room: &'r mut [Sge]) -> &'r [Sge] {
        let mut left = self.bounds.bytes.unwrap_or(usize::MAX);
        let mut count = 0;
        for place in room.iter_mut().take(self.bounds.entries) {
            let Some(entry) = self.rest.take().or_else(|| self.entries.next()) else {
                break;
            };
            let (front, rest) = entry.split(left);
            (*place, self.rest) = (front, rest);
            count += 1;
            left -= front.len() as usize;
            if left == 0 {
                break;
            }
        }
        &room[..count]
    }
}
