// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Mapped doorbells: drivers write doorbells to memory, without a trap to the device.
//!
//! Queues share the registers of a UAR page, and memory keeps only the last write. The device therefore never reads
//! these pages. It polls the doorbell records instead: each queue has a record in guest memory, and drivers write it
//! before the doorbell. The device polls while queues exist: continuously while doorbell records change, and at growing
//! intervals when none does.
//!
//! Event queues have no doorbell records, so the device has neither their consumer counters nor arm requests. Each
//! event raises an interrupt, and an event queue is never full.

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
const MIN_INTERVAL: Duration = Duration::from_micros(1);
const MAX_INTERVAL: Duration = Duration::from_millis(1);

/// The interval between two polls is the time since the last change divided by this number.
const BACKOFF_DIVISOR: u32 = 4;

/// Schedule of polls of the doorbell records.
#[derive(Debug, Default)]
pub struct PollSchedule {
    last_change: Duration,
    next: Option<Duration>,
}

impl PollSchedule {
    /// Records a poll at `now`. `rang` is `true` if a doorbell record has changed.
    pub fn record_poll(&mut self, now: Duration, rang: bool) {
        if rang {
            self.last_change = now;
        }
        let idle = now.saturating_sub(self.last_change);
        self.next = Some(now + (idle / BACKOFF_DIVISOR).clamp(MIN_INTERVAL, MAX_INTERVAL));
    }

    /// Stops polling.
    pub fn stop(&mut self) {
        self.next = None;
    }

    /// Returns the time of the next poll. Returns `None` if polling is stopped.
    pub fn next_poll(&self) -> Option<Duration> {
        self.next
    }
}

/// Returns the file that machines map in place of the UAR pages of BAR 0. Offsets in the file are those in the BAR.
pub fn create_pages() -> io::Result<File> {
    let file = memfd_create("connectx-doorbells", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bar::SIZE)?;
    Ok(file.into())
}

/// Returns `true` if the doorbell records of this device must be polled.
pub fn needs_polling(device: &Device) -> bool {
    let objects = &device.objects;
    let has_queues = !objects.qps.is_empty() || !objects.cqs.is_empty();
    device.doorbells.is_some() && !device.dead && has_queues
}

/// Handles all changed doorbell records. Returns `true` if any record has changed.
pub fn poll_records(device: &mut Device, outbox: &mut Outbox) -> bool {
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
