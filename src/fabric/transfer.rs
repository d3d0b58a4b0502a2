// SPDX-License-Identifier: GPL-2.0

//! Reads and writes of remote memory.
//!
//! A transfer is a sequence of parts, each within one node's contiguous memory. Short parts go through
//! the buffer of their slot; long ones straight from and to the user's pages, pinned for as long as the
//! part takes. Several parts are under way at once. A part whose queue pair failed is done again: a
//! read or write of the same bytes may be repeated, and a new queue pair exists only when the old one
//! can no longer deliver (`kite_core::conn`).

use super::{
    conn::Use,
    sender::{Claim, BUFFER_SIZE, MAX_POSTED},
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
use kernel::{page::PAGE_SIZE, prelude::*};

/// Parts under way at once in one transfer.
const WINDOW: usize = 4;

/// Longest part, unless the RNIC's scatter lists are too short for it.
const PART_MAX: usize = 1 << 20;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the region to the caller.
    Read,
    /// From the caller to the region.
    Write,
}

/// Contiguous memory of one node, and where in the caller's buffer its bytes go or come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) node: u32,
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

/// A part that has been posted. Dropping it waits for it.
struct Flight<'a> {
    // Waits for its requests before the use of the queue pair ends: fields drop in this order.
    claim: Claim<'a>,
    usage: Use,
    part: Part,
}

/// One read or write.
pub(crate) struct Transfer<'a> {
    fabric: &'a Fabric,
    direction: Direction,
    memory: &'a Memory,
    deadline: Deadline,
    /// Oldest first, as a ring: `flights[next % WINDOW]` is the oldest, if any.
    flights: [Option<Flight<'a>>; WINDOW],
    next: usize,
}

impl<'a> Transfer<'a> {
    /// Begins a transfer between `memory` and remote parts.
    pub(crate) fn new(
        fabric: &'a Fabric,
        direction: Direction,
        memory: &'a Memory,
        deadline: Deadline,
    ) -> Self {
        Self {
            fabric,
            direction,
            memory,
            deadline,
            flights: [const { None }; WINDOW],
            next: 0,
        }
    }

    /// Adds `part`, and waits for an older one if too many are under way.
    ///
    /// # Errors
    ///
    /// Of this part or of one before it:
    /// - `EHOSTDOWN` if the node is not in the view, `ETIMEDOUT`, `EINTR`.
    /// - `EFAULT` for a bad user buffer, `ENOMEM` if it cannot be pinned.
    /// - `EIO` if the peer or the RNIC refused.
    pub(crate) fn add(&mut self, mut part: Part) -> Result {
        while part.len != 0 {
            let front = part.split_front(self.fabric.part_max());
            let at = self.next % WINDOW;
            if let Some(oldest) = self.flights[at].take() {
                self.land(oldest)?;
            }
            self.flights[at] = Some(self.launch(front)?);
            self.next += 1;
        }
        Ok(())
    }

    /// Waits for all parts.
    ///
    /// # Errors
    ///
    /// As for [`Self::add`].
    pub(crate) fn finish(mut self) -> Result {
        for i in 0..WINDOW {
            if let Some(flight) = self.flights[(self.next + i) % WINDOW].take() {
                self.land(flight)?;
            }
        }
        Ok(())
    }

    /// Posts a part.
    fn launch(&self, part: Part) -> Result<Flight<'a>> {
        let peer = self.fabric.peer(part.node)?;
        let mut claim = self.fabric.sender().claim(self.deadline)?;
        let sges = self.sges(&mut claim, part)?;
        let count = sges.len().div_ceil(self.fabric.sge_max()) as u32;
        let usage = peer.pick()?.begin(count, 0, self.deadline)?;
        let flight = Flight { claim, usage, part };
        self.post(&flight, &sges);
        Ok(flight)
    }

    /// Prepares local memory for a part: the buffer of the claim's slot, or the caller's own pages.
    fn sges(&self, claim: &mut Claim<'a>, part: Part) -> Result<KVec<Sge>> {
        let key = self.fabric.local_key();
        let mut sges = KVec::new();
        if part.len <= BUFFER_SIZE {
            let buffer = claim.buffer();
            if self.direction == Direction::Write {
                self.memory.copy_to(buffer, 0, part.at, part.len)?;
            }
            buffer.for_device(part.len);
            sges.push(buffer.sge(key, 0, part.len).ok_or(EINVAL)?, GFP_KERNEL)?;
        } else {
            let writable = self.direction == Direction::Read;
            let pinned = self.memory.pin(part.at, part.len, writable)?;
            let user = DmaUser::new(self.fabric.device(), pinned, writable)?;
            for sge in claim.hold(user).sges(key) {
                sges.push(sge, GFP_KERNEL)?;
            }
        }
        Ok(sges)
    }

    /// Posts the requests of a flight. One that is refused makes the flight fail when it lands.
    fn post(&self, flight: &Flight<'_>, sges: &[Sge]) {
        let Flight { claim, usage, part } = flight;
        let mut addr = part.addr;
        for sges in sges.chunks(self.fabric.sge_max()) {
            // SAFETY: The entries name the claim's buffer, or memory that it holds.
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

    /// Waits for a flight, and flies it again if its queue pair failed.
    fn land(&self, mut flight: Flight<'a>) -> Result {
        loop {
            let status = flight.claim.wait(|| flight.usage.give_up());
            if status == Status::Success {
                return self.deliver(&flight);
            }
            flight.usage.failed(status);
            if matches!(status, Status::Refused | Status::Local) {
                return Err(EIO);
            }
            self.fabric.stats.retries.add(1);
            let part = flight.part;
            trace::retry(part.node, part.len as u64, status.code());
            drop(flight);
            flight = self.launch(part)?;
        }
    }

    /// Copies what a short read brought.
    fn deliver(&self, flight: &Flight<'_>) -> Result {
        let part = flight.part;
        if self.direction == Direction::Write || flight.claim.user().is_some() {
            return Ok(());
        }
        flight.claim.buffer().for_cpu(part.len);
        self.memory
            .copy_from(flight.claim.buffer(), 0, part.at, part.len)
    }
}

impl Fabric {
    /// Scatter-gather entries of a request.
    fn sge_max(&self) -> usize {
        (self.device().limits().sge as usize).clamp(1, MAX_SGE)
    }

    /// Bytes of a part: each page may need an entry, and the first may be cut.
    fn part_max(&self) -> usize {
        PART_MAX.min((MAX_POSTED as usize * self.sge_max() - 1) * PAGE_SIZE)
    }
}
