// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of remote memory.
//!
//! A transfer is a sequence of parts ([`super::flight`]), of which several are under way at once. A part whose
//! queue pair failed is done again: a read or write of the same bytes may be repeated, and a new queue pair
//! exists only when the old one can no longer deliver (`kite_core::conn`).

use super::{
    conn::Conn,
    flight::{deliver, Direction, Failed, Flight, Mover, Part, Permit, BUFFER_SIZE},
    sender::Claim,
};
use crate::{
    errno,
    sys::{deadline::Deadline, memory::Memory},
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, page::PAGE_SIZE, prelude::*, sync::Arc};

/// Parts under way at once in one transfer.
const WINDOW: usize = 4;

/// Times that a part is done again that the peer or our RNIC refused. On a shared queue pair the request
/// that is blamed need not be the one at fault, and Soft-RoCE refuses some of which packets came twice.
const REFUSALS_MAX: u32 = 3;

/// Shortest part that a piece of memory is cut into so that one is pinned while another is under way.
const PART_MIN: usize = 1 << 18;

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
    fn store(&self, memory: &Memory) -> Result {
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
    /// The region is elsewhere, or about to be. It may go on when that is known. Nothing is under way.
    Moved {
        /// Bytes of the buffer, from its start, for which nothing is left to do.
        moved: usize,
    },
    /// It may go on when this memory was fetched. Nothing is under way.
    Absent(Absent),
    /// It may go on when the tenant may have so many bytes more go. Nothing is under way.
    Held {
        due: u64,
        /// Bytes of the buffer, from its start, for which nothing is left to do.
        moved: usize,
    },
}

/// What a transfer is to go on with when it has stopped.
#[derive(Default)]
pub(crate) struct Left {
    /// What it brought, and is to be stored at the end.
    pub(crate) late: KVec<Late>,
    /// Bytes that the tenant may have go without being asked.
    pub(crate) paid: u64,
    /// Bytes of the buffer before this one are copied by slot buffers, since they cannot be pinned.
    pub(crate) copied_to: usize,
}

