// SPDX-License-Identifier: GPL-2.0

//! Memory of processes that requests of virtual queue pairs name, here and at other nodes.
//!
//! Each piece has a record in a table that peers read (`kite_core::wire::memory`), and whoever read it relies on it
//! for a while. So memory that is taken back stays the RNIC's until then: a request that comes late is served, and
//! not refused, which would break the queue pair that it came by for others.
//!
//! Memory taken back stays pinned for up to `RELEASE_MS`. A user that registers and takes back in a loop is slowed
//! down: [`Memories::await_release`] waits for the memory that the user took back before.

use super::registrar::RegisteredMr;
use crate::{
    fabric::Fabric,
    sys::{
        deadline::Deadline,
        pages::{total_ram_bytes, ContiguousPages, MemcgCharge},
        pin::PinnedPages,
    },
    verbs::{
        device::IbDevice,
        dma::{DmaPages, LongTermDmaMap},
    },
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

/// How long a request may be under way that was posted at the end of a lease: above what an initiator tries.
const DEREG_GRACE_MS: u32 = 1500;

/// Maximum time from taking memory back until it is released.
const DEREG_DELAY_MS: u32 = MR_LEASE_MS + DEREG_GRACE_MS;

/// Fraction of RAM that memory taken back by one user may have. It bounds users without a lock limit.
const PENDING_DEREG_RAM_FRACTION: u64 = 8;

/// Pieces of memory that one user may have taken back.
const MAX_PENDING_DEREGS: usize = 512;

/// A refusal as an error.
pub(crate) fn mr_access_errno(error: MrAccessError) -> Error {
    match error {
        MrAccessError::Forbidden => EACCES,
        MrAccessError::OutOfRange => ERANGE,
    }
}

/// Memory of a process.
pub(crate) struct UserMr {
    pub(crate) entry: MrEntry,
    mr: RegisteredMr,
    pinned: Arc<PinnedPages>,
}

impl UserMr {
    /// The key by which our requests name it.
    pub(crate) fn local_key(&self) -> u32 {
        self.mr.local_key()
    }

    /// Writes to it, by the addresses of its owner.
    ///
    /// # Errors
    ///
    /// `EFAULT` if they are not all there.
    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) -> Result {
        let offset = addr.checked_sub(self.entry.addr).ok_or(EFAULT)?;
        // SAFETY: The bytes are there.
        unsafe {
            self.pinned
                .write(offset as usize, bytes.as_ptr(), bytes.len())
        }
    }

    /// Changes a word of it, by the addresses of its owner, as one step to all processors. Returns what it was.
    ///
    /// # Errors
    ///
    /// `EFAULT` if it is not there; `EINVAL` if it is no word's place.
    pub(crate) fn execute_atomic(&self, addr: u64, op: AtomicOp) -> Result<u64> {
        let offset = addr.checked_sub(self.entry.addr).ok_or(EFAULT)?;
        self.pinned.apply_atomic(offset as usize, op)
    }
}

/// Memory that was taken back, and is given back then.
struct PendingDereg {
    due: Deadline,
    /// Position in the order in which memory was taken back.
    seq: u64,
    uid: u32,
    len: u64,
    /// `None` while it is released.
    mr: Option<Arc<UserMr>>,
}

struct MrTableState {
    /// By index.
    entries: KVVec<Option<Arc<UserMr>>>,
    /// How many there are.
    live_count: usize,
    /// Where to look for a free place first.
    next_index: usize,
    pending_deregs: KVVec<PendingDereg>,
    /// Pieces of memory that were taken back so far.
    dereg_count: u64,
    /// Pieces of memory that were released so far.
    released_count: u64,
}

impl MrTableState {
    /// Returns `true` if the retired memory of a user leaves room for `len` bytes more.
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

    /// Returns `true` if memory of a user is left among the first `count` retired pieces.
    fn has_pending_dereg(&self, uid: u32, count: u64) -> bool {
        let mut all_pending = self.pending_deregs.iter();
        all_pending.any(|pending| pending.uid == uid && pending.seq < count)
    }
}

/// The memory of all processes on an RNIC.
#[pin_data]
pub(crate) struct MrTable {
    #[pin]
    state: Mutex<MrTableState>,
    /// Signalled when memory that was taken back is released.
    #[pin]
    released_cv: CondVar,
    /// What peers read.
    remote_table: DmaPages,
}

impl MrTable {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(in crate::fabric) fn new(device: IbDevice) -> Result<Pin<KBox<Self>>> {
        let pages = ContiguousPages::new(
            MR_TABLE_ENTRIES as usize * MR_ENTRY_SIZE,
            MemcgCharge::Kernel,
        )?;
        let remote_table = DmaPages::new_coherent(device, pages)?;
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
        KBox::pin_init(
            pin_init!(Self {
                state <- new_mutex!(state),
                released_cv <- new_condvar!(),
                remote_table,
            }),
            GFP_KERNEL,
        )
    }

