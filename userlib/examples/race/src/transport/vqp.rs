// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transport by virtual queue pairs of kite: two system calls for a batch to one memory. Connecting sends no message to
//! the memory node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kite::{Buffer, Cluster, Completion, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use crate::error::TransportError;
use crate::layout::offset_in_memory;
use crate::member::MrName;

use super::{Queue, QueueSet, Request, Transport, LOCAL_BYTES};

/// Maximum time of a batch. A dead node is detected earlier.
const BATCH_TIMEOUT: Duration = Duration::from_secs(20);

/// Virtual queue pair to a memory.
#[derive(Debug)]
struct VqpQueue {
    vqp: Vqp,
    local: Arc<Mr>,
    remote: RemoteMemory,
}

/// Connects to memories of nodes.
///
/// # Errors
/// The error of kite.
pub(crate) fn connect(memories: &[MrName]) -> Result<impl Transport, TransportError> {
    let connect = || -> kite::Result<_> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(LOCAL_BYTES)?, Rights::empty())?;
        let local = Arc::new(local);
        let queue = |name: &MrName| {
            Ok(VqpQueue {
                vqp: cluster.connect(name.node)?,
                local: Arc::clone(&local),
                remote: name.memory,
            })
        };
        let queues = memories.iter().map(queue);
        Ok(QueueSet::new(queues.collect::<kite::Result<_>>()?))
    };
    connect().map_err(TransportError::new)
}

impl VqpQueue {
    /// Returns an unsignaled work request for a request with local bytes at `offset`.
    fn send_wr(&self, request: &Request<'_>, offset: usize) -> SendWr<'_> {
        let op = match *request {
            Request::Read { .. } => WrOp::Read,
            Request::Write { .. } => WrOp::Write,
            Request::CompareSwap { expected, new, .. } => WrOp::CompareSwap { expected, new },
            Request::FetchAdd { operand, .. } => WrOp::FetchAdd { operand },
        };
        SendWr {
            tag: 0,
            op,
            local: &self.local,
            local_offset: offset,
            len: request.len(),
            remote: self.remote,
            remote_offset: offset_in_memory(request.addr()),
            immediate: None,
            signaled: false,
            fence: false,
        }
    }

    /// Waits for a completion. Continues after a signal handler ran.
    fn pop(&self) -> kite::Result<Completion> {
        let deadline = Instant::now() + BATCH_TIMEOUT;
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            match self.vqp.pop(1, Some(remaining)) {
                Err(Error::Interrupted) if !remaining.is_zero() => (),
                popped => return Ok(popped?[0]),
            }
        }
    }
}

impl Queue for VqpQueue {
    fn store(&self, offset: usize, from: &[u8]) -> Result<()> {
        Ok(self.local.buffer().store(offset, from)?)
    }

    fn load(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        Ok(self.local.buffer().load(offset, into)?)
    }

    fn post(&self, batch: &[(&Request<'_>, usize)]) -> Result<()> {
        let wrs = batch
            .iter()
            .map(|(request, offset)| self.send_wr(request, *offset));
        let mut wrs: Vec<_> = wrs.collect();
        if let Some(last) = wrs.last_mut() {
            last.signaled = true;
        }
        Ok(self.vqp.push(&wrs)?)
    }

    /// Waits for one completion: that of the last request, which is signaled, or of the first failed one.
    fn wait(&self) -> Result<()> {
        Ok(self.pop()?.result.map(drop)?)
    }
}
