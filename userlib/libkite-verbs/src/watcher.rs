// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A thread that looks after what a session of kite has while nobody else does: queue pairs when nobody polls, and what
//! the connection manager waits for.
//!
//! Of queue pairs it finds completions of which a channel is to tell, lets other ends in, and sees that they have ended.
//! It also fills places for messages of who has not polled for a while, as an RNIC would; whoever does poll is not
//! disturbed.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::thread;

use kite::Cluster;

use crate::counter::counter;
use crate::errno::{last, Result};
use crate::pair::Pair;
use crate::session::Session;

/// How long it rests, in ms, when there is something that it can do nothing about: first, and at most, after it has found
/// nothing to do for a while.
const REST_MS: i32 = 1;
const LONG_REST_MS: i32 = 10;

/// What it has found.
pub(crate) struct Found {
    /// There was something to do.
    pub(crate) busy: bool,
    /// It is to look again after so many ms, whatever happens; or if that is negative, only when something does.
    pub(crate) again_ms: i32,
}

impl Found {
    pub(crate) const NOTHING: Self = Self {
        busy: false,
        again_ms: -1,
    };

    /// Both.
    pub(crate) fn and(self, other: Self) -> Self {
        let sooner = self.again_ms.min(other.again_ms);
        Self {
            busy: self.busy || other.busy,
            again_ms: match sooner {
                0.. => sooner,
                _ => self.again_ms.max(other.again_ms),
            },
        }
    }
}

/// How to wake it, and to end it: it ends when this is dropped.
pub(crate) struct Watcher(Arc<Bell>);

struct Bell {
    rung: File,
    over: AtomicBool,
}

impl Watcher {
    /// Starts one, which does `work` until there is nobody any more to do it for. No signal of the program's is
    /// delivered to it.
    pub(crate) fn start(
        cluster: &Cluster,
        work: impl FnMut() -> Option<Found> + Send + 'static,
    ) -> Result<Self> {
        let bell = Arc::new(Bell {
            rung: counter(libc::EFD_NONBLOCK)?,
            over: AtomicBool::new(false),
        });
        let (rung, cluster) = (bell.clone(), cluster.clone());
        let thread = thread::Builder::new().name("kite-verbs".into());
        let started = without_signals(|| thread.spawn(move || watch(&cluster, &rung, work)));
        started??;
        Ok(Self(bell))
    }

    pub(crate) fn wake(&self) {
        // It cannot count so far that this would fail.
        let _ = (&self.0.rung).write_all(&1u64.to_ne_bytes());
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.over.store(true, Relaxed);
        self.wake();
    }
}

/// Does something with all signals blocked, which a new thread then has, too.
fn without_signals<T>(f: impl FnOnce() -> T) -> Result<T> {
    // SAFETY: sets of signals are numbers; the functions write them, and nothing else.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        if libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before) != 0 {
            return Err(last());
        }
        before
    };
    let done = f();
    // SAFETY: it was read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    Ok(done)
}

/// Waits for the bell, or also for something in the session, so many ms or, if that is negative, for ever. Returns
/// whether there is something in the session.
fn wait(bell: &File, cluster: Option<&Cluster>, ms: i32) -> bool {
    let of = |fd: i32| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let session = cluster.map_or(-1, |cluster| cluster.as_fd().as_raw_fd());
    let mut all = [of(bell.as_raw_fd()), of(session)];
    // SAFETY: it writes what was found to the array, of which it gets the length. A failure is as nothing found.
    unsafe { libc::poll(all.as_mut_ptr(), 2, ms) };
    all[1].revents != 0
}

fn watch(cluster: &Cluster, bell: &Bell, mut work: impl FnMut() -> Option<Found>) {
    let (mut rest, mut again_ms) = (REST_MS, -1);
    loop {
        wait(&bell.rung, Some(cluster), again_ms);
        let _ = (&bell.rung).read(&mut [0; 8]);
        if bell.over.load(Relaxed) {
            return;
        }
        let Some(found) = work() else {
            return;
        };
        again_ms = found.again_ms;
        rest = match found.busy {
            true => REST_MS,
            false => (2 * rest).min(LONG_REST_MS),
        };
        // What is left is for somebody who polls, or for nobody yet.
        if wait(&bell.rung, Some(cluster), 0) {
            wait(&bell.rung, None, rest);
        }
    }
}

/// The work for the queue pairs of a session.
pub(crate) fn look_after(session: &Arc<Session>) -> impl FnMut() -> Option<Found> + Send + 'static {
    let session = Arc::downgrade(session);
    let mut seen = Vec::new();
    move || {
        let pairs = session.upgrade()?.pairs();
        let busy;
        (seen, busy) = look(&pairs, &seen);
        Some(Found { busy, again_ms: -1 })
    }
}

/// Looks after all of which nobody else does. Returns how often each was polled, and whether there was anything to do.
fn look(pairs: &[Arc<Pair>], seen: &[(u32, u64)]) -> (Vec<(u32, u64)>, bool) {
    let mut busy = false;
    let look = |pair: &Arc<Pair>| {
        let queues = [&pair.send_queue, &pair.receive_queue];
        let now = (pair.number, queues.map(|queue| queue.polls()).iter().sum());
        pair.attend();
        if queues.iter().any(|queue| queue.is_armed()) || seen.contains(&now) {
            busy |= pair.proceed();
        }
        now
    };
    (pairs.iter().map(look).collect(), busy)
}
