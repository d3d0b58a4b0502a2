// SPDX-License-Identifier: GPL-2.0

//! Short accesses of one mapping that are posted together, one way and to one node.
//!
//! What was looked up for the first, by which it may go, holds for those that join it: of them only the bytes
//! are looked at.

use super::{
    io::{Access, Looker},
    mapping::{KeptPass, Mapping},
    places::Found,
};
use crate::{
    fabric::{
        batch::{self, Placed, Works},
        flight::{Direction, Mover, Part, Watched},
        Fabric,
    },
    sys::memory::Memory,
    verbs::dma::DmaArena,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::layout::Layout;

/// A batch of accesses. Dropping it gives them up.
pub(crate) struct Batch {
    inner: batch::Batch<KeptPass>,
    layout: Layout,
}

impl Batch {
    /// One for parts like this first one, of a region that is in the places of this version. There is none
    /// if the part is too long.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Access::run`].
    pub(super) fn new(
        mover: &Mover<'_>,
        mapping: &Arc<Mapping>,
        layout: Layout,
        version: u32,
        first: Part,
        arena: Option<&Arc<DmaArena>>,
    ) -> Result<Option<Self>> {
        let peer = mover.fabric.peer_in(first.life)?;
        let conn = peer.pick(mover.tenant.share())?;
        let permit = || mapping.keep_pass(version);
        let inner = batch::Batch::new(mover, &conn, first, arena, permit)?;
        let inner = inner.filter(|inner| inner.has_room(mover.memory, first.len));
        Ok(inner.map(|inner| Self { inner, layout }))
    }

    /// Which way its accesses go.
    pub(crate) fn direction(&self) -> Direction {
        self.inner.direction()
    }

    /// Whose they are.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        self.inner.permit().mapping()
    }

    /// Whether no other is to join them.
    pub(crate) fn is_full(&self) -> bool {
        self.inner.is_full()
    }

    /// Adds an access that can go with the others.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if its turn has not come; else as for [`Access::run`].
    pub(super) fn join(
        &mut self,
        fabric: &Fabric,
        access: &Access,
        memory: &Memory,
        looker: &mut Looker<'_>,
    ) -> Result<Option<Placed>> {
        let fits = access.len != 0 && self.inner.has_room(memory, access.len as usize);
        if access.direction != self.direction() || !fits {
            return Ok(None);
        }
        let Some(piece) = access.one_piece(&self.layout, looker)? else {
            return Ok(None);
        };
        let found = self.inner.permit().places().find(piece)?;
        let place = match found {
            Found::Remote(place) if place.life == self.inner.life() => place,
            _ => return Ok(None),
        };
        if !looker.may_go(access)? {
            return Err(EAGAIN);
        }
        let part = access.part(place);
        self.add(fabric, memory, part, looker.works).map(Some)
    }

    /// Adds a part for which there is room.
    ///
    /// # Errors
    ///
    /// As for [`batch::Batch::add`].
    pub(super) fn add(
        &mut self,
        fabric: &Fabric,
        memory: &Memory,
        part: Part,
        works: &mut Works,
    ) -> Result<Placed> {
        self.inner.add(fabric, memory, part, works)
    }

    /// Posts them.
    pub(crate) fn post(
        self,
        fabric: &Fabric,
        works: &mut Works,
        now: Instant<Monotonic>,
    ) -> Watched<KeptPass> {
        self.inner.post(fabric, works, now)
    }
}
