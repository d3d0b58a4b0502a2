// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Event queues: rings of guest memory to which a device writes completion events and asynchronous events, each with
//! an interrupt vector.

use tracing::{debug, warn};

use crate::device::Device;
use crate::layout::put_be;
use crate::memory::{Dma, DmaFault};
use crate::object::buffer::Buffer;

/// Bytes of an entry; device.h of the kernel has it as `mlx5_eqe`.
pub const ENTRY: usize = 64;
/// Where in an entry is what depends on the type.
const DATA: usize = 32;
/// Where in an entry the bit is that changes each time around.
const OWNER: usize = 63;

/// Counters have 24 bits.
const COUNTER: u32 = 0xff_ffff;

/// Subtype of a page fault with key and address.
const FAULT_BY_MEMORY: u8 = 2;
/// Flag of such a fault: the driver must answer.
const LAST_FAULT: u8 = 1 << 7;
const PORT_DOWN: u8 = 1;
const PORT_ACTIVE: u8 = 4;

/// An event queue.
#[derive(Debug)]
pub struct Eq {
    /// Entries of 64 bytes.
    pub buffer: Buffer,
    /// Log2 of the number of entries.
    pub log_size: u32,
    /// Its vector.
    pub vector: usize,
    /// Bit n is set if events of type n come here.
    pub mask: u64,
    /// Number of entries written so far; 24 bits.
    pub producer: u32,
    /// Number of entries that the driver has taken, by its last doorbell; 24 bits.
    pub consumer: u32,
    /// `true` if the next event interrupts the driver.
    pub armed: bool,
    /// `true` if no doorbell reaches the device when the driver takes events and arms the queue.
    pub unheard: bool,
    /// The context as the driver gave it.
    pub context: Vec<u8>,
}

/// Event of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QpEvent {
    /// The path was migrated.
    PathMigrated = 0x01,
    /// The first packet came before the state was RTS.
    CommunicationEstablished = 0x02,
    /// The send queue is drained.
    SqDrained = 0x03,
    /// An error that no completion can report.
    Catastrophic = 0x05,
    /// The path could not be migrated.
    PathMigrationFailed = 0x07,
    /// The responder got an invalid request.
    InvalidRequest = 0x10,
    /// The responder got a request that violates access rights.
    AccessError = 0x11,
    /// The QP took its last work request from its SRQ.
    LastWqe = 0x13,
}

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A completion queue, by its number, has something new. Never masked.
    Completion(u32),
    /// Something happened to a QP.
    Qp(QpEvent, u32),
    /// An SRQ has fewer work requests than its limit.
    SrqLimit(u32),
    /// An SRQ has failed.
    SrqError(u32),
    /// A completion queue has failed: number and syndrome (1 overrun, 2 access).
    CqError(u32, u8),
    /// The port came up or went down.
    Port {
        /// `true` if the port is up.
        up: bool,
    },
    /// A DC target was drained.
    DctDrained(u32),
    /// A DC target was accessed with a wrong key.
    DctKeyViolation(u32),
    /// Commands ended: one bit for each slot of the command queue.
    Command(u32),
    /// A page of memory is absent that is needed.
    PageFault {
        /// By which the driver answers; 48 bits.
        token: u64,
        /// The memory key.
        key: u32,
        /// The first absent byte, as an address of the key.
        address: u64,
        /// Number of bytes needed from there on; more of them may be absent.
        length: u32,
    },
}

impl Event {
    /// The type by which drivers know it.
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

    /// Returns the entry of the event, without its owner.
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
    /// Returns `true` if events of this kind are written to this queue.
    pub fn wants(&self, event: Event) -> bool {
        (self.mask >> event.kind()) & 1 != 0
    }

    /// Writes an entry. Returns `true` if the driver must be interrupted.
    fn push(&mut self, dma: &Dma, mut entry: [u8; ENTRY]) -> Result<bool, DmaFault> {
        let size = 1 << self.log_size;
        let waiting = self.producer.wrapping_sub(self.consumer) & COUNTER;
        if waiting >= size && !self.unheard {
            warn!("an event queue is full, and an event lost");
            return Ok(false);
        }
        entry[OWNER] = ((self.producer >> self.log_size) & 1) as u8;
        let at = u64::from(self.producer & (size - 1)) * ENTRY as u64;
        self.buffer.write(dma, at, &entry[..OWNER])?;
        // The driver takes what has its owner changed.
        self.buffer.write(dma, at + OWNER as u64, &entry[OWNER..])?;
        self.producer = self.producer.wrapping_add(1) & COUNTER;
        Ok(std::mem::take(&mut self.armed) || self.unheard)
    }
}

/// Writes an event to all queues that subscribe to it.
pub fn event(device: &mut Device, event: Event) {
    debug!(device = device.id.0, ?event);
    let wanting = device.objects.eqs.iter().filter(|(_, eq)| eq.wants(event));
    let wanting: Vec<u32> = wanting.map(|(eqn, _)| eqn).collect();
    for eqn in wanting {
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
        Err(fault) => warn!(eqn, %fault, "an event queue is out of reach"),
    }
}

/// The driver has taken what came before `consumer`. If it arms the queue, the next event interrupts it, or
/// at once what is there already.
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
