// SPDX-License-Identifier: GPL-2.0

//! Chunk locations of a mapping, which are withdrawn while the region moves.
//!
//! # Operation
//!
//! A region may move to other nodes while it is used ([`crate::region::home::migrate`]). The home quiesces
//! every mapping first ([`ChunkMapCell::try_quiesce`]). Accesses hold a [`RevocableGuard`] while they read
//! locations or send to them. So once the map is revoked, no access uses the old locations.
//! [`ChunkMapCell::resume`] installs the new ones. The version changes with each quiesce and each resume: an
//! access that has read a location earlier detects the move by the version.
//!
//! # Recovery
//!
//! When the home is fenced, the map is withdrawn as well ([`ChunkMapCell::suspend`]). Once the home is
//! reachable again, the mapping is opened again there and a new map installed ([`super::reopen`]).
//!
//! # Locking
//!
//! `ChunkMapCell::state` (mutex) protects [`ChunkMapState`], and serializes installing, quiescing and
//! resuming. [`ChunkMapCell::close`] revokes the map after it has set `closed` and released the mutex. Only
//! the final revocation waits for guards, so no guard is waited for with the mutex held.
//! The `update` of a resume takes `Cluster::state` and `LoanTable::chunks_by_addr` inside.

use crate::{
    errno::{TryError, TryResult},
    region::lend::loan::LentChunk,
    sys::revocable::{RevocableGuard, SleepableRevocable},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::{layout::Piece, wire::ChunkLocation};

/// Location of a chunk.
pub(crate) enum MappedChunk {
    /// On this node.
    Local(Arc<LentChunk>),
    /// On another node.
    Remote(ChunkLocation),
}

/// Location of a piece of a region.
pub(crate) enum PieceLocation {
    /// In this chunk on this node.
    Local(Arc<LentChunk>),
    /// At this address of the global memory region of another node.
    Remote(ChunkLocation),
}

/// Locations of all chunks of a region, as of one version.
pub(crate) struct ChunkMap {
    pub(crate) version: u32,
    pub(crate) chunks: KVVec<MappedChunk>,
}

impl ChunkMap {
    /// Returns the location of a piece.
    ///
    /// # Errors
    ///
    /// - `EIO`: the region has no such chunk.
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

/// Relation of a mapping to the home of its region.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HomeLink {
    /// The home has the mapping.
    Connected,
    /// The home is reachable again, and has no such mapping yet.
    Reopening,
    /// The home is unreachable.
    Unreachable,
}

/// State of a chunk map that also exists while the map is withdrawn.
struct ChunkMapState {
    home_link: HomeLink,
    /// Changes whenever locations obtained before may be outdated. Wraps around.
    version: u32,
    quiesced: bool,
    closed: bool,
    /// Map of a quiesced mapping.
    saved_map: Option<ChunkMap>,
}

/// Revocable chunk map of a mapping.
#[pin_data]
pub(crate) struct ChunkMapCell {
    #[pin]
    map: SleepableRevocable<ChunkMap>,
    #[pin]
    state: Mutex<ChunkMapState>,
}

impl ChunkMapCell {
    /// Creates a cell without map. [`Self::install`] adds one.
    pub(crate) fn new() -> impl PinInit<Self> {
        let state = ChunkMapState {
            home_link: HomeLink::Connected,
            version: 0,
            quiesced: false,
            closed: false,
            saved_map: None,
        };
        pin_init!(Self {
            map <- SleepableRevocable::new_revoked(),
            state <- new_mutex!(state, "ChunkMapCell::state"),
        })
    }

    /// Returns the revocable value that holds the map.
    pub(crate) fn revocable(&self) -> &SleepableRevocable<ChunkMap> {
        &self.map
    }

    /// Returns the map, or `None` if it is not installed, withdrawn or closed.
    pub(crate) fn try_access(&self) -> Option<RevocableGuard<'_, ChunkMap>> {
        self.map.try_access()
    }

    /// Returns the current version, to be read before the locations are requested from the home.
    pub(crate) fn version(&self) -> u32 {
        self.state.lock().version
    }

    /// Returns the relation to the home.
    pub(crate) fn home_link(&self) -> HomeLink {
        self.state.lock().home_link
    }

    /// Installs a chunk map, with locations from a connected home. Does nothing if the cell is closed.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the chunks may have moved since the version of `chunk_map`.
    /// - `EEXIST`: a map is installed.
    pub(crate) fn install(&self, chunk_map: ChunkMap) -> TryResult {
        let mut state = self.state.lock();
        if state.quiesced || state.version != chunk_map.version {
            return Err(TryError::WouldBlock);
        }
        if state.closed {
            return Ok(());
        }
        self.map.install(chunk_map)?;
        state.home_link = HomeLink::Connected;
        Ok(())
    }

    /// Withdraws the map because the home was fenced, and waits until no access holds it. `link` is the new
    /// relation to the home, until [`Self::install`].
    pub(crate) fn suspend(&self, link: HomeLink) {
        let mut state = self.state.lock();
        state.home_link = link;
        state.version = state.version.wrapping_add(1);
        // The home does not resume a mapping that it does not know any longer.
        state.quiesced = false;
        let saved_map = state.saved_map.take();
        drop(state);
        drop((saved_map, self.map.revoke()));
    }

    /// Withdraws the map until [`Self::resume`]. New accesses are rejected in any case.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: an access still holds the map.
    pub(crate) fn try_quiesce(&self) -> TryResult {
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

    /// Publishes the map again, changed by `update`. `update` is not called if this node has no map.
    pub(crate) fn resume(&self, update: impl FnOnce(&mut [MappedChunk])) {
        let mut state = self.state.lock();
        if state.quiesced {
            // Locations requested from the home since the quiesce may be the old ones.
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
                // Cannot fail: the value was taken out under the same lock, so no other thread installs one.
                let _ = self.map.install(chunk_map);
            }
            // An access may still have held the map at the last quiesce. In that case no chunk was moved.
            None => drop(self.map.unrevoke()),
        }
    }

    /// Withdraws the map permanently, and waits until no access holds it.
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
