// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The way by virtual queue pairs of kite: two system calls for a batch in one memory, and next to none to connect.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kite::{Buffer, Cluster, Completion, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use crate::error::Lost;
use crate::layout::within;
use crate::place::Name;

use super::{Queue, Request, Transport, Ways, LOCAL};

/// Maximum time of a batch. A dead node is detected earlier.
const PATIENCE: Duration = Duration::from_secs(20);

/// A virtual queue pair to a memory.
#[derive(Debug)]
struct OverKite {
    vqp: Vqp,
    local: Arc<Mr>,
    remote: RemoteMemory,
}

/// Connects to memories of nodes.
///
/// # Errors
/// [`Lost`], with the error of kite.
pub(crate) fn connect(memories: &[Name]) -> Result<impl Transport, Lost> {
    let connect = || -> kite::Result<_> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(LOCAL)?, Rights::empty())?;
        let local = Arc::new(local);
        let queue = |name: &Name| {
            Ok(OverKite {
                vqp: cluster.connect(name.node)?,
                local: Arc::clone(&local),
                remote: name.memory,
            })
        };
        let queues = memories.iter().map(queue);
        Ok(Ways::by(queues.collect::<kite::Result<_>>()?))
    };
    connect().map_err(Lost::because)
}

impl OverKite {
    fn work(&self, request: &Request<'_>, at: usize) -> SendWr<'_> {
        let verb = match *request {
            Request::Read { .. } => WrOp::Read,
            Request::Write { .. } => WrOp::Write,
            Request::CompareSwap { expected, new, .. } => WrOp::CompareSwap { expected, new },
            Request::FetchAdd { operand, .. } => WrOp::FetchAdd { operand },
        };
        SendWr {
            tag: 0,
            op: verb,
            local: &self.local,
            local_offset: at,
            len: request.len(),
            remote: self.remote,
            remote_offset: within(request.place()),
            immediate: None,
            signaled: false,
            fence: false,
        }
    }

    /// Waits for a completion, also if signals come meanwhile.
    fn pop(&self) -> kite::Result<Completion> {
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
        Ok(self.local.buffer().store(at, from)?)
    }

    fn load(&self, at: usize, into: &mut [u8]) -> Result<()> {
        Ok(self.local.buffer().load(at, into)?)
    }

    fn post(&self, batch: &[(&Request<'_>, usize)]) -> Result<()> {
        let works = batch.iter().map(|(request, at)| self.work(request, *at));
        let mut works: Vec<_> = works.collect();
        if let Some(last) = works.last_mut() {
            last.signaled = true;
        }
        Ok(self.vqp.push(&works)?)
    }

    /// The last completion comes when all are done; one that fails comes before.
    fn wait(&self) -> Result<()> {
        Ok(self.pop()?.result.map(drop)?)
    }
}
