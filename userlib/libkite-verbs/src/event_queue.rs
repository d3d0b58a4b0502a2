// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Queues of events that a program takes in order. The descriptor of a queue is readable while there are events.
//!
//! Each event belongs to an owner, an object of the program. An owner is not destroyed before the program has
//! acknowledged all of its events that it took. The remaining events are dropped.
//!
//! A thread that waits for an event may be canceled, which unwinds its stack. The unwinding must not pass a frame with
//! a destructor, so callers of [`EventQueue::next_event`] have none.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::errno::Result;
use crate::eventfd::{create_eventfd, try_decrement};
use crate::object::SendPtr;
use crate::sync::lock;

extern "C-unwind" {
    /// `read` of libc, at which a thread may be canceled.
    fn read(fd: c_int, to: *mut c_void, len: usize) -> isize;
}

struct EventOwner<R> {
    ptr: SendPtr<R>,
    /// Events that were taken, and are not acknowledged yet.
    unacked: u32,
}

struct EventQueueState<R, E> {
    owners: HashMap<u64, EventOwner<R>>,
    events: VecDeque<(u64, E)>,
}

/// Queue of events `E` with owners that programs know as `R`.
pub(crate) struct EventQueue<R, E> {
    /// Counts the events that no thread is about to take.
    eventfd: File,
    state: Mutex<EventQueueState<R, E>>,
    acknowledged: Condvar,
}

/// Event that was taken, with its owner.
pub(crate) struct DeliveredEvent<R, E> {
    pub(crate) owner_id: u64,
    pub(crate) ptr: SendPtr<R>,
    pub(crate) event: E,
}

