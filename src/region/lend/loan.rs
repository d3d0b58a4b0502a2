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
        deadline::fatal_signal_pending,
        pages::{self, ContiguousPages, MemcgCharge},
        pin::PinnedPages,
    },
    verbs::{device::IbDevice, dma::DmaPages},
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
pub(crate) type NodeScopedId = (u32, u64);

/// Those that were given back are missing.
type LentChunks = KVVec<Option<Arc<LentChunk>>>;

/// A chunk of lent memory.
pub(crate) struct LentChunk {
    pages: DmaPages,
    /// What it is for: the home of a region, and the region.
    region: NodeScopedId,
}

impl Deref for LentChunk {
    type Target = DmaPages;

    fn deref(&self) -> &DmaPages {
        &self.pages
    }
}

impl LentChunk {
    /// The region, and the RNIC address. Memory of a process may be in several regions.
    fn table_key(&self) -> (NodeScopedId, u64) {
        (self.region, self.dma_addr())
    }
}

struct Loan {
    /// Nothing while it is being allocated.
    chunks: Option<LentChunks>,
    bytes: u64,
    /// Whether its home is another node.
    remote_home: bool,
}

/// Bytes that this node lends to others, and to regions of its own, through whichever RNIC.
static LENT_BYTES: Counter = Counter::new();
static OWN_BYTES: Counter = Counter::new();

/// The most that they may be.
#[derive(Clone, Copy)]
pub(crate) struct LendLimits {
    pub(crate) lent_bytes: u64,
    pub(crate) own_bytes: u64,
}

/// Memory of a dead home.
struct OrphanedLoan {
    /// The view in which the home was missing first.
    removed_epoch: u64,
    loan: Loan,
}

struct LoanTableState {
    loans: RBTree<NodeScopedId, Loan>,
    quarantine: KVVec<OrphanedLoan>,
}

/// The leases of one node.
#[pin_data]
pub(crate) struct LoanTable {
    device: IbDevice,
    limits: LendLimits,
    #[pin]
    state: Mutex<LoanTableState>,
    /// Chunks by region and RNIC address, for regions mapped on the node that lends them.
    #[pin]
    chunks_by_addr: Mutex<RBTree<(NodeScopedId, u64), Arc<LentChunk>>>,
    stats: Arc<Stats>,
}

/// Bytes that a region may take: what is available now, less a reserve to live on.
fn lendable_bytes() -> u64 {
    // SAFETY: The function has no preconditions.
    let pages = unsafe { bindings::si_mem_available() };
    let available = u64::try_from(pages).unwrap_or(0) * PAGE_SIZE as u64;
    available.saturating_sub(pages::total_ram_bytes() / 8)
}

