// SPDX-License-Identifier: GPL-2.0

//! Memory that this node lends to regions, its own and those of other nodes.
//!
//! A lease is known by the home of its region and the number that the home gave it, so that asking for
//! the same lease twice gives the same memory. When a home dies its leases go to quarantine: a node that
//! has not heard yet may still write to them, so they are freed only when all have
//! (`cluster::Cluster::is_synced`).

use crate::{
    bindings::{self, inline},
    errno,
    stats::Stats,
    sys::pages::{Charge, Pages},
    verbs::{device::Device, dma::DmaPages},
};
use kernel::{
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    rbtree::RBTree,
    sync::{Arc, Mutex},
    xarray::{AllocKind, XArray},
};
use kite_core::layout::{Layout, PAGE_SHIFT};

/// The home of a region, and the number it gave the lease.
pub(crate) type Key = (u32, u64);

type Chunks = KVVec<Arc<DmaPages>>;

enum Lease {
    /// Being allocated.
    Pending,
    Lent(Chunks),
}

struct Table {
    leases: RBTree<Key, Lease>,
    /// Leases of dead homes.
    quarantine: KVVec<Chunks>,
    /// Bytes lent to other nodes, those in quarantine included.
    lent: u64,
}

/// The leases of one node.
#[pin_data]
pub(crate) struct Leases {
    device: Device,
    /// Most bytes that other nodes get.
    cap: u64,
    #[pin]
    table: Mutex<Table>,
    /// Chunks by page number of their RNIC address, for regions mapped on the node that lends them.
    #[pin]
    by_address: XArray<Arc<DmaPages>>,
    stats: Arc<Stats>,
}

fn bytes(chunks: &Chunks) -> u64 {
    chunks.iter().map(|chunk| chunk.len() as u64).sum()
}

/// Bytes that a region may take: what is available now, less a reserve to live on.
fn spendable() -> u64 {
    // SAFETY: The function has no preconditions.
    let pages = unsafe { bindings::si_mem_available() };
    u64::try_from(pages).unwrap_or(0) * PAGE_SIZE as u64 / 8 * 7
}

/// Whether the current task is being killed: then it needs no memory any more.
fn is_killed() -> bool {
    // SAFETY: `current` is valid.
    unsafe { inline::fatal_signal_pending(bindings::get_current()) != 0 }
}

fn index(addr: u64) -> usize {
    (addr >> PAGE_SHIFT) as usize
}

impl Leases {
    /// Nothing lent.
    pub(crate) fn new(device: Device, cap: u64, stats: Arc<Stats>) -> impl PinInit<Self> {
        let table = Table {
            leases: RBTree::new(),
            quarantine: KVVec::new(),
            lent: 0,
        };
        pin_init!(Self {
            device,
            cap,
            table <- new_mutex!(table),
            by_address <- XArray::new(AllocKind::Alloc),
            stats,
        })
    }

    /// Lends memory for `layout`, unless the lease exists already. `foreign` says whether the home is
    /// another node; its memory counts against the cap, ours is charged to the caller.
    ///
    /// # Errors
    ///
    /// - `ENOMEM` if there is none in chunks of this size, or the cap is reached.
    /// - `EINPROGRESS` if the same lease is being made.
    pub(crate) fn lend(&self, key: Key, layout: &Layout, foreign: bool) -> Result {
        let size = Self::size(layout);
        if !self.reserve(key, size, foreign)? {
            return Ok(());
        }
        let chunks = self.allocate(layout, foreign);
        let mut table = self.table.lock();
        let (chunks, error) = match (chunks, table.leases.get_mut(&key)) {
            (Ok(chunks), Some(lease)) => {
                *lease = Lease::Lent(chunks);
                return Ok(());
            }
            // The home died meanwhile.
            (Ok(chunks), None) => (chunks, errno::hostdown()),
            (Err(error), _) => (KVVec::new(), error),
        };
        table.leases.remove(&key);
        self.settle(&mut table, foreign, size);
        drop(table);
        self.withdraw(&chunks);
        Err(error)
    }

    fn size(layout: &Layout) -> u64 {
        (0..layout.chunks())
            .map(|i| u64::from(layout.chunk_pages(i)) * PAGE_SIZE as u64)
            .sum()
    }

    /// Enters a pending lease. Returns whether it is new.
    fn reserve(&self, key: Key, size: u64, foreign: bool) -> Result<bool> {
        let mut table = self.table.lock();
        match table.leases.get(&key) {
            Some(Lease::Pending) => return Err(errno::inprogress()),
            Some(Lease::Lent(_)) => return Ok(false),
            None => {}
        }
        if foreign && table.lent.saturating_add(size) > self.cap {
            return Err(ENOMEM);
        }
        table
            .leases
            .try_create_and_insert(key, Lease::Pending, GFP_KERNEL)?;
        if foreign {
            table.lent += size;
            self.stats.lent_bytes.add(size);
        }
        Ok(true)
    }

