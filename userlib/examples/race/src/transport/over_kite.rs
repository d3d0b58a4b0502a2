// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The way by a virtual queue pair of kite: two system calls for a batch, and next to none to connect.

use std::time::{Duration, Instant};

use anyhow::Result;
use kite::{Cluster, Completion, Error, Memory, Registered, RemoteMemory, Rights, Verb, Vqp, Work};

use crate::error::Lost;

use super::{Queue, Request, Transport, Way, LOCAL};

/// How long a batch may take. A node that dies is noticed before.
const PATIENCE: Duration = Duration::from_secs(20);

/// A virtual queue pair to the memory.
#[derive(Debug)]
struct OverKite {
    vqp: Vqp,
    local: Registered,
    remote: RemoteMemory,
}

/// Connects to memory of a node.
///
/// # Errors
/// [`Lost`], with what kite says.
pub(crate) fn connect(node: u32, remote: RemoteMemory) -> Result<impl Transport, Lost> {
    let connect = || -> kite::Result<_> {
        let cluster = Cluster::open()?;
        Ok(Way::by(OverKite {
            local: cluster.register_memory(Memory::new(LOCAL)?, Rights::empty())?,
            vqp: cluster.connect(node)?,
            remote,
        }))
    };
    connect().map_err(Lost::because)
}

impl OverKite {
    fn work(&self, request: &Request<'_>, at: usize) -> Work<'_> {
        let verb = match *request {
            Request::Read { .. } => Verb::Read,
            Request::Write { .. } => Verb::Write,
            Request::CompareSwap { expected, new, .. } => Verb::CompareSwap { expected, new },
            Request::FetchAdd { operand, .. } => Verb::FetchAdd { operand },
        };
        Work {
            tag: 0,
            verb,
            local: &self.local,
            at,
            len: request.len(),
            remote: self.remote,
            offset: request.place(),
            immediate: None,
            signalled: false,
            fenced: false,
        }
    }

    /// Waits for a completion, also if signals come meanwhile.
    fn wait(&self) -> kite::Result<Completion> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.vqp.pop(1, Some(left)) {
                Err(Error::Interrupted) if !left.is_zero() => (),
                popped => return Ok(popped?[0]),
            }
        }
    }
}

impl Queue for OverKite {
    fn store(&self, at: usize, from: &[u8]) -> Result<()> {
        Ok(self.local.memory().store(at, from)?)
    }

    fn load(&self, at: usize, into: &mut [u8]) -> Result<()> {
        Ok(self.local.memory().load(at, into)?)
    }

    fn exchange(&self, batch: &[Request<'_>], locals: &[usize]) -> Result<()> {
        let works = batch.iter().zip(locals);
        let mut works: Vec<_> = works.map(|(request, &at)| self.work(request, at)).collect();
        if let Some(last) = works.last_mut() {
            last.signalled = true;
        }
        self.vqp.push(&works)?;
        // The last comes when all are done; one that fails comes before.
        Ok(self.wait()?.result.map(drop)?)
    }
}
