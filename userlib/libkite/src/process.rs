// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Objects of this process: one session, and tables of regions, servers, calls without a reply, locks and I/O queues.
//!
//! C refers to an object by its handle or ID, which is at least 1. A handle or ID is never reused, so functions reject
//! it after it was closed.
//!
//! # Locking
//!
//! Each table has a lock, which is held only during an access. No thread sleeps while it holds the lock of a table.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kite_rs::{
    Cluster, Completion, Error, IoQueue, LockGuard, PendingCall, QueueWaiter, Region, Result,
    ServeOptions, Service,
};

static SESSION: OnceLock<Cluster> = OnceLock::new();
static REGIONS: HandleTable<Region> = HandleTable::new();
static SERVICES: HandleTable<Service> = HandleTable::new();
static CALLS: HandleTable<CallEntry> = HandleTable::new();
static LOCKS: HandleTable<LockEntry> = HandleTable::new();
static QUEUES: HandleTable<Arc<SharedQueue>> = HandleTable::new();

/// Maximum sleep of a waiter before it checks whether another thread has consumed the last completion.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A call without a reply, and the handle of its server.
struct CallEntry {
    call: PendingCall,
    lh: i64,
}

/// A lock that this process owns, and the handle that acquired it.
struct LockEntry {
    lock: LockGuard,
    lh: i64,
}

/// Opens the session on an RNIC; an empty name is the first RNIC. Returns the number of this node.
///
/// # Errors
/// - [`Error::Busy`]: the process has a session.
/// - [`Error::NotJoined`]: this node is in no cluster.
/// - For the others see [`Cluster::open_rnic`].
pub(crate) fn join(rnic: &str) -> Result<i32> {
    let cluster = Cluster::open_rnic(rnic)?;
    let view = cluster.view()?;
    if view.epoch == 0 {
        return Err(Error::NotJoined);
    }
    SESSION.set(cluster).map_err(|_| Error::Busy)?;
    i32::try_from(view.local_node).map_err(|_| Error::Io)
}

/// Returns the session.
///
/// # Errors
/// - [`Error::NotBound`]: the process has none.
pub(crate) fn session() -> Result<&'static Cluster> {
    SESSION.get().ok_or(Error::NotBound)
}

/// Returns the session. Opens it on the first RNIC if the process has none.
pub(crate) fn session_or_join() -> Result<&'static Cluster> {
    if SESSION.get().is_none() {
        // Another thread may open the session first.
        match join("") {
            Err(error) if error != Error::Busy => return Err(error),
            _ => {}
        }
    }
    session()
}

/// Stores a region. Returns its handle.
pub(crate) fn insert_region(region: Region) -> i64 {
    REGIONS.insert(region)
}

/// Returns the region of a handle.
pub(crate) fn region(lh: i64) -> Result<Region> {
    REGIONS.get(lh).ok_or(Error::BadHandle)
}

/// Closes a handle, and calls `finalize` with its region. Aborts calls without a reply that the handle has received.
/// Releases its locks as if their owner had died.
pub(crate) fn close(lh: i64, finalize: impl FnOnce(Region) -> Result<()>) -> Result<()> {
    let region = REGIONS.remove(lh).ok_or(Error::BadHandle)?;
    SERVICES.remove(lh);
    // Ends the calls without a reply: their callers get an error, and the handle is no longer referenced.
    drop(CALLS.remove_where(|entry| entry.lh == lh));
    let result = finalize(region);
    // The kernel also releases the locks of a closed handle, as if their owner had died. `finalize` comes first:
    // otherwise a waiter could acquire a lock of a region that is about to be freed.
    for entry in LOCKS.remove_where(|entry| entry.lh == lh) {
        let _ = entry.lock.unlock_owner_died();
    }
    result
}

/// Makes this process a server of the region of a handle.
pub(crate) fn serve(lh: i64, options: &ServeOptions) -> Result<()> {
    let service = region(lh)?.serve(options)?;
    SERVICES.insert_at(lh, service);
    Ok(())
}

/// Returns the server of a handle.
pub(crate) fn service(lh: i64) -> Result<Service> {
    region(lh)?;
    SERVICES.get(lh).ok_or(Error::NotSupported)
}

/// Stores a received call of a handle. Returns the ID for the reply.
pub(crate) fn insert_call(lh: i64, call: PendingCall) -> u64 {
    let key = CALLS.insert(CallEntry { call, lh });
    if region(lh).is_err() {
        // The handle was closed meanwhile, possibly before the call was in the table.
        CALLS.remove(key);
    }
    key.unsigned_abs()
}

/// Removes a call, to reply to it once.
pub(crate) fn remove_call(id: u64) -> Result<PendingCall> {
    let key = i64::try_from(id).map_err(|_| Error::BadHandle)?;
    let entry = CALLS.remove(key).ok_or(Error::BadHandle)?;
    Ok(entry.call)
}

/// Stores an acquired lock. Returns its ID.
pub(crate) fn insert_lock(lh: i64, lock: LockGuard) -> u64 {
    LOCKS.insert(LockEntry { lock, lh }).unsigned_abs()
}

