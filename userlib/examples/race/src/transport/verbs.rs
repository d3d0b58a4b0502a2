// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transport by queue pairs of user-space verbs, for comparison. The ends exchange their addresses over TCP.

use std::sync::Arc;

use anyhow::{ensure, Result};
use plain_verbs::{Access, Device, End, Pair, Spot, Verb};

use crate::error::TransportError;
use crate::layout::offset_in_memory;
use crate::link::{Hello, Link};
use crate::member::Member;

use super::{Queue, QueueSet, Request, Transport, LOCAL_BYTES};

/// Queue pair to a memory.
#[derive(Debug)]
struct VerbsQueue {
    pair: Pair,
    spot: Spot,
    /// The memory node destroys its queue pair when this connection is closed.
    _link: Link,
}

/// Connects to memories through their memory nodes.
///
/// # Errors
/// The error of libibverbs or of TCP.
pub(crate) fn connect(members: &[Member]) -> Result<impl Transport, TransportError> {
    let connect = || -> Result<_> {
        let device = Device::open("", Access::Atomic)?;
        let queues = members
            .iter()
            .map(|member| VerbsQueue::new(&device, member));
        Ok(QueueSet::new(queues.collect::<Result<_>>()?))
    };
    connect().map_err(|error| TransportError::new(format!("{error:#}")))
}

impl VerbsQueue {
    fn new(device: &Arc<Device>, member: &Member) -> Result<Self> {
        let pair = Pair::on(device, LOCAL_BYTES)?;
        let mut link = Link::to(member.server, &Hello::Verbs(pair.end().clone()))?;
        let (other, spot, name): (End, Spot, String) = link.receive()?;
        ensure!(
            name == member.name.to_string(),
            "{} now serves another memory",
            member.server
        );
        pair.connect(&other)?;
        Ok(Self {
            pair,
            spot,
            _link: link,
        })
    }

    /// Returns an unsignaled request of `plain_verbs`, with local bytes at `offset`.
    fn request(&self, request: &Request<'_>, offset: usize) -> plain_verbs::Request {
        let verb = match *request {
            Request::Read { .. } => Verb::Read,
            Request::Write { .. } => Verb::Write,
            Request::CompareSwap { expected, new, .. } => Verb::CompareSwap { expected, new },
            Request::FetchAdd { operand, .. } => Verb::FetchAdd { operand },
        };
        plain_verbs::Request {
            verb,
            at: offset,
            len: request.len(),
            spot: self.spot.plus(offset_in_memory(request.addr()) as usize),
            signalled: false,
        }
    }
}

impl Queue for VerbsQueue {
    fn store(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.pair.memory().store(offset, from)
    }

    fn load(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.pair.memory().load(offset, into)
    }

    fn post(&self, batch: &[(&Request<'_>, usize)]) -> Result<()> {
        let requests = batch
            .iter()
            .map(|(request, offset)| self.request(request, *offset));
        let mut requests: Vec<_> = requests.collect();
        if let Some(last) = requests.last_mut() {
            last.signalled = true;
        }
        self.pair.post(&requests)
    }

    fn wait(&self) -> Result<()> {
        self.pair.wait()
    }
}
