// SPDX-License-Identifier: GPL-2.0

//! Memory that this node lends to regions, local ones and those of other nodes.
//!
//! # Operation
//!
//! A loan is identified by the home of its region and by a number that the home chose. So a repeated request
//! returns the same memory. A loan is reserved and charged first, then allocated without the lock, then
//! committed.
//!
//! # Recovery
//!
//! Loans of a dead home enter quarantine ([`quarantine`]).
//!
//! # Locking
//!
//! - `LoanTable::state` (mutex) protects loans and quarantine.
//! - `LoanTable::chunks_by_addr` (mutex) protects the index of chunks, and nests inside `state`.

mod quarantine;
mod ram_reservation;

use self::{quarantine::OrphanedLoan, ram_reservation::RamReservation};
use crate::{
    errno::{self, TryError, TryResult},
    stats::{Counter, Stats},
    sys::{
        deadline::fatal_signal_pending,
        pages::{ContiguousPages, MemcgCharge},
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

/// Home of a region, and the number of a loan or region at that home.
pub(crate) type NodeScopedId = (u32, u64);

/// Chunks of a loan. `None`: the chunk was returned.
type LentChunks = KVVec<Option<Arc<LentChunk>>>;

/// Chunk of lent memory.
pub(crate) struct LentChunk {
    pages: DmaPages,
    /// Home and number of the region that the memory is lent to.
    region: NodeScopedId,
}

impl Deref for LentChunk {
    type Target = DmaPages;

    fn deref(&self) -> &DmaPages {
        &self.pages
    }
}

impl LentChunk {
    /// Returns the key of the chunk in `chunks_by_addr`. Pinned memory of a process may be in several
    /// regions.
    fn table_key(&self) -> (NodeScopedId, u64) {
        (self.region, self.dma_addr())
    }
}

struct Loan {
    /// `None` while the chunks are being allocated.
    chunks: Option<LentChunks>,
    bytes: u64,
    /// Set if the home is another node.
    remote_home: bool,
}

/// Bytes lent to other nodes and to local regions. All RNICs of this node share both counters.
static LENT_BYTES: Counter = Counter::new();
static OWN_BYTES: Counter = Counter::new();

/// Maximum bytes lent to other nodes and to local regions.
#[derive(Clone, Copy)]
pub(crate) struct LendLimits {
    pub(crate) lent_bytes: u64,
    pub(crate) own_bytes: u64,
}

struct LoanTableState {
    loans: RBTree<NodeScopedId, Loan>,
    quarantine: KVVec<OrphanedLoan>,
}

/// Loans of this node through one RNIC.
#[pin_data]
pub(crate) struct LoanTable {
    device: IbDevice,
    limits: LendLimits,
    #[pin]
    state: Mutex<LoanTableState>,
    /// Chunks by region and RNIC address, for mappings on the lending node.
    #[pin]
    chunks_by_addr: Mutex<RBTree<(NodeScopedId, u64), Arc<LentChunk>>>,
    stats: Arc<Stats>,
}

impl LoanTable {
    /// Creates an empty table.
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
            state <- new_mutex!(state, "LoanTable::state"),
            chunks_by_addr <- new_mutex!(RBTree::new(), "LoanTable::chunks_by_addr"),
            stats,
        })
    }

    /// Lends memory for `layout` to a region of the home, unless the loan exists already. If the home is this
    /// node (`remote_home` is `false`), the memory is charged to the caller. `check_live` is called before
    /// each chunk is allocated, and an error stops the allocation.
    ///
    /// # Errors
    ///
    /// - `ENOSPC`: not enough memory, or a limit is reached. Smaller chunks do not help.
    /// - `ENOMEM`: no memory in chunks of this size.
    /// - `EINPROGRESS`: the same loan is being allocated.
    /// - `EINVAL`: the loan exists with another number of chunks.
    /// - `EHOSTDOWN`: the home died meanwhile.
    /// - Errors of `check_live`.
    pub(crate) fn lend(
        &self,
        key: NodeScopedId,
        region: u64,
        layout: &Layout,
        remote_home: bool,
        check_live: impl Fn() -> TryResult,
    ) -> Result {
        if !self.reserve(key, layout, remote_home)? {
            return Ok(());
        }
        let chunks = self.allocate_chunks((key.0, region), layout, remote_home, check_live);
        self.commit(key, chunks)
    }

    /// Lends pinned memory to a region of this node. The contents remain.
    ///
    /// # Errors
    ///
    /// - `ENOSPC`: a limit is reached.
    /// - `ENOMEM`: out of memory.
    /// - `EINVAL`: the memory is not contiguous as `layout` requires, or contains a page twice.
    /// - `EINTR`: the task was killed.
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

    /// Completes a reserved loan with its chunks, or removes the loan on error.
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

    /// Reserves a loan without memory and charges its size. Returns `true` if the loan is new.
    fn reserve(&self, key: NodeScopedId, layout: &Layout, remote_home: bool) -> TryResult<bool> {
        let mut state = self.state.lock();
        match state.loans.get(&key) {
            Some(Loan { chunks: None, .. }) => return Err(TryError::InTransition),
            Some(Loan {
                chunks: Some(chunks),
                ..
            }) => {
                let same = chunks.len() == layout.chunk_count() as usize;
                return if same { Ok(false) } else { Err(EINVAL.into()) };
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

    /// Subtracts removed loans from the counters of lent memory.
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
        check_live: impl Fn() -> TryResult,
    ) -> Result<LentChunks> {
        let mut reservation = RamReservation::new(layout.page_count() * PAGE_SIZE as u64)?;
        let charge = if remote_home {
            MemcgCharge::Kernel
        } else {
            MemcgCharge::Caller
        };
        self.build_chunks(region, layout, |i| {
            check_live()?;
            let chunk = ContiguousPages::new(layout.chunk_len(i) as usize, charge)?;
            reservation.release(layout.chunk_len(i).into());
            Ok(chunk)
        })
    }

    /// Builds the chunks of a region. `pages` returns the memory of each chunk.
    ///
    /// The bookkeeping is not charged to a cgroup. At the limit of a cgroup, page allocations fail, but small
    /// allocations invoke the OOM killer. The bookkeeping is small compared to the pages, which the limits
    /// bound.
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
        // A process may have mapped a page twice.
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

    /// Returns the chunk of a region at an RNIC address of this node.
    pub(crate) fn find_chunk(&self, region: NodeScopedId, addr: u64) -> Option<Arc<LentChunk>> {
        self.chunks_by_addr.lock().get(&(region, addr)).cloned()
    }

    /// Calls `f` with the RNIC addresses of a loan's chunks, starting at `first_chunk`, until `f` returns
    /// `false`.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the loan does not exist, or a chunk was returned.
    /// - `EINPROGRESS`: the loan is being allocated.
    pub(crate) fn for_each_address(
        &self,
        key: NodeScopedId,
        first_chunk: u32,
        mut f: impl FnMut(u64) -> bool,
    ) -> Result {
        let state = self.state.lock();
        let loan = state.loans.get(&key).ok_or(ENOENT)?;
        let chunks = loan.chunks.as_ref().ok_or(TryError::InTransition)?;
        for chunk in chunks.iter().skip(first_chunk as usize) {
            if !f(chunk.as_ref().ok_or(ENOENT)?.dma_addr()) {
                break;
            }
        }
        Ok(())
    }

    /// Frees a loan, if it exists.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the loan is being allocated.
    pub(crate) fn release(&self, key: NodeScopedId) -> Result {
        let mut state = self.state.lock();
        if matches!(state.loans.get(&key), Some(Loan { chunks: None, .. })) {
            return Err(TryError::InTransition.into());
        }
        let removed = state.loans.remove(&key);
        drop(state);
        self.free_loans(removed);
        Ok(())
    }

    /// Frees some chunks of a loan. Ignores missing chunks and a missing loan.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the loan is being allocated.
    pub(crate) fn shrink(&self, key: NodeScopedId, indices: impl Iterator<Item = u32>) -> Result {
        let mut state = self.state.lock();
        let Some(loan) = state.loans.get_mut(&key) else {
            return Ok(());
        };
        let chunks = loan.chunks.as_mut().ok_or(TryError::InTransition)?;
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

    /// Frees loans. Their memory cannot be accessed any longer.
    fn free_loans(&self, loans: impl IntoIterator<Item = Loan>) {
        for loan in loans {
            if let Some(chunks) = &loan.chunks {
                self.unpublish(chunks);
            }
            self.uncharge_all(Some(&loan));
        }
    }
}
