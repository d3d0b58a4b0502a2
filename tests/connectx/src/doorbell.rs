// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Mapped doorbells: machines write to memory, and no write traps to the device.
//!
//! Queues share the registers of a UAR page, and memory keeps only the last write. So the device never reads these
//! pages. It polls the doorbell records instead: each queue has its own in the machine's memory, and drivers write it
//! before they ring. The device polls while there are queues: continuously while doorbell records change, and at
//! growing intervals when none does.
//!
//! Event queues have no doorbell records. What a driver takes from them, and whether it arms them, is not
//! known: every event interrupts, and no event queue is ever full.

use std::fs::File;
use std::io;
use std::sync::atomic::{fence, Ordering};
use std::time::Duration;

use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

use crate::bar;
use crate::device::Device;
use crate::engine;
use crate::network::Outbox;
use crate::object::cq;

/// Minimum and maximum time between two polls of the doorbell records.
const SOON: Duration = Duration::from_micros(1);
const LATE: Duration = Duration::from_millis(1);

/// A silence of some time may last this part of it longer before it is noticed that it ended.
const PART: u32 = 4;

/// When to look at doorbell records.
#[derive(Debug, Default)]
pub struct Pace {
    heard: Duration,
    next: Option<Duration>,
}

impl Pace {
    /// It was looked now, and something rang or not.
    pub fn looked(&mut self, now: Duration, rang: bool) {
        if rang {
            self.heard = now;
        }
        let silence = now.saturating_sub(self.heard);
        self.next = Some(now + (silence / PART).clamp(SOON, LATE));
    }

    /// There is nothing to look at.
    pub fn rest(&mut self) {
        self.next = None;
    }

    /// When to look again, if there is anything to look at.
    pub fn next(&self) -> Option<Duration> {
        self.next
    }
}

/// Returns the file that machines map in place of the UAR pages of BAR 0. Offsets in the file are those in the BAR.
pub fn pages() -> io::Result<File> {
    let file = memfd_create("connectx-doorbells", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bar::SIZE)?;
    Ok(file.into())
}

/// Returns `true` if the doorbell records of this device must be polled.
pub fn is_watched(device: &Device) -> bool {
    let objects = &device.objects;
    let has_queues = !objects.qps.is_empty() || !objects.cqs.is_empty();
    device.doorbells.is_some() && !device.dead && has_queues
}

/// Does what the doorbell records ask for that did not before. Returns whether any did.
pub fn look(device: &mut Device, outbox: &mut Outbox) -> bool {
    let (objects, dma) = (&mut device.objects, &device.dma);
    let cqs = objects.cqs.iter_mut();
    let armed: Vec<_> = cqs
        .filter_map(|(cqn, cq)| Some((cqn, cq.newly_armed(dma)?)))
        .collect();
    let qps = objects.qps.iter();
    let posted: Vec<_> = qps
        .filter_map(|(qpn, qp)| Some((qpn, qp.newly_posted(dma)?)))
        .collect();
    // The driver writes work requests before their doorbell record. The fence orders the device's reads accordingly.
    fence(Ordering::Acquire);
    for &(cqn, command) in &armed {
        cq::arm(device, cqn, command);
    }
    for &(qpn, counter) in &posted {
        device.cost.count.doorbells += 1;
        engine::handle_doorbell(device, qpn, counter, outbox);
    }
    !armed.is_empty() || !posted.is_empty()
}
