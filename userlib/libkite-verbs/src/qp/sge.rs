// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Scatter-gather lists.
//!
//! A request of kite has one contiguous buffer at each end. If a list has several SGEs, the data goes through a bounce
//! buffer: it is gathered before a send, and scattered after a receive.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Buffer, Mr};

use super::EmulatedQp;
use crate::errno::Result;
use crate::header::ibv_sge;
use crate::memory::EmulatedMr;

/// Maximum number and length of the bounce buffers that a QP keeps.
const MAX_SPARE_MRS: usize = 16;
const MAX_SPARE_MR_BYTES: usize = 64 << 10;

/// Part of a memory region.
pub(crate) struct Segment {
    mr: Arc<EmulatedMr>,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// Local memory of a request.
pub(crate) enum LocalBuffer {
    Contiguous(Segment),
    Scattered(SegmentList),
}

/// Segments in the order of their bytes.
pub(crate) struct SegmentList(Vec<Segment>);

/// Contiguous buffer in place of segments.
pub(crate) struct BounceBuffer {
    segments: SegmentList,
    pub(crate) mr: Arc<Mr>,
    /// The request writes to the buffer.
    is_inbound: bool,
}

/// Returns an SGE list of verbs as a slice.
///
/// # Safety
/// There are `count` entries, if `count` is above 0.
pub(crate) unsafe fn sge_slice<'a>(ptr: *const ibv_sge, count: c_int) -> &'a [ibv_sge] {
    match usize::try_from(count) {
        // SAFETY: guaranteed by the caller.
        Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(ptr, count) },
        _ => &[],
    }
}

/// Returns the sum of the lengths.
pub(crate) fn total_len(list: &[ibv_sge]) -> u64 {
    list.iter().map(|sge| u64::from(sge.length)).sum()
}

impl Segment {
    /// Returns `None` if the program may not access the memory in this way.
    fn lookup(qp: &EmulatedQp, sge: &ibv_sge, is_write: bool) -> Option<Self> {
        let mr = qp.session.find_mr(sge.lkey)?;
        let offset = mr.sge_offset(&qp.pd, sge, is_write)?;
        let len = sge.length as usize;
        Some(Self { mr, offset, len })
    }

    pub(crate) fn kite_mr(&self) -> &Arc<Mr> {
        &self.mr.kite_mr
    }
}

impl LocalBuffer {
    /// Returns the memory of a list. Returns `None` if the list has no bytes, or the program may not access them in
    /// this way.
    pub(crate) fn lookup(qp: &EmulatedQp, list: &[ibv_sge], is_write: bool) -> Option<Self> {
        // An SGE of length 0 needs no valid key.
        let mut sges = list.iter().filter(|sge| sge.length != 0);
        let first = Segment::lookup(qp, sges.next()?, is_write)?;
        let Some(second) = sges.next() else {
            return Some(Self::Contiguous(first));
        };
        let remaining = std::iter::once(second).chain(sges);
        let remaining = remaining.map(|sge| Segment::lookup(qp, sge, is_write));
        let segments = std::iter::once(Some(first)).chain(remaining);
        segments
            .collect::<Option<_>>()
            .map(|all| Self::Scattered(SegmentList(all)))
    }
}

impl SegmentList {
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|segment| segment.len).sum()
    }

    /// Copies the segments to a buffer.
    fn gather(&self, to: &Buffer) -> kite::Result<()> {
        let mut offset = 0;
        for segment in &self.0 {
            let mut bytes = vec![0; segment.len];
            segment
                .kite_mr()
                .buffer()
                .load(segment.offset, &mut bytes)?;
            to.store(offset, &bytes)?;
            offset += segment.len;
        }
        Ok(())
    }

    /// Copies the first `len` bytes of a buffer to the segments.
    pub(crate) fn scatter(&self, from: &Buffer, len: usize) -> kite::Result<()> {
        let mut offset = 0;
        for segment in &self.0 {
            let mut bytes = vec![0; segment.len.min(len - offset)];
            from.load(offset, &mut bytes)?;
            segment.kite_mr().buffer().store(segment.offset, &bytes)?;
            offset += bytes.len();
        }
        Ok(())
    }
}

impl BounceBuffer {
    /// Takes a buffer from `spare` or registers one. Gathers the segments if the request reads them.
    ///
    /// # Errors
    /// If memory is exhausted, see `Session::alloc_mr`.
    pub(crate) fn new(
        qp: &EmulatedQp,
        segments: SegmentList,
        is_inbound: bool,
        spare: &mut Vec<Arc<Mr>>,
    ) -> Result<Self> {
        let fits = |mr: &Arc<Mr>| mr.buffer().len() >= segments.len();
        let mr = match spare.iter().position(fits) {
            Some(index) => spare.swap_remove(index),
            None => qp.session.alloc_mr(segments.len())?,
        };
        if !is_inbound {
            segments.gather(mr.buffer())?;
        }
        Ok(Self {
            segments,
            mr,
            is_inbound,
        })
    }

    /// Ends a request. Scatters the data if the request succeeded, and keeps the buffer within the limits for spare
    /// ones.
    pub(crate) fn finish(self, succeeded: bool, spare: &mut Vec<Arc<Mr>>) {
        if self.is_inbound && succeeded {
            // Each segment was checked against its memory, which cannot shrink.
            let _ = self.segments.scatter(self.mr.buffer(), self.segments.len());
        }
        if spare.len() < MAX_SPARE_MRS && self.mr.buffer().len() <= MAX_SPARE_MR_BYTES {
            spare.push(self.mr);
        }
    }
}
