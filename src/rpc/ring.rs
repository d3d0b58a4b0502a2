// SPDX-License-Identifier: GPL-2.0

//! Rings of channels in regions.
//!
//! A ring is a region of one chunk at the node that reads the ring. The other node maps the region and writes
//! the messages.

use crate::region::{
    lend::loan::LentChunk,
    map::{chunk_map::MappedChunk, Mapping},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::ring;

/// Region and ID of a ring, as assigned by the ring's node.
#[derive(Clone, Copy)]
pub(crate) struct RingInfo {
    pub(crate) region: u64,
    pub(crate) id: u16,
}

/// Returns the only chunk of a ring at this node.
pub(super) fn local_chunk(mapping: &Mapping) -> Result<Arc<LentChunk>> {
    match mapping.access_chunks()?.chunks.first() {
        Some(MappedChunk::Local(chunk)) => Ok(chunk.clone()),
        _ => Err(EIO),
    }
}

/// Returns the capacity, in units, of the ring in a mapped region.
///
/// # Errors
///
/// - `ENOMEM`: the region has several chunks, since no contiguous memory was free.
/// - `EIO`: the length is not that of a ring.
pub(super) fn ring_capacity(mapping: &Mapping) -> Result<u32> {
    let layout = mapping.layout()?;
    if layout.chunk_count() != 1 {
        return Err(ENOMEM);
    }
    ring::capacity_units(layout.len()).ok_or(EIO)
}
