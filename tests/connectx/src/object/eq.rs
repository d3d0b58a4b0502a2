// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Event queues: rings of guest memory to which a device writes completion events and asynchronous events, each with
//! an interrupt vector.

use tracing::{debug, warn};

use crate::device::Device;
use crate::layout::put_be;
use crate::memory::{Dma, DmaFault};
use crate::object::buffer::Buffer;

/// Size of an entry, which is `mlx5_eqe` in device.h of the kernel.
pub const ENTRY: usize = 64;
/// Offset of the event data in an entry.
const DATA: usize = 32;
/// Offset of the owner bit in an entry. The bit toggles on each pass through the ring.
const OWNER: usize = 63;

/// Mask of counters, which have 24 bits.
const COUNTER: u32 = 0xff_ffff;

/// Subtype of a page fault with key and address.
const FAULT_BY_MEMORY: u8 = 2;
/// Flag of a page fault that the driver must resume.
const LAST_FAULT: u8 = 1 << 7;
const PORT_DOWN: u8 = 1;
const PORT_ACTIVE: u8 = 4;

/// Event queue.
#[derive(Debug)]
pub struct Eq {
    /// Entries of 64 bytes.
    pub buffer: Buffer,
    /// Log2 of the number of entries.
    pub log_size: u32,
    /// Interrupt vector.
    pub vector: usize,
    /// Bit n is set if the queue subscribes to events of type n.
    pub mask: u64,
    /// Number of entries written so far; 24 bits.
    pub producer: u32,
    /// Consumer counter of the last doorbell; 24 bits.
    pub consumer: u32,
    /// `true` if the next event interrupts the driver.
    pub armed: bool,
    /// `true` if doorbells are mapped: the device receives neither the consumer counter nor arm requests.
    pub unheard: bool,
    /// Context of the CREATE command.
    pub context: Vec<u8>,
}

/// Event of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QpEvent {
    /// The path has migrated.
    PathMigrated = 0x01,
    /// The first packet arrived before the state RTS.
    CommunicationEstablished = 0x02,
    /// The send queue is drained.
    SqDrained = 0x03,
    /// Error without a completion to report it.
    Catastrophic = 0x05,
    /// The migration of the path has failed.
    PathMigrationFailed = 0x07,
    /// The responder has received an invalid request.
    InvalidRequest = 0x10,
    /// The responder has received a request that violates access rights.
    AccessError = 0x11,
    /// The QP took its last work request from its SRQ.
    LastWqe = 0x13,
}

/// Asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The completion queue with this number has new entries. Never masked.
    Completion(u32),
    /// Event of a QP.
    Qp(QpEvent, u32),
    /// An SRQ has fewer work requests than its limit.
    SrqLimit(u32),
    /// An SRQ has failed.
    SrqError(u32),
    /// A completion queue has failed: number and syndrome (1 overrun, 2 access).
    CqError(u32, u8),
    /// The state of the port has changed.
    Port {
        /// `true` if the port is up.
        up: bool,
    },
    /// A DC target is drained.
    DctDrained(u32),
    /// A DC target has received a request with a wrong key.
    DctKeyViolation(u32),
    /// Commands have completed: one bit for each slot of the command queue.
    Command(u32),
    /// An access has met an absent page.
    PageFault {
        /// Token for the reply of the driver; 48 bits.
        token: u64,
        /// Memory key.
        key: u32,
        /// Address of the first absent byte, in the address space of the key.
        address: u64,
        /// Number of bytes of the access from this address on. More of them may be absent.
        length: u32,
    },
}

impl Event {
    /// Returns the type code of the event.
    pub fn kind(self) -> u8 {
        match self {
            Event::Completion(_) => 0x00,
            Event::Qp(event, _) => event as u8,
            Event::SrqLimit(_) => 0x14,
            Event::SrqError(_) => 0x12,
            Event::CqError(..) => 0x04,
            Event::Port { .. } => 0x09,
            Event::DctDrained(_) => 0x1c,
            Event::DctKeyViolation(_) => 0x1d,
            Event::Command(_) => 0x0a,
            Event::PageFault { .. } => 0x0c,
        }
    }

