// SPDX-License-Identifier: GPL-2.0

//! A region as mapped by one handle: where its bytes are, and whether they may still be touched.
//!
//! All that an access needs is here, at the node that makes it (LITE, section 4: no extra round trip).
//! Each access goes through a gate; when the region is freed, or its home dies, that is shut and
//! whoever is inside finishes first. While the region moves nobody may know where it is ([`super::places`]).

use super::{
    places::{Chunk, Found, Places, Whereabouts},
    reclaim::patiently,
};
use crate::{
    errno,
    fabric::{flight::Permit, usage::Failure},
    sys::{
        deadline::{settle, Deadline},
        gate::{Gate, Inside, Kept},
        watch::Watch,
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Full, Release},
        Arc, Mutex, SetOnce,
    },
};
use kite_core::{
    layout::{Layout, Piece},
    view::Life,
    wire::Reason,
};

/// Why a mapping ended.
const FREED: u32 = 1;
const HOME_DIED: u32 = 2;
const REVOKED: u32 = 3;

/// It has not ended.
const QUIET: u32 = 0;
/// It ended, and waits to be reported.
const RAISED: u32 = 1;
/// It was reported.
const SETTLED: u32 = 2;
/// Its session is freeing the region.
const HUSHED: u32 = 3;
/// The handle was given back.
const RETIRED: u32 = 4;

/// A mapping.
#[pin_data]
pub(crate) struct Mapping {
    pub(crate) id: u64,
    pub(crate) home: u32,
    /// That of the home in which it has the region.
    pub(super) life: Life,
    pub(crate) region: u64,
    #[pin]
    gate: Gate<SetOnce<Layout>>,
    #[pin]
    places: Whereabouts,
    /// Queue pairs that failed under accesses, and may have left packets in the network.
    #[pin]
    failures: Mutex<KVec<Failure>>,
    /// Requests to other nodes to change the region, of which it is not known whether they are done.
    asked: Atomic<u32>,
    ended: Atomic<u32>,
    /// Whether it was ever used to stand in line.
    lined_up: AtomicFlag,
    /// Whether the session has been, or is to be, told of the end: [`QUIET`], [`RAISED`], [`SETTLED`],
    /// [`HUSHED`] or [`RETIRED`].
    told: Atomic<u32>,
    watch: Arc<Watch>,
}

impl Mapping {
    /// Makes a mapping of a region of which nothing is known yet.
    pub(crate) fn new(id: u64, life: Life, region: u64, watch: Arc<Watch>) -> Result<Arc<Self>> {
        let home = life.node;
        Arc::pin_init(
            pin_init!(Self {
                id, home, life, region,
                gate <- Gate::new(SetOnce::new()),
                places <- Whereabouts::new(),
                failures <- new_mutex!(KVec::new()),
                asked: Atomic::new(0u32),
                ended: Atomic::new(0u32),
                lined_up: AtomicFlag::new(false),
                told: Atomic::new(QUIET),
                watch,
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// As of which version [`Self::fill`] is told the chunks that are asked for from now on.
    pub(super) fn version(&self) -> u32 {
        self.places.version()
    }

    /// Says where the region is.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it may have moved; as for [`Self::enter`], if the mapping ended before.
    pub(super) fn fill(&self, layout: Layout, version: u32, chunks: KVVec<Chunk>) -> Result {
        let inside = self.enter()?;
        self.places.fill(Places { version, chunks })?;
        inside.populate(layout);
        Ok(())
    }

    /// How the region is cut.
    ///
    /// # Errors
    ///
    /// As for [`Self::enter`].
    pub(crate) fn layout(&self) -> Result<Layout> {
        self.enter()?.as_ref().copied().ok_or_else(errno::stale)
    }

    /// Where the region is, for as long as nobody lets go of the result.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` while it is moving; as for [`Self::enter`].
    pub(crate) fn look(&self) -> Result<Inside<'_, Places>> {
        self.places.look().ok_or_else(|| self.why_shut())
    }

    /// As [`Self::look`], but only as of this version.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if it has moved since; as there.
    pub(crate) fn look_at(&self, version: u32) -> Result<Inside<'_, Places>> {
        let places = self.look()?;
        let same = places.version == version;
        same.then_some(places).ok_or_else(errno::inprogress)
    }

    fn why_shut(&self) -> Error {
        self.enter().err().unwrap_or_else(errno::inprogress)
    }

    /// Waits while the region is moving.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`, `EINTR`; as for [`Self::enter`].
    pub(crate) fn await_places(&self, deadline: Deadline) -> Result {
        settle(deadline, || self.look().map(drop))
    }

    /// Whether a piece is at another node.
    ///
    /// # Errors
    ///
    /// As for [`Self::look`].
    pub(crate) fn is_elsewhere(&self, piece: Piece) -> Result<bool> {
        Ok(matches!(self.look()?.find(piece)?, Found::Remote(_)))
    }

    /// Calls `f`, and again when the region has moved meanwhile.
    ///
    /// # Errors
    ///
    /// Those of `f`, and as for [`Self::await_places`].
    pub(crate) fn again<T>(
        &self,
        deadline: Deadline,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            match f() {
                Err(error) if error == errno::inprogress() => self.await_places(deadline)?,
                result => return result,
            }
        }
    }

    /// Lets nobody know where the region is, until [`Self::resume`].
    ///
    /// # Errors
    ///
    /// `EAGAIN` while somebody does.
    pub(super) fn pause(&self) -> Result {
        self.places.pause()
    }

    /// Lets all know again where it is, after `change`.
    pub(super) fn resume(&self, change: impl FnOnce(&mut [Chunk])) {
        self.places.resume(change);
    }

    /// Enters the mapping for what needs not know where the region is.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the region was freed, `EACCES` if the rights were revoked, `EHOSTDOWN` if its home died,
    /// `EBADF` if the handle was given back.
    pub(crate) fn enter(&self) -> Result<Inside<'_, SetOnce<Layout>>> {
        self.gate.enter().ok_or_else(|| self.why_ended())
    }