impl Left {
    /// Stores what short reads brought, and frees it.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    pub(crate) fn store_late(&mut self, memory: &Memory) -> Result {
        self.late.iter().try_for_each(|late| late.store(memory))?;
        self.late.clear();
        Ok(())
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Stop {
    /// With this error, when nothing is left to do for the bytes before `at`.
    pub(crate) fn new(error: Error, at: usize) -> Self {
        if error == errno::inprogress() {
            Self::Moved { moved: at }
        } else {
            Self::Failed(error)
        }
    }

    /// Says that it is to go on with byte `at` of the buffer at the latest.
    fn back_to(mut self, at: usize) -> Self {
        match &mut self {
            Self::Absent(Absent { moved, .. }) | Self::Moved { moved } => *moved = at.min(*moved),
            _ => {}
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
    mover: Mover<'a>,
    deadline: Deadline,
    permit: P,
    flights: [Option<Flight<G>>; WINDOW],
    next: usize,
    left: &'a mut Left,
}

impl<'a, G: Permit, P: Fn() -> Result<G>> Transfer<'a, G, P> {
    /// Begins a transfer, or goes on with it.
    pub(crate) fn new(mover: Mover<'a>, deadline: Deadline, permit: P, left: &'a mut Left) -> Self {
        // One by one: a repeated constant would be zeroed whole, and most accesses have one part.
        let flights: [_; WINDOW] = [None, None, None, None];
        Self {
            mover,
            deadline,
            permit,
            flights,
            next: 0,
            left,
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
            let share_of_conns = self.mover.tenant.share();
            let conn = self.mover.fabric.peer_in(part.life)?.pick(share_of_conns)?;
            let most = self.part_max(&conn, part);
            let front = part.split_front(share.max(PART_MIN).min(most));
            self.ask(front)?;
            let at = self.next % WINDOW;
            if let Some(oldest) = self.flights[at].take() {
                self.land(oldest)?;
            }
            let flight = self.post(&conn, front);
            if flight.is_err() {
                // It is asked for once.
                self.left.paid += front.len as u64;
            }
            self.flights[at] = Some(flight?);
            self.next += 1;
        }
        Ok(())
    }

    /// Maximum bytes of the next part.
    fn part_max(&self, conn: &Conn, part: Part) -> usize {
        match part.at < self.left.copied_to {
            true => BUFFER_SIZE,
            false => self.mover.part_max(conn),
        }
    }

    /// Posts a part, when others have landed if need be.
    fn post(&mut self, conn: &Arc<Conn>, part: Part) -> Result<Flight<G>, Stop> {
        match self.launch(conn, part, None) {
            Ok(Some(flight)) => Ok(flight),
            Ok(None) => {
                self.land_all()?;
                self.launch_alone(conn, part)
            }
            Err(stop) => {
                if let Stop::Moved { .. } = stop {
                    self.land_all()?;
                }
                Err(stop)
            }
        }
    }

    /// Asks whether a part may go by the priority and limits of the tenant.
    fn ask(&mut self, part: Part) -> Result<(), Stop> {
        let paid = self.left.paid.min(part.len as u64);
        let (due, moved) = (part.len as u64 - paid, part.at);
        if due != 0 && !self.mover.tenant.goes_now(due)? {
            self.land_all()?;
            return Err(Stop::Held { due, moved });
        }
        self.left.paid -= paid;
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
    fn launch_alone(&self, conn: &Arc<Conn>, part: Part) -> Result<Flight<G>, Stop> {
        let launched = self.launch(conn, part, Some(self.deadline))?;
        launched.ok_or(Stop::Absent(Absent {
            at: part.at,
            len: part.len,
            writable: self.mover.direction == Direction::Read,
            pinned: !part.is_short(),
            moved: part.at,
        }))
    }

    fn launch(
        &self,
        conn: &Arc<Conn>,
        part: Part,
        deadline: Option<Deadline>,
    ) -> Result<Option<Flight<G>>, Stop> {
        let launched = self.mover.launch(conn, part, &self.permit, deadline);
        launched.map_err(|error| Stop::new(error, part.at))
    }

    /// Waits for a flight. If its queue pair failed, waits for the others too, so that nothing keeps the
    /// queue pair from being replaced, and does again what failed.
    fn land(&mut self, flight: Flight<G>) -> Result<(), Stop> {
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
        for failed in again.iter().flatten() {
            lowest = lowest.min(failed.part.at);
            // Who stops for memory may go on with another connection: not before this one was replaced.
            failed.outlive(self.deadline)?;
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
        let error = (self.permit)().err().unwrap_or(EIO);
        Err(Stop::new(error, failed.part.at))
    }

    /// Waits for a flight, and copies what a short read brought. Returns the part if its queue pair
    /// failed.
    fn settle(&mut self, flight: Flight<G>) -> Result<Option<Failed>> {
        let (mover, late) = (&self.mover, &mut self.left.late);
        flight.settle(&mover.fabric.stats, |claim, part| {
            match deliver(mover.direction, mover.memory, claim, part, 0) {
                Err(error) if error == EAGAIN => put_by(late, claim, part),
                delivered => delivered,
            }
        })
    }
}

/// Keeps what a short read brought: the caller's memory may keep us waiting for as long as its owner likes,
/// and others need what we hold.
fn put_by(late: &mut KVec<Late>, claim: &Claim, part: Part) -> Result {
    let mut bytes = KVec::from_elem(0, part.len, GFP_KERNEL_ACCOUNT)?;
    claim.buffer().read(0, &mut bytes)?;
    let late_part = Late { at: part.at, bytes };
    Ok(late.push(late_part, GFP_KERNEL_ACCOUNT)?)
}

/// What is under way when a transfer fails is waited for: it names the caller's memory.
impl<G: Permit, P: Fn() -> Result<G>> Drop for Transfer<'_, G, P> {
    fn drop(&mut self) {
        for flight in self.flights.iter().flatten() {
            flight.wait();
        }
    }
}