    /// Address of the table, for peers.
    pub(crate) fn table_addr(&self) -> u64 {
        self.remote_table.dma_addr()
    }

    /// Where in a table of that address the record of a key is.
    pub(crate) fn entry_addr(table_addr: u64, key: u32) -> u64 {
        table_addr + u64::from(key_index(key)) * MR_ENTRY_SIZE as u64
    }

    /// Enters a region of pinned memory, whose first byte its owner `uid` has at `addr`. Returns its key.
    fn insert(
        &self,
        (pinned, mr): (Arc<PinnedPages>, RegisteredMr),
        (addr, len): (u64, u64),
        uid: u32,
        other_rights: Rights,
    ) -> Result<u32> {
        // Nobody waits for a cgroup that is full while all others, and the poller, wait for the lock.
        let allocation = UniqueArc::new_uninit(GFP_KERNEL_ACCOUNT)?;
        let mut state = self.state.lock();
        // For each that is there: they may all be taken back at once.
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

    /// The memory of that key.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none.
    pub(crate) fn get(&self, key: u32) -> Result<Arc<UserMr>> {
        let state = self.state.lock();
        let mr = state
            .entries
            .get(key_index(key) as usize)
            .and_then(Option::as_ref);
        let mr = mr.filter(|mr| mr.entry.key == key);
        mr.cloned().ok_or(EBADF)
    }

    /// Takes memory back. Its place is another's when nobody relies on it any more.
    fn deregister(&self, key: u32) {
        let Ok(mr) = self.get(key) else { return };
        let mut state = self.state.lock();
        let entry_index = key_index(key) as usize;
        let _ = self
            .remote_table
            .write(entry_index * MR_ENTRY_SIZE, &[0; MR_ENTRY_SIZE]);
        let removed = state.entries.get_mut(entry_index).and_then(Option::take);
        state.live_count -= usize::from(removed.is_some());
        let pending = PendingDereg {
            due: Deadline::after_ms(DEREG_DELAY_MS),
            seq: state.dereg_count,
            uid: mr.entry.owner_uid,
            len: mr.entry.len,
            mr: Some(mr),
        };
        state.dereg_count += 1;
        // There is room since it was registered.
        let _ = state.pending_deregs.push_within_capacity(pending);
    }

    /// Number of pieces of memory that were released so far.
    pub(crate) fn released_count(&self) -> u64 {
        self.state.lock().released_count
    }

    /// Waits until the memory that `uid` took back before this call is released. Returns whether any memory was
    /// released since [`Self::released_count`] returned `seen`.
    ///
    /// # Errors
    ///
    /// `ERESTARTSYS` if a signal is pending.
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

    /// Waits until memory taken back by `uid` leaves room for `len` bytes more.
    ///
    /// # Errors
    ///
    /// See [`Self::await_release`].
    pub(crate) fn throttle_deregistration(&self, uid: u32, len: u64) -> Result {
        if !self.state.lock().has_dereg_quota(uid, len) {
            self.wait_deregistered(uid, 0)?;
        }
        Ok(())
    }

    /// Gives back what nobody relies on any more. Returns whether to come again.
    pub(in crate::fabric) fn reap(&self) -> bool {
        while let Some(mr) = self.pop_due() {
            drop(mr);
            let mut state = self.state.lock();
            let _ = state.pending_deregs.remove(0);
            state.released_count += 1;
            self.released_cv.notify_all();
        }
        !self.state.lock().pending_deregs.is_empty()
    }

    /// Takes the memory of the first entry once no request can reach it. The entry stays until the memory is
    /// released, so that a waiter finds the pages unaccounted. Entries become due in their order.
    fn pop_due(&self) -> Option<Arc<UserMr>> {
        let mut state = self.state.lock();
        let oldest = state.pending_deregs.first_mut()?;
        match oldest.due.has_expired() {
            true => oldest.mr.take(),
            false => None,
        }
    }
}

impl Fabric {
    /// Registers pinned memory, whose first byte its owner `uid` has at `addr`. Returns its key.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the RNIC has no keys to so much; `EIO`; `ENOMEM`, also if there is as much as there can be.
    pub(crate) fn register_mr(
        &self,
        pinned: Arc<PinnedPages>,
        (addr, len): (u64, u64),
        uid: u32,
        other_rights: Rights,
    ) -> Result<u32> {
        let dma = LongTermDmaMap::new(self.device(), pinned.clone())?;
        let mr = self.create_mr(dma, addr, len)?;
        self.mr_table
            .insert((pinned, mr), (addr, len), uid, other_rights)
    }

    /// Takes memory back. The connector gives it back when nobody relies on it any more.
    pub(crate) fn deregister_mr(&self, key: u32) {
        self.mr_table.deregister(key);
        self.connector_waker.event.complete();
    }
}
