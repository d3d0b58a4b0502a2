// SPDX-License-Identifier: GPL-2.0

//! Memory of processes that requests of virtual queue pairs name, here and at other nodes.
//!
//! Each piece has a record in a table that peers read (`kite_core::wire::memory`), and whoever read it relies on it
//! for a while. So memory that is taken back stays the RNIC's until then: a request that comes late is served, and
//! not refused, which would break the queue pair that it came by for others.
//!
//! Memory taken back stays pinned for up to `RELEASE_MS`. A user that registers and takes back in a loop is slowed
//! down: [`Memories::await_release`] waits for the memory that the user took back before.

use super::{registrar::Region, Fabric};
use crate::{
    sys::{
        deadline::Deadline,
        pages::{all_memory, Charge, Pages},
        pin::Pinned,
    },
    verbs::{
        device::Device,
        dma::{DmaArena, DmaPages},
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
    atomic::Atomic,
    rights::Rights,
    wire::memory::{index, key, Record, Refusal, LEASE_MS, RECORDS, RECORD_SIZE},
};

/// How long a request may be under way that was posted at the end of a lease: above what an initiator tries.
const LATE_MS: u32 = 1500;

/// Maximum time from taking memory back until it is released.
const RELEASE_MS: u32 = LEASE_MS + LATE_MS;

/// Fraction of RAM that memory taken back by one user may have. It bounds users without a lock limit.
const RETIRED_FRACTION: u64 = 8;

/// Pieces of memory that one user may have taken back.
const RETIRED_PIECES: usize = 512;

/// A refusal as an error.
pub(crate) fn refused(refusal: Refusal) -> Error {
    match refusal {
        Refusal::Forbidden => EACCES,
        Refusal::OutOfRange => ERANGE,
    }
}

/// Memory of a process.
pub(crate) struct Memory {
    pub(crate) record: Record,
    region: Region,
    pinned: Arc<Pinned>,
}

impl Memory {
    /// The key by which our requests name it.
    pub(crate) fn local_key(&self) -> u32 {
        self.region.local_key()
    }

    /// Writes to it, by the addresses of its owner.
    ///
    /// # Errors
    ///
    /// `EFAULT` if they are not all there.
    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) -> Result {
        let at = addr.checked_sub(self.record.addr).ok_or(EFAULT)?;
        // SAFETY: The bytes are there.
        unsafe { self.pinned.write(at as usize, bytes.as_ptr(), bytes.len()) }
    }

    /// Changes a word of it, by the addresses of its owner, as one step to all processors. Returns what it was.
    ///
    /// # Errors
    ///
    /// `EFAULT` if it is not there; `EINVAL` if it is no word's place.
    pub(crate) fn change(&self, addr: u64, atomic: Atomic) -> Result<u64> {
        let at = addr.checked_sub(self.record.addr).ok_or(EFAULT)?;
        self.pinned.change(at as usize, atomic)
    }
}

/// Memory that was taken back, and is given back then.
struct Retired {
    due: Deadline,
    /// Position in the order in which memory was taken back.
    number: u64,
    uid: u32,
    len: u64,
    /// `None` while it is released.
    memory: Option<Arc<Memory>>,
}

struct State {
    /// By index.
    all: KVVec<Option<Arc<Memory>>>,
    /// How many there are.
    live: usize,
    /// Where to look for a free place first.
    next: usize,
    retired: KVVec<Retired>,
    /// Pieces of memory that were taken back so far.
    retired_count: u64,
    /// Pieces of memory that were released so far.
    released_count: u64,
}

impl State {
    /// Returns `true` if the retired memory of a user leaves room for `len` bytes more.
    fn has_room(&self, uid: u32, len: u64) -> bool {
        let own = || self.retired.iter().filter(|retired| retired.uid == uid);
        let bytes: u64 = own().map(|retired| retired.len).sum();
        own().count() < RETIRED_PIECES
            && bytes.saturating_add(len) <= all_memory() / RETIRED_FRACTION
    }

    /// Returns `true` if memory of a user is left among the first `count` retired pieces.
    fn has_retired(&self, uid: u32, count: u64) -> bool {
        let mut all = self.retired.iter();
        all.any(|retired| retired.uid == uid && retired.number < count)
    }
}

/// The memory of all processes on an RNIC.
#[pin_data]
pub(crate) struct Memories {
    #[pin]
    state: Mutex<State>,
    /// Signalled when memory that was taken back is released.
    #[pin]
    released: CondVar,
    /// What peers read.
    table: DmaPages,
}

impl Memories {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(device: Device) -> Result<Pin<KBox<Self>>> {
        let pages = Pages::new(RECORDS as usize * RECORD_SIZE, Charge::Kernel)?;
        let table = DmaPages::shared(device, pages)?;
        let mut all = KVVec::new();
        for _ in 0..RECORDS {
            all.push(None, GFP_KERNEL)?;
        }
        let state = State {
            all,
            live: 0,
            next: 0,
            retired: KVVec::new(),
            retired_count: 0,
            released_count: 0,
        };
        KBox::pin_init(
            pin_init!(Self {
                state <- new_mutex!(state),
                released <- new_condvar!(),
                table,
            }),
            GFP_KERNEL,
        )
    }

