// SPDX-License-Identifier: GPL-2.0

//! Registered user memory (MRs), which work requests of virtual queue pairs address, locally and on other
//! nodes.
//!
//! # Operation
//!
//! Each MR has an entry in a table that peers read with RDMA (`kite_core::wire::memory`). A peer may cache an
//! entry for `MR_LEASE_MS`. A deregistered MR therefore stays accessible to the RNIC until the leases have
//! expired and the last request is done. A late request is executed: a rejected one would break its QP for
//! all other users. The connector releases the memory ([`MrTable::reap`]).
//!
//! Deregistered memory stays pinned for up to `DEREG_DELAY_MS`. A user that registers and deregisters in a
//! loop is throttled: [`MrTable::wait_deregistered`] waits for the memory that the user deregistered before.
//!
//! # Locking
//!
//! `MrTable::state` is a mutex for all fields of [`MrTableState`] and for writes to `remote_table`. A holder
//! may sleep for memory that is charged to no cgroup. MRs are released after the lock is dropped, because
//! unpinning sleeps. `released_cv` waits with the mutex.

use super::registrar::{MrRegistrar, RegisteredMr};
use crate::{
    fabric::{address::LocalAddress, recv::wake::ThreadWaker},
    mlx5::Mlx5Device,
    sys::{
        deadline::Deadline,
        pages::{total_ram_bytes, ContiguousPages, MemcgCharge},
        pin::PinnedPages,
    },
    verbs::dma::DmaPages,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_condvar, new_mutex,
    prelude::*,
    sync::{Arc, CondVar, CondVarTimeoutResult, Mutex, UniqueArc},
    time::msecs_to_jiffies,
};
use kite_core::{
    atomic::AtomicOp,
    rights::Rights,
    wire::memory::{
        key_index, make_key, MrAccessError, MrEntry, MR_ENTRY_SIZE, MR_LEASE_MS, MR_TABLE_ENTRIES,
    },
};

/// Maximum time in ms that a request can be in flight if it was posted at the end of a lease: longer than a
/// DCI retries.
const DEREG_GRACE_MS: u32 = 1500;

/// Time in ms from deregistration to release.
const DEREG_DELAY_MS: u32 = MR_LEASE_MS + DEREG_GRACE_MS;

/// Deregistered memory of one user that awaits release is at most RAM divided by this. The limit bounds users
/// without a memlock limit.
const PENDING_DEREG_RAM_FRACTION: u64 = 8;

/// Maximum number of deregistered MRs of one user that await release.
const MAX_PENDING_DEREGS: usize = 512;

/// Returns the error code of a failed access check.
pub(crate) fn mr_access_errno(error: MrAccessError) -> Error {
    match error {
        MrAccessError::Forbidden => EACCES,
        MrAccessError::OutOfRange => ERANGE,
    }
}

/// Registered memory of a process.
pub(crate) struct UserMr {
    pub(crate) entry: MrEntry,
    mr: RegisteredMr,
    pinned: Arc<PinnedPages>,
}

impl UserMr {
    /// Returns the lkey, used in local work requests.
    pub(crate) fn local_key(&self) -> u32 {
        self.mr.local_key()
    }

    /// Writes bytes to the MR. `addr` is an address in the owner's address space.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range exceeds the MR.
    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) -> Result {
        let offset = addr.checked_sub(self.entry.addr).ok_or(EFAULT)?;
        // SAFETY: `bytes` is a live slice of `bytes.len()` bytes.
        unsafe {
            self.pinned
                .write(offset as usize, bytes.as_ptr(), bytes.len())
        }
    }

    /// Applies an atomic operation of the CPU to a word of the MR. `addr` is an address in the owner's
    /// address space. Returns the old value.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the word is not in the MR.
    /// - `EINVAL`: the word is misaligned.
    pub(crate) fn execute_atomic(&self, addr: u64, op: AtomicOp) -> Result<u64> {
        let offset = addr.checked_sub(self.entry.addr).ok_or(EFAULT)?;
        self.pinned.apply_atomic(offset as usize, op)
    }
}

/// A deregistered MR that awaits release.
struct PendingDereg {
    due: Deadline,
    /// Position in the order of deregistrations.
    seq: u64,
    uid: u32,
    len: u64,
    /// `None` while the MR is being released.
    mr: Option<Arc<UserMr>>,
}

struct MrTableState {
    /// MRs by table index.
    entries: KVVec<Option<Arc<UserMr>>>,
    /// Number of registered MRs.
    live_count: usize,
    /// Index at which the search for a free entry starts.
    next_index: usize,
    /// Ordered by `seq`, and so by `due`. Has capacity for all registered MRs, so deregistration does not
    /// allocate.
    pending_deregs: KVVec<PendingDereg>,
    /// Number of deregistrations so far.
    dereg_count: u64,
    /// Number of releases so far.
    released_count: u64,
}

