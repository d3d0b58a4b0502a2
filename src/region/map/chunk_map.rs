// SPDX-License-Identifier: GPL-2.0

//! Where the bytes of a mapped region are, for as long as they stay there.
//!
//! A region may move to other nodes while it is used ([`crate::region::home::migrate`]). Its home then has every mapping pause:
//! who finds places, or sends to them, is inside of a gate meanwhile, so that when the gate is closed nobody
//! knows the old places any more. What was found before and is sent after that is told apart by its version.

use crate::{
    region::lend::loan::LentChunk,
    sys::revocable::{RevocableGuard, SleepableRevocable},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::{layout::Piece, wire::ChunkLocation};

/// Where a chunk is.
pub(crate) enum MappedChunk {
    /// On this node.
    Local(Arc<LentChunk>),
    /// On another.
    Remote(ChunkLocation),
}

/// Where a piece of a region is.
pub(crate) enum PieceLocation {
    /// In this chunk of this node.
    Local(Arc<LentChunk>),
    /// There, in the global memory region of another node.
    Remote(ChunkLocation),
}

/// Where the chunks of a region are.
pub(crate) struct ChunkMap {
    pub(crate) version: u32,
    pub(crate) chunks: KVVec<MappedChunk>,
}

impl ChunkMap {
    /// Finds a piece.
    ///
    /// # Errors
    ///
    /// `EIO` if there is no such chunk.
    pub(crate) fn find(&self, piece: Piece) -> Result<PieceLocation> {
        Ok(match self.chunks.get(piece.chunk as usize).ok_or(EIO)? {
            MappedChunk::Local(pages) => PieceLocation::Local(pages.clone()),
            MappedChunk::Remote(ChunkLocation { instance, addr }) => {
                PieceLocation::Remote(ChunkLocation {
                    instance: *instance,
                    addr: addr + u64::from(piece.offset),
                })
            }
        })
    }
}

/// What becomes of the places while nobody may know them.
struct ChunkMapState {
    /// Another whenever places that were told may have changed.
    version: u32,
    quiesced: bool,
    closed: bool,
    /// Those of a mapping that is paused.
    saved_map: Option<ChunkMap>,
}

/// The places of a mapping.
#[pin_data]
pub(crate) struct ChunkMapCell {
    #[pin]
    map: SleepableRevocable<ChunkMap>,
    #[pin]
    state: Mutex<ChunkMapState>,
}

impl ChunkMapCell {
    /// Not known yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        let state = ChunkMapState {
            version: 0,
            quiesced: false,
            closed: false,
            saved_map: None,
        };
        pin_init!(Self {
            map <- SleepableRevocable::new_revoked(),
            state <- new_mutex!(state),
        })
    }

    /// The gate in which they are.
    pub(crate) fn revocable(&self) -> &SleepableRevocable<ChunkMap> {
        &self.map
    }

    /// The places, unless nobody may know them now.
    pub(crate) fn try_access(&self) -> Option<RevocableGuard<'_, ChunkMap>> {
        self.map.try_access()
    }

    /// As of which version places are about to be asked for.
    pub(crate) fn version(&self) -> u32 {
        self.state.lock().version
    }

    /// Says where the chunks are, as of a version.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if they may have moved since.
    pub(crate) fn install(&self, chunk_map: ChunkMap) -> Result {
        let state = self.state.lock();
        if state.quiesced || state.version != chunk_map.version {
            return Err(EAGAIN);
        }
        if state.closed {
            return Ok(());
        }
        self.map.install(chunk_map)
    }

    /// Lets nobody know the places.
    ///
    /// # Errors
    ///
    /// `EAGAIN` while somebody does.
    pub(crate) fn try_quiesce(&self) -> Result {
        let mut state = self.state.lock();
        if !state.quiesced {
            state.version = state.version.wrapping_add(1);
            state.quiesced = true;
        }
        let removed_map = self.map.try_revoke()?;
        if !state.closed {
            state.saved_map = removed_map.or(state.saved_map.take());
        }
        Ok(())
    }

    /// Lets all know the places again, after `change` if they are known here at all.
    pub(crate) fn resume(&self, update: impl FnOnce(&mut [MappedChunk])) {
        let mut state = self.state.lock();
        if state.quiesced {
            // Who asked for places meanwhile may have been told the old ones.
            state.version = state.version.wrapping_add(1);
            state.quiesced = false;
        }
        if state.closed {
            return;
        }
        match state.saved_map.take() {
            Some(mut chunk_map) => {
                chunk_map.version = state.version;
                update(&mut chunk_map.chunks);
                // Who took them out is the only one to put them back.
                let _ = self.map.install(chunk_map);
            }
            // Some may still have been inside: then nothing has moved.
            None => drop(self.map.unrevoke()),
        }
    }

    /// Lets nobody know the places ever again, and waits for those who do.
    pub(crate) fn close(&self) {
        let saved_map = {
            let mut state = self.state.lock();
            state.closed = true;
            state.saved_map.take()
        };
        drop(saved_map);
        drop(self.map.revoke());
    }
}
