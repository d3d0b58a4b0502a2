// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A VQP whose requests use system calls or an I/O queue, with the same interface.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use kite::{Cluster, Completion, Error, IoQueue, SendWr, Vqp};

/// Interface of the requests
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Way {
    /// By a queue, and not by system calls
    #[arg(long)]
    queue: bool,
}

/// Pushes and pops.
pub(crate) struct Pusher<'a> {
    vqp: &'a Vqp,
    queue: Option<IoQueue>,
    /// Tags of unsignaled requests by the I/O queue, whose successful completions are dropped.
    silent: HashSet<u64>,
}

impl Way {
    pub(crate) const CALLS: Self = Self { queue: false };
    pub(crate) const QUEUE: Self = Self { queue: true };

    pub(crate) fn of<'a>(self, cluster: &Cluster, vqp: &'a Vqp) -> Result<Pusher<'a>> {
        let make = || cluster.create_queue(kite::VQP_DEPTH as u32, 1);
        Ok(Pusher {
            vqp,
            queue: self.queue.then(make).transpose()?,
            silent: HashSet::new(),
        })
    }
}

impl Pusher<'_> {
    /// As [`Vqp::push`], but that by a queue nothing is refused at once.
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

    /// As [`Vqp::pop`].
    pub(crate) fn pop(
        &mut self,
        most: usize,
        wait: Option<Duration>,
    ) -> kite::Result<Vec<Completion>> {
        if self.queue.is_none() {
            return self.vqp.pop(most, wait);
        }
        let mut popped = Vec::new();
        while popped.len() < most {
            match self.next(wait.filter(|_| popped.is_empty()))? {
                Some(done) => popped.push(done),
                None if popped.is_empty() => return Err(Error::WouldBlock),
                None => break,
            }
        }
        Ok(popped)
    }

    /// Returns the next completion of the I/O queue that is not dropped. With `wait` waits for it.
    fn next(&mut self, wait: Option<Duration>) -> kite::Result<Option<Completion>> {
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