    /// Encodes the entry of the event, without the owner bit.
    fn entry(self) -> [u8; ENTRY] {
        let mut entry = [0; ENTRY];
        entry[1] = self.kind();
        let (data, number) = match self {
            Event::Completion(cqn) => (24, cqn),
            Event::Qp(_, qpn) => (24, qpn),
            Event::SrqLimit(srqn) | Event::SrqError(srqn) => (24, srqn),
            Event::CqError(cqn, syndrome) => {
                entry[DATA + 11] = syndrome;
                (0, cqn)
            }
            Event::Port { up } => {
                entry[3] = if up { PORT_ACTIVE } else { PORT_DOWN };
                entry[DATA + 8] = 1 << 4;
                return entry;
            }
            Event::DctDrained(dctn) | Event::DctKeyViolation(dctn) => (24, dctn),
            Event::Command(slots) => (0, slots),
            Event::PageFault {
                token,
                key,
                address,
                length,
            } => {
                entry[3] = FAULT_BY_MEMORY;
                entry[DATA] = LAST_FAULT;
                put_be(&mut entry, DATA + 6, 6, token);
                put_be(
                    &mut entry,
                    DATA + 12,
                    4,
                    u64::from(length.next_multiple_of(4096)),
                );
                put_be(&mut entry, DATA + 20, 8, address);
                (16, key)
            }
        };
        put_be(&mut entry, DATA + data, 4, u64::from(number));
        entry
    }
}

impl Eq {
    /// Returns `true` if the queue subscribes to events of this kind.
    pub fn subscribes_to(&self, event: Event) -> bool {
        (self.mask >> event.kind()) & 1 != 0
    }

    /// Writes an entry. Returns `true` if the driver must be interrupted.
    fn push(&mut self, dma: &Dma, mut entry: [u8; ENTRY]) -> Result<bool, DmaFault> {
        let size = 1 << self.log_size;
        let waiting = self.producer.wrapping_sub(self.consumer) & COUNTER;
        if waiting >= size && !self.unheard {
            warn!("event queue full: event dropped");
            return Ok(false);
        }
        entry[OWNER] = ((self.producer >> self.log_size) & 1) as u8;
        let at = u64::from(self.producer & (size - 1)) * ENTRY as u64;
        self.buffer.write(dma, at, &entry[..OWNER])?;
        // The owner bit hands the entry to the driver, so it is written last.
        self.buffer.write(dma, at + OWNER as u64, &entry[OWNER..])?;
        self.producer = self.producer.wrapping_add(1) & COUNTER;
        Ok(std::mem::take(&mut self.armed) || self.unheard)
    }
}

/// Writes an event to all queues that subscribe to it.
pub fn event(device: &mut Device, event: Event) {
    debug!(device = device.id.0, ?event);
    let subscribed = device
        .objects
        .eqs
        .iter()
        .filter(|(_, eq)| eq.subscribes_to(event));
    let subscribed: Vec<u32> = subscribed.map(|(eqn, _)| eqn).collect();
    for eqn in subscribed {
        push(device, eqn, event);
    }
}

/// Writes a completion event of the completion queue `cqn` to the event queue `eqn`.
pub fn complete(device: &mut Device, eqn: u32, cqn: u32) {
    push(device, eqn, Event::Completion(cqn));
}

fn push(device: &mut Device, eqn: u32, event: Event) {
    let Some(eq) = device.objects.eqs.get_mut(eqn) else {
        return;
    };
    device.cost.count.eqes += 1;
    match eq.push(&device.dma, event.entry()) {
        Ok(true) => device.interrupts.raise(eq.vector),
        Ok(false) => (),
        Err(fault) => warn!(eqn, %fault, "cannot access the event queue"),
    }
}

/// Handles a doorbell: the driver has consumed all entries before `consumer`. If the doorbell arms the queue, the next
/// event raises an interrupt, or at once if an unconsumed entry exists.
pub fn consume(device: &mut Device, eqn: u32, consumer: u32, arm: bool) {
    let Some(eq) = device.objects.eqs.get_mut(eqn) else {
        return;
    };
    eq.consumer = consumer;
    if arm {
        eq.armed = eq.consumer == eq.producer;
        if !eq.armed {
            device.interrupts.raise(eq.vector);
        }
    }
}