impl LoanTable {
    /// Nothing lent.
    pub(crate) fn new(
        device: IbDevice,
        limits: LendLimits,
        stats: Arc<Stats>,
    ) -> impl PinInit<Self> {
        let state = LoanTableState {
            loans: RBTree::new(),
            quarantine: KVVec::new(),
        };
        pin_init!(Self {
            device,
            limits,
            state <- new_mutex!(state),
            chunks_by_addr <- new_mutex!(RBTree::new()),
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
        key: NodeScopedId,
        region: u64,
        layout: &Layout,
        remote_home: bool,
        check_live: impl Fn() -> Result,
    ) -> Result {
        if !self.reserve(key, layout, remote_home)? {
            return Ok(());
        }
        let chunks = self.allocate_chunks((key.0, region), layout, remote_home, check_live);
        self.commit(key, chunks)
    }

    /// As [`Self::lend`], to a region of this node, but of memory that is there, and stays what it is.
    ///
    /// # Errors
    ///
    /// - `ENOSPC` if a cap is reached, `ENOMEM`.
    /// - `EINVAL` if it is not contiguous as the layout has it, or has a page twice.
    /// - `EINTR` if the task is killed.
    pub(crate) fn lend_pinned(
        &self,
        key: NodeScopedId,
        region: u64,
        layout: &Layout,
        pinned: &Arc<PinnedPages>,
    ) -> Result {
        if !self.reserve(key, layout, false)? {
            return Ok(());
        }
        let mut first = 0;
        let chunks = self.build_chunks((key.0, region), layout, |i| {
            if fatal_signal_pending() {
                return Err(EINTR);
            }
            let count = layout.chunk_pages(i) as usize;
            let pages = ContiguousPages::from_pinned(pinned, first, count);
            first += count;
            pages
        });
        self.commit(key, chunks)
    }

    /// Gives a lease that was reserved its memory, or forgets it.
    fn commit(&self, key: NodeScopedId, chunks: Result<LentChunks>) -> Result {
        let mut state = self.state.lock();
        let (chunks, error) = match (chunks, state.loans.get_mut(&key)) {
            (Ok(chunks), Some(loan)) => {
                loan.chunks = Some(chunks);
                return Ok(());
            }
            // The home died meanwhile.
            (Ok(chunks), None) => (chunks, errno::hostdown()),
            (Err(error), _) => (KVVec::new(), error),
        };
        let reserved = state.loans.remove(&key);
        drop(state);
        self.unpublish(&chunks);
        drop(chunks);
        self.uncharge_all(reserved.as_ref());
        Err(error)
    }

    /// Enters a lease without memory. Returns whether it is new.
    fn reserve(&self, key: NodeScopedId, layout: &Layout, remote_home: bool) -> Result<bool> {
        let mut state = self.state.lock();
        match state.loans.get(&key) {
            Some(Loan { chunks: None, .. }) => return Err(errno::inprogress()),
            Some(Loan {
                chunks: Some(chunks),
                ..
            }) => {
                let same = chunks.len() == layout.chunk_count() as usize;
                return if same { Ok(false) } else { Err(EINVAL) };
            }
            None => {}
        }
        let bytes = layout.page_count() * PAGE_SIZE as u64;
        let loan = Loan {
            chunks: None,
            bytes,
            remote_home,
        };
        self.charge(bytes, remote_home)?;
        let entered = state.loans.try_create_and_insert(key, loan, GFP_KERNEL);
        entered.inspect_err(|_| self.uncharge(bytes, remote_home))?;
        Ok(true)
    }

    fn charge(&self, bytes: u64, remote_home: bool) -> Result {
        let (counter, limit) = if remote_home {
            (&LENT_BYTES, self.limits.lent_bytes)
        } else {
            (&OWN_BYTES, self.limits.own_bytes)
        };
        if !counter.try_add(bytes, limit) {
            return Err(ENOSPC);
        }
        if remote_home {
            self.stats.lent_bytes.add(bytes);
        }
        Ok(())
    }

    fn uncharge(&self, bytes: u64, remote_home: bool) {
        if remote_home {
            LENT_BYTES.sub(bytes);
            self.stats.lent_bytes.sub(bytes);
        } else {
            OWN_BYTES.sub(bytes);
        }
    }

    /// Takes leases that are gone off what is taken.
    fn uncharge_all<'a>(&self, loans: impl IntoIterator<Item = &'a Loan>) {
        for loan in loans {
            self.uncharge(loan.bytes, loan.remote_home);
        }
    }

    fn allocate_chunks(
        &self,
        region: NodeScopedId,
        layout: &Layout,
        remote_home: bool,
        check_live: impl Fn() -> Result,
    ) -> Result<LentChunks> {
        if layout.page_count() * PAGE_SIZE as u64 > lendable_bytes() {
            return Err(ENOSPC);
        }
        let charge = if remote_home {
            MemcgCharge::Kernel
        } else {
            MemcgCharge::Caller
        };
        self.build_chunks(region, layout, |i| {
            check_live()?;
            ContiguousPages::new(layout.chunk_len(i) as usize, charge)
        })
    }

    /// The chunks of a region, of whose memory `pages` gives the part of each.
    ///
    /// What tells of them is charged to nobody: where a group has taken all it may, pages are refused, but
    /// small things kill. It is little beside the pages, which the caps bound.
    fn build_chunks(
        &self,
        region: NodeScopedId,
        layout: &Layout,
        mut pages: impl FnMut(u32) -> Result<ContiguousPages>,
    ) -> Result<LentChunks> {
        let mut chunks = KVVec::with_capacity(layout.chunk_count() as usize, GFP_KERNEL)?;
        for i in 0..layout.chunk_count() {
            let built = pages(i)
                .and_then(|pages| DmaPages::new_coherent(self.device, pages))
                .and_then(|pages| Ok(Arc::new(LentChunk { pages, region }, GFP_KERNEL)?))
                .and_then(|chunk| self.publish_chunk(chunk))
                .and_then(|chunk| Ok(chunks.push(Some(chunk), GFP_KERNEL)?));
            if let Err(error) = built {
                self.unpublish(&chunks);
                return Err(error);
            }
        }
        Ok(chunks)
    }

    fn publish_chunk(&self, chunk: Arc<LentChunk>) -> Result<Arc<LentChunk>> {
        let node = RBTreeNode::new(chunk.table_key(), chunk.clone(), GFP_KERNEL)?;
        let mut chunks_by_addr = self.chunks_by_addr.lock();
        // A process may have a page twice.
        if chunks_by_addr.get(&chunk.table_key()).is_some() {
            return Err(EINVAL);
        }
        chunks_by_addr.insert(node);
        Ok(chunk)
    }

    fn unpublish(&self, chunks: &LentChunks) {
        for chunk in chunks.iter().flatten() {
            self.unpublish_chunk(chunk);
        }
    }

    fn unpublish_chunk(&self, chunk: &LentChunk) {
        let removed = self.chunks_by_addr.lock().remove(&chunk.table_key());
        drop(removed);
    }

    /// The chunk of a region at an RNIC address of ours.
    pub(crate) fn find_chunk(&self, region: NodeScopedId, addr: u64) -> Option<Arc<LentChunk>> {
        self.chunks_by_addr.lock().get(&(region, addr)).cloned()
    }

    /// Calls `f` with the RNIC addresses of a lease's chunks from `first` on, until it returns false.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such lease.
    pub(crate) fn for_each_address(
        &self,
        key: NodeScopedId,
        first_chunk: u32,
        mut f: impl FnMut(u64) -> bool,
    ) -> Result {
        let state = self.state.lock();
        let loan = state.loans.get(&key).ok_or(ENOENT)?;
        let chunks = loan.chunks.as_ref().ok_or_else(errno::inprogress)?;
        for chunk in chunks.iter().skip(first_chunk as usize) {
            if !f(chunk.as_ref().ok_or(ENOENT)?.dma_addr()) {
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
    pub(crate) fn release(&self, key: NodeScopedId) -> Result {
        let mut state = self.state.lock();
        if matches!(state.loans.get(&key), Some(Loan { chunks: None, .. })) {
            return Err(errno::inprogress());
        }
        let removed = state.loans.remove(&key);
        drop(state);
        self.free_loans(removed);
        Ok(())
    }

    /// Takes some chunks of a lease back, those that there are.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if it is being made.
    pub(crate) fn shrink(&self, key: NodeScopedId, indices: impl Iterator<Item = u32>) -> Result {
        let mut state = self.state.lock();
        let Some(loan) = state.loans.get_mut(&key) else {
            return Ok(());
        };
        let chunks = loan.chunks.as_mut().ok_or_else(errno::inprogress)?;
        for index in indices {
            if let Some(chunk) = chunks.get_mut(index as usize).and_then(Option::take) {
                self.unpublish_chunk(&chunk);
                let bytes = chunk.len() as u64;
                loan.bytes -= bytes;
                self.uncharge(bytes, loan.remote_home);
            }
        }
        Ok(())
    }

    /// Frees leases, whose memory nobody can reach any more.
    fn free_loans(&self, loans: impl IntoIterator<Item = Loan>) {
        for loan in loans {
            if let Some(chunks) = &loan.chunks {
                self.unpublish(chunks);
            }
            self.uncharge_all(Some(&loan));
        }
    }

    /// Puts the leases of a home in quarantine that is missing from the view as of `epoch`.
    pub(crate) fn quarantine_home(&self, home: u32, epoch: u64) {
        let mut state = self.state.lock();
        loop {
            let next = state.loans.cursor_lower_bound(&(home, 0));
            let Some(key) = next
                .map(|cursor| *cursor.current().0)
                .filter(|key| key.0 == home)
            else {
                break;
            };
            let Some(loan) = state.loans.remove(&key) else {
                break;
            };
            if let Some(chunks) = &loan.chunks {
                self.unpublish(chunks);
                let orphan = OrphanedLoan {
                    removed_epoch: epoch,
                    loan,
                };
                // Without memory to note it, it is lost for good: a dead node's peers may still write to it.
                if let Err(error) = state.quarantine.reserve(1, GFP_KERNEL) {
                    pr_warn!("no memory to note lent memory: it is lost: {error:?}\n");
                    core::mem::forget(orphan);
                } else {
                    let _ = state.quarantine.push(orphan, GFP_KERNEL);
                }
            } else {
                // Who makes it finds it gone, and gives its memory back.
                self.uncharge_all(Some(&loan));
            }
        }
    }

    /// Frees what is in quarantine since `epoch` or before: every node has heard of that view.
    pub(crate) fn free_quarantined(&self, epoch: u64) {
        self.state.lock().quarantine.retain(|orphan| {
            let keep = orphan.removed_epoch > epoch;
            if !keep {
                self.uncharge_all(Some(&orphan.loan));
            }
            keep
        });
    }

    /// Frees everything: the node has left, or the RNIC goes, and nobody is connected any more.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        let loans = core::mem::replace(&mut state.loans, RBTree::new());
        let quarantine = core::mem::take(&mut state.quarantine);
        drop(state);
        for loan in loans.values() {
            if let Some(chunks) = &loan.chunks {
                self.unpublish(chunks);
            }
        }
        self.uncharge_all(loans.values());
        self.uncharge_all(quarantine.iter().map(|orphan| &orphan.loan));
    }
}
