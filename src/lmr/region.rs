// SPDX-License-Identifier: GPL-2.0

//! A region at its home: what it is made of, who may use it, and who has it mapped.
//!
//! LITE (section 4) keeps this at the node of the *master*, the one that made the region.

mod rights;

use super::{
    lease::Key,
    lines::{refused, Asked, Bearer, Blank as BlankTicket, LineKey, Lines},
    placement::Placement,
};
use crate::{errno, sys::payer::Payer};
use core::{convert::Infallible, mem::MaybeUninit};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Full, Release},
        Arc, Mutex, UniqueArc,
    },
};
use kite_core::{
    layout::Layout,
    lock::End,
    name::Name,
    rights::Rights,
    ticket::{Said, Wish},
    view::Life,
};

pub(crate) use rights::Whom;

/// A handle on the region somewhere in the cluster.
#[derive(Clone, Copy)]
pub(crate) struct Mapper {
    pub(crate) node: u32,
    /// Number of the mapping at that node.
    pub(crate) mapping: u64,
    pub(crate) rights: Rights,
    /// For whom it is.
    pub(crate) uid: u32,
}

/// What is known of a mapper.
struct Entry {
    rights: Rights,
    uid: u32,
    /// The user has lost one of these rights, and the mapping is to end.
    revoked: bool,
}

struct State {
    owner: u32,
    others: Rights,
    /// Rights of users that were named.
    granted: RBTree<u32, Rights>,
    grants: u32,
    /// By node and number of the mapping. There may be very many.
    mappers: RBTree<(u32, u64), Entry>,
    /// Of them, those that are revoked.
    revoking: u32,
    /// The last request of another node to change rights.
    last_grant: Option<(Life, u64)>,
    count: u32,
    freeing: bool,
    moving: Move,
    /// Of its locks and barriers.
    lines: Lines,
}

impl State {
    fn check(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let entry = self.mappers.get(&(node, mapping)).ok_or(ENOENT)?;
        // Who lost a right may not be marked yet.
        let may = !entry.revoked && self.rights_of(entry.uid).contains(entry.rights);
        let may = may && entry.rights.contains(rights);
        may.then_some(()).ok_or(EACCES)
    }

    /// Removes a mapper, if it is there.
    fn remove(&mut self, key: (u32, u64)) {
        if let Some(gone) = self.mappers.remove(&key) {
            self.count -= 1;
            self.revoking -= u32::from(gone.revoked);
        }
    }
}

/// What a region is, for as long as it lives.
pub(crate) struct Spec {
    pub(crate) name: Option<Name>,
    pub(crate) layout: Layout,
    pub(crate) owner: u32,
    /// At first.
    pub(crate) others: Rights,
}

/// A move of a region to other nodes.
#[derive(Default)]
struct Move {
    /// Who asked for the last few: the node, and a number of its choice; and what came of it, when it is over.
    last: [((u32, u64), Option<Result>); MOVES_KEPT],
    running: bool,
    /// Nobody may learn where the region is.
    still: bool,
}

/// Who asks what came of a move may be late: another may have begun.
const MOVES_KEPT: usize = 8;

/// A region.
#[pin_data]
pub(crate) struct Region {
    pub(crate) id: u64,
    pub(crate) spec: Spec,
    /// Whether its name was granted, and is to be told to whoever keeps it.
    registered: AtomicFlag,
    /// What the next step of its end waits for.
    holds: Atomic<u32>,
    /// For who waits in its lines.
    payer: Payer,
    /// Taken after `state`.
    #[pin]
    placement: Mutex<Placement>,
    #[pin]
    state: Mutex<State>,
}

/// Memory for a region. It is there before anything is leased, so that from then on nothing can fail.
pub(crate) struct Blank(UniqueArc<MaybeUninit<Region>>);

impl Blank {
    /// Gets the memory, charged to the caller.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(UniqueArc::new_uninit(GFP_KERNEL_ACCOUNT)?))
    }

    /// Makes region `id`, which nobody has mapped.
    pub(crate) fn fill(self, id: u64, spec: Spec, placement: Placement) -> Arc<Region> {
        let state = State {
            owner: spec.owner,
            others: spec.others,
            granted: RBTree::new(),
            grants: 0,
            revoking: 0,
            last_grant: None,
            mappers: RBTree::new(),
            count: 0,
            freeing: false,
            moving: Move::default(),
            lines: Lines::new(),
        };
        let Ok(region) = self.0.pin_init_with::<Infallible>(pin_init!(Region {
            id,
            spec,
            registered: AtomicFlag::new(false),
            holds: Atomic::new(0u32),
            payer: Payer::current(),
            placement <- new_mutex!(placement),
            state <- new_mutex!(state),
        }));
        region.into()
    }
}

impl Region {
    /// The name was granted.
    pub(crate) fn set_registered(&self) {
        self.registered.store(true, Release);
    }

    /// The name that others are to know: granted, and of a region that is not being freed.
    pub(crate) fn known_name(&self) -> Option<Name> {
        self.spec
            .name
            .filter(|_| self.registered.load(Acquire) && !self.is_freeing())
    }

