// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of remote memory.
//!
//! A transfer is a sequence of parts, each within one node's contiguous memory. Short parts go through
//! the buffer of their slot; long ones straight from and to the user's pages, pinned for as long as the
//! part takes. Several parts are under way at once. A part whose queue pair failed is done again: a
//! read or write of the same bytes may be repeated, and a new queue pair exists only when the old one
//! can no longer deliver (`kite_core::conn`).

use super::{
    conn::Conn,
    cut::{Bounds, Cutter},
    sender::{Claim, Class, BUFFER_SIZE, MAX_POSTED},
    usage::{Failure, Use},
    Fabric,
};
use crate::{
    sys::{deadline::Deadline, memory::Memory},
    trace,
    verbs::{
        cq::Status,
        dma::DmaUser,
        work::{Sge, MAX_SGE},
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, page::PAGE_SIZE, prelude::*, sync::Arc};
use kite_core::view::Life;

/// Parts under way at once in one transfer.
const WINDOW: usize = 4;

/// Times that a part is done again that the peer or our RNIC refused. On a shared queue pair the request
/// that is blamed need not be the one at fault, and Soft-RoCE refuses some of which packets came twice.
const REFUSALS_MAX: u32 = 3;

/// Longest part, unless the RNIC's scatter lists are too short for it.
const PART_MAX: usize = 1 << 20;

/// Shortest part that a piece of memory is cut into so that one is pinned while another is under way.
const PART_MIN: usize = 1 << 18;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the region to the caller.
    Read,
    /// From the caller to the region.
    Write,
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
    fn split_front(&mut self, len: usize) -> Self {
        let len = len.min(self.len);
        let front = Self { len, ..*self };
        self.addr += len as u64;
        self.at += len;
        self.len -= len;
        front
    }
}

/// What allows a part to be under way.
pub(crate) trait Permit {
    /// The part's queue pair failed. The memory that it is for must not be another's before that is over.
    fn note(&self, failure: Failure);
}

/// A part that has been posted. [`Transfer`] waits for it. Who waits for room looks for a slot first, so
/// that is given back first.
struct Flight<'a, G> {
    claim: Claim<'a>,
    usage: Use,
    permit: G,
    part: Part,
}

impl<G: Permit> Flight<'_, G> {
    /// Waits until nothing of it is under way at this node. If its queue pair failed, says so to all who
    /// have to know.
    fn wait(&self) -> Status {
        let status = self.claim.wait(|how| self.usage.rescue(how));
        if status != Status::Success {
            self.usage.failed(status);
            self.permit.note(self.usage.failure(self.part.life));
        }
        status
    }
}

/// A part whose queue pair failed, perhaps by what it asked for, and the connection on which it may be
/// done again: only there is it certain that the first attempt delivers nothing any more.
struct Failed {
    part: Part,
    conn: Arc<Conn>,
    /// Times that it was refused.
    refusals: u32,
}

/// What a short read brought for memory that was not present.
pub(crate) struct Late {
    at: usize,
    bytes: KVec<u8>,
}

impl Late {
    /// Gives it to the caller, whose memory may keep us waiting.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    pub(crate) fn store(&self, memory: &Memory) -> Result {
        memory.store(self.at, &self.bytes)
    }
}

/// Memory of the caller's that is not present.
pub(crate) struct Absent {
    pub(crate) at: usize,
    pub(crate) len: usize,
    pub(crate) writable: bool,
    /// Whether it is to be pinned, or just copied.
    pub(crate) pinned: bool,
    /// Bytes of the buffer, from its start, for which nothing is left to do.
    pub(crate) moved: usize,
}

impl Absent {
    /// Makes it present, for now. That may take as long as the owner of the memory likes.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there is no such memory, `ENOMEM` if there is none for it or it cannot be pinned.
    pub(crate) fn fetch(&self, memory: &Memory) -> Result {
        if self.pinned {
            memory.fault_in_to_pin(self.at, self.len, self.writable)
        } else {
            memory.fault_in(self.at, self.len, self.writable)
        }
    }
}

