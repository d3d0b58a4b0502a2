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
    sender::{Claim, Class, BUFFER_SIZE, MAX_POSTED},
    Fabric,
};
use crate::{
    sys::{deadline::Deadline, memory::Memory},
    trace,
    verbs::{
        cq::Status,
        dma::DmaUser,
        work::{Sge, INLINE_MAX, MAX_SGE},
    },
};
use kernel::{page::PAGE_SIZE, prelude::*};
use kite_core::view::Life;

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

    /// Posts a part. Requests that the RNIC refuses make it fail when it lands.
    fn launch(&self, part: Part) -> Result<Flight<'a>> {
        if part.len <= BUFFER_SIZE {
            self.launch_copy(part)
        } else {
            self.launch_pinned(part)
        }
    }

    /// Posts a short part, by way of the slot's buffer.
    fn launch_copy(&self, part: Part) -> Result<Flight<'a>> {
        let usage = self.begin(part, 1)?;
        let claim = self.fabric.sender().claim(Class::Data, self.deadline)?;
        let buffer = claim.buffer();
        if self.direction == Direction::Write {
            self.memory.copy_to(buffer, 0, part.at, part.len)?;
        }
        let posted = if self.direction == Direction::Write && part.len <= INLINE_MAX {
            let sge = Sge::new(buffer.as_ptr() as u64, part.len as u32, 0);
            // SAFETY: The request names the claim's buffer.
            unsafe { usage.write_inline(&claim, &[sge], part.addr) }
        } else {
            buffer.for_device(part.len);
            let sge = buffer
                .sge(self.fabric.local_key(), 0, part.len)
                .ok_or(EINVAL)?;
            // SAFETY: As above.
            unsafe { self.post(&usage, &claim, &[sge], part.addr) }
        };
        if posted.is_err() {
            claim.fail();
        }
        Ok(Flight { claim, usage, part })
    }

    /// Posts a long part, straight from or to the caller's pages.
    fn launch_pinned(&self, part: Part) -> Result<Flight<'a>> {
        let writable = self.direction == Direction::Read;
        let pinned = self.memory.pin(part.at, part.len, writable)?;
        let user = DmaUser::new(self.fabric.device(), pinned, writable)?;
        let mut sges = KVec::with_capacity(user.len(), GFP_KERNEL)?;
        for sge in user.sges(self.fabric.local_key()) {
            sges.push(sge, GFP_KERNEL)?;
        }
        let usage = self.begin(part, sges.len().div_ceil(self.fabric.sge_max()) as u32)?;
        let mut claim = self.fabric.sender().claim(Class::Data, self.deadline)?;
        claim.hold(user);
        let mut addr = part.addr;
        for sges in sges.chunks(self.fabric.sge_max()) {
            // SAFETY: The entries name memory that the claim holds.
            if unsafe { self.post(&usage, &claim, sges, addr) }.is_err() {
                claim.fail();
                break;
            }
            addr += sges.iter().map(|sge| u64::from(sge.len())).sum::<u64>();
        }
        Ok(Flight { claim, usage, part })
    }

    fn begin(&self, part: Part, count: u32) -> Result<Use> {
        self.fabric
            .peer_in(part.life)?
            .pick()?
            .begin(count, 0, self.deadline)
    }

    /// # Safety
    ///
    /// `sges` must name the buffer of `claim`, or memory that it holds.
    unsafe fn post(&self, usage: &Use, claim: &Claim<'_>, sges: &[Sge], addr: u64) -> Result {
        // SAFETY: By the safety requirements.
        unsafe {
            match self.direction {
                Direction::Write => usage.write(claim, sges, addr),
                Direction::Read => usage.read(claim, sges, addr),
            }
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
            trace::retry(part.life.node, part.len as u64, status.code());
            drop(flight);
            flight = self.launch(part)?;
        }
    }

    /// Copies what a short read brought.
    fn deliver(&self, flight: &Flight<'_>) -> Result {
        let part = flight.part;
        if self.direction == Direction::Write || part.len > BUFFER_SIZE {
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
