// SPDX-License-Identifier: GPL-2.0

//! Where the bytes of a mapped region are, for as long as they stay there.
//!
//! A region may move to other nodes while it is used ([`super::migrate`]). Its home then has every mapping pause:
//! who finds places, or sends to them, is inside of a gate meanwhile, so that when the gate is closed nobody
//! knows the old places any more. What was found before and is sent after that is told apart by its version.

use super::lease::Lent;
use crate::sys::gate::{Gate, Inside};
use kernel::{new_mutex, prelude::*, sync::Arc, sync::Mutex};
use kite_core::{layout::Piece, wire::Place};

/// Where a chunk is.
pub(crate) enum Chunk {
    /// On this node.
    Local(Arc<Lent>),
    /// On another.
    Remote(Place),
}

/// Where a piece of a region is.
pub(crate) enum Found {
    /// In this chunk of this node.
    Local(Arc<Lent>),
    /// There, in the global memory region of another node.
    Remote(Place),
}

/// Where the chunks of a region are.
pub(crate) struct Places {
    pub(crate) version: u32,
    pub(crate) chunks: KVVec<Chunk>,
}

impl Places {
    /// Finds a piece.
    ///
    /// # Errors
    ///
    /// `EIO` if there is no such chunk.
    pub(crate) fn find(&self, piece: Piece) -> Result<Found> {
        Ok(match self.chunks.get(piece.chunk as usize).ok_or(EIO)? {
            Chunk::Local(pages) => Found::Local(pages.clone()),
            Chunk::Remote(Place { life, addr }) => Found::Remote(Place {
                life: *life,
                addr: addr + u64::from(piece.offset),
            }),
        })
    }
}

/// What becomes of the places while nobody may know them.
struct Rest {
    /// Another whenever places that were told may have changed.
    version: u32,
    paused: bool,
    over: bool,
    /// Those of a mapping that is paused.
    kept: Option<Places>,
}

/// The places of a mapping.
#[pin_data]
pub(crate) struct Whereabouts {
    #[pin]
    gate: Gate<Places>,
    #[pin]
    rest: Mutex<Rest>,
}

impl Whereabouts {
    /// Not known yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        let rest = Rest {
            version: 0,
            paused: false,
            over: false,
            kept: None,
        };
        pin_init!(Self {
            gate <- Gate::closed(),
            rest <- new_mutex!(rest),
        })
    }

    /// The gate in which they are.
    pub(crate) fn gate(&self) -> &Gate<Places> {
        &self.gate
    }

    /// The places, unless nobody may know them now.
    pub(crate) fn look(&self) -> Option<Inside<'_, Places>> {
        self.gate.enter()
    }

    /// As of which version places are about to be asked for.
    pub(crate) fn version(&self) -> u32 {
        self.rest.lock().version
    }

    /// Says where the chunks are, as of a version.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if they may have moved since.
    pub(crate) fn fill(&self, places: Places) -> Result {
        let rest = self.rest.lock();
        if rest.paused || rest.version != places.version {
            return Err(EAGAIN);
        }
        if rest.over {
            return Ok(());
        }
        self.gate.open(places)
    }

    /// Lets nobody know the places.
    ///
    /// # Errors
    ///
    /// `EAGAIN` while somebody does.
    pub(crate) fn pause(&self) -> Result {
        let mut rest = self.rest.lock();
        if !rest.paused {
            rest.version = rest.version.wrapping_add(1);
            rest.paused = true;
        }
        let taken = self.gate.try_close()?;
        if !rest.over {
            rest.kept = taken.or(rest.kept.take());
        }
        Ok(())
    }

    /// Lets all know the places again, after `change` if they are known here at all.
    pub(crate) fn resume(&self, change: impl FnOnce(&mut [Chunk])) {
        let mut rest = self.rest.lock();
        if rest.paused {
            // Who asked for places meanwhile may have been told the old ones.
            rest.version = rest.version.wrapping_add(1);
            rest.paused = false;
        }
        if rest.over {
            return;
        }
        match rest.kept.take() {
            Some(mut places) => {
                places.version = rest.version;
                change(&mut places.chunks);
                // Who took them out is the only one to put them back.
                let _ = self.gate.open(places);
            }
            // Some may still have been inside: then nothing has moved.
            None => drop(self.gate.unshut()),
        }
    }

    /// Lets nobody know the places ever again, and waits for those who do.
    pub(crate) fn end(&self) {
        let kept = {
            let mut rest = self.rest.lock();
            rest.over = true;
            rest.kept.take()
        };
        drop(kept);
        drop(self.gate.close());
    }
}