    /// Enters a mapper. Entering the same twice is fine.
    ///
    /// # Errors
    ///
    /// - `EACCES` if its user has not these rights, or no more.
    /// - `ENOENT` if the region is being freed; `EINPROGRESS` while it may not be used.
    pub(crate) fn map(&self, mapper: Mapper) -> Result {
        let Mapper { rights, uid, .. } = mapper;
        let key = (mapper.node, mapper.mapping);
        let mut state = self.state.lock();
        if rights.is_empty() || !state.rights_of(uid).contains(rights) {
            return Err(EACCES);
        }
        if state.freeing {
            return Err(ENOENT);
        }
        if state.mappers.get(&key).is_some() {
            return state.check(mapper.node, mapper.mapping, rights);
        }
        if state.moving.still {
            return Err(errno::inprogress());
        }
        let entry = Entry {
            rights,
            uid,
            revoked: false,
        };
        state
            .mappers
            .try_create_and_insert(key, entry, GFP_KERNEL)?;
        state.count += 1;
        Ok(())
    }

    /// Has the region's owner pay for the memory that `f` gets.
    pub(crate) fn pays<R>(&self, f: impl FnOnce() -> R) -> R {
        self.payer.pays(f)
    }

    /// Removes a mapper, if it is there, and its tickets. Others may have news then.
    pub(crate) fn unmap(&self, node: u32, mapping: u64) {
        let mut state = self.state.lock();
        state.remove((node, mapping));
        if !state.freeing {
            let is_gone = |bearer: Bearer, by, _| bearer.life.node == node && by == mapping;
            state.lines.bury(is_gone);
        }
    }

    /// Memory for a ticket, for which the region's owner pays.
    pub(crate) fn blank_ticket(&self) -> Result<BlankTicket> {
        BlankTicket::new(&self.payer)
    }

    /// Gives a mapper a ticket. Others may have news then.
    pub(crate) fn enter(&self, request: &Asked, blank: BlankTicket) -> Said {
        let needed = match request.wish {
            Wish::Lock { shared: true } => Rights::READ,
            _ => Rights::WRITE,
        };
        let mut state = self.state.lock();
        let may = if state.freeing {
            Err(ENOENT)
        } else {
            state.check(request.bearer.life.node, request.mapping, needed)
        };
        match may {
            Ok(()) => state.lines.enter(request, blank),
            Err(error) => refused(error),
        }
    }

    /// Ends a ticket. Others may have news then.
    pub(crate) fn leave(&self, place: LineKey, bearer: Bearer, how: End) {
        self.state.lock().lines.leave(place, bearer, how);
    }

    /// Ends the tickets of those who are gone, when they can do no more harm. Others may have news then.
    pub(crate) fn bury(&self, is_gone: impl Fn(Life) -> bool) {
        let mut state = self.state.lock();
        state.lines.bury(|bearer, _, _| is_gone(bearer.life));
    }

    /// As [`Lines::take_news`]; without a place, [`Lines::take_any_news`].
    pub(crate) fn take_news(&self, place: Option<LineKey>) -> Option<(LineKey, u32)> {
        let mut state = self.state.lock();
        match place {
            Some(place) => Some((place, state.lines.take_news(place)?)),
            None => state.lines.take_any_news(),
        }
    }

    /// See [`Lines::news_of`].
    pub(crate) fn news_of(&self, place: LineKey, life: Life) -> Option<(u64, Said)> {
        self.state.lock().lines.news_of(place, life)
    }

    /// See [`Lines::heard`].
    pub(crate) fn heard(&self, place: LineKey, bearer: Bearer) {
        self.state.lock().lines.heard(place, bearer);
    }

    /// Removes all mappers of a dead node. Their tickets stay until [`Self::bury`].
    pub(crate) fn forget_node(&self, node: u32) {
        let mut state = self.state.lock();
        while let Some(key) = state
            .mappers
            .cursor_lower_bound(&(node, 0))
            .map(|at| *at.current().0)
            .filter(|key| key.0 == node)
        {
            state.remove(key);
        }
    }

    /// The number of mappers.
    pub(crate) fn mappers(&self) -> u32 {
        self.state.lock().count
    }

