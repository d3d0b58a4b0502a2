// SPDX-License-Identifier: GPL-2.0

//! Making, mapping and giving back regions, on behalf of a session.

use super::{
    lease::Key,
    mapping::Mapping,
    placement::Placement,
    places::Chunk,
    reclaim::Haste,
    region::{Blank, Region, Spec},
    Lmr, CONTROL_MS,
};
use crate::{
    errno,
    sys::{
        deadline::{settle, Deadline},
        pin::Pinned,
        watch::Watch,
    },
};
use core::ops::Deref;
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{
    layout::{initial_shift, share, Layout, Share, PAGE_SHIFT},
    name::Name,
    rights::Rights,
    wire::{Entry, Place, Reply, Request},
};

/// Most bytes of the table of a region's chunks: enough for 46 TiB in chunks of 4 MiB.
const TABLE_MAX: usize = 256 << 20;

/// Bytes that any node zeroes in a millisecond: 256 MiB in a second.
const ZEROED_PER_MS: u64 = (256 << 20) / 1000;

/// How long the zeroing of `len` bytes may take, in ms. A lender goes on for as long as it is waited for.
fn zeroing_ms(len: u64) -> u32 {
    u32::try_from(len / ZEROED_PER_MS).unwrap_or(u32::MAX)
}

/// What a user asks for.
pub(crate) struct Order<'a> {
    pub(crate) len: u64,
    /// The nodes to stripe over; none means this one.
    pub(crate) nodes: &'a [u32],
    pub(crate) name: Option<Name>,
    pub(crate) owner: u32,
    pub(crate) others: Rights,
}

impl Order<'_> {
    fn spec(&self, layout: Layout) -> Spec {
        Spec {
            name: self.name,
            layout,
            owner: self.owner,
            others: self.others,
        }
    }
}

/// A mapping that was given back. Until this is dropped its home can ask whether anything of it is still
/// under way.
pub(super) struct Retired {
    lmr: Arc<Lmr>,
    mapping: Arc<Mapping>,
}

impl Deref for Retired {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        self.lmr.mappings.remove(self.mapping.id);
    }
}

