// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Waiting for completions: adaptive polling, then a system call.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{IoQueue, QueueHandle, CQ_TAIL_OFFSET};
use crate::completion::Completion;
use crate::error::{Error, Result};

/// Waits for completions of an [`IoQueue`] that another thread uses.
///
/// A waiter consumes no completion: after [`wait`](Self::wait) the owner of the queue calls [`IoQueue::try_next`].
/// The queue is destroyed when it and all its waiters are dropped.
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// let queue = cluster.create_queue(64, 4096)?;
/// let waiter = queue.waiter();
/// std::thread::spawn(move || waiter.wait(None));
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct QueueWaiter(Arc<QueueHandle>);

impl QueueWaiter {
    /// Waits until the queue has a completion that was not consumed, for at most `timeout`, or without limit.
    ///
    /// # Errors
    /// - [`Error::Interrupted`]: a signal handler ran.
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::TimedOut`]: there was none in time.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let remaining =
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let result = self.0.enter(1, remaining.unwrap_or(Duration::MAX));
            // Before the deadline the kernel times out after its longest wait only.
            if result != Err(Error::TimedOut)
                || remaining.is_some_and(|remaining| remaining.is_zero())
            {
                return result;
            }
        }
    }
}

impl IoQueue {
    /// Submits all new requests, and waits for a completion: polls first, then sleeps.
    ///
    /// # Errors
    /// - [`Error::Interrupted`]: a signal handler ran.
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::WouldBlock`]: no request is in flight.
    pub fn wait(&mut self) -> Result<Completion> {
        self.wait_until(None)
    }

    /// Submits all new requests, and waits for a completion for at most `timeout`.
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: there was none in time.
    /// - For the others see [`wait`](Self::wait).
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<Completion> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// Returns a waiter for other threads.
    pub fn waiter(&self) -> QueueWaiter {
        QueueWaiter(self.handle.clone())
    }

    /// Submits all new requests, and polls for a completion for at most 16384 iterations. The number of iterations
    /// adapts to recent waits. Returns `None` if there was no completion.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::WouldBlock`]: no request is in flight.
    pub fn poll(&mut self) -> Result<Option<Completion>> {
        self.submit()?;
        if self.in_flight() == 0 {
            return Err(Error::WouldBlock);
        }
        if !self.has_completion()? && !self.spin_for_completion()? {
            return Ok(None);
        }
        self.try_next()
    }

    fn wait_until(&mut self, deadline: Option<Instant>) -> Result<Completion> {
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            self.system_calls.set(self.system_calls.get() + 1);
            let remaining =
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            self.waiter().wait(remaining)?;
        }
    }

    fn spin_for_completion(&mut self) -> Result<bool> {
        let tail = self.rings.atomic_u32(CQ_TAIL_OFFSET)?;
        let cq_head = self.cq_head;
        let is_ready = || tail.load(Ordering::Relaxed) != cq_head;
        Ok(self.spin.spin_until(is_ready))
    }
}
