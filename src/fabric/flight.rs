// SPDX-License-Identifier: GPL-2.0

//! One part of a read or write: how it is posted, and what came of it.
//!
//! A part is within one node's contiguous memory. A short one goes through the buffer of its slot, a long one
//! straight from and to the caller's pages, pinned for as long as it takes. Posting waits for nothing unless
//! it is given a deadline, so who must not wait can move short parts too, and look now and then for their end.

pub(crate) use super::sender::BUFFER_SIZE;
use super::{
    conn::Conn,
    cut::{Bounds, Cutter},
    qos::{tenant::Tenant, Measure},
    sender::{Claim, Class, Held, MAX_POSTED},
    usage::{Failure, Use},
    Fabric,
};
use crate::{
    stats::Stats,
    sys::{deadline::Deadline, memory::Memory},
    trace,
    verbs::{
        cq::Status,
        dma::DmaUser,
        work::{Sge, Verb, MAX_SGE},
    },
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};
use kite_core::view::Life;

/// Longest part, unless the RNIC's scatter lists are too short for it.
const PART_MAX: usize = 1 << 20;

/// Time after which somebody should wait for what was posted.
const PATIENCE_MS: i64 = 1000;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the region to the caller.
    Read,
    /// From the caller to the region.
    Write,
}

impl Direction {
    /// What to do with memory that goes that way.
    pub(super) fn verb(self) -> Verb {
        match self {
            Self::Read => Verb::Read,
            Self::Write => Verb::Write,
        }
    }

    /// What to do with `len` bytes at `place` of the buffer of a claim. Returns nothing if they are not all there.
    pub(super) fn request(
        self,
        fabric: &Fabric,
        usage: &Use,
        claim: &Claim,
        place: usize,
        len: usize,
    ) -> Option<(Verb, Sge)> {
        let buffer = claim.buffer();
        if self == Self::Write && len <= usage.inline_max() {
            let at = buffer.as_ptr().wrapping_add(place);
            return Some((Verb::WriteInline, Sge::new(at as u64, len as u32, 0)));
        }
        Some((self.verb(), buffer.sge(fabric.local_key(), place, len)?))
    }
}

/// Contiguous memory of one node in one life, and where in the caller's buffer its bytes go or come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) life: Life,
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) at: usize,
}

impl Part {
    /// Cuts off the first `len` bytes, or takes all if there are no more.
    pub(super) fn split_front(&mut self, len: usize) -> Self {
        let len = len.min(self.len);
        let front = Self { len, ..*self };
        self.addr += len as u64;
        self.at += len;
        self.len -= len;
        front
    }

    /// Whether it fits the buffer of a slot.
    pub(crate) fn is_short(&self) -> bool {
        self.len <= BUFFER_SIZE
    }
}

/// What allows a part to be under way.
pub(crate) trait Permit {
    /// The part's queue pair failed. The memory that it is for must not be another's before that is over.
    fn note(&self, failure: Failure);
}

/// A part that has been posted, and has to be waited for. Who waits for room looks for a slot first, so that
/// is given back first.
pub(crate) struct Flight<G> {
    pub(super) claim: Claim,
    pub(super) usage: Use,
    pub(super) permit: G,
    pub(super) part: Part,
    /// How long it takes, if somebody wants to know.
    pub(super) measure: Option<Measure>,
}

/// A part whose queue pair failed, perhaps by what it asked for, and the connection on which it may be
/// done again: only there is it certain that the first attempt delivers nothing any more.
#[derive(Clone)]
pub(crate) struct Failed {
    pub(super) part: Part,
    pub(super) conn: Arc<Conn>,
    /// Times that it was refused.
    pub(super) refusals: u32,
}

impl Failed {
    /// Waits until what it sent can reach the peer's memory no more.
    ///
    /// # Errors
    ///
    /// As for [`Conn::begin`].
    pub(crate) fn outlive(&self, deadline: Deadline) -> Result {
        self.conn.begin(1, 0, Some(deadline)).map(drop)
    }
}

impl<G: Permit> Flight<G> {
    /// Waits until nothing of it is under way at this node. If its queue pair failed, says so to all who
    /// have to know.
    pub(super) fn wait(&self) -> Status {
        let status = self.claim.wait(|how| self.usage.rescue(how));
        if status != Status::Success {
            self.usage.failed(status);
            self.permit.note(self.usage.failure(self.part.life));
        }
        status
    }

    /// Waits for it. What a short read brought is given to `deliver`. Returns the part if its queue pair
    /// failed.
    ///
    /// # Errors
    ///
    /// `EIO` if the RNIC does not let go of it; those of `deliver`.
    pub(crate) fn settle(
        self,
        stats: &Stats,
        deliver: impl FnOnce(&Claim, Part) -> Result,
    ) -> Result<Option<Failed>> {
        match self.wait() {
            Status::Success => {
                if let Some(measure) = self.measure {
                    measure.end();
                }
                deliver(&self.claim, self.part).map(|()| None)
            }
            Status::Stuck => Err(EIO),
            status => Ok(Some(self.failure(stats, status))),
        }
    }