/// Why a transfer stops before its end.
pub(crate) enum Stop {
    Failed(Error),
    /// It may go on when this memory was fetched. Nothing is under way.
    Absent(Absent),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Stop {
    /// Says that it is to go on with byte `at` of the buffer at the latest.
    fn back_to(mut self, at: usize) -> Self {
        if let Self::Absent(absent) = &mut self {
            absent.moved = absent.moved.min(at);
        }
        self
    }
}

/// One read or write.
///
/// `permit` is asked before each part is posted, and what it gives is held until the part is done. While
/// a transfer holds permits or credits it waits for nothing but the RNIC: where it would have to wait
/// for a queue pair or a slot it first lands what is under way, and where for the caller's memory, it
/// stops.
pub(crate) struct Transfer<'a, G: Permit, P: Fn() -> Result<G>> {
    fabric: &'a Fabric,
    direction: Direction,
    memory: &'a Memory,
    deadline: Deadline,
    permit: P,
    flights: [Option<Flight<'a, G>>; WINDOW],
    next: usize,
    late: &'a mut KVec<Late>,
}

impl<'a, G: Permit, P: Fn() -> Result<G>> Transfer<'a, G, P> {
    /// Begins a transfer between `memory` and remote parts. What is left to store at the end is added to
    /// `late`.
    pub(crate) fn new(
        fabric: &'a Fabric,
        direction: Direction,
        memory: &'a Memory,
        deadline: Deadline,
        permit: P,
        late: &'a mut KVec<Late>,
    ) -> Self {
        // One by one: a repeated constant would be zeroed whole, and most accesses have one part.
        let flights: [_; WINDOW] = [None, None, None, None];
        Self {
            fabric,
            direction,
            memory,
            deadline,
            permit,
            flights,
            next: 0,
            late,
        }
    }

    /// Adds `part`, and waits for an older one if too many are under way.
    ///
    /// # Errors
    ///
    /// Of this part or of one before it:
    /// - those of `permit`.
    /// - `EHOSTDOWN` if the node is not in the view, `ETIMEDOUT`, `EINTR`.
    /// - `EFAULT` for a bad buffer, `ENOMEM`.
    /// - `EIO` if the peer or the RNIC refused.
    pub(crate) fn add(&mut self, mut part: Part) -> Result<(), Stop> {
        let share = part.len.div_ceil(WINDOW).next_multiple_of(PAGE_SIZE);
        while part.len != 0 {
            self.deadline.check()?;
            let conn = self.fabric.peer_in(part.life)?.pick()?;
            let most = self.fabric.part_max(self.bounds(&conn));
            let front = part.split_front(share.max(PART_MIN).min(most));
            let at = self.next % WINDOW;
            if let Some(oldest) = self.flights[at].take() {
                self.land(oldest)?;
            }
            let flight = match self.launch(&conn, front, None)? {
                Some(flight) => flight,
                None => {
                    self.land_all()?;
                    self.launch_alone(&conn, front)?
                }
            };
            self.flights[at] = Some(flight);
            self.next += 1;
        }
        Ok(())
    }

    /// Waits for all parts so far: afterwards the transfer holds nothing that others need.
    ///
    /// # Errors
    ///
    /// As for [`Self::add`].
    pub(crate) fn land_all(&mut self) -> Result<(), Stop> {
        for i in 0..WINDOW {
            if let Some(flight) = self.flights[i].take() {
                self.land(flight)?;
            }
        }
        Ok(())
    }

    /// Posts a part while nothing else is under way: waits for what it needs, but the caller's memory.
    fn launch_alone(&self, conn: &Arc<Conn>, part: Part) -> Result<Flight<'a, G>, Stop> {
        let launched = self.launch(conn, part, Some(self.deadline))?;
        launched.ok_or(Stop::Absent(Absent {
            at: part.at,
            len: part.len,
            writable: self.direction == Direction::Read,
            pinned: part.len > BUFFER_SIZE,
            moved: part.at,
        }))
    }

