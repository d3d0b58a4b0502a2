// SPDX-License-Identifier: GPL-2.0

//! Calls of which the data are in relays, at the end that serves.
//!
//! To fetch them takes the other node, which may not answer. So such a call leaves the ring at once, for those
//! behind it, and is parked if it is not to be fetched now: unless a node has just let one be fetched, there are
//! few at a time, so that it holds up few servers.

use super::{link::Link, open::tell, service::Taken, Rpc};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::wire::ring::{Line, Relays, What};

/// Calls of one link that have left its ring and that no server has.
const LONG_MAX: usize = 32;

/// Fetches at a time from a node that has not let one be done for [`SLOW_MS`].
const SLOW_MAX: usize = 2;
const SLOW_MS: i64 = 100;

/// The long calls of a link that have left its ring.
pub(super) struct Fetches {
    /// Those that are not being fetched. There is room for all.
    parked: KVec<(Line, Relays)>,
    running: usize,
    /// Whether those that left the ring have their turn before those that are in it.
    turn: bool,
    /// When one was done last.
    done: Option<Instant<Monotonic>>,
}

/// There are too many: a call stays in the ring.
pub(super) struct NoRoom;

impl Fetches {
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            parked: KVec::with_capacity(LONG_MAX, GFP_KERNEL_ACCOUNT)?,
            running: 0,
            turn: false,
            done: None,
        })
    }

    fn may_begin(&self) -> bool {
        let quick = |done: Instant<Monotonic>| done.elapsed().as_millis() < SLOW_MS;
        self.running < SLOW_MAX || self.done.is_some_and(quick)
    }

    /// Whether those that left the ring come first this time.
    pub(super) fn flip(&mut self) -> bool {
        self.turn = !self.turn;
        self.turn
    }

    /// Whether there is no room for one more.
    pub(super) fn is_full(&self) -> bool {
        self.running + self.parked.len() >= LONG_MAX
    }

    /// Lets one leave the ring. Returns whether it is to be fetched now, if it may be; else it is parked.
    fn admit(&mut self, line: Line, relays: Relays, may_be: bool) -> Result<bool, NoRoom> {
        if self.is_full() {
            return Err(NoRoom);
        }
        let now = may_be && self.may_begin();
        if now {
            self.running += 1;
        } else {
            self.park(line, relays);
        }
        Ok(now)
    }

    fn resume(&mut self) -> Option<(Line, Relays)> {
        let next = self.may_begin().then(|| self.parked.remove(0).ok());
        self.running += usize::from(matches!(next, Some(Some(_))));
        next?
    }

    fn park(&mut self, line: Line, relays: Relays) {
        // Within the capacity: those that are fetched count, too.
        let _ = self.parked.push((line, relays), GFP_ATOMIC);
    }

    /// Whether one waits that may be fetched.
    pub(super) fn has_ready(&self) -> bool {
        self.has_parked() && self.may_begin()
    }

    /// Whether one waits.
    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Takes one that is not to be fetched any more.
    pub(super) fn drain(&mut self) -> Option<Line> {
        self.parked.remove(0).ok().map(|(line, _)| line)
    }
}

/// A fetch under way.
struct Fetch {
    link: Arc<Link>,
    done: bool,
}

impl Drop for Fetch {
    fn drop(&mut self) {
        let mut fetches = self.link.fetches.lock();
        fetches.running -= 1;
        if self.done {
            fetches.done = Some(Instant::now());
        }
        let wanted = fetches.has_parked();
        drop(fetches);
        // Others may have waited for this; or in the ring, for room.
        if let Some(service) = self
            .link
            .service()
            .filter(|_| wanted || self.link.has_waiting())
        {
            service.arrived();
        }
    }
}

/// A call or message that has left the ring, and whose data are yet to be read from a relay. If it is neither refused
/// nor had, it is parked: another server is to get it, or the same.
pub(crate) struct Long {
    link: Arc<Link>,
    pub(super) line: Line,
    relays: Relays,
    /// Nothing once its data were fetched.
    fetch: Option<Fetch>,
    /// It was refused, or had.
    over: bool,
}

impl Long {
    /// The next that left the ring of `link` before, if it is to be fetched now.
    pub(super) fn resume(link: &Arc<Link>) -> Option<Self> {
        let parked = link.fetches.lock().resume();
        parked.map(|(line, relays)| Self::new(link, line, relays))
    }

    /// One that leaves the ring of `link`, if it is to be fetched now, and may be.
    pub(super) fn admit(
        link: &Arc<Link>,
        line: Line,
        relays: Relays,
        may_be: bool,
    ) -> Result<Option<Self>, NoRoom> {
        let now = link.fetches.lock().admit(line, relays, may_be)?;
        Ok(now.then(|| Self::new(link, line, relays)))
    }

    fn new(link: &Arc<Link>, line: Line, relays: Relays) -> Self {
        let fetch = Fetch {
            link: link.clone(),
            done: false,
        };
        Self {
            link: link.clone(),
            line,
            relays,
            fetch: Some(fetch),
            over: false,
        }
    }

    /// By which it came.
    pub(crate) fn link(&self) -> Arc<Link> {
        self.link.clone()
    }

    /// The region at the caller's node that has the data.
    ///
    /// # Errors
    ///
    /// `EIO` if there is none.
    pub(crate) fn relay(&self) -> Result<u64> {
        self.relays.data.ok_or(EIO)
    }

    /// Bytes of its data.
    pub(crate) fn len(&self) -> u64 {
        self.line.len
    }

    /// Nobody gets it.
    pub(crate) fn refuse(mut self, rpc: &Arc<Rpc>, error: Error) {
        self.over = true;
        self.fetch = None;
        tell(rpc, &self.link, self.line.call, Err(error));
    }

    /// Its data were fetched.
    pub(crate) fn fetched(&mut self) {
        if let Some(mut fetch) = self.fetch.take() {
            fetch.done = true;
        }
    }

    /// A server has the data.
    pub(crate) fn had(mut self, rpc: &Arc<Rpc>) -> Taken {
        self.over = true;
        if self.line.what == What::Send {
            // Its sender waits for that.
            tell(rpc, &self.link, self.line.call, Ok(()));
        }
        Taken::new(&self.link, self.line, self.relays)
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        if !self.over {
            self.link.fetches.lock().park(self.line, self.relays);
        }
    }
}