impl<R, E> EventQueue<R, E> {
    /// Creates a queue without owners. Its descriptor has these flags of `eventfd`.
    pub(crate) fn new(flags: c_int) -> Result<Self> {
        Ok(Self {
            eventfd: create_eventfd(libc::EFD_SEMAPHORE | flags)?,
            state: Mutex::new(EventQueueState {
                owners: HashMap::new(),
                events: VecDeque::new(),
            }),
            acknowledged: Condvar::new(),
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    /// Returns `true` if no object has events here.
    pub(crate) fn has_no_owners(&self) -> bool {
        lock(&self.state).owners.is_empty()
    }

    /// Adds an owner, which may have events from now on.
    pub(crate) fn add_owner(&self, owner_id: u64, ptr: SendPtr<R>) {
        let owner = EventOwner { ptr, unacked: 0 };
        lock(&self.state).owners.insert(owner_id, owner);
    }

    /// Removes the events of an owner that were not taken, and returns them.
    pub(crate) fn remove_events(&self, owner_id: u64) -> Vec<E> {
        let mut state = lock(&self.state);
        let (removed, remaining) = std::mem::take(&mut state.events)
            .into_iter()
            .partition::<Vec<_>, _>(|(id, _)| *id == owner_id);
        state.events = remaining.into();
        for _ in &removed {
            try_decrement(&self.eventfd);
        }
        removed.into_iter().map(|(_, event)| event).collect()
    }

    /// Removes an owner, after all of its events that were taken are acknowledged. The remaining events are dropped
    /// before that wait, since other threads may wait for what they hold.
    pub(crate) fn remove_owner(&self, owner_id: u64) {
        drop(self.remove_events(owner_id));
        let has_unacked = |state: &mut EventQueueState<R, E>| {
            let owner = state.owners.get(&owner_id);
            owner.is_some_and(|owner| owner.unacked != 0)
        };
        let state = lock(&self.state);
        let guard = self.acknowledged.wait_while(state, has_unacked);
        let mut state = guard.unwrap_or_else(PoisonError::into_inner);
        state.owners.remove(&owner_id);
    }

    /// Adds an event. Returns the event if its owner was removed.
    pub(crate) fn push_event(&self, owner_id: u64, event: E) -> std::result::Result<(), E> {
        let mut state = lock(&self.state);
        if !state.owners.contains_key(&owner_id) {
            return Err(event);
        }
        state.events.push_back((owner_id, event));
        // The counter cannot get large enough for the write to fail.
        let _ = (&self.eventfd).write_all(&1u64.to_ne_bytes());
        Ok(())
    }

    pub(crate) fn acknowledge(&self, owner_id: u64, count: u32) {
        if let Some(owner) = lock(&self.state).owners.get_mut(&owner_id) {
            owner.unacked = owner.unacked.saturating_sub(count);
        }
        self.acknowledged.notify_all();
    }

    /// Waits until the counter reserves an event for this thread. A signal interrupts the wait, as programs expect.
    fn wait_for_event(&self) -> io::Result<()> {
        let mut count = [0u8; 8];
        // SAFETY: the call writes at most the length of the buffer.
        match unsafe { read(self.fd(), count.as_mut_ptr().cast(), count.len()) } {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Takes the next event. Waits for one, unless the descriptor is non-blocking.
    pub(crate) fn next_event(&self) -> io::Result<DeliveredEvent<R, E>> {
        loop {
            self.wait_for_event()?;
            let mut state = lock(&self.state);
            let Some((owner_id, event)) = state.events.pop_front() else {
                // The owner was removed meanwhile.
                continue;
            };
            if let Some(owner) = state.owners.get_mut(&owner_id) {
                owner.unacked += 1;
                return Ok(DeliveredEvent {
                    owner_id,
                    ptr: owner.ptr,
                    event,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::sync::mpsc::{channel, RecvTimeoutError::Disconnected, Sender};
    use std::thread;
    use std::time::Duration;

    use super::*;

    type TestQueue = EventQueue<u8, u32>;

    #[test]
    fn events_are_taken_once_and_events_of_removed_owners_never() {
        let queue = TestQueue::new(libc::EFD_NONBLOCK).unwrap();
        queue.add_owner(1, SendPtr(ptr::null_mut()));
        queue.add_owner(2, SendPtr(ptr::null_mut()));
        for (number, event) in [(2, 20), (1, 10), (2, 21)] {
            queue.push_event(number, event).unwrap();
        }
        let first = queue.next_event().unwrap();
        assert_eq!((first.owner_id, first.event), (2, 20));
        queue.acknowledge(2, 1);
        queue.remove_owner(2);
        assert_eq!(queue.next_event().unwrap().event, 10);
        let none = queue.next_event().err().unwrap();
        assert_eq!(none.raw_os_error(), Some(libc::EAGAIN));
    }

    #[test]
    fn remove_owner_with_unacked_event_drops_pending_events_first() {
        let queue = EventQueue::<u8, Sender<()>>::new(0).unwrap();
        queue.add_owner(1, SendPtr(ptr::null_mut()));
        queue.push_event(1, channel().0).unwrap();
        let (held, dropped) = channel();
        queue.push_event(1, held).unwrap();
        queue.next_event().unwrap();
        thread::scope(|scope| {
            let remover = scope.spawn(|| queue.remove_owner(1));
            let result = dropped.recv_timeout(Duration::from_secs(10));
            queue.acknowledge(1, 1);
            remover.join().unwrap();
            assert_eq!(result, Err(Disconnected));
        });
    }

    #[test]
    fn fd_after_remove_owner_is_not_readable() {
        let queue = TestQueue::new(0).unwrap();
        queue.add_owner(1, SendPtr(ptr::null_mut()));
        queue.push_event(1, 1).unwrap();
        queue.push_event(1, 2).unwrap();
        queue.remove_owner(1);
        assert_eq!(queue.push_event(1, 3), Err(3));
        let mut readable = libc::pollfd {
            fd: queue.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the call writes only to the one structure.
        assert_eq!(unsafe { libc::poll(&mut readable, 1, 0) }, 0);
    }
}
