// SPDX-License-Identifier: GPL-2.0

//! Memory that this node lends to regions, its own and those of other nodes.
//!
//! A lease is known by the home of its region and the number that the home gave it, so that asking for
//! the same lease twice gives the same memory. When a home dies its leases go to quarantine: a node that
//! has not heard yet may still write to them, so they are freed only when all have
//! (`cluster::Cluster::synced_epoch`).

use crate::{
    bindings, errno,
    stats::{Counter, Stats},
    sys::{
        deadline::is_killed,
        pages::{self, Charge, Pages},
        pin::Pinned,
    },
    verbs::{device::Device, dma::DmaPages},
};
use core::ops::Deref;
use kernel::{
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{Arc, Mutex},
};
use kite_core::layout::Layout;

/// The home of a region, and the number it gave the lease.
pub(crate) type Key = (u32, u64);

/// Those that were given back are missing.
type Chunks = KVVec<Option<Arc<Lent>>>;

/// A chunk of lent memory.
pub(crate) struct Lent {
    pages: DmaPages,
    /// What it is for: the home of a region, and the region.
    region: Key,
}

impl Deref for Lent {
    type Target = DmaPages;

    fn deref(&self) -> &DmaPages {
        &self.pages
    }
}

impl Lent {
    /// The region, and the RNIC address. Memory of a process may be in several regions.
    fn place(&self) -> (Key, u64) {
        (self.region, self.addr())
    }
}

struct Lease {
    /// Nothing while it is being allocated.
    chunks: Option<Chunks>,
    bytes: u64,
    /// Whether its home is another node.
    foreign: bool,
}

/// Bytes that this node lends to others, and to regions of its own, through whichever RNIC.
static LENT: Counter = Counter::new();
static OWN: Counter = Counter::new();

/// The most that they may be.
#[derive(Clone, Copy)]
pub(crate) struct Caps {
    pub(crate) lent: u64,
    pub(crate) own: u64,
}

/// Memory of a dead home.
struct Orphan {
    /// The view in which the home was missing first.
    epoch: u64,
    lease: Lease,
}

struct Table {
    leases: RBTree<Key, Lease>,
    quarantine: KVVec<Orphan>,
}

/// The leases of one node.
#[pin_data]
pub(crate) struct Leases {
    device: Device,
    caps: Caps,
    #[pin]
    table: Mutex<Table>,
    /// Chunks by region and RNIC address, for regions mapped on the node that lends them.
    #[pin]
    by_place: Mutex<RBTree<(Key, u64), Arc<Lent>>>,
    stats: Arc<Stats>,
}

/// Bytes that a region may take: what is available now, less a reserve to live on.
fn spendable() -> u64 {
    // SAFETY: The function has no preconditions.
    let pages = unsafe { bindings::si_mem_available() };
    let available = u64::try_from(pages).unwrap_or(0) * PAGE_SIZE as u64;
    available.saturating_sub(pages::all_memory() / 8)
}

impl Leases {
    /// Nothing lent.
    pub(crate) fn new(device: Device, caps: Caps, stats: Arc<Stats>) -> impl PinInit<Self> {
        let table = Table {
            leases: RBTree::new(),
            quarantine: KVVec::new(),
        };
        pin_init!(Self {
            device,
            caps,
            table <- new_mutex!(table),
            by_place <- new_mutex!(RBTree::new()),
            stats,
        })
    }

    /// Lends memory for `layout` to a region of the home, unless the lease exists already. `foreign` says
    /// whether the home is another node; if it is not, the caller is charged for the memory. `wanted` is asked, once there is a
    /// lease and from time to time, whether to go on.
    ///
    /// # Errors
    ///
    /// - `ENOSPC` if there is not so much, or a cap is reached: chunks of no size will do.
    /// - `ENOMEM` if there is none in chunks of this size.
    /// - `EINPROGRESS` if the same lease is being made.
    /// - That of `wanted`.
    pub(crate) fn lend(
        &self,
        key: Key,
        region: u64,
        layout: &Layout,
        foreign: bool,
        wanted: impl Fn() -> Result,
    ) -> Result {
        if !self.reserve(key, layout, foreign)? {
            return Ok(());
        }
        let chunks = self.allocate((key.0, region), layout, foreign, wanted);
        self.enter(key, chunks)
    }

    /// As [`Self::lend`], to a region of this node, but of memory that is there, and stays what it is.
    ///
    /// # Errors
    ///
    /// - `ENOSPC` if a cap is reached, `ENOMEM`.
    /// - `EINVAL` if it is not contiguous as the layout has it, or has a page twice.
    /// - `EINTR` if the task is killed.
    pub(crate) fn adopt(
        &self,
        key: Key,
        region: u64,
        layout: &Layout,
        pinned: &Arc<Pinned>,
    ) -> Result {
        if !self.reserve(key, layout, false)? {
            return Ok(());
        }
        let mut first = 0;
        let chunks = self.chunks((key.0, region), layout, |i| {
            if is_killed() {
                return Err(EINTR);
            }
            let count = layout.chunk_pages(i) as usize;
            let pages = Pages::pinned(pinned, first, count);
            first += count;
            pages
        });
        self.enter(key, chunks)
    }