    fn why_ended(&self) -> Error {
        match self.ended.load(Acquire) {
            HOME_DIED => errno::hostdown(),
            FREED => errno::stale(),
            REVOKED => EACCES,
            _ => EBADF,
        }
    }

    /// Enters the mapping for what is sent to other nodes, to places as of this version.
    ///
    /// # Errors
    ///
    /// As for [`Self::look_at`].
    pub(crate) fn pass(&self, version: u32) -> Result<Pass<'_>> {
        let _inside = self.look_at(version)?;
        Ok(Pass {
            mapping: self,
            _inside,
        })
    }

    /// As [`Self::pass`], for who does not wait for the end of what is sent.
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn keep_pass(self: &Arc<Self>, version: u32) -> Result<KeptPass> {
        let kept = Kept::enter(self.clone(), |mapping| mapping.places.gate());
        let kept = kept.ok_or_else(|| self.why_shut())?;
        let same = kept.version == version;
        let kept = same.then_some(kept).ok_or_else(errno::inprogress)?;
        Ok(KeptPass(kept))
    }

    /// Somebody is about to stand in line by it, and may wait for its end.
    pub(super) fn line_up(&self) {
        self.lined_up.store(true, Release);
    }

    /// Whether anybody did.
    pub(super) fn lined_up(&self) -> bool {
        self.lined_up.load(Acquire)
    }

    fn note(&self, failure: Failure) {
        let mut failures = self.failures.lock();
        failures.retain(|failure| !failure.is_over());
        patiently(|| Ok(failures.push(failure.clone(), GFP_KERNEL)?));
    }

    /// Begins a request to another node to change the region. The mapping is not quiet until the result is
    /// dropped.
    ///
    /// # Errors
    ///
    /// As for [`Self::enter`].
    pub(super) fn begin_asking(self: &Arc<Self>) -> Result<Asking> {
        let _inside = self.enter()?;
        self.asked.fetch_add(1u32, Full);
        Ok(Asking(self.clone()))
    }

    /// Whether nothing that accesses have sent, or asked others for, can come late, to members of the view as
    /// `has` knows it.
    pub(crate) fn is_quiet(&self, has: impl Fn(Life) -> bool) -> bool {
        if self.asked.load(Acquire) != 0 {
            return false;
        }
        let failures = self.failures.lock();
        failures
            .iter()
            .all(|failure| failure.is_over() || !has(failure.life))
    }

    /// Takes the news of its end, if it ended and that was not reported yet.
    pub(crate) fn report(&self) -> bool {
        let fresh = self.told.cmpxchg(RAISED, SETTLED, Full).is_ok();
        if fresh {
            self.watch.settle();
        }
        fresh
    }

    /// Ends the mapping and waits for accesses under way. Its session hears of it.
    fn end(&self, why: u32) {
        // Before the gate is shut: who finds it so asks why.
        let first = self.ended.cmpxchg(0, why, Full).is_ok();
        self.gate.shut();
        if first {
            self.raise();
        }
        self.close();
    }

    /// Waits for whoever is inside.
    fn close(&self) {
        self.gate.close();
        self.places.end();
    }

    fn raise(&self) {
        if self.told.cmpxchg(QUIET, RAISED, Full).is_ok() {
            self.watch.raise();
        }
    }

    /// The session is about to free the region itself, and is not to be told.
    pub(crate) fn hush(&self) {
        let _ = self.told.cmpxchg(QUIET, HUSHED, Full);
    }

    /// Takes [`Self::hush`] back: the region was not freed, or not yet.
    pub(crate) fn unhush(&self) {
        let _ = self.told.cmpxchg(HUSHED, QUIET, Full);
        if self.ended.load(Acquire) != 0 {
            self.raise();
        }
    }

    /// The region was freed, or the rights revoked.
    pub(crate) fn invalidate(&self, why: Reason) {
        self.end(match why {
            Reason::Freed => FREED,
            Reason::Revoked => REVOKED,
        });
    }

    /// The home of the region died, or left.
    pub(crate) fn lose_home(&self) {
        self.end(HOME_DIED);
    }

    /// The handle is given back: its session hears no more of it. Waits for accesses under way. Returns
    /// whether this was the first time.
    pub(crate) fn retire(&self) -> bool {
        let before = self.told.xchg(RETIRED, Full);
        if before == RAISED {
            self.watch.settle();
        }
        self.close();
        before != RETIRED
    }
}