    /// The nodes that have it mapped, in order of their numbers. One that comes meanwhile may be missed.
    pub(crate) fn mapper_nodes(&self) -> impl Iterator<Item = u32> + '_ {
        let mut last = 0;
        core::iter::from_fn(move || {
            last = self.mapper_at_or_after(last + 1, 0)?.0;
            Some(last)
        })
    }

    /// The first mapping of it on `node`, from number `mapping` on.
    pub(crate) fn mapping_of(&self, node: u32, mapping: u64) -> Option<u64> {
        let found = self.mapper_at_or_after(node, mapping);
        found.filter(|mapper| mapper.0 == node).map(|found| found.1)
    }

    /// The first mapper from that one on.
    fn mapper_at_or_after(&self, node: u32, mapping: u64) -> Option<(u32, u64)> {
        let state = self.state.lock();
        let cursor = state.mappers.cursor_lower_bound(&(node, mapping))?;
        Some(*cursor.current().0)
    }

    /// Adds something that the next step of its end waits for.
    pub(crate) fn hold(&self) {
        self.holds.fetch_add(1u32, Full);
    }

    /// Takes that back. Returns whether there is nothing more to wait for.
    pub(crate) fn let_go(&self) -> bool {
        self.holds.fetch_sub(1u32, Full) == 1
    }

    /// Begins to free the region on behalf of a mapper. Returns whether it was not begun before, and does not
    /// have to wait for the end of a move. All mappings are then to be invalidated, that one too: its session may
    /// be using it this moment.
    ///
    /// # Errors
    ///
    /// - `EACCES` if the mapper is not a master.
    /// - `ENOENT` if it is none at all.
    pub(crate) fn begin_free(&self, node: u32, mapping: u64) -> Result<bool> {
        let mut state = self.state.lock();
        if state.freeing {
            return Ok(false);
        }
        state.check(node, mapping, Rights::MASTER)?;
        state.freeing = true;
        Ok(!state.moving.running)
    }

    /// Begins to move the region on behalf of a mapper, who chose that number for it.
    ///
    /// # Errors
    ///
    /// - `EBUSY` if it is moving already.
    /// - `EACCES` if the mapper is not a master.
    /// - `ENOENT` if it is none at all, or the region is being freed.
    pub(crate) fn begin_move(&self, node: u32, mapping: u64, number: u64) -> Result {
        let mut state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check(node, mapping, Rights::MASTER)?;
        if state.moving.running {
            return Err(EBUSY);
        }
        state.moving.running = true;
        state.moving.last.rotate_right(1);
        state.moving.last[0] = ((node, number), None);
        Ok(())
    }

    /// The move is over. Returns whether the region was freed meanwhile, and is to be taken apart.
    pub(crate) fn end_move(&self, result: Result) -> bool {
        let mut state = self.state.lock();
        state.moving.running = false;
        state.moving.last[0].1 = Some(result);
        state.freeing
    }

    /// What came of a move.
    ///
    /// # Errors
    ///
    /// That of the move; `EINPROGRESS` while it goes on; `ENOENT` if it is not known any more.
    pub(crate) fn move_result(&self, node: u32, number: u64) -> Result {
        let state = self.state.lock();
        let mut last = state.moving.last.iter();
        let (_, result) = last.find(|(by, _)| *by == (node, number)).ok_or(ENOENT)?;
        result.unwrap_or_else(|| Err(errno::inprogress()))
    }

    /// Lets nobody map it, or whoever likes again.
    pub(crate) fn hold_still(&self, still: bool) {
        self.state.lock().moving.still = still;
    }

    /// Where its chunks are.
    pub(crate) fn placement<R>(&self, f: impl FnOnce(&mut Placement) -> R) -> R {
        f(&mut self.placement.lock())
    }

    /// Its leases.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Key> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let lease = self.placement(|placement| placement.leases().flatten().nth(next));
            next += 1;
            lease
        })
    }

    /// Whether a mapper has these rights.
    ///
    /// # Errors
    ///
    /// `EACCES` if it has not; `ENOENT` if it is none, or the region is being freed.
    pub(crate) fn check(&self, node: u32, mapping: u64, rights: Rights) -> Result {
        let state = self.state.lock();
        if state.freeing {
            return Err(ENOENT);
        }
        state.check(node, mapping, rights)
    }

    /// Keeps everybody from mapping a region that is given up before it was complete. As for
    /// [`Self::begin_free`]: somebody may have found it already.
    pub(crate) fn condemn(&self) -> bool {
        let mut state = self.state.lock();
        let first = !state.freeing;
        state.freeing = true;
        first && !state.moving.running
    }

    /// Whether the region is being freed.
    pub(crate) fn is_freeing(&self) -> bool {
        self.state.lock().freeing
    }
}

/// The regions of which this node is the home.
#[pin_data]
pub(crate) struct Regions {
    #[pin]
    table: Mutex<RBTree<u64, Arc<Region>>>,
}

impl Regions {
    /// None.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new()) })
    }

    /// Enters a region.
    pub(crate) fn insert(&self, region: Arc<Region>) -> Result {
        // Outside of the lock: who is at the limit of a cgroup may have to wait.
        let node = RBTreeNode::new(region.id, region, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Finds a region.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is none of that number.
    pub(crate) fn get(&self, id: u64) -> Result<Arc<Region>> {
        self.table.lock().get(&id).cloned().ok_or(ENOENT)
    }

    /// The region with the lowest number that is at least `id`.
    pub(crate) fn at_or_after(&self, id: u64) -> Option<Arc<Region>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }

    /// All regions, in order of their numbers. One that comes or goes meanwhile may be missed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Arc<Region>> + '_ {
        let mut next = 0;
        core::iter::from_fn(move || {
            let region = self.at_or_after(next)?;
            next = region.id + 1;
            Some(region)
        })
    }

    /// Removes a region.
    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Region>> {
        self.table.lock().remove(&id)
    }
}