    /// Gives a lease that was reserved its memory, or forgets it.
    fn enter(&self, key: Key, chunks: Result<Chunks>) -> Result {
        let mut table = self.table.lock();
        let (chunks, error) = match (chunks, table.leases.get_mut(&key)) {
            (Ok(chunks), Some(lease)) => {
                lease.chunks = Some(chunks);
                return Ok(());
            }
            // The home died meanwhile.
            (Ok(chunks), None) => (chunks, errno::hostdown()),
            (Err(error), _) => (KVVec::new(), error),
        };
        let reserved = table.leases.remove(&key);
        drop(table);
        self.withdraw(&chunks);
        drop(chunks);
        self.settle(reserved.as_ref());
        Err(error)
    }

    /// Enters a lease without memory. Returns whether it is new.
    fn reserve(&self, key: Key, layout: &Layout, foreign: bool) -> Result<bool> {
        let mut table = self.table.lock();
        match table.leases.get(&key) {
            Some(Lease { chunks: None, .. }) => return Err(errno::inprogress()),
            Some(Lease {
                chunks: Some(chunks),
                ..
            }) => {
                let same = chunks.len() == layout.chunks() as usize;
                return if same { Ok(false) } else { Err(EINVAL) };
            }
            None => {}
        }
        let bytes = layout.pages() * PAGE_SIZE as u64;
        let lease = Lease {
            chunks: None,
            bytes,
            foreign,
        };
        self.count(bytes, foreign)?;
        let entered = table.leases.try_create_and_insert(key, lease, GFP_KERNEL);
        entered.inspect_err(|_| self.count_off(bytes, foreign))?;
        Ok(true)
    }

    fn count(&self, bytes: u64, foreign: bool) -> Result {
        let (taken, cap) = if foreign {
            (&LENT, self.caps.lent)
        } else {
            (&OWN, self.caps.own)
        };
        if !taken.add_below(bytes, cap) {
            return Err(ENOSPC);
        }
        if foreign {
            self.stats.lent_bytes.add(bytes);
        }
        Ok(())
    }

    fn count_off(&self, bytes: u64, foreign: bool) {
        if foreign {
            LENT.sub(bytes);
            self.stats.lent_bytes.sub(bytes);
        } else {
            OWN.sub(bytes);
        }
    }

