// SPDX-License-Identifier: GPL-2.0

//! Where the chunks of a region are, as its home keeps it, and of which leases they are.

use super::lease::Key;
use core::num::NonZeroUsize;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*};
use kite_core::wire::Place;

/// Most leases of a region: those of where it is, and of where it was and goes.
const LEASES_MAX: usize = 1 << 14;

/// A lease, and how many of its chunks are the region's.
struct Lease {
    key: Key,
    chunks: u32,
}

/// Which chunk of a lease it is.
#[derive(Clone, Copy, Default)]
pub(super) struct Origin {
    /// The number of the lease among those of the region.
    pub(super) lease: u16,
    /// The number of the chunk in the lease.
    pub(super) chunk: u32,
}

/// Where the chunks of a region are.
pub(crate) struct Placement {
    places: KVVec<Place>,
    origins: KVVec<Origin>,
    /// Those that were given back are missing.
    leases: KVec<Option<Lease>>,
}

impl Placement {
    /// Of chunks at these places, which are of `leases` in turn, like cards.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there are no leases, `ENOMEM`.
    pub(super) fn new(places: KVVec<Place>, leases: &[Key]) -> Result<Self> {
        let turns = NonZeroUsize::new(leases.len()).ok_or(EINVAL)?;
        let count = places.len();
        let mut made = Self {
            origins: KVVec::from_elem(Origin::default(), count, GFP_KERNEL_ACCOUNT)?,
            places,
            leases: KVec::with_capacity(turns.get(), GFP_KERNEL_ACCOUNT)?,
        };
        for (i, origin) in made.origins.iter_mut().enumerate() {
            *origin = Origin {
                lease: (i % turns) as u16,
                chunk: (i / turns) as u32,
            };
        }
        for (i, &key) in leases.iter().enumerate() {
            let chunks = (i..count).step_by(turns.get()).len() as u32;
            made.leases
                .push(Some(Lease { key, chunks }), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(made)
    }

    /// The places of all chunks.
    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }

    /// The leases, by their numbers. Those that were given back are missing.
    pub(super) fn leases(&self) -> impl ExactSizeIterator<Item = Option<Key>> + '_ {
        let key = |lease: &Option<Lease>| lease.as_ref().map(|lease| lease.key);
        self.leases.iter().map(key)
    }

    /// Enters a lease of which no chunk is the region's yet; returns its number.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, also if there are too many.
    pub(super) fn add(&mut self, key: Key) -> Result<u16> {
        let lease = Some(Lease { key, chunks: 0 });
        if let Some(free) = self.leases.iter().position(Option::is_none) {
            self.leases[free] = lease;
            return Ok(free as u16);
        }
        if self.leases.len() == LEASES_MAX {
            return Err(ENOMEM);
        }
        self.leases.push(lease, GFP_KERNEL)?;
        Ok(self.leases.len() as u16 - 1)
    }

    fn count(&mut self, lease: u16, change: i32) {
        if let Some(Some(lease)) = self.leases.get_mut(usize::from(lease)) {
            lease.chunks = lease.chunks.wrapping_add_signed(change);
        }
    }

    /// A chunk has moved. Returns what it was before.
    pub(super) fn set(&mut self, chunk: u32, place: Place, origin: Origin) -> Origin {
        let chunk = chunk as usize;
        let before = core::mem::replace(&mut self.origins[chunk], origin);
        self.places[chunk] = place;
        self.count(before.lease, -1);
        self.count(origin.lease, 1);
        before
    }

    /// The lease of that number, if any of its chunks is the region's.
    pub(super) fn used(&self, lease: u16) -> Option<Key> {
        let lease = self.leases.get(usize::from(lease))?.as_ref()?;
        (lease.chunks != 0).then_some(lease.key)
    }

    /// Takes a lease out of which no chunk is the region's any more.
    pub(super) fn take_unused(&mut self) -> Option<Key> {
        let unused = |lease: &Option<Lease>| lease.as_ref().is_some_and(|lease| lease.chunks == 0);
        let at = self.leases.iter().position(unused)?;
        self.leases[at].take().map(|lease| lease.key)
    }
}
