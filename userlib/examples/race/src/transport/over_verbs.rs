// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transport by queue pairs of user-space verbs, for comparison: connected as by any program, with addresses exchanged
//! over TCP.

use std::sync::Arc;

use anyhow::{ensure, Result};
use plain_verbs::{Access, Device, End, Pair, Spot, Verb};

use crate::error::Lost;
use crate::layout::within;
use crate::link::{Hello, Link};
use crate::place::Member;

use super::{Queue, Request, Transport, Ways, LOCAL};

/// A queue pair to a memory.
#[derive(Debug)]
struct OverVerbs {
    pair: Pair,
    spot: Spot,
    /// The other side keeps its queue pair until this is closed.
    _link: Link,
}

/// Connects to memories through their memory nodes.
///
/// # Errors
/// [`Lost`], with what libibverbs or TCP say.
pub(crate) fn connect(members: &[Member]) -> Result<impl Transport, Lost> {
    let connect = || -> Result<_> {
        let device = Device::open("", Access::Atomic)?;
        let queues = members.iter().map(|member| OverVerbs::new(&device, member));
        Ok(Ways::by(queues.collect::<Result<_>>()?))
    };
    connect().map_err(|error| Lost::because(format!("{error:#}")))
}

impl OverVerbs {
    fn new(device: &Arc<Device>, member: &Member) -> Result<Self> {
        let pair = Pair::on(device, LOCAL)?;
        let mut link = Link::to(member.server, &Hello::Verbs(pair.end().clone()))?;
        let (other, spot, name): (End, Spot, String) = link.hear()?;
        let Member {
            server,
            name: known,
        } = member;
        ensure!(
            name == known.to_string(),
            "{server} serves another memory by now"
        );
        pair.connect(&other)?;
        Ok(Self {
            pair,
            spot,
            _link: link,
        })
    }

    fn request(&self, request: &Request<'_>, at: usize) -> plain_verbs::Request {
        let verb = match *request {
            Request::Read { .. } => Verb::Read,
            Request::Write { .. } => Verb::Write,
            Request::CompareSwap { expected, new, .. } => Verb::CompareSwap { expected, new },
            Request::FetchAdd { operand, .. } => Verb::FetchAdd { operand },
        };
        plain_verbs::Request {
            verb,
            at,
            len: request.len(),
            spot: self.spot.plus(within(request.place()) as usize),
            signalled: false,
        }
    }
}

impl Queue for OverVerbs {
    fn store(&self, at: usize, from: &[u8]) -> Result<()> {
        self.pair.memory().store(at, from)
    }

    fn load(&self, at: usize, into: &mut [u8]) -> Result<()> {
        self.pair.memory().load(at, into)
    }

    fn post(&self, batch: &[(&Request<'_>, usize)]) -> Result<()> {
        let requests = batch.iter().map(|(request, at)| self.request(request, *at));
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