    /// Takes leases that are gone off what is taken.
    fn settle<'a>(&self, gone: impl IntoIterator<Item = &'a Lease>) {
        for lease in gone {
            self.count_off(lease.bytes, lease.foreign);
        }
    }

    fn allocate(
        &self,
        region: Key,
        layout: &Layout,
        foreign: bool,
        wanted: impl Fn() -> Result,
    ) -> Result<Chunks> {
        if layout.pages() * PAGE_SIZE as u64 > spendable() {
            return Err(ENOSPC);
        }
        let charge = if foreign {
            Charge::Kernel
        } else {
            Charge::Caller
        };
        self.chunks(region, layout, |i| {
            wanted()?;
            Pages::new(layout.chunk_len(i) as usize, charge)
        })
    }

    /// The chunks of a region, of whose memory `pages` gives the part of each.
    ///
    /// What tells of them is charged to nobody: where a group has taken all it may, pages are refused, but
    /// small things kill. It is little beside the pages, which the caps bound.
    fn chunks(
        &self,
        region: Key,
        layout: &Layout,
        mut pages: impl FnMut(u32) -> Result<Pages>,
    ) -> Result<Chunks> {
        let mut chunks = KVVec::with_capacity(layout.chunks() as usize, GFP_KERNEL)?;
        for i in 0..layout.chunks() {
            let made = pages(i)
                .and_then(|pages| DmaPages::shared(self.device, pages))
                .and_then(|pages| Ok(Arc::new(Lent { pages, region }, GFP_KERNEL)?))
                .and_then(|chunk| self.publish(chunk))
                .and_then(|chunk| Ok(chunks.push(Some(chunk), GFP_KERNEL)?));
            if let Err(error) = made {
                self.withdraw(&chunks);
                return Err(error);
            }
        }
        Ok(chunks)
    }

    fn publish(&self, chunk: Arc<Lent>) -> Result<Arc<Lent>> {
        let node = RBTreeNode::new(chunk.place(), chunk.clone(), GFP_KERNEL)?;
        let mut by_place = self.by_place.lock();
        // A process may have a page twice.
        if by_place.get(&chunk.place()).is_some() {
            return Err(EINVAL);
        }
        by_place.insert(node);
        Ok(chunk)
    }

    fn withdraw(&self, chunks: &Chunks) {
        for chunk in chunks.iter().flatten() {
            self.withdraw_one(chunk);
        }
    }

    fn withdraw_one(&self, chunk: &Lent) {
        let removed = self.by_place.lock().remove(&chunk.place());
        drop(removed);
    }

    /// The chunk of a region at an RNIC address of ours.
    pub(crate) fn find(&self, region: Key, addr: u64) -> Option<Arc<Lent>> {
        self.by_place.lock().get(&(region, addr)).cloned()
    }

    /// Calls `f` with the RNIC addresses of a lease's chunks from `first` on, until it returns false.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such lease.
    pub(crate) fn addresses(&self, key: Key, first: u32, mut f: impl FnMut(u64) -> bool) -> Result {
        let table = self.table.lock();
        let lease = table.leases.get(&key).ok_or(ENOENT)?;
        let chunks = lease.chunks.as_ref().ok_or_else(errno::inprogress)?;
        for chunk in chunks.iter().skip(first as usize) {
            if !f(chunk.as_ref().ok_or(ENOENT)?.addr()) {
                break;
            }
        }
        Ok(())
    }

    /// Takes the memory of a lease back, if there is such a lease.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if it is being made.
    pub(crate) fn release(&self, key: Key) -> Result {
        let mut table = self.table.lock();
        if matches!(table.leases.get(&key), Some(Lease { chunks: None, .. })) {
            return Err(errno::inprogress());
        }
        let gone = table.leases.remove(&key);
        drop(table);
        self.free(gone);
        Ok(())
    }

    /// Takes some chunks of a lease back, those that there are.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if it is being made.
    pub(crate) fn trim(&self, key: Key, numbers: impl Iterator<Item = u32>) -> Result {
        let mut table = self.table.lock();
        let Some(lease) = table.leases.get_mut(&key) else {
            return Ok(());
        };
        let chunks = lease.chunks.as_mut().ok_or_else(errno::inprogress)?;
        for number in numbers {
            if let Some(chunk) = chunks.get_mut(number as usize).and_then(Option::take) {
                self.withdraw_one(&chunk);
                let bytes = chunk.len() as u64;
                lease.bytes -= bytes;
                self.count_off(bytes, lease.foreign);
            }
        }
        Ok(())
    }

    /// Frees leases, whose memory nobody can reach any more.
    fn free(&self, gone: impl IntoIterator<Item = Lease>) {
        for lease in gone {
            if let Some(chunks) = &lease.chunks {
                self.withdraw(chunks);
            }
            self.settle(Some(&lease));
        }
    }

    /// Puts the leases of a home in quarantine that is missing from the view as of `epoch`.
    pub(crate) fn orphan(&self, home: u32, epoch: u64) {
        let mut table = self.table.lock();
        loop {
            let next = table.leases.cursor_lower_bound(&(home, 0));
            let Some(key) = next.map(|at| *at.current().0).filter(|key| key.0 == home) else {
                break;
            };
            let Some(lease) = table.leases.remove(&key) else {
                break;
            };
            if let Some(chunks) = &lease.chunks {
                self.withdraw(chunks);
                let orphan = Orphan { epoch, lease };
                // Without memory to note it, it is lost for good: a dead node's peers may still write to it.
                if let Err(error) = table.quarantine.reserve(1, GFP_KERNEL) {
                    pr_warn!("no memory to note lent memory: it is lost: {error:?}\n");
                    core::mem::forget(orphan);
                } else {
                    let _ = table.quarantine.push(orphan, GFP_KERNEL);
                }
            } else {
                // Who makes it finds it gone, and gives its memory back.
                self.settle(Some(&lease));
            }
        }
    }

    /// Frees what is in quarantine since `epoch` or before: every node has heard of that view.
    pub(crate) fn free_orphans(&self, epoch: u64) {
        self.table.lock().quarantine.retain(|orphan| {
            let kept = orphan.epoch > epoch;
            if !kept {
                self.settle(Some(&orphan.lease));
            }
            kept
        });
    }

    /// Frees everything: the node has left, or the RNIC goes, and nobody is connected any more.
    pub(crate) fn clear(&self) {
        let mut table = self.table.lock();
        let leases = core::mem::replace(&mut table.leases, RBTree::new());
        let quarantine = core::mem::take(&mut table.quarantine);
        drop(table);
        for lease in leases.values() {
            if let Some(chunks) = &lease.chunks {
                self.withdraw(chunks);
            }
        }
        self.settle(leases.values());
        self.settle(quarantine.iter().map(|orphan| &orphan.lease));
    }
}
