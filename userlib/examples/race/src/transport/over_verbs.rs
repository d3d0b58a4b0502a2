// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The way by a queue pair of user-space verbs, for comparison: connected as any program does it, with what the other
//! side has to know told over TCP.

use std::net::SocketAddr;

use plain_verbs::{Access, Device, End, Pair, Spot, Verb};

use crate::error::Lost;
use crate::link::{Hello, Link};

use super::{locals, Request, Transport, LOCAL};

/// A queue pair to the memory.
#[derive(Debug)]
pub(crate) struct OverVerbs {
    pair: Pair,
    spot: Spot,
    /// The other side keeps its queue pair until this is closed.
    _link: Link,
}

impl OverVerbs {
    /// To the memory of who serves at an address.
    ///
    /// # Errors
    /// [`Lost`], with what libibverbs or TCP say.
    pub(crate) fn connect(server: SocketAddr) -> Result<Self, Lost> {
        let connect = || -> anyhow::Result<Self> {
            let pair = Pair::on(&Device::open("", Access::Atomic)?, LOCAL)?;
            let mut link = Link::to(server, &Hello::Verbs(pair.end().clone()))?;
            let (other, spot): (End, Spot) = link.hear()?;
            pair.connect(&other)?;
            Ok(Self {
                pair,
                spot,
                _link: link,
            })
        };
        connect().map_err(|error| Lost::because(format!("{error:#}")))
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
            spot: self.spot.plus(request.place() as usize),
            signalled: false,
        }
    }

    fn go(&self, batch: &mut [Request<'_>]) -> anyhow::Result<()> {
        let (locals, memory) = (locals(batch), self.pair.memory());
        let mut requests = Vec::with_capacity(batch.len());
        for (request, &at) in batch.iter().zip(&locals) {
            if let Request::Write { from, .. } = request {
                memory.store(at, from)?;
            }
            requests.push(self.request(request, at));
        }
        if let Some(last) = requests.last_mut() {
            last.signalled = true;
        }
        self.pair.post(&requests)?;
        self.pair.wait()?;
        let mut answers = batch.iter_mut().zip(&locals);
        answers.try_for_each(|(request, &at)| request.accept(|bytes| memory.load(at, bytes)))
    }
}

impl Transport for OverVerbs {
    fn run(&mut self, batch: &mut [Request<'_>]) -> Result<(), Lost> {
        let done = self.go(batch);
        done.map_err(|error| Lost::because(format!("{error:#}")))
    }
}
