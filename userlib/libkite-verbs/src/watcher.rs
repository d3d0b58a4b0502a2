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

use crate::counter::create_eventfd;
use crate::errno::{last_errno, Result};
use crate::pair::EmulatedQp;
use crate::session::Session;

/// How long it rests, in ms, when there is something that it can do nothing about: first, and at most, after it has found
/// nothing to do for a while.
const MIN_PAUSE_MS: i32 = 1;
const MAX_PAUSE_MS: i32 = 10;

/// What it has found.
pub(crate) struct PollOutcome {
    /// There was something to do.
    pub(crate) had_work: bool,
    /// It is to look again after so many ms, whatever happens; or if that is negative, only when something does.
    pub(crate) recheck_ms: i32,
}

impl PollOutcome {
    pub(crate) const IDLE: Self = Self {
        had_work: false,
        recheck_ms: -1,
    };

    /// Both.
    pub(crate) fn merge(self, other: Self) -> Self {
        let sooner = self.recheck_ms.min(other.recheck_ms);
        Self {
            had_work: self.had_work || other.had_work,
            recheck_ms: match sooner {
                0.. => sooner,
                _ => self.recheck_ms.max(other.recheck_ms),
            },
        }
    }
}

/// How to wake it, and to end it: it ends when this is dropped.
pub(crate) struct BackgroundPoller(Arc<PollerControl>);

struct PollerControl {
    wake_fd: File,
    stop: AtomicBool,
}

impl BackgroundPoller {
    /// Starts one, which does `work` until there is nobody any more to do it for. No signal of the program's is
    /// delivered to it.
    pub(crate) fn start(
        cluster: &Cluster,
        work: impl FnMut() -> Option<PollOutcome> + Send + 'static,
    ) -> Result<Self> {
        let control = Arc::new(PollerControl {
            wake_fd: create_eventfd(libc::EFD_NONBLOCK)?,
            stop: AtomicBool::new(false),
        });
        let (thread_control, cluster) = (control.clone(), cluster.clone());
        let thread = thread::Builder::new().name("kite-verbs".into());
        let started = with_signals_blocked(|| {
            thread.spawn(move || run_poller(&cluster, &thread_control, work))
        });
        started??;
        Ok(Self(control))
    }

    pub(crate) fn wake(&self) {
        // It cannot count so far that this would fail.
        let _ = (&self.0.wake_fd).write_all(&1u64.to_ne_bytes());
    }
}

impl Drop for BackgroundPoller {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
        self.wake();
    }
}

/// Does something with all signals blocked, which a new thread then has, too.
fn with_signals_blocked<T>(f: impl FnOnce() -> T) -> Result<T> {
    // SAFETY: sets of signals are numbers; the functions write them, and nothing else.
    let old_mask = unsafe {
        let (mut all_signals, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all_signals);
        if libc::pthread_sigmask(libc::SIG_BLOCK, &all_signals, &mut before) != 0 {
            return Err(last_errno());
        }
        before
    };
    let result = f();
    // SAFETY: it was read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &old_mask, std::ptr::null_mut()) };
    Ok(result)
}

/// Waits for the bell, or also for something in the session, so many ms or, if that is negative, for ever. Returns
/// whether there is something in the session.
fn wait_readable(wake_fd: &File, cluster: Option<&Cluster>, ms: i32) -> bool {
    let poll_in = |fd: i32| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let session = cluster.map_or(-1, |cluster| cluster.as_fd().as_raw_fd());
    let mut fds = [poll_in(wake_fd.as_raw_fd()), poll_in(session)];
    // SAFETY: it writes what was found to the array, of which it gets the length. A failure is as nothing found.
    unsafe { libc::poll(fds.as_mut_ptr(), 2, ms) };
    fds[1].revents != 0
}

fn run_poller(
    cluster: &Cluster,
    control: &PollerControl,
    mut work: impl FnMut() -> Option<PollOutcome>,
) {
    let (mut pause_ms, mut recheck_ms) = (MIN_PAUSE_MS, -1);
    loop {
        wait_readable(&control.wake_fd, Some(cluster), recheck_ms);
        let _ = (&control.wake_fd).read(&mut [0; 8]);
        if control.stop.load(Relaxed) {
            return;
        }
        let Some(found) = work() else {
            return;
        };
        recheck_ms = found.recheck_ms;
        pause_ms = match found.had_work {
            true => MIN_PAUSE_MS,
            false => (2 * pause_ms).min(MAX_PAUSE_MS),
        };
        // What is left is for somebody who polls, or for nobody yet.
        if wait_readable(&control.wake_fd, Some(cluster), 0) {
            wait_readable(&control.wake_fd, None, pause_ms);
        }
    }
}

/// The work for the queue pairs of a session.
pub(crate) fn poll_work_for_session(
    session: &Arc<Session>,
) -> impl FnMut() -> Option<PollOutcome> + Send + 'static {
    let session = Arc::downgrade(session);
    let mut last_poll_counts = Vec::new();
    move || {
        let qps = session.upgrade()?.qps();
        let busy;
        (last_poll_counts, busy) = poll_unattended_qps(&qps, &last_poll_counts);
        Some(PollOutcome {
            had_work: busy,
            recheck_ms: -1,
        })
    }
}

/// Looks after all of which nobody else does. Returns how often each was polled, and whether there was anything to do.
fn poll_unattended_qps(
    qps: &[Arc<EmulatedQp>],
    last_poll_counts: &[(u32, u64)],
) -> (Vec<(u32, u64)>, bool) {
    let mut busy = false;
    let poll_qp = |qp: &Arc<EmulatedQp>| {
        let cqs = [&qp.send_cq, &qp.recv_cq];
        let poll_count = (qp.qpn, cqs.map(|queue| queue.poll_count()).iter().sum());
        qp.poll_peer();
        if cqs.iter().any(|queue| queue.is_armed()) || last_poll_counts.contains(&poll_count) {
            busy |= qp.poll();
        }
        poll_count
    };
    (qps.iter().map(poll_qp).collect(), busy)
}