impl Lmr {
    /// Allocates a region, and maps it with all rights.
    ///
    /// # Errors
    ///
    /// As `struct kite_alloc` in `include/uapi/kite.h` says.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        order: &Order<'_>,
        watch: Arc<Watch>,
    ) -> Result<Arc<Mapping>> {
        let me = self.cluster.node()?;
        let region = self.build(me, order)?;
        self.open(me, &region, order, watch)
    }

    /// Makes a region of memory that is there, and maps it with all rights.
    ///
    /// # Errors
    ///
    /// As `struct kite_register` in `include/uapi/kite.h` says.
    pub(crate) fn register(
        self: &Arc<Self>,
        pinned: &Arc<Pinned>,
        order: &Order<'_>,
        watch: Arc<Watch>,
    ) -> Result<Arc<Mapping>> {
        let me = self.cluster.node()?;
        let region = self.adopt(me, pinned, order)?;
        self.open(me, &region, order, watch)
    }

    /// Enters a region that was made, and maps it.
    fn open(
        self: &Arc<Self>,
        me: u32,
        region: &Arc<Region>,
        order: &Order<'_>,
        watch: Arc<Watch>,
    ) -> Result<Arc<Mapping>> {
        self.regions
            .insert(region.clone())
            .inspect_err(|_| self.reclaim_later(region, Haste::Idle))?;
        self.stats.regions.add(1);
        let deadline = Deadline::after_ms(CONTROL_MS);
        let mapped = self.register_name(region, deadline).and_then(|()| {
            self.map_region(me, region.id, order.owner, Rights::ALL, watch, deadline)
        });
        if mapped.is_err() {
            if region.condemn() {
                self.reclaim_later(region, Haste::Idle);
            }
        }
        mapped
    }

    /// Makes a region of memory that is there, in the largest chunks in which it is contiguous.
    fn adopt(
        self: &Arc<Self>,
        me: u32,
        pinned: &Arc<Pinned>,
        order: &Order<'_>,
    ) -> Result<Arc<Region>> {
        let (blank, region, lease) = (Blank::new()?, self.new_id(), self.new_id());
        let shifts = (PAGE_SHIFT..=initial_shift(order.len)).rev();
        let mut layouts = shifts.filter_map(|shift| Layout::new(order.len, shift));
        let layout = layouts.find(|layout| pinned.fits(layout)).ok_or(EINVAL)?;
        let mut leases = KVec::new();
        leases.push((me, lease), GFP_KERNEL)?;
        let mut chunks = Self::table(&layout)?;
        let life = self.cluster.life_of(me)?;
        let adopted = self.leases.adopt((me, lease), region, &layout, pinned);
        adopted.map_err(|error| if error == ENOSPC { ENOMEM } else { error })?;
        let mut places = chunks.iter_mut();
        let enter = |addr| {
            places
                .next()
                .map(|place| *place = Place { life, addr })
                .is_some()
        };
        let entered = self.leases.addresses((me, lease), 0, enter);
        let entered = entered.map_err(|_| errno::hostdown());
        let placed = entered.and_then(|()| Placement::new(chunks, &leases));
        let has = self.cluster.has(life);
        let placed = placed.and_then(|placed| has.then_some(placed).ok_or_else(errno::hostdown));
        match placed {
            Ok(placement) => Ok(blank.fill(region, order.spec(layout), placement)),
            Err(error) => {
                // Nobody else has heard of it.
                self.leases.release((me, lease))?;
                Err(error)
            }
        }
    }

    /// Allocates the memory of a region, in the largest chunks that every node has.
    fn build(self: &Arc<Self>, me: u32, order: &Order<'_>) -> Result<Arc<Region>> {
        let own = [me];
        let nodes = if order.nodes.is_empty() {
            &own
        } else {
            order.nodes
        };
        let (blank, region) = (Blank::new()?, self.new_id());
        let mut shift = initial_shift(order.len);
        loop {
            let layout = Layout::new(order.len, shift).ok_or(EINVAL)?;
            let deadline = Deadline::after_ms(CONTROL_MS.saturating_add(zeroing_ms(order.len)));
            match self.lease_all(region, &layout, nodes, deadline) {
                Ok((chunks, leases)) => {
                    return match Placement::new(chunks, &leases) {
                        Ok(placement) => Ok(blank.fill(region, order.spec(layout), placement)),
                        Err(error) => Err(self.give_back(leases, error, deadline)),
                    };
                }
                Err(error) if error == ENOMEM && shift > PAGE_SHIFT => shift -= 1,
                Err(error) if error == ENOSPC => return Err(ENOMEM),
                Err(error) => return Err(error),
            }
        }
    }

    /// Leases the chunks of a region from its nodes, round robin.
    fn lease_all(
        self: &Arc<Self>,
        region: u64,
        layout: &Layout,
        nodes: &[u32],
        deadline: Deadline,
    ) -> Result<(KVVec<Place>, KVec<Key>)> {
        let mut chunks = Self::table(layout)?;
        let mut leases = KVec::new();
        for (position, &node) in nodes.iter().enumerate() {
            let node = if node == 0 {
                self.cluster.node()?
            } else {
                node
            };
            let part = share(layout, position, nodes.len());
            if part.chunks == 0 {
                break;
            }
            let lease = self.new_id();
            let noted = leases.push((node, lease), GFP_KERNEL);
            let leased = noted.map_err(Error::from).and_then(|()| {
                let part = (layout.shift(), part);
                self.lease(part, (node, lease), region, deadline, |i, place| {
                    let chunk = position + i as usize * nodes.len();
                    *chunks.get_mut(chunk).ok_or(EIO)? = place;
                    Ok(())
                })
            });
            if let Err(error) = leased {
                return Err(self.give_back(leases, error, deadline));
            }
        }
        Ok((chunks, leases))
    }

    /// Gives leases back of which no region is made because of `error`. Returns what there is to say of it.
    fn give_back(self: &Arc<Self>, leases: KVec<Key>, error: Error, deadline: Deadline) -> Error {
        let release = |&(node, lease): &Key| {
            let request = Request::Release { lease };
            self.ask(node, &request, deadline)?.done()
        };
        let given = if error == ENOMEM {
            // Smaller chunks, which are tried next, want the same memory.
            leases.iter().try_for_each(release)
        } else {
            Err(error)
        };
        if given.is_err() {
            for lease in leases {
                self.give_back_later(lease, Haste::Idle, || ());
            }
        }
        given.err().unwrap_or(error)
    }

    /// A table of the chunks' places, charged to the caller.
    fn table(layout: &Layout) -> Result<KVVec<Place>> {
        let count = layout.chunks() as usize;
        if count > TABLE_MAX / size_of::<Place>() {
            return Err(ENOMEM);
        }
        Ok(KVVec::from_elem(
            Place::default(),
            count,
            GFP_KERNEL_ACCOUNT,
        )?)
    }

    /// Leases chunks of that size for a region; `place` is told where each is.
    ///
    /// # Errors
    ///
    /// Those of `place`; as for [`Self::ask`].
    pub(super) fn lease(
        self: &Arc<Self>,
        (shift, part): (u8, Share),
        (node, lease): Key,
        region: u64,
        deadline: Deadline,
        mut place: impl FnMut(u32, Place) -> Result,
    ) -> Result {
        let life = self.cluster.life_of(node)?;
        let alloc = Request::Alloc {
            lease,
            region,
            shift,
            chunks: part.chunks,
            tail: part.tail,
        };
        let mut answer = self.ask(node, &alloc, deadline)?;
        let mut got = 0;
        loop {
            let Reply::Addresses(addresses) = answer.reply()? else {
                return Err(EIO);
            };
            let before = got;
            for addr in addresses {
                place(got, Place { life, addr })?;
                got += 1;
            }
            if got >= part.chunks {
                break;
            }
            if got == before {
                return Err(EIO);
            }
            answer = self.ask(node, &Request::Chunks { lease, first: got }, deadline)?;
        }
        // If it is in the same life now, it was all the while.
        if self.cluster.has(life) {
            Ok(())
        } else {
            Err(errno::hostdown())
        }
    }

    /// Enters the region's name, if it has one, at the node that keeps it.
    fn register_name(self: &Arc<Self>, region: &Region, deadline: Deadline) -> Result {
        let Some(name) = region.spec.name else {
            return Ok(());
        };
        let request = Request::Register {
            name,
            region: region.id,
        };
        loop {
            let epoch = self.cluster.epoch();
            settle(deadline, || {
                let keeper = self.cluster.keeper(&name)?;
                self.ask_once(keeper, &request, deadline)?.done()
            })?;
            region.set_registered();
            // From here on a change of view tells the name to whoever keeps it then.
            if self.cluster.epoch() == epoch {
                return Ok(());
            }
        }
    }

    /// Maps a region by name.
    ///
    /// # Errors
    ///
    /// As `struct kite_map` in `include/uapi/kite.h` says.
    pub(crate) fn map(
        self: &Arc<Self>,
        name: Name,
        uid: u32,
        rights: Rights,
        watch: Arc<Watch>,
    ) -> Result<Arc<Mapping>> {
        let deadline = Deadline::after_ms(CONTROL_MS);
        let (home, region) = settle(deadline, || {
            let keeper = self.cluster.keeper(&name)?;
            match self
                .ask_once(keeper, &Request::Lookup { name }, deadline)?
                .reply()?
            {
                Reply::Found { home, region } => Ok((home, region)),
                _ => Err(EIO),
            }
        })?;
        self.map_region(home, region, uid, rights, watch, deadline)
    }

    /// Maps a region. The mapping is entered before the home knows of it, so that the home's word of the
    /// region's end cannot miss it.
    pub(crate) fn map_region(
        self: &Arc<Self>,
        home: u32,
        region: u64,
        uid: u32,
        rights: Rights,
        watch: Arc<Watch>,
        deadline: Deadline,
    ) -> Result<Arc<Mapping>> {
        let life = self.cluster.life_of(home)?;
        let mapping = Mapping::new(self.new_id(), life, region, watch)?;
        self.mappings.insert(mapping.clone())?;
        self.stats.mappings.add(1);
        let found = self.find(&mapping, uid, rights, deadline);
        // Else it may be another's that has the same number.
        let has = || self.cluster.has(life).then_some(());
        match found.and_then(|()| has().ok_or_else(errno::hostdown)) {
            Ok(()) => Ok(mapping),
            Err(error) => {
                self.unmap(&mapping);
                Err(error)
            }
        }
    }

    /// Learns a region's layout and the places of its chunks.
    fn find(
        self: &Arc<Self>,
        mapping: &Mapping,
        uid: u32,
        rights: Rights,
        deadline: Deadline,
    ) -> Result {
        let Mapping { home, region, .. } = *mapping;
        let request = Request::Map {
            region,
            mapping: mapping.id,
            uid,
            rights,
        };
        let layout = match self.ask(home, &request, deadline)?.reply()? {
            Reply::Mapped { len, shift } => Layout::new(len, shift).ok_or(EIO)?,
            _ => return Err(EIO),
        };
        settle(deadline, || {
            let version = mapping.version();
            match self.locate_all((home, region), &layout, deadline) {
                Ok(chunks) => mapping.fill(layout, version, chunks),
                // What is not where it was said to be may have moved.
                Err(_) if mapping.version() != version => Err(EAGAIN),
                Err(error) => Err(error),
            }
        })
    }

    /// Asks a home for the places of all chunks of a region.
    fn locate_all(
        self: &Arc<Self>,
        (home, region): Key,
        layout: &Layout,
        deadline: Deadline,
    ) -> Result<KVVec<Chunk>> {
        let count = layout.chunks() as usize;
        let mut chunks = KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        while chunks.len() < count {
            let first = chunks.len() as u32;
            let answer = self.ask(home, &Request::Locate { region, first }, deadline)?;
            let Reply::Located(located) = answer.reply()? else {
                return Err(EIO);
            };
            for place in located.take(count - chunks.len()) {
                let chunk = self.chunk((home, region), place, 1 << layout.shift())?;
                chunks.push(chunk, GFP_KERNEL_ACCOUNT)?;
            }
            if chunks.len() == first as usize {
                return Err(EIO);
            }
        }
        Ok(chunks)
    }

    /// Where a chunk of `size` bytes of a region is, of which another node told the place.
    pub(super) fn chunk(&self, region: Key, place: Place, size: u64) -> Result<Chunk> {
        place.addr.checked_add(size).ok_or(EIO)?;
        let own = place.life.node == self.cluster.node()?;
        if !own || !self.cluster.has(place.life) {
            return Ok(Chunk::Remote(place));
        }
        let found = self.leases.find(region, place.addr);
        found.map(Chunk::Local).ok_or_else(errno::hostdown)
    }

    /// Gives a mapping back. Accesses under way finish first; the home is told in the background.
    pub(crate) fn unmap(self: &Arc<Self>, mapping: &Arc<Mapping>) {
        let retired = self.retire(mapping);
        self.unmap_later(mapping, retired);
    }

    /// As [`Self::unmap`], but the home is told at once if it answers in time.
    pub(crate) fn unmap_now(self: &Arc<Self>, mapping: &Arc<Mapping>, deadline: Deadline) {
        let retired = self.retire(mapping);
        let request = Request::Unmap {
            region: mapping.region,
            mapping: mapping.id,
        };
        let ask = || self.ask_once(mapping.home, &request, deadline);
        let told = self.is_quiet(&retired) && ask().is_ok_and(|answer| answer.done().is_ok());
        if !told {
            self.unmap_later(mapping, retired);
        }
    }

    fn unmap_later(self: &Arc<Self>, mapping: &Mapping, retired: Retired) {
        let (home, region, id) = (mapping.home, mapping.region, mapping.id);
        let haste = if retired.lined_up() {
            Haste::Turn
        } else {
            Haste::Idle
        };
        self.when_quiet(home, haste, retired, move |lmr, life, _retired| {
            let request = Request::Unmap {
                region,
                mapping: id,
            };
            lmr.insist(life, &request);
        });
    }

    /// Gives back the only mapping of a region whose home is this node and which goes with it, in the
    /// background.
    pub(crate) fn abandon(self: &Arc<Self>, mapping: &Arc<Mapping>) {
        let retired = self.retire(mapping);
        let begun = self.regions.get(mapping.region).and_then(|region| {
            let first = region.begin_free(mapping.home, mapping.id)?;
            if first {
                self.reclaim_later(&region, Haste::Idle);
            }
            Ok(())
        });
        if let Err(error) = begun {
            pr_debug!("an anonymous region is gone already: {error:?}\n");
        }
        // Until then the region may ask.
        self.when_quiet(mapping.home, Haste::Idle, retired, |_, _, retired| {
            drop(retired);
        });
    }

    /// Frees the region behind a mapping, and gives the mapping back.
    ///
    /// # Errors
    ///
    /// `EACCES`, `EHOSTDOWN`, `ESTALE`, `ETIMEDOUT`.
    pub(crate) fn free(self: &Arc<Self>, mapping: &Arc<Mapping>) -> Result {
        drop(mapping.enter()?);
        let deadline = Deadline::after_ms(CONTROL_MS);
        let request = Request::Free {
            region: mapping.region,
            mapping: mapping.id,
        };
        mapping.hush();
        let freed = self.ask(mapping.home, &request, deadline);
        freed.and_then(|answer| answer.done()).map_err(|error| {
            mapping.unhush();
            // The home does not know a mapping that is being given back.
            if error == ENOENT {
                EBADF
            } else {
                error
            }
        })?;
        drop(self.retire(mapping));
        Ok(())
    }

    fn retire(self: &Arc<Self>, mapping: &Arc<Mapping>) -> Retired {
        if mapping.retire() {
            self.stats.mappings.sub(1);
        }
        Retired {
            lmr: self.clone(),
            mapping: mapping.clone(),
        }
    }

    /// Calls `f` with up to `limit` named regions of `node` (0 for this one) from `cursor` on, and
    /// returns where to go on.
    ///
    /// # Errors
    ///
    /// Those of `f`, `EHOSTDOWN`, `EHOSTUNREACH`, `ETIMEDOUT`.
    pub(crate) fn list_node(
        self: &Arc<Self>,
        node: u32,
        cursor: u64,
        limit: u32,
        mut f: impl FnMut(u32, Entry) -> Result,
    ) -> Result<u64> {
        let node = if node == 0 {
            self.cluster.node()?
        } else {
            node
        };
        let request = Request::List { cursor, limit };
        let answer = self.ask(node, &request, Deadline::after_ms(CONTROL_MS))?;
        let Reply::Listed { cursor, entries } = answer.reply()? else {
            return Err(EIO);
        };
        for entry in entries.take(limit as usize) {
            f(node, entry)?;
        }
        Ok(cursor)
    }
}
