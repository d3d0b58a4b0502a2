// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Background poller: a thread that polls the objects of a session of kite while the program does not: QPs, or
//! identifiers of the connection manager.
//!
//! # Operation
//!
//! For QPs, the thread accepts the connection of the remote QP, and detects that the remote QP has closed. If a CQ of
//! the QP is armed, or the program has not polled the CQs since the last round, the thread also polls the QP: it
//! collects completions, and copies received messages to posted receive buffers, as an RNIC would. Otherwise the
//! program polls the QP.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::thread;

use kite::Cluster;

use crate::errno::{last_errno, Result};
use crate::eventfd::create_eventfd;

/// Pause in ms while the session is readable, but the thread cannot proceed: initially, and at most after several
/// rounds without work.
const MIN_PAUSE_MS: i32 = 1;
const MAX_PAUSE_MS: i32 = 10;

/// Result of a round.
pub(crate) struct PollOutcome {
    /// There was work.
    pub(crate) had_work: bool,
    /// Time in ms until the next round at the latest; negative: no limit.
    pub(crate) recheck_ms: i32,
}

impl PollOutcome {
    pub(crate) const IDLE: Self = Self {
        had_work: false,
        recheck_ms: -1,
    };

    /// Returns the combined result of two rounds.
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

/// QP as pollers need it.
pub(crate) trait PolledQp: Send + Sync {
    /// Returns the number of the QP.
    fn qpn(&self) -> u32;

    /// Returns the number of polls of the CQs by the program.
    fn poll_count(&self) -> u64;

    /// Returns `true` if the next completion of a CQ raises an event.
    fn is_armed(&self) -> bool;

    /// Accepts the connection of the remote QP, and detects its end.
    fn poll_peer(&self);

    /// Polls for completions. Returns `true` if there were any.
    fn poll(&self) -> bool;
}

/// Handle of a background poller, which ends when the handle is dropped.
pub(crate) struct BackgroundPoller(Arc<PollerControl>);

struct PollerControl {
    wake_fd: File,
    stop: AtomicBool,
}

impl BackgroundPoller {
    /// Starts a poller that calls `work` until it returns `None`. No signal of the program is delivered to the thread.
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
        // The counter cannot get large enough for the write to fail.
        let _ = (&self.0.wake_fd).write_all(&1u64.to_ne_bytes());
    }
}

impl Drop for BackgroundPoller {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
        self.wake();
    }
}

/// Calls a function with all signals blocked. A thread that it starts inherits the mask.
fn with_signals_blocked<T>(f: impl FnOnce() -> T) -> Result<T> {
    // SAFETY: signal sets are plain data, and the functions write only to these.
    let old_mask = unsafe {
        let (mut all_signals, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all_signals);
        if libc::pthread_sigmask(libc::SIG_BLOCK, &all_signals, &mut before) != 0 {
            return Err(last_errno());
        }
        before
    };
    let result = f();
    // SAFETY: the mask was read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &old_mask, std::ptr::null_mut()) };
    Ok(result)
}

/// Waits for the eventfd, or also for the session, at most `ms` or without limit if `ms` is negative. Returns `true` if
/// the session is readable.
fn wait_readable(wake_fd: &File, cluster: Option<&Cluster>, ms: i32) -> bool {
    let poll_in = |fd: i32| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let session = cluster.map_or(-1, |cluster| cluster.as_fd().as_raw_fd());
    let mut fds = [poll_in(wake_fd.as_raw_fd()), poll_in(session)];
    // SAFETY: the call writes to the array, whose length it gets. A failure leaves `revents` at 0.
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
        // What remains is for a thread of the program that polls, or cannot be handled yet.
        if wait_readable(&control.wake_fd, Some(cluster), 0) {
            wait_readable(&control.wake_fd, None, pause_ms);
        }
    }
}

/// Polls all QPs that the program does not poll. Returns the number of polls of each, and whether there was work.
pub(crate) fn poll_unattended_qps(
    qps: &[Arc<dyn PolledQp>],
    last_poll_counts: &[(u32, u64)],
) -> (Vec<(u32, u64)>, bool) {
    let mut busy = false;
    let poll_qp = |qp: &Arc<dyn PolledQp>| {
        let poll_count = (qp.qpn(), qp.poll_count());
        qp.poll_peer();
        if qp.is_armed() || last_poll_counts.contains(&poll_count) {
            busy |= qp.poll();
        }
        poll_count
    };
    (qps.iter().map(poll_qp).collect(), busy)
}