/// A request to another node to change the region, of which it is not known whether it is done.
pub(super) struct Asking(Arc<Mapping>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.asked.fetch_sub(1u32, Full);
    }
}

/// An access that may send to other nodes.
pub(crate) struct Pass<'a> {
    mapping: &'a Mapping,
    _inside: Inside<'a, Places>,
}

impl Permit for Pass<'_> {
    fn note(&self, failure: Failure) {
        self.mapping.note(failure);
    }
}

/// As [`Pass`], on whichever thread.
pub(crate) struct KeptPass(Kept<Mapping, Places>);

impl KeptPass {
    /// The mapping that is accessed.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        self.0.owner()
    }

    /// Where the region is, meanwhile.
    pub(super) fn places(&self) -> &Places {
        &self.0
    }
}

impl Permit for KeptPass {
    fn note(&self, failure: Failure) {
        self.0.owner().note(failure);
    }
}

/// The mappings of this node.
#[pin_data]
pub(crate) struct Mappings {
    #[pin]
    table: Mutex<RBTree<u64, Arc<Mapping>>>,
}

impl Mappings {
    /// None.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self { table <- new_mutex!(RBTree::new()) })
    }

    /// Enters a mapping.
    pub(crate) fn insert(&self, mapping: Arc<Mapping>) -> Result {
        // Outside of the lock: who is at the limit of a cgroup may have to wait.
        let node = RBTreeNode::new(mapping.id, mapping, GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(())
    }

    /// Finds a mapping.
    pub(crate) fn get(&self, id: u64) -> Option<Arc<Mapping>> {
        self.table.lock().get(&id).cloned()
    }

    /// Removes a mapping.
    pub(crate) fn remove(&self, id: u64) -> Option<Arc<Mapping>> {
        self.table.lock().remove(&id)
    }

    /// Calls `f` with every mapping, without the table locked.
    pub(crate) fn for_each(&self, f: impl Fn(&Mapping)) {
        let mut next = 0;
        while let Some(mapping) = self.at_or_after(next) {
            next = mapping.id + 1;
            f(&mapping);
        }
    }

    fn at_or_after(&self, id: u64) -> Option<Arc<Mapping>> {
        let table = self.table.lock();
        let cursor = table.cursor_lower_bound(&id)?;
        Some(cursor.current().1.clone())
    }
}