    /// As [`Self::settle`], of parts that were posted together, but `deliver` is told how many of all requests
    /// succeeded, which are the first ones, also if the queue pair failed.
    ///
    /// # Errors
    ///
    /// `EIO` if the RNIC does not let go of them.
    pub(crate) fn settle_batch(
        self,
        stats: &Stats,
        deliver: impl FnOnce(&Claim, u32),
    ) -> Result<Option<Failed>> {
        let status = self.wait();
        if status == Status::Stuck {
            return Err(EIO);
        }
        deliver(
            &self.claim,
            self.usage.count.saturating_sub(self.claim.failed()),
        );
        if status != Status::Success {
            return Ok(Some(self.failure(stats, status)));
        }
        if let Some(measure) = self.measure {
            measure.end();
        }
        Ok(None)
    }

    fn failure(&self, stats: &Stats, status: Status) -> Failed {
        let part = self.part;
        stats.retries.add(1);
        trace::retry(part.life.node, part.len as u64, status.code());
        let refused = matches!(status, Status::Refused | Status::Local);
        Failed {
            part,
            conn: self.usage.conn.clone(),
            refusals: refused.into(),
        }
    }
}

/// A flight that nobody waits for: somebody looks after it. Dropping it waits for it.
pub(crate) struct Watched<G: Permit> {
    /// Nothing once it was settled.
    flight: Option<Flight<G>>,
    since: Instant<Monotonic>,
}

impl<G: Permit> Watched<G> {
    /// Watches from now on.
    pub(crate) fn new(flight: Flight<G>, now: Instant<Monotonic>) -> Self {
        Self {
            flight: Some(flight),
            since: now,
        }
    }

    /// Looks for completions of everybody.
    pub(crate) fn look(&self) {
        if let Some(flight) = &self.flight {
            flight.claim.look();
        }
    }

    /// Whether all its requests have completed.
    pub(crate) fn is_done(&self) -> bool {
        let flight = self.flight.as_ref();
        flight.is_none_or(|flight| flight.claim.is_done())
    }

    /// Whether it takes so long by now that somebody should wait for it, who makes its queue pair fail in the end.
    pub(crate) fn is_stuck(&self, now: Instant<Monotonic>) -> bool {
        (now - self.since).as_millis() > PATIENCE_MS
    }

    /// As [`Flight::settle`].
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn settle(
        mut self,
        stats: &Stats,
        deliver: impl FnOnce(&Claim, Part) -> Result,
    ) -> Result<Option<Failed>> {
        let flight = self.flight.take().ok_or(EIO)?;
        flight.settle(stats, deliver)
    }

    /// As [`Flight::settle_batch`].
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn settle_batch(
        mut self,
        stats: &Stats,
        deliver: impl FnOnce(&Claim, u32),
    ) -> Result<Option<Failed>> {
        let flight = self.flight.take().ok_or(EIO)?;
        flight.settle_batch(stats, deliver)
    }
}

impl<G: Permit> Drop for Watched<G> {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            flight.wait();
        }
    }
}

/// Moves parts between `memory` and other nodes, one way.
#[derive(Clone, Copy)]
pub(crate) struct Mover<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) direction: Direction,
    pub(crate) memory: &'a Memory,
    pub(crate) tenant: &'a Tenant,
}

