// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Lists of pieces of memory, for programs that send or receive several at a time.
//!
//! A request of kite's has one piece of memory at either end. So several are copied: together into memory of ours before
//! they go, and apart from there when they have come.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Buffer, Mr};

use crate::errno::Result;
use crate::header::ibv_sge;
use crate::memory::EmulatedMr;
use crate::pair::EmulatedQp;

/// Most pieces of a request.
pub(crate) const MAX_SGE: u32 = 16;

/// Memory that a queue pair keeps to spare, and most bytes of each.
const MAX_SPARE_MRS: usize = 16;
const MAX_SPARE_MR_BYTES: usize = 64 << 10;

/// Bytes of memory that was registered.
pub(crate) struct Segment {
    mr: Arc<EmulatedMr>,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// Where the bytes of a message are.
pub(crate) enum LocalBuffer {
    Contiguous(Segment),
    Scattered(SegmentList),
}

/// Pieces in the order of their bytes.
pub(crate) struct SegmentList(Vec<Segment>);

/// What kite has instead of pieces.
pub(crate) struct BounceBuffer {
    segments: SegmentList,
    pub(crate) mr: Arc<Mr>,
    /// The bytes are to come.
    is_inbound: bool,
}

/// A list as verbs have it.
///
/// # Safety
/// There are so many, if any.
pub(crate) unsafe fn sge_slice<'a>(ptr: *const ibv_sge, count: c_int) -> &'a [ibv_sge] {
    match usize::try_from(count) {
        // SAFETY: the caller vouches for it.
        Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(ptr, count) },
        _ => &[],
    }
}

/// The bytes of all.
pub(crate) fn total_len(list: &[ibv_sge]) -> u64 {
    list.iter().map(|sge| u64::from(sge.length)).sum()
}

impl Segment {
    /// None if the program may not use it so.
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
    /// That of a list with some bytes. None if the program may not use it so.
    pub(crate) fn lookup(qp: &EmulatedQp, list: &[ibv_sge], is_write: bool) -> Option<Self> {
        // Of no bytes there need not be a key.
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

    /// Copies them together.
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

    /// Copies the first bytes of what came together apart.
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
    /// Memory for the bytes of the pieces: those that are to go, or those that are to come. There may be some to spare.
    ///
    /// # Errors
    /// Those of registering memory.
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

    /// The request has ended, and may have been done. Its memory is to spare, unless there is much of that.
    pub(crate) fn finish(self, succeeded: bool, spare: &mut Vec<Arc<Mr>>) {
        if self.is_inbound && succeeded {
            // Each piece was found inside of its memory, which cannot become shorter.
            let _ = self.segments.scatter(self.mr.buffer(), self.segments.len());
        }
        if spare.len() < MAX_SPARE_MRS && self.mr.buffer().len() <= MAX_SPARE_MR_BYTES {
            spare.push(self.mr);
        }
    }
}
