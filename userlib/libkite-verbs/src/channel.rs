// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion channels: a descriptor that is readable once for each completion queue that has something to tell.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::counter::{counter, uncount};
use crate::errno::{pointer, set, Errno, Result};
use crate::header::*;
use crate::object::{self, Raw};
use crate::session::lock;

/// A completion queue as its channel has it.
struct Entry {
    cq: *mut ibv_cq,
    /// Events that were taken, and not acknowledged yet.
    taken: u32,
}

// SAFETY: the pointer is only handed to the program.
unsafe impl Send for Entry {}

#[derive(Default)]
struct State {
    queues: HashMap<u64, Entry>,
    /// Of which completion queues there are events.
    events: VecDeque<u64>,
}

pub(crate) struct Channel {
    /// As much as there are events that nobody is about to take.
    count: File,
    state: Mutex<State>,
    acknowledged: Condvar,
}

impl Raw for ibv_comp_channel {
    type Own = Arc<Channel>;
}

impl Channel {
    /// One without queues, whose descriptor has flags of `eventfd`.
    fn new(flags: c_int) -> Result<Self> {
        Ok(Self {
            count: counter(libc::EFD_SEMAPHORE | flags)?,
            state: Mutex::default(),
            acknowledged: Condvar::new(),
        })
    }

    /// A completion queue may have events from now on.
    pub(crate) fn enter(&self, number: u64, cq: *mut ibv_cq) {
        let entry = Entry { cq, taken: 0 };
        lock(&self.state).queues.insert(number, entry);
    }

    /// It has no more, and all that were taken are acknowledged.
    pub(crate) fn leave(&self, number: u64) {
        let mut state = lock(&self.state);
        let before = state.events.len();
        state.events.retain(|event| *event != number);
        for _ in state.events.len()..before {
            uncount(&self.count);
        }
        while state
            .queues
            .get(&number)
            .is_some_and(|queue| queue.taken != 0)
        {
            let waited = self.acknowledged.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.queues.remove(&number);
    }

    /// Tells of a completion queue.
    pub(crate) fn tell(&self, number: u64) {
        let mut state = lock(&self.state);
        if !state.queues.contains_key(&number) {
            return;
        }
        state.events.push_back(number);
        // It cannot count so far that this would fail.
        let _ = (&self.count).write_all(&1u64.to_ne_bytes());
    }

    pub(crate) fn acknowledge(&self, number: u64, count: u32) {
        if let Some(queue) = lock(&self.state).queues.get_mut(&number) {
            queue.taken = queue.taken.saturating_sub(count);
        }
        self.acknowledged.notify_all();
    }

    /// Takes the next event, once there is one, or if the program's descriptor does not wait fails.
    fn next(&self) -> std::io::Result<*mut ibv_cq> {
        loop {
            // A signal ends it, as programs expect.
            let _all = (&self.count).read(&mut [0; 8])?;
            let mut state = lock(&self.state);
            let Some(number) = state.events.pop_front() else {
                // Its queue was destroyed meanwhile.
                continue;
            };
            if let Some(queue) = state.queues.get_mut(&number) {
                queue.taken += 1;
                return Ok(queue.cq);
            }
        }
    }
}

/// # Safety
/// The context is open.
#[no_mangle]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    pointer(Channel::new(0).map(|own| {
        let channel = ibv_comp_channel {
            context,
            fd: own.count.as_raw_fd(),
            refcnt: 0,
        };
        object::give(channel, Arc::new(own))
    }))
}

/// # Safety
/// Its argument came from [`ibv_create_comp_channel`].
#[no_mangle]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller vouches for it.
    if !lock(&unsafe { object::own(channel) }.state)
        .queues
        .is_empty()
    {
        return libc::EBUSY;
    }
    // SAFETY: likewise, and no queue has it.
    drop(unsafe { object::take(channel) });
    0
}

/// # Safety
/// The channel is live, and both results may be written.
#[no_mangle]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller vouches for it.
    match unsafe { object::own(channel) }.next() {
        Ok(found) => {
            // SAFETY: likewise; the program has not destroyed the queue before it acknowledges the event.
            unsafe {
                cq.write(found);
                cq_context.write((*found).cq_context);
            }
            0
        }
        Err(error) => {
            set(Errno(error.raw_os_error().unwrap_or(libc::EIO)));
            -1
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn each_event_is_taken_once_and_those_of_queues_that_are_gone_never() {
        let channel = Channel::new(libc::EFD_NONBLOCK).unwrap();
        let cq = |number: usize| number as *mut ibv_cq;
        channel.enter(1, cq(1));
        channel.enter(2, cq(2));
        for number in [2, 1, 2] {
            channel.tell(number);
        }
        assert_eq!(channel.next().unwrap(), cq(2));
        channel.acknowledge(2, 1);
        channel.leave(2);
        assert_eq!(channel.next().unwrap(), cq(1));
        let none = channel.next().unwrap_err();
        assert_eq!(none.raw_os_error(), Some(libc::EAGAIN));
    }

    #[test]
    fn what_nobody_will_take_makes_nobody_wait_for_it() {
        let channel = Channel::new(0).unwrap();
        channel.enter(1, ptr::null_mut());
        channel.tell(1);
        channel.tell(1);
        channel.leave(1);
        channel.tell(1);
        let mut readable = libc::pollfd {
            fd: channel.count.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: it writes what was found to the one structure.
        assert_eq!(unsafe { libc::poll(&mut readable, 1, 0) }, 0);
    }
}
