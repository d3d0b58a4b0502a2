// SPDX-License-Identifier: GPL-2.0

//! Calls of which the data are in relays, at the end that serves.
//!
//! To fetch them takes the other node, which may not answer. So such a call leaves the ring before that, for
//! those behind it; and while a fetch takes long no other is begun from the same node, which thus holds up few
//! servers, and not those of others.

use super::{
    link::Link,
    service::{tell, Service, Taken},
    Rpc,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::wire::ring::{Line, Relays, What};

/// Calls of one link that are being fetched, or are to be again.
const FETCHES_MAX: usize = 16;

/// Time without a fetch that ends after which no other is begun.
const SLOW_MS: i64 = 100;

/// The long calls of a link that have left its ring.
pub(super) struct Fetches {
    /// Those that no server has. There is room for all that are running.
    parked: KVec<(Line, Relays)>,
    running: usize,
    /// When the first of them began, or one ended.
    moved: Instant<Monotonic>,
}

impl Fetches {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            parked: KVec::with_capacity(FETCHES_MAX, GFP_KERNEL_ACCOUNT)?,
            running: 0,
            moved: Instant::now(),
        })
    }

    fn is_slow(&self) -> bool {
        self.running != 0 && self.moved.elapsed().as_millis() >= SLOW_MS
    }

    fn run(&mut self) {
        if self.running == 0 {
            self.moved = Instant::now();
        }
        self.running += 1;
    }

    /// Begins to fetch one that leaves the ring. Returns whether that may be now.
    fn begin(&mut self) -> bool {
        let may = !self.is_slow() && self.running + self.parked.len() < FETCHES_MAX;
        if may {
            self.run();
        }
        may
    }

    /// Begins to fetch one that left the ring before.
    fn resume(&mut self) -> Option<(Line, Relays)> {
        if self.is_slow() {
            return None;
        }
        let parked = self.parked.remove(0).ok()?;
        self.run();
        Some(parked)
    }

    fn end(&mut self) {
        self.running -= 1;
        self.moved = Instant::now();
    }

    /// Whether there is one that no server has.
    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }
}

/// A fetch under way.
pub(super) struct Fetch(Arc<Link>);

impl Fetch {
    /// Begins one of a call that leaves the ring, if that may be now.
    pub(super) fn begin(link: &Arc<Link>) -> Option<Self> {
        let begun = link.fetches.lock().begin();
        begun.then(|| Self(link.clone()))
    }

    /// Begins one of a call that left the ring before, if there is one and that may be now.
    pub(super) fn resume(link: &Arc<Link>) -> Option<(Self, Line, Relays)> {
        let (line, relays) = link.fetches.lock().resume()?;
        Some((Self(link.clone()), line, relays))
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.0.fetches.lock().end();
        // Others may have waited for this.
        if let Some(service) = self.0.service().filter(|_| self.0.has_waiting()) {
            service.arrived();
        }
    }
}

/// A call or message that has left the ring, and whose data are yet to be read from a relay. It is to be parked,
/// refused or had.
pub(crate) struct Long {
    link: Arc<Link>,
    line: Line,
    relays: Relays,
    _fetch: Fetch,
}

impl Long {
    /// The call that `fetch` is of.
    pub(super) fn new(fetch: Fetch, line: Line, relays: Relays) -> Self {
        Self {
            link: fetch.0.clone(),
            line,
            relays,
            _fetch: fetch,
        }
    }

    /// The node of the caller, and the region there that has the data.
    ///
    /// # Errors
    ///
    /// `EIO` if there is none.
    pub(crate) fn relay(&self) -> Result<(u32, u64)> {
        let region = self.relays.data.ok_or(EIO)?;
        Ok((self.link.peer.node, region))
    }

    /// Bytes of its data.
    pub(crate) fn len(&self) -> u64 {
        self.line.len
    }

    /// Another server, or the same, is to get it.
    pub(crate) fn park(self) {
        // There is room, as it is still counted.
        let parked = (self.line, self.relays);
        let _ = self.link.fetches.lock().parked.push(parked, GFP_ATOMIC);
    }

    /// Nobody gets it: its data cannot be had.
    pub(crate) fn refuse(self, rpc: &Arc<Rpc>, error: Error) {
        tell(rpc, &self.link, self.line.call, Err(error));
    }

    /// A server has the data.
    pub(crate) fn had(self, rpc: &Arc<Rpc>) -> Taken {
        if self.line.what == What::Send {
            // Its sender waits for that.
            tell(rpc, &self.link, self.line.call, Ok(()));
        }
        Taken::new(&self.link, self.line, self.relays)
    }
}

/// A call that a server takes from a link.
pub(super) struct Arrival {
    pub(super) line: Line,
    /// It left the ring before, and has these.
    pub(super) relays: Option<Relays>,
    /// If it is long.
    pub(super) fetch: Option<Fetch>,
}

impl Service {
    /// Puts a call back that was taken.
    pub(super) fn put_back(&self, link: &Arc<Link>, arrival: Arrival) {
        match (arrival.fetch, arrival.relays) {
            (Some(fetch), Some(relays)) => Long::new(fetch, arrival.line, relays).park(),
            _ => link.put_back(&arrival.line),
        }
        self.arrived();
    }
}
