// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A VQP whose requests use system calls or an I/O queue, with the same interface.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use kite::{Cluster, Completion, Error, IoQueue, SendWr, Vqp};

/// Interface that pushes the requests
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct PushInterface {
    /// Uses an I/O queue instead of system calls
    #[arg(long)]
    queue: bool,
}

/// VQP with the interface of its requests.
pub(crate) struct Pusher<'a> {
    vqp: &'a Vqp,
    queue: Option<IoQueue>,
    /// Tags of unsignaled requests by the I/O queue, whose successful completions are dropped.
    silent: HashSet<u64>,
}

impl PushInterface {
    pub(crate) const CALLS: Self = Self { queue: false };
    pub(crate) const QUEUE: Self = Self { queue: true };

    pub(crate) fn open<'a>(self, cluster: &Cluster, vqp: &'a Vqp) -> Result<Pusher<'a>> {
        let create = || cluster.create_queue(kite::VQP_DEPTH as u32, 1);
        Ok(Pusher {
            vqp,
            queue: self.queue.then(create).transpose()?,
            silent: HashSet::new(),
        })
    }
}

impl Pusher<'_> {
    /// See [`Vqp::push`]. An I/O queue reports invalid requests by their completions.
    pub(crate) fn push(&mut self, works: &[SendWr<'_>]) -> kite::Result<()> {
        let Some(queue) = &mut self.queue else {
            return self.vqp.push(works);
        };
        for work in works {
            queue.push(self.vqp, work)?;
            if !work.signaled {
                self.silent.insert(work.tag);
            }
        }
        queue.submit()
    }

    /// See [`Vqp::pop`].
    pub(crate) fn pop(
        &mut self,
        max: usize,
        wait: Option<Duration>,
    ) -> kite::Result<Vec<Completion>> {
        if self.queue.is_none() {
            return self.vqp.pop(max, wait);
        }
        let mut popped = Vec::new();
        while popped.len() < max {
            match self.next_completion(wait.filter(|_| popped.is_empty()))? {
                Some(done) => popped.push(done),
                None if popped.is_empty() => return Err(Error::WouldBlock),
                None => break,
            }
        }
        Ok(popped)
    }

    /// Returns the next completion of the I/O queue that is not dropped, and waits for it if `wait` is set.
    fn next_completion(&mut self, wait: Option<Duration>) -> kite::Result<Option<Completion>> {
        let Some(queue) = &mut self.queue else {
            return Ok(None);
        };
        loop {
            let done = match wait {
                Some(_) => Some(queue.wait()?),
                None => queue.try_next()?,
            };
            match done {
                Some(done) if self.silent.remove(&done.tag) && done.result.is_ok() => {}
                done => return Ok(done),
            }
        }
    }
}