    /// Posts a part. Without a deadline it waits for nothing, and returns nothing if it would have to;
    /// with one, it returns nothing if the caller's memory is not present. Requests that the RNIC refuses
    /// make the part fail when it lands.
    fn launch(
        &self,
        conn: &Arc<Conn>,
        part: Part,
        deadline: Option<Deadline>,
    ) -> Result<Option<Flight<'a, G>>> {
        let launched = if part.len <= BUFFER_SIZE {
            self.launch_copy(conn, part, deadline)
        } else {
            self.launch_pinned(conn, part, deadline)
        };
        match launched {
            Ok(flight) => Ok(Some(flight)),
            Err(error) if error == EAGAIN => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Posts a short part, by way of the slot's buffer.
    fn launch_copy(
        &self,
        conn: &Arc<Conn>,
        part: Part,
        deadline: Option<Deadline>,
    ) -> Result<Flight<'a, G>> {
        let bounds = self.bounds(conn);
        let count = bounds.requests(1, part.len) as u32;
        let usage = conn.begin_part(count, self.fabric, deadline)?;
        let claim = self.fabric.sender().claim(Class::Data, deadline)?;
        let buffer = claim.buffer();
        if self.direction == Direction::Write {
            self.memory.try_copy_to(buffer, 0, part.at, part.len)?;
        }
        let permit = (self.permit)()?;
        if self.direction == Direction::Write && part.len <= usage.inline_max() {
            let sge = Sge::new(buffer.as_ptr() as u64, part.len as u32, 0);
            // SAFETY: The request names the claim's buffer.
            if unsafe { usage.write_inline(&claim, &[sge], part.addr) }.is_err() {
                claim.fail();
            }
        } else {
            buffer.for_device(part.len);
            let sge = buffer
                .sge(self.fabric.local_key(), 0, part.len)
                .ok_or(EINVAL)?;
            // SAFETY: As above.
            unsafe {
                self.post(
                    &usage,
                    &claim,
                    Cutter::new(Some(sge).into_iter(), bounds),
                    part,
                )
            };
        }
        Ok(Flight {
            claim,
            usage,
            permit,
            part,
        })
    }

