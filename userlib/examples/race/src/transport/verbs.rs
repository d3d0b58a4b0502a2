// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transport by RC QPs of user-space verbs, for comparison. Both ends exchange their QP addresses over TCP.

use std::sync::Arc;

use anyhow::{ensure, Result};
use plain_verbs::{Access, Device, Qp, QpAddress, RemoteAddr, Verb};

use crate::error::TransportError;
use crate::layout::offset_in_memory;
use crate::link::{Hello, Link};
use crate::member::Member;

use super::{Queue, QueueSet, Request, Transport, LOCAL_BYTES};

/// QP that is connected to the memory node of a memory.
#[derive(Debug)]
struct VerbsQueue {
    qp: Qp,
    remote_addr: RemoteAddr,
    /// The memory node destroys its QP when this connection is closed.
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
        let qp = Qp::on_device(device, LOCAL_BYTES)?;
        let mut link = Link::to(member.server, &Hello::Verbs(qp.address().clone()))?;
        let (other, remote_addr, name): (QpAddress, RemoteAddr, String) = link.receive()?;
        ensure!(
            name == member.name.to_string(),
            "{} now serves another memory",
            member.server
        );
        qp.connect(&other)?;
        Ok(Self {
            qp,
            remote_addr,
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
            offset,
            len: request.len(),
            remote_addr: self
                .remote_addr
                .offset_by(offset_in_memory(request.addr()) as usize),
            signaled: false,
        }
    }
}

impl Queue for VerbsQueue {
    fn store(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.qp.memory().store(offset, from)
    }

    fn load(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.qp.memory().load(offset, into)
    }

    fn post(&self, batch: &[(&Request<'_>, usize)]) -> Result<()> {
        let requests = batch
            .iter()
            .map(|(request, offset)| self.request(request, *offset));
        let mut requests: Vec<_> = requests.collect();
        if let Some(last) = requests.last_mut() {
            last.signaled = true;
        }
        self.qp.post(&requests)
    }

    fn wait(&self) -> Result<()> {
        self.qp.wait()
    }
}