    /// Address of the table, for peers.
    pub(crate) fn table(&self) -> u64 {
        self.table.addr()
    }

    /// Where in a table of that address the record of a key is.
    pub(crate) fn place(table: u64, key: u32) -> u64 {
        table + u64::from(index(key)) * RECORD_SIZE as u64
    }

    /// Enters a region of pinned memory, whose first byte its owner `uid` has at `addr`. Returns its key.
    fn enter(
        &self,
        (pinned, region): (Arc<Pinned>, Region),
        (addr, len): (u64, u64),
        uid: u32,
        others: Rights,
    ) -> Result<u32> {
        // Nobody waits for a cgroup that is full while all others, and the poller, wait for the lock.
        let room = UniqueArc::new_uninit(GFP_KERNEL_ACCOUNT)?;
        let mut state = self.state.lock();
        // For each that is there: they may all be taken back at once.
        let live = state.live + 1;
        state.retired.reserve(live, GFP_KERNEL)?;
        let count = state.all.len();
        let free = (state.next..state.next + count).find(|i| state.all[i % count].is_none());
        let at = free.ok_or(ENOMEM)? % count;
        // SAFETY: The function has no preconditions.
        let key = key(at as u32, unsafe { crate::bindings::get_random_u32() });
        let record = Record {
            key,
            uid,
            others,
            rkey: region.remote_key(),
            addr,
            len,
        };
        let memory = Memory {
            record,
            region,
            pinned,
        };
        self.table.write(at * RECORD_SIZE, &record.encode())?;
        state.all[at] = Some(room.write(memory).into());
        state.live = live;
        state.next = at + 1;
        Ok(key)
    }

    /// The memory of that key.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none.
    pub(crate) fn get(&self, key: u32) -> Result<Arc<Memory>> {
        let state = self.state.lock();
        let found = state.all.get(index(key) as usize).and_then(Option::as_ref);
        let found = found.filter(|memory| memory.record.key == key);
        found.cloned().ok_or(EBADF)
    }

    /// Takes memory back. Its place is another's when nobody relies on it any more.
    fn forget(&self, key: u32) {
        let Ok(memory) = self.get(key) else { return };
        let mut state = self.state.lock();
        let at = index(key) as usize;
        let _ = self.table.write(at * RECORD_SIZE, &[0; RECORD_SIZE]);
        let gone = state.all.get_mut(at).and_then(Option::take);
        state.live -= usize::from(gone.is_some());
        let retired = Retired {
            due: Deadline::after_ms(RELEASE_MS),
            number: state.retired_count,
            uid: memory.record.uid,
            len: memory.record.len,
            memory: Some(memory),
        };
        state.retired_count += 1;
        // There is room since it was registered.
        let _ = state.retired.push_within_capacity(retired);
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
    pub(crate) fn await_release(&self, uid: u32, seen: u64) -> Result<bool> {
        let limit = Deadline::after_ms(2 * RELEASE_MS);
        let mut state = self.state.lock();
        let count = state.retired_count;
        while state.has_retired(uid, count) && !limit.passed() {
            let nap = msecs_to_jiffies(RELEASE_MS);
            if let CondVarTimeoutResult::Signal { .. } =
                self.released.wait_interruptible_timeout(&mut state, nap)
            {
                return Err(ERESTARTSYS);
            }
        }
        Ok(state.released_count != seen)
    }

    /// Waits until memory taken back by `uid` leaves room for `len` bytes more.
    ///
    /// # Errors
    ///
    /// See [`Self::await_release`].
    pub(crate) fn limit_retired(&self, uid: u32, len: u64) -> Result {
        if !self.state.lock().has_room(uid, len) {
            self.await_release(uid, 0)?;
        }
        Ok(())
    }

    /// Gives back what nobody relies on any more. Returns whether to come again.
    pub(super) fn reap(&self) -> bool {
        while let Some(memory) = self.take_over() {
            drop(memory);
            let mut state = self.state.lock();
            let _ = state.retired.remove(0);
            state.released_count += 1;
            self.released.notify_all();
        }
        !self.state.lock().retired.is_empty()
    }

    /// Takes the memory of the first entry once no request can reach it. The entry stays until the memory is
    /// released, so that a waiter finds the pages unaccounted. Entries become due in their order.
    fn take_over(&self) -> Option<Arc<Memory>> {
        let mut state = self.state.lock();
        let first = state.retired.first_mut()?;
        match first.due.passed() {
            true => first.memory.take(),
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
    pub(crate) fn register_memory(
        &self,
        pinned: Arc<Pinned>,
        (addr, len): (u64, u64),
        uid: u32,
        others: Rights,
    ) -> Result<u32> {
        let arena = DmaArena::new(self.device(), pinned.clone())?;
        let region = self.region(arena, addr, len)?;
        self.memories
            .enter((pinned, region), (addr, len), uid, others)
    }

    /// Takes memory back. The connector gives it back when nobody relies on it any more.
    pub(crate) fn forget_memory(&self, key: u32) {
        self.memories.forget(key);
        self.connector.event.signal();
    }
}