impl Mover<'_> {
    /// Posts a part. Without a deadline it waits for nothing, and returns nothing if it would have to;
    /// with one, it returns nothing if the caller's memory is not present. Requests that the RNIC refuses
    /// make the part fail when it lands.
    ///
    /// # Errors
    ///
    /// Those of `permit`, and as for [`Conn::begin`]; `EIO`, `ENOMEM`.
    pub(crate) fn launch<G: Permit>(
        &self,
        conn: &Arc<Conn>,
        part: Part,
        permit: impl FnOnce() -> Result<G>,
        deadline: Option<Deadline>,
    ) -> Result<Option<Flight<G>>> {
        let launched = if part.is_short() {
            self.launch_copy(conn, part, permit, deadline)
        } else {
            self.launch_pinned(conn, part, permit, deadline)
        };
        match launched {
            Ok(flight) => Ok(Some(flight)),
            Err(error) if error == EAGAIN => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Posts a short part, by way of the slot's buffer.
    fn launch_copy<G: Permit>(
        &self,
        conn: &Arc<Conn>,
        part: Part,
        permit: impl FnOnce() -> Result<G>,
        deadline: Option<Deadline>,
    ) -> Result<Flight<G>> {
        let bounds = self.bounds(conn);
        let count = bounds.requests(1, part.len) as u32;
        // What it waits for is others', too.
        let measure = self.tenant.measure(part.len);
        let usage = conn.begin_part(count, self.fabric, deadline)?;
        let claim = self.fabric.sender().claim(Class::Data, deadline)?;
        if self.direction == Direction::Write {
            self.memory
                .try_copy_to(claim.buffer(), 0, part.at, part.len)?;
        }
        let permit = permit()?;
        let request = self
            .direction
            .request(self.fabric, &usage, &claim, 0, part.len);
        let (verb, sge) = request.ok_or(EINVAL)?;
        claim.buffer().for_device(part.len);
        if verb == Verb::WriteInline {
            // SAFETY: The request names the claim's buffer.
            if unsafe { usage.write_inline(&claim, &[sge], part.addr) }.is_err() {
                claim.fail();
            }
        } else {
            let sges = Cutter::new(Some(sge).into_iter(), bounds);
            // SAFETY: As above.
            unsafe { self.post(&usage, &claim, sges, part) };
        }
        Ok(Flight {
            claim,
            usage,
            permit,
            part,
            measure,
        })
    }

    /// Posts a long part, straight from or to the caller's pages.
    fn launch_pinned<G: Permit>(
        &self,
        conn: &Arc<Conn>,
        part: Part,
        permit: impl FnOnce() -> Result<G>,
        deadline: Option<Deadline>,
    ) -> Result<Flight<G>> {
        let writable = self.direction == Direction::Read;
        let pinned = self.memory.try_pin(part.at, part.len, writable)?;
        let user = DmaUser::new(self.fabric.device(), pinned, writable)?;
        let user = KBox::new(user, GFP_KERNEL)?;
        let bounds = self.bounds(conn);
        let count = bounds.requests(user.len(), part.len);
        if count > MAX_POSTED as usize {
            // Connected anew, and to smaller packets than it was cut for.
            return Err(EIO);
        }
        let measure = self.tenant.measure(part.len);
        let usage = conn.begin_part(count as u32, self.fabric, deadline)?;
        let mut claim = self.fabric.sender().claim(Class::Data, deadline)?;
        claim.hold(Held::User(user));
        let permit = permit()?;
        let sges = claim.held(self.fabric.local_key());
        // SAFETY: The entries name memory that the claim holds.
        unsafe { self.post(&usage, &claim, Cutter::new(sges, bounds), part) };
        Ok(Flight {
            claim,
            usage,
            permit,
            part,
            measure,
        })
    }

    /// What a request to `conn` may have.
    pub(super) fn bounds(&self, conn: &Conn) -> Bounds {
        let one_packet =
            self.direction == Direction::Read && self.fabric.device().reads_one_packet();
        Bounds {
            entries: self.fabric.sge_max(),
            bytes: one_packet.then(|| conn.packet()),
        }
    }

    /// Bytes of a part to `conn`. Without a bound on bytes each page may need an entry, and the first may be
    /// cut.
    pub(super) fn part_max(&self, conn: &Conn) -> usize {
        let (bounds, requests) = (self.bounds(conn), MAX_POSTED as usize);
        PART_MAX.min(match bounds.bytes {
            Some(bytes) => requests * bytes,
            None => (requests * bounds.entries - 1) * PAGE_SIZE,
        })
    }

    /// Posts the requests for a part. If the RNIC refuses one, the part fails when it lands.
    ///
    /// # Safety
    ///
    /// `sges` must name the buffer of `claim`, or memory that it holds.
    unsafe fn post<I: Iterator<Item = Sge>>(
        &self,
        usage: &Use,
        claim: &Claim,
        mut sges: Cutter<I>,
        part: Part,
    ) {
        let mut room = [Sge::new(0, 0, 0); MAX_SGE];
        let mut addr = part.addr;
        loop {
            let sges = sges.next(&mut room);
            if sges.is_empty() {
                return;
            }
            // SAFETY: By the safety requirements.
            let posted = unsafe {
                match self.direction {
                    Direction::Write => usage.write(claim, sges, addr),
                    Direction::Read => usage.read(claim, sges, addr),
                }
            };
            if posted.is_err() {
                return claim.fail();
            }
            addr += sges.iter().map(|sge| u64::from(sge.len())).sum::<u64>();
        }
    }
}

/// Copies what a short read brought to `place` of its buffer to the caller's memory.
///
/// # Errors
///
/// `EAGAIN` if that is not present; `EFAULT`.
pub(crate) fn deliver(
    direction: Direction,
    memory: &Memory,
    claim: &Claim,
    part: Part,
    place: usize,
) -> Result {
    if direction == Direction::Write || !part.is_short() {
        return Ok(());
    }
    claim.buffer().for_cpu(place, part.len);
    memory.try_copy_from(claim.buffer(), place, part.at, part.len)
}

impl Fabric {
    /// Scatter-gather entries of a request.
    fn sge_max(&self) -> usize {
        (self.device().limits().sge as usize).clamp(1, MAX_SGE)
    }
}