    /// Takes `size` bytes off what is lent to others.
    fn settle(&self, table: &mut Table, foreign: bool, size: u64) {
        if foreign {
            table.lent -= size;
            self.stats.lent_bytes.sub(size);
        }
    }

    fn allocate(&self, layout: &Layout, foreign: bool) -> Result<Chunks> {
        if Self::size(layout) > spendable() {
            return Err(ENOMEM);
        }
        let charge = if foreign {
            Charge::Kernel
        } else {
            Charge::Caller
        };
        let mut chunks = KVVec::with_capacity(layout.chunks() as usize, GFP_KERNEL)?;
        for i in 0..layout.chunks() {
            if is_killed() {
                self.withdraw(&chunks);
                return Err(EINTR);
            }
            let made = Pages::new(layout.chunk_len(i) as usize, charge)
                .and_then(|pages| DmaPages::new(self.device, pages))
                .and_then(|pages| Ok(Arc::new(pages, GFP_KERNEL)?))
                .and_then(|chunk| self.publish(chunk))
                .and_then(|chunk| Ok(chunks.push(chunk, GFP_KERNEL)?));
            if let Err(error) = made {
                self.withdraw(&chunks);
                return Err(error);
            }
        }
        Ok(chunks)
    }

    fn publish(&self, chunk: Arc<DmaPages>) -> Result<Arc<DmaPages>> {
        let stored = self
            .by_address
            .lock()
            .store(index(chunk.addr()), chunk.clone(), GFP_KERNEL);
        stored.map_err(|error| error.error)?;
        Ok(chunk)
    }

    fn withdraw(&self, chunks: &Chunks) {
        for chunk in chunks {
            let removed = self.by_address.lock().remove(index(chunk.addr()));
            drop(removed);
        }
    }

    /// The chunk at an RNIC address of ours.
    pub(crate) fn find(&self, addr: u64) -> Option<Arc<DmaPages>> {
        self.by_address.lock().get(index(addr)).map(Into::into)
    }

    /// Calls `f` with the RNIC addresses of a lease's chunks from `first` on, until it returns false.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such lease.
    pub(crate) fn addresses(&self, key: Key, first: u32, mut f: impl FnMut(u64) -> bool) -> Result {
        let table = self.table.lock();
        let Some(Lease::Lent(chunks)) = table.leases.get(&key) else {
            return Err(ENOENT);
        };
        let rest = chunks.iter().skip(first as usize);
        let _ = rest.map(|chunk| chunk.addr()).all(&mut f);
        Ok(())
    }

    /// Takes the memory of a lease back, if there is such a lease.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if it is being made.
    pub(crate) fn release(&self, key: Key, foreign: bool) -> Result {
        let mut table = self.table.lock();
        if matches!(table.leases.get(&key), Some(Lease::Pending)) {
            return Err(errno::inprogress());
        }
        if let Some(Lease::Lent(chunks)) = table.leases.remove(&key) {
            self.settle(&mut table, foreign, bytes(&chunks));
            drop(table);
            self.withdraw(&chunks);
        }
        Ok(())
    }

    /// Puts the leases of a dead home in quarantine.
    pub(crate) fn orphan(&self, home: u32) {
        let mut table = self.table.lock();
        loop {
            let next = table.leases.cursor_lower_bound(&(home, 0));
            let Some(key) = next.map(|at| *at.current().0).filter(|key| key.0 == home) else {
                break;
            };
            // Who makes a pending one finds it gone, and gives its memory back.
            if let Some(Lease::Lent(chunks)) = table.leases.remove(&key) {
                self.withdraw(&chunks);
                if table.quarantine.push(chunks, GFP_KERNEL).is_err() {
                    pr_warn!("no memory to note lent memory: it is freed early\n");
                }
            }
        }
    }

    /// Frees what is in quarantine.
    pub(crate) fn free_orphans(&self) {
        let mut table = self.table.lock();
        let orphans = core::mem::take(&mut table.quarantine);
        let size = orphans.iter().map(bytes).sum();
        self.settle(&mut table, true, size);
    }

    /// Frees everything: the node has left, or the RNIC goes.
    pub(crate) fn clear(&self) {
        let mut table = self.table.lock();
        let (lent, leases) = (table.lent, core::mem::take(&mut table.leases));
        table.quarantine = KVVec::new();
        self.settle(&mut table, true, lent);
        drop(table);
        for lease in leases.values() {
            if let Lease::Lent(chunks) = lease {
                self.withdraw(chunks);
            }
        }
    }
}
