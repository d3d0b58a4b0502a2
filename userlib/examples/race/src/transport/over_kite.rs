// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The way by a virtual queue pair of kite: two system calls for a batch, and next to none to connect.

use std::time::Duration;

use kite::{Cluster, Memory, Registered, RemoteMemory, Rights, Verb, Vqp, Work};

use crate::error::Lost;

use super::{locals, Request, Transport, LOCAL};

/// How long a batch may take. A node that dies is noticed before.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(20));

/// A virtual queue pair to the memory.
#[derive(Debug)]
pub(crate) struct OverKite {
    vqp: Vqp,
    local: Registered,
    remote: RemoteMemory,
}

impl OverKite {
    /// To memory of a node.
    ///
    /// # Errors
    /// [`Lost`], with what kite says.
    pub(crate) fn connect(node: u32, remote: RemoteMemory) -> Result<Self, Lost> {
        let connect = || -> kite::Result<Self> {
            let cluster = Cluster::open()?;
            Ok(Self {
                local: cluster.register_memory(Memory::new(LOCAL)?, Rights::empty())?,
                vqp: cluster.connect(node)?,
                remote,
            })
        };
        connect().map_err(Lost::because)
    }

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

    fn go(&self, batch: &mut [Request<'_>]) -> kite::Result<()> {
        let (locals, memory) = (locals(batch), self.local.memory());
        let mut works = Vec::with_capacity(batch.len());
        for (request, &at) in batch.iter().zip(&locals) {
            if let Request::Write { from, .. } = request {
                memory.store(at, from)?;
            }
            works.push(self.work(request, at));
        }
        if let Some(last) = works.last_mut() {
            last.signalled = true;
        }
        self.vqp.push(&works)?;
        // The last comes when all are done; one that fails comes before.
        self.vqp.pop(1, PATIENCE)?[0].result?;
        let mut answers = batch.iter_mut().zip(&locals);
        answers.try_for_each(|(request, &at)| request.accept(|bytes| memory.load(at, bytes)))
    }
}

impl Transport for OverKite {
    fn run(&mut self, batch: &mut [Request<'_>]) -> Result<(), Lost> {
        self.go(batch).map_err(Lost::because)
    }
}
