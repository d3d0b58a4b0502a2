// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Events that a program takes in their order: a descriptor is readable while there are any.
//!
//! Each event is of an owner, an object of the program's. One is not destroyed before the program has acknowledged all
//! that it took, and what it has not taken then, it never will.
//!
//! A thread that waits for one may be cancelled, which unwinds its stack. That may pass no frame with something to drop, so
//! callers of [`Mailbox::next`] have nothing of the kind.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::counter::{counter, uncount};
use crate::errno::Result;
use crate::object::Handle;
use crate::session::lock;

extern "C-unwind" {
    /// That of libc, which ends a thread that is cancelled.
    fn read(fd: c_int, to: *mut c_void, len: usize) -> isize;
}

struct Owner<R> {
    handle: Handle<R>,
    /// Events that were taken, and not acknowledged yet.
    taken: u32,
}

struct State<R, E> {
    owners: HashMap<u64, Owner<R>>,
    events: VecDeque<(u64, E)>,
}

/// Events `E` of owners that programs know as `R`.
pub(crate) struct Mailbox<R, E> {
    /// As much as there are events that nobody is about to take.
    count: File,
    state: Mutex<State<R, E>>,
    acknowledged: Condvar,
}

/// An event that was taken, and of which owner it is.
pub(crate) struct Taken<R, E> {
    pub(crate) number: u64,
    pub(crate) handle: Handle<R>,
    pub(crate) event: E,
}

impl<R, E> Mailbox<R, E> {
    /// One without owners, whose descriptor has flags of `eventfd`.
    pub(crate) fn new(flags: c_int) -> Result<Self> {
        Ok(Self {
            count: counter(libc::EFD_SEMAPHORE | flags)?,
            state: Mutex::new(State {
                owners: HashMap::new(),
                events: VecDeque::new(),
            }),
            acknowledged: Condvar::new(),
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.count.as_raw_fd()
    }

    /// Whether nobody has events here.
    pub(crate) fn is_unused(&self) -> bool {
        lock(&self.state).owners.is_empty()
    }

    /// An owner may have events from now on.
    pub(crate) fn enter(&self, number: u64, handle: Handle<R>) {
        let owner = Owner { handle, taken: 0 };
        lock(&self.state).owners.insert(number, owner);
    }

    /// Takes back the events of an owner that were not taken.
    pub(crate) fn withdraw(&self, number: u64) -> Vec<E> {
        let mut state = lock(&self.state);
        let (back, others) = std::mem::take(&mut state.events)
            .into_iter()
            .partition::<Vec<_>, _>(|(of, _)| *of == number);
        state.events = others.into();
        for _ in &back {
            uncount(&self.count);
        }
        back.into_iter().map(|(_, event)| event).collect()
    }

    /// An owner has no more events, and all that were taken are acknowledged. Those that were not are dropped at once:
    /// others may wait for what they hold.
    pub(crate) fn leave(&self, number: u64) {
        drop(self.withdraw(number));
        let has_taken = |state: &mut State<R, E>| {
            let owner = state.owners.get(&number);
            owner.is_some_and(|owner| owner.taken != 0)
        };
        let state = lock(&self.state);
        let waited = self.acknowledged.wait_while(state, has_taken);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.owners.remove(&number);
    }

    /// Adds an event, unless its owner is gone: then it comes back.
    pub(crate) fn tell(&self, number: u64, event: E) -> std::result::Result<(), E> {
        let mut state = lock(&self.state);
        if !state.owners.contains_key(&number) {
            return Err(event);
        }
        state.events.push_back((number, event));
        // It cannot count so far that this would fail.
        let _ = (&self.count).write_all(&1u64.to_ne_bytes());
        Ok(())
    }

    pub(crate) fn acknowledge(&self, number: u64, count: u32) {
        if let Some(owner) = lock(&self.state).owners.get_mut(&number) {
            owner.taken = owner.taken.saturating_sub(count);
        }
        self.acknowledged.notify_all();
    }

    /// Waits until it counts an event, which is then this thread's to take. A signal ends it, as programs expect.
    fn wait(&self) -> io::Result<()> {
        let mut one = [0u8; 8];
        // SAFETY: it writes no more than there is room for.
        match unsafe { read(self.fd(), one.as_mut_ptr().cast(), one.len()) } {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Takes the next event, once there is one, or if the program's descriptor does not wait fails.
    pub(crate) fn next(&self) -> io::Result<Taken<R, E>> {
        loop {
            self.wait()?;
            let mut state = lock(&self.state);
            let Some((number, event)) = state.events.pop_front() else {
                // Its owner was destroyed meanwhile.
                continue;
            };
            if let Some(owner) = state.owners.get_mut(&number) {
                owner.taken += 1;
                return Ok(Taken {
                    number,
                    handle: owner.handle,
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

    type Numbers = Mailbox<u8, u32>;

    #[test]
    fn each_event_is_taken_once_and_those_of_owners_that_are_gone_never() {
        let mailbox = Numbers::new(libc::EFD_NONBLOCK).unwrap();
        mailbox.enter(1, Handle(ptr::null_mut()));
        mailbox.enter(2, Handle(ptr::null_mut()));
        for (number, event) in [(2, 20), (1, 10), (2, 21)] {
            mailbox.tell(number, event).unwrap();
        }
        let first = mailbox.next().unwrap();
        assert_eq!((first.number, first.event), (2, 20));
        mailbox.acknowledge(2, 1);
        mailbox.leave(2);
        assert_eq!(mailbox.next().unwrap().event, 10);
        let none = mailbox.next().err().unwrap();
        assert_eq!(none.raw_os_error(), Some(libc::EAGAIN));
    }

    #[test]
    fn what_was_not_taken_is_dropped_before_what_was_is_acknowledged() {
        let mailbox = Mailbox::<u8, Sender<()>>::new(0).unwrap();
        mailbox.enter(1, Handle(ptr::null_mut()));
        mailbox.tell(1, channel().0).unwrap();
        let (held, dropped) = channel();
        mailbox.tell(1, held).unwrap();
        mailbox.next().unwrap();
        thread::scope(|scope| {
            let leaves = scope.spawn(|| mailbox.leave(1));
            let told = dropped.recv_timeout(Duration::from_secs(10));
            mailbox.acknowledge(1, 1);
            leaves.join().unwrap();
            assert_eq!(told, Err(Disconnected));
        });
    }

    #[test]
    fn what_nobody_will_take_makes_nobody_wait_for_it() {
        let mailbox = Numbers::new(0).unwrap();
        mailbox.enter(1, Handle(ptr::null_mut()));
        mailbox.tell(1, 1).unwrap();
        mailbox.tell(1, 2).unwrap();
        mailbox.leave(1);
        assert_eq!(mailbox.tell(1, 3), Err(3));
        let mut readable = libc::pollfd {
            fd: mailbox.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: it writes what was found to the one structure.
        assert_eq!(unsafe { libc::poll(&mut readable, 1, 0) }, 0);
    }
}