impl MrTableState {
    /// Returns `true` if the user may deregister `len` more bytes without exceeding its limits.
    fn has_dereg_quota(&self, uid: u32, len: u64) -> bool {
        let of_user = || {
            self.pending_deregs
                .iter()
                .filter(|pending| pending.uid == uid)
        };
        let bytes: u64 = of_user().map(|pending| pending.len).sum();
        of_user().count() < MAX_PENDING_DEREGS
            && bytes.saturating_add(len) <= total_ram_bytes() / PENDING_DEREG_RAM_FRACTION
    }

    /// Returns `true` if one of the first `count` deregistrations belongs to the user and awaits release.
    fn has_pending_dereg(&self, uid: u32, count: u64) -> bool {
        let mut all_pending = self.pending_deregs.iter();
        all_pending.any(|pending| pending.uid == uid && pending.seq < count)
    }
}

/// The registered MRs of an RNIC.
#[pin_data]
pub(crate) struct MrTable {
    #[pin]
    state: Mutex<MrTableState>,
    /// Notified when a deregistered MR is released.
    #[pin]
    released_cv: CondVar,
    /// Entries that peers read.
    remote_table: DmaPages,
    #[pin]
    registrar: MrRegistrar,
    connector_waker: Arc<ThreadWaker>,
}