    /// Posts a long part, straight from or to the caller's pages.
    fn launch_pinned(
        &self,
        conn: &Arc<Conn>,
        part: Part,
        deadline: Option<Deadline>,
    ) -> Result<Flight<'a, G>> {
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
        let usage = conn.begin_part(count as u32, self.fabric, deadline)?;
        let mut claim = self.fabric.sender().claim(Class::Data, deadline)?;
        claim.hold(user);
        let permit = (self.permit)()?;
        let sges = claim.held(self.fabric.local_key());
        // SAFETY: The entries name memory that the claim holds.
        unsafe { self.post(&usage, &claim, Cutter::new(sges, bounds), part) };
        Ok(Flight {
            claim,
            usage,
            permit,
            part,
        })
    }

    /// What a request to `conn` may have.
    fn bounds(&self, conn: &Conn) -> Bounds {
        let one_packet =
            self.direction == Direction::Read && self.fabric.device().reads_one_packet();
        Bounds {
            entries: self.fabric.sge_max(),
            bytes: one_packet.then(|| conn.packet()),
        }
    }

    /// Posts the requests for a part. If the RNIC refuses one, the part fails when it lands.
    ///
    /// # Safety
    ///
    /// `sges` must name the buffer of `claim`, or memory that it holds.
    unsafe fn post<I: Iterator<Item = Sge>>(
        &self,
        usage: &Use,
        claim: &Claim<'_>,
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

    /// Waits for a flight. If its queue pair failed, waits for the others too, so that nothing keeps the
    /// queue pair from being replaced, and does again what failed.
    fn land(&mut self, flight: Flight<'a, G>) -> Result<(), Stop> {
        let Some(first) = self.settle(flight)? else {
            return Ok(());
        };
        let mut lowest = first.part.at;
        let mut again = [const { None }; WINDOW + 1];
        for (i, failed) in again.iter_mut().take(WINDOW).enumerate() {
            if let Some(flight) = self.flights[i].take() {
                *failed = self.settle(flight)?;
            }
        }
        again[WINDOW] = Some(first);
        for Failed { part, conn, .. } in again.iter().flatten() {
            lowest = lowest.min(part.at);
            // Who stops for memory may go on with another connection: not before this one was replaced.
            drop(conn.begin(1, 0, Some(self.deadline))?);
        }
        for failed in again.into_iter().flatten() {
            self.redo(failed).map_err(|stop| stop.back_to(lowest))?;
        }
        Ok(())
    }

    fn redo(&mut self, mut failed: Failed) -> Result<(), Stop> {
        while failed.refusals <= REFUSALS_MAX {
            let flight = self.launch_alone(&failed.conn, failed.part)?;
            let Some(again) = self.settle(flight)? else {
                return Ok(());
            };
            failed = Failed {
                refusals: failed.refusals + again.refusals,
                ..again
            };
        }
        // If it may not be done any more, that is the reason to give.
        (self.permit)()?;
        Err(EIO.into())
    }

    /// Waits for a flight, and copies what a short read brought. Returns the part if its queue pair
    /// failed.
    fn settle(&mut self, flight: Flight<'a, G>) -> Result<Option<Failed>> {
        match flight.wait() {
            Status::Success => self.deliver(&flight.claim, flight.part).map(|()| None),
            Status::Stuck => Err(EIO),
            status => {
                let part = flight.part;
                self.fabric.stats.retries.add(1);
                trace::retry(part.life.node, part.len as u64, status.code());
                let refused = matches!(status, Status::Refused | Status::Local);
                Ok(Some(Failed {
                    part,
                    conn: flight.usage.conn.clone(),
                    refusals: refused.into(),
                }))
            }
        }
    }

    /// Copies what a short read brought, or puts it by: the caller's memory may keep us waiting for as long
    /// as its owner likes, and others need what we hold.
    fn deliver(&mut self, claim: &Claim<'_>, part: Part) -> Result {
        if self.direction == Direction::Write || part.len > BUFFER_SIZE {
            return Ok(());
        }
        let buffer = claim.buffer();
        buffer.for_cpu(0, part.len);
        match self.memory.try_copy_from(buffer, 0, part.at, part.len) {
            Err(error) if error == EAGAIN => {
                let mut bytes = KVec::from_elem(0, part.len, GFP_KERNEL_ACCOUNT)?;
                buffer.read(0, &mut bytes)?;
                let late = Late { at: part.at, bytes };
                Ok(self.late.push(late, GFP_KERNEL_ACCOUNT)?)
            }
            copied => copied,
        }
    }
}

/// What is under way when a transfer fails is waited for: it names the caller's memory.
impl<G: Permit, P: Fn() -> Result<G>> Drop for Transfer<'_, G, P> {
    fn drop(&mut self) {
        for flight in self.flights.iter().flatten() {
            flight.wait();
        }
    }
}

impl Fabric {
    /// Scatter-gather entries of a request.
    fn sge_max(&self) -> usize {
        (self.device().limits().sge as usize).clamp(1, MAX_SGE)
    }

    /// Bytes of a part. Without a bound on bytes each page may need an entry, and the first may be cut.
    fn part_max(&self, bounds: Bounds) -> usize {
        let requests = MAX_POSTED as usize;
        PART_MAX.min(match bounds.bytes {
            Some(bytes) => requests * bytes,
            None => (requests * bounds.entries - 1) * PAGE_SIZE,
        })
    }
}
