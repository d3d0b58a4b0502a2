// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The way by a queue pair of user-space verbs, for comparison: connected as any program does it, with what the other
//! side has to know told over TCP.

use std::net::SocketAddr;

use anyhow::Result;
use plain_verbs::{Access, Device, End, Pair, Spot, Verb};

use crate::error::Lost;
use crate::link::{Hello, Link};

use super::{Queue, Request, Transport, Way, LOCAL};

/// A queue pair to the memory.
#[derive(Debug)]
struct OverVerbs {
    pair: Pair,
    spot: Spot,
    /// The other side keeps its queue pair until this is closed.
    _link: Link,
}

/// Connects to the memory of who serves at an address.
///
/// # Errors
/// [`Lost`], with what libibverbs or TCP say.
pub(crate) fn connect(server: SocketAddr) -> Result<impl Transport, Lost> {
    let connect = || -> Result<_> {
        let pair = Pair::on(&Device::open("", Access::Atomic)?, LOCAL)?;
        let mut link = Link::to(server, &Hello::Verbs(pair.end().clone()))?;
        let (other, spot): (End, Spot) = link.hear()?;
        pair.connect(&other)?;
        Ok(Way::by(OverVerbs {
            pair,
            spot,
            _link: link,
        }))
    };
    connect().map_err(|error| Lost::because(format!("{error:#}")))
}

impl OverVerbs {
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
}

impl Queue for OverVerbs {
    fn store(&self, at: usize, from: &[u8]) -> Result<()> {
        self.pair.memory().store(at, from)
    }

    fn load(&self, at: usize, into: &mut [u8]) -> Result<()> {
        self.pair.memory().load(at, into)
    }

    fn exchange(&self, batch: &[Request<'_>], locals: &[usize]) -> Result<()> {
        let requests = batch.iter().zip(locals);
        let mut requests: Vec<_> = requests
            .map(|(request, &at)| self.request(request, at))
            .collect();
        if let Some(last) = requests.last_mut() {
            last.signalled = true;
        }
        self.pair.post(&requests)?;
        self.pair.wait()
    }
}