/// Removes a lock, to release it once.
pub(crate) fn remove_lock(id: u64) -> Result<LockGuard> {
    let key = i64::try_from(id).map_err(|_| Error::BadHandle)?;
    let entry = LOCKS.remove(key).ok_or(Error::BadHandle)?;
    Ok(entry.lock)
}

/// I/O queue that threads share. A thread sleeps in `waiter` without the lock, so that others can submit and cancel
/// meanwhile.
pub(crate) struct SharedQueue {
    queue: Mutex<IoQueue>,
    waiter: QueueWaiter,
}

impl SharedQueue {
    fn with_locked<T>(&self, f: impl FnOnce(&mut IoQueue) -> Result<T>) -> Result<T> {
        f(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sleeps until there may be a completion, for at most [`RECHECK_INTERVAL`].
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the deadline passed.
    /// - For the others see [`QueueWaiter::wait`].
    fn wait_ready(&self, deadline: Option<Instant>) -> Result<()> {
        let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = remaining.map_or(RECHECK_INTERVAL, |remaining| {
            remaining.min(RECHECK_INTERVAL)
        });
        match self.waiter.wait(Some(slice)) {
            Err(Error::TimedOut) if remaining.is_none_or(|remaining| remaining > slice) => Ok(()),
            result => result,
        }
    }
}

/// Stores a queue. Returns its ID.
pub(crate) fn insert_queue(queue: IoQueue) -> i64 {
    let waiter = queue.waiter();
    let queue = Mutex::new(queue);
    QUEUES.insert(Arc::new(SharedQueue { queue, waiter }))
}

/// Calls `f` with a queue, locked.
pub(crate) fn with_queue<T>(id: i64, f: impl FnOnce(&mut IoQueue) -> Result<T>) -> Result<T> {
    QUEUES.get(id).ok_or(Error::BadHandle)?.with_locked(f)
}

/// Waits for a completion of a queue, for at most `timeout`, or without limit.
pub(crate) fn wait_completion(id: i64, timeout: Option<Duration>) -> Result<Completion> {
    let queue = QUEUES.get(id).ok_or(Error::BadHandle)?;
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        if let Some(completion) = queue.with_locked(IoQueue::poll)? {
            return Ok(completion);
        }
        queue.wait_ready(deadline)?;
    }
}

/// Removes a queue. The queue is destroyed when no thread uses it any longer.
pub(crate) fn remove_queue(id: i64) -> Result<Arc<SharedQueue>> {
    QUEUES.remove(id).ok_or(Error::BadHandle)
}

/// Table of objects that C refers to by number.
pub(crate) struct HandleTable<T>(RwLock<Option<HandleTableState<T>>>);

/// Entries of a table, created by the first insert.
pub(crate) struct HandleTableState<T> {
    last_key: i64,
    entries: HashMap<i64, T>,
}

impl<T> Default for HandleTableState<T> {
    fn default() -> Self {
        Self {
            last_key: 0,
            entries: HashMap::new(),
        }
    }
}

impl<T> HandleTable<T> {
    pub(crate) const fn new() -> Self {
        Self(RwLock::new(None))
    }

    /// Stores a value. Returns its new key, at least 1.
    pub(crate) fn insert(&self, value: T) -> i64 {
        // No code panics while it holds the lock, so a poisoned table is consistent.
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let table = table.get_or_insert_with(HandleTableState::default);
        table.last_key += 1;
        let key = table.last_key;
        table.entries.insert(key, value);
        key
    }

    /// Stores a value by a key that the caller has chosen, such as the key of another table.
    pub(crate) fn insert_at(&self, key: i64, value: T) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let table = table.get_or_insert_with(HandleTableState::default);
        table.entries.insert(key, value);
    }

    pub(crate) fn get(&self, key: i64) -> Option<T>
    where
        T: Clone,
    {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.as_ref()?.entries.get(&key).cloned()
    }

    /// Removes the values for which `predicate` returns `true`.
    fn remove_where(&self, predicate: impl Fn(&T) -> bool) -> Vec<T> {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let table = table.get_or_insert_with(HandleTableState::default);
        let entries = std::mem::take(&mut table.entries);
        let (removed, remaining): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|(_, value)| predicate(value));
        table.entries = remaining.into_iter().collect();
        removed.into_iter().map(|(_, value)| value).collect()
    }

    pub(crate) fn remove(&self, key: i64) -> Option<T> {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        table.as_mut()?.entries.remove(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_after_remove_is_not_reused() {
        let table = HandleTable::new();
        let first = table.insert('a');
        assert!(first > 0);
        assert_eq!(table.get(first), Some('a'));
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert_ne!(first, second);
        assert_eq!((table.get(first), table.remove(first)), (None, None));
        assert_eq!(table.get(second), Some('b'));
        assert_eq!(table.remove_where(|value| *value == 'b'), ['b']);
        assert_eq!(table.get(second), None);
    }
}