impl MrTable {
    /// Creates an empty table.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - The error of the RNIC if the table cannot be mapped.
    pub(in crate::fabric) fn new(
        local_address: Arc<LocalAddress>,
        hca: Option<Arc<Mlx5Device>>,
        connector_waker: Arc<ThreadWaker>,
    ) -> Result<Pin<KBox<Self>>> {
        let pages = ContiguousPages::new(
            MR_TABLE_ENTRIES as usize * MR_ENTRY_SIZE,
            MemcgCharge::Kernel,
        )?;
        let remote_table = DmaPages::new_coherent(local_address.device(), pages)?;
        let mut entries = KVVec::new();
        for _ in 0..MR_TABLE_ENTRIES {
            entries.push(None, GFP_KERNEL)?;
        }
        let state = MrTableState {
            entries,
            live_count: 0,
            next_index: 0,
            pending_deregs: KVVec::new(),
            dereg_count: 0,
            released_count: 0,
        };
        let registrar = MrRegistrar::new(local_address, hca)?;
        KBox::pin_init(
            pin_init!(Self {
                state <- new_mutex!(state, "MrTable::state"),
                released_cv <- new_condvar!("MrTable::released_cv"),
                remote_table,
                registrar <- registrar,
                connector_waker,
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the address of the table, for peers.
    pub(crate) fn table_addr(&self) -> u64 {
        self.remote_table.dma_addr()
    }

    /// Returns the address of the entry of `key` in a table at `table_addr`.
    pub(crate) fn entry_addr(table_addr: u64, key: u32) -> u64 {
        table_addr + u64::from(key_index(key)) * MR_ENTRY_SIZE as u64
    }

    /// Registers pinned memory. `addr` is the address of the first byte in the address space of its owner
    /// `uid`. Returns the key.
    ///
    /// # Errors
    ///
    /// - `ENXIO`: the RNIC cannot register this number of bytes.
    /// - `EIO`: the registration failed.
    /// - `ETIMEDOUT`: the registration did not complete.
    /// - `ENOMEM`: the table is full, or out of memory.
    pub(crate) fn register(
        &self,
        pinned: Arc<PinnedPages>,
        (addr, len): (u64, u64),
        uid: u32,
        other_rights: Rights,
    ) -> Result<u32> {
        let mr = self.registrar.register(pinned.clone(), addr, len)?;
        self.insert((pinned, mr), (addr, len), uid, other_rights)
    }

    /// Enters pinned memory into the table. `addr` is the address of the first byte in the address space of
    /// its owner `uid`. Returns the key.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the table is full, or out of memory.
    fn insert(
        &self,
        (pinned, mr): (Arc<PinnedPages>, RegisteredMr),
        (addr, len): (u64, u64),
        uid: u32,
        other_rights: Rights,
    ) -> Result<u32> {
        // Allocate before locking. An allocation charged to a full cgroup can block, and all other users and
        // the connector would wait for the lock.
        let allocation = UniqueArc::new_uninit(GFP_KERNEL_ACCOUNT)?;
        let mut state = self.state.lock();
        // Reserve for every registered MR: all may be deregistered at once.
        let live_count = state.live_count + 1;
        state.pending_deregs.reserve(live_count, GFP_KERNEL)?;
        let capacity = state.entries.len();
        let free_index = (state.next_index..state.next_index + capacity)
            .find(|i| state.entries[i % capacity].is_none());
        let entry_index = free_index.ok_or(ENOMEM)? % capacity;
        // SAFETY: The function has no preconditions.
        let key = make_key(entry_index as u32, unsafe {
            crate::bindings::get_random_u32()
        });
        let entry = MrEntry {
            key,
            owner_uid: uid,
            other_rights,
            rkey: mr.remote_key(),
            addr,
            len,
        };
        let user_mr = UserMr { entry, mr, pinned };
        self.remote_table
            .write(entry_index * MR_ENTRY_SIZE, &entry.encode())?;
        state.entries[entry_index] = Some(allocation.write(user_mr).into());
        state.live_count = live_count;
        state.next_index = entry_index + 1;
        Ok(key)
    }

    /// Returns the MR with this key.
    ///
    /// # Errors
    ///
    /// - `EBADF`: no MR has the key.
    pub(crate) fn get(&self, key: u32) -> Result<Arc<UserMr>> {
        let state = self.state.lock();
        let mr = state
            .entries
            .get(key_index(key) as usize)
            .and_then(Option::as_ref);
        let mr = mr.filter(|mr| mr.entry.key == key);
        mr.cloned().ok_or(EBADF)
    }

    /// Deregisters an MR. The connector releases the memory after `DEREG_DELAY_MS`.
    pub(crate) fn deregister(&self, key: u32) {
        self.remove(key);
        self.connector_waker.event.complete();
    }

    /// Removes an MR from the table. The memory stays accessible to the RNIC until no peer can hold a lease.
    fn remove(&self, key: u32) {
        let mut state = self.state.lock();
        let entry_index = key_index(key) as usize;
        let entry = state.entries.get_mut(entry_index);
        let Some(mr) = entry.and_then(|entry| entry.take_if(|mr| mr.entry.key == key)) else {
            return;
        };
        state.live_count -= 1;
        // Cannot fail: `insert` wrote an entry at this offset.
        let _ = self
            .remote_table
            .write(entry_index * MR_ENTRY_SIZE, &[0; MR_ENTRY_SIZE]);
        let pending = PendingDereg {
            due: Deadline::after_ms(DEREG_DELAY_MS),
            seq: state.dereg_count,
            uid: mr.entry.owner_uid,
            len: mr.entry.len,
            mr: Some(mr),
        };
        state.dereg_count += 1;
        // `insert` reserved the capacity.
        let _ = state.pending_deregs.push_within_capacity(pending);
    }

    /// Returns the number of MRs released so far.
    pub(crate) fn released_count(&self) -> u64 {
        self.state.lock().released_count
    }

    /// Waits until all memory that `uid` deregistered before this call is released, or for 2 ·
    /// `DEREG_DELAY_MS`. Returns `true` if any MR was released since [`Self::released_count`] returned
    /// `seen_count`.
    ///
    /// # Errors
    ///
    /// - `ERESTARTSYS`: a signal is pending.
    pub(crate) fn wait_deregistered(&self, uid: u32, seen_count: u64) -> Result<bool> {
        let deadline = Deadline::after_ms(2 * DEREG_DELAY_MS);
        let mut state = self.state.lock();
        let count = state.dereg_count;
        while state.has_pending_dereg(uid, count) && !deadline.has_expired() {
            let slice = msecs_to_jiffies(DEREG_DELAY_MS);
            if let CondVarTimeoutResult::Signal { .. } = self
                .released_cv
                .wait_interruptible_timeout(&mut state, slice)
            {
                return Err(ERESTARTSYS);
            }
        }
        Ok(state.released_count != seen_count)
    }

    /// Waits for the deregistered memory of `uid` if `len` more bytes would exceed the user's limits.
    ///
    /// # Errors
    ///
    /// See [`Self::wait_deregistered`].
    pub(crate) fn throttle_deregistration(&self, uid: u32, len: u64) -> Result {
        if !self.state.lock().has_dereg_quota(uid, len) {
            self.wait_deregistered(uid, 0)?;
        }
        Ok(())
    }

    /// Releases deregistered MRs that are due. Returns `true` if others remain. Called by the connector only.
    pub(in crate::fabric) fn reap(&self) -> bool {
        while let Some(mr) = self.pop_due() {
            // Before the RNIC can assign the index of the key again.
            self.registrar.retire(&mr.mr);
            drop(mr);
            let mut state = self.state.lock();
            // Cannot fail: only this function removes entries, and `pop_due` found the first one.
            let _ = state.pending_deregs.remove(0);
            state.released_count += 1;
            self.released_cv.notify_all();
        }
        !self.state.lock().pending_deregs.is_empty()
    }

    /// Takes the first deregistered MR if no request can access it any longer. Its entry stays in the list
    /// until the release, so that a waiter finds the pages uncharged. Entries become due in list order.
    fn pop_due(&self) -> Option<Arc<UserMr>> {
        let mut state = self.state.lock();
        let oldest = state.pending_deregs.first_mut()?;
        match oldest.due.has_expired() {
            true => oldest.mr.take(),
            false => None,
        }
    }
}
