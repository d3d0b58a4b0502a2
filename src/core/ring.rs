// SPDX-License-Identifier: GPL-2.0

//! Message ring in the memory of one node, to which another node writes (LITE, section 5.1: the LMR of an RPC
//! function).
//!
//! # Operation
//!
//! The writer owns the [`RingProducer`] and reserves a [`RingSlot`] for each message. The reader owns the
//! [`RingConsumer`] and frees slots in any order. The head is the position up to which all units are free.
//! The reader publishes its head to the writer as credit.
//!
//! The first unit of the memory is not part of the ring. In this unit the reader of the ring in the
//! *opposite* direction publishes its head.
//!
//! # Recovery
//!
//! The writer may write a message repeatedly to its slot, until the writer has confirmation that the message
//! arrived. Until then no other message uses the slot, even if the reader has freed the slot. Hence a late
//! copy overwrites no other message. The reader detects a copy by its position, which is unique over the
//! lifetime of the ring.

use core::ops::DerefMut;

/// Size of a unit in bytes: one cache line. Slots are allocated in units.
pub const UNIT_BYTES: usize = 64;

/// Minimum size of the memory of a ring in bytes.
///
/// The reader publishes its head only after it has freed a quarter of the ring. In a ring of this size, two
/// of the longest messages still fit beside the freed units that are not yet published.
pub const MIN_RING_BYTES: u64 = 32 << 10;

/// Maximum size of the memory of a ring in bytes: an immediate has 16 bits for the unit index.
pub const MAX_RING_BYTES: u64 = 4 << 20;

/// Maximum length of a message in bytes. A message with 4 KiB of data fits.
pub const MAX_MESSAGE_BYTES: usize = 8192;

/// Returns the capacity in units of a ring in memory of `size` bytes.
///
/// Returns `None` unless `size` is a power of two from [`MIN_RING_BYTES`] to [`MAX_RING_BYTES`].
#[must_use]
pub const fn capacity_units(size: u64) -> Option<u32> {
    if size.is_power_of_two() && size >= MIN_RING_BYTES && size <= MAX_RING_BYTES {
        Some((size / UNIT_BYTES as u64) as u32 - 1)
    } else {
        None
    }
}

/// Returns the number of units that `bytes` bytes occupy.
const fn units_for(bytes: usize) -> u32 {
    bytes.div_ceil(UNIT_BYTES) as u32
}

/// Reserved range of units for one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub struct RingSlot {
    /// Position of the first unit: the number of units of the ring ever used before it.
    pub position: u64,
    /// Units skipped before the message, which did not fit before the end of the ring. Freed with the
    /// message.
    pub skipped_units: u32,
    /// Length of the message in units.
    pub units: u32,
}

impl RingSlot {
    /// Returns the byte offset of the message in the memory of a ring of `capacity` units.
    #[must_use]
    pub const fn offset(&self, capacity: u32) -> u64 {
        self.unit_index(capacity) as u64 * UNIT_BYTES as u64
    }

    /// Returns the unit index of the message in the memory of the ring: 1 … `capacity`.
    #[must_use]
    pub const fn unit_index(&self, capacity: u32) -> u32 {
        match self.position.checked_rem(capacity as u64) {
            Some(at) => 1 + at as u32,
            None => 1,
        }
    }

    fn start_position(&self) -> u64 {
        self.position.wrapping_sub(self.skipped_units.into())
    }

    fn end_position(&self) -> u64 {
        self.position.wrapping_add(self.units.into())
    }

    /// Returns `true` if [`RingProducer::reserve`] can return the slot for a ring of `capacity` units.
    fn is_valid(&self, capacity: u32) -> bool {
        let in_order =
            self.start_position() <= self.position && self.position < self.end_position();
        let at_start = self.skipped_units == 0 || self.unit_index(capacity) == 1;
        let last = u64::from(self.unit_index(capacity)) - 1 + u64::from(self.units);
        in_order && at_start && last <= capacity.into()
    }
}

/// Unit state at both ends: no message is in flight, received or freed at the unit.
const EMPTY: u8 = 0;
/// Unit state at the writer: first unit of a message that may still be written.
const IN_FLIGHT: u8 = 1;
/// Unit state at the reader: first unit of a message that has arrived and is not freed.
const RECEIVED: u8 = 1;
/// Unit state at the reader: freed, but an earlier unit is not.
const FREED: u8 = 2;

/// Returns the state of the unit at `position`.
fn unit_state(states: &mut [u8], position: u64) -> Option<&mut u8> {
    let index = position.checked_rem(states.len() as u64)?;
    states.get_mut(index as usize)
}

/// Writer's end of a ring.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub struct RingProducer<S> {
    /// State of each unit: [`EMPTY`] or [`IN_FLIGHT`].
    unit_states: S,
    /// Position of the next message.
    tail: u64,
    /// Latest head published by the reader.
    consumer_head: u64,
    /// Position of the first unit that must not be reused. At most `consumer_head`.
    reuse_limit: u64,
}

impl<S: DerefMut<Target = [u8]>> RingProducer<S> {
    /// Creates the writer's end of an empty ring. `states` must hold one zero byte for each unit of the
    /// capacity.
    #[must_use]
    pub fn new(states: S) -> Self {
        Self {
            unit_states: states,
            tail: 0,
            consumer_head: 0,
            reuse_limit: 0,
        }
    }

    /// Reserves a slot for a message of `bytes` bytes, at least 1. Returns `None` if no slot is free.
    ///
    /// The caller may write to the slot until [`Self::complete`].
    #[must_use]
    pub fn reserve(&mut self, bytes: usize) -> Option<RingSlot> {
        let (units, capacity) = (units_for(bytes), self.unit_states.len() as u32);
        let index = self.tail.checked_rem(capacity.into())? as u32;
        let skipped = if units > capacity - index {
            capacity - index
        } else {
            0
        };
        let slot = RingSlot {
            position: self.tail + u64::from(skipped),
            skipped_units: skipped,
            units,
        };
        if units == 0 || slot.end_position() - self.reuse_limit > capacity.into() {
            return None;
        }
        *unit_state(&mut self.unit_states, slot.position)? = IN_FLIGHT;
        self.tail = slot.end_position();
        Some(slot)
    }

    /// Marks a slot as final: no write to the slot can execute any more, not even a late one.
    ///
    /// Returns `true` if units became reusable.
    pub fn complete(&mut self, slot: &RingSlot) -> bool {
        if let Some(state) = unit_state(&mut self.unit_states, slot.position) {
            *state = EMPTY;
        }
        self.advance_reuse_limit()
    }

    /// Processes a head published by the reader. A head that is not newer, or beyond the tail, is ignored.
    ///
    /// Returns `true` if units became reusable.
    pub fn on_credit(&mut self, head: u64) -> bool {
        if self.consumer_head < head && head <= self.tail {
            self.consumer_head = head;
        }
        self.advance_reuse_limit()
    }

    /// Advances the reuse limit to the reader's head, but not past a slot in flight.
    ///
    /// A copy of the message may still be written to a slot in flight, even if the reader has freed the slot.
    fn advance_reuse_limit(&mut self) -> bool {
        let before = self.reuse_limit;
        while self.reuse_limit < self.consumer_head {
            match unit_state(&mut self.unit_states, self.reuse_limit) {
                Some(state) if *state == EMPTY => self.reuse_limit += 1,
                _ => break,
            }
        }
        self.reuse_limit != before
    }
}

/// Reader's end of a ring.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub struct RingConsumer<S> {
    /// State of each unit: [`EMPTY`], [`RECEIVED`] or [`FREED`].
    unit_states: S,
    /// Position of the first unit that is not free.
    head: u64,
    /// Head last published to the writer.
    published_head: u64,
}

impl<S: DerefMut<Target = [u8]>> RingConsumer<S> {
    /// Creates the reader's end of an empty ring. `states` must hold one zero byte for each unit of the
    /// capacity.
    #[must_use]
    pub fn new(states: S) -> Self {
        Self {
            unit_states: states,
            head: 0,
            published_head: 0,
        }
    }

    fn capacity(&self) -> u32 {
        self.unit_states.len() as u32
    }

    /// Returns `true` if the slot is valid, not behind the head, and within one capacity of the head.
    fn is_in_window(&self, slot: &RingSlot) -> bool {
        let capacity = self.capacity();
        capacity != 0
            && slot.is_valid(capacity)
            && slot.start_position() >= self.head
            && slot.end_position() - self.head <= capacity.into()
    }

    /// Records the arrival of a message. Returns `true` for the first arrival, `false` for a copy or an
    /// invalid slot.
    #[must_use]
    pub fn receive(&mut self, slot: &RingSlot) -> bool {
        let is_in_window = self.is_in_window(slot);
        match unit_state(&mut self.unit_states, slot.position).filter(|state| **state == EMPTY) {
            Some(state) if is_in_window => {
                *state = RECEIVED;
                true
            }
            _ => false,
        }
    }

    /// Frees the slot of a received message. Any other slot has no effect.
    pub fn free(&mut self, slot: &RingSlot) {
        let is_received =
            unit_state(&mut self.unit_states, slot.position).map(|state| *state) == Some(RECEIVED);
        if !is_received || !self.is_in_window(slot) {
            return;
        }
        for position in slot.start_position()..slot.end_position() {
            if let Some(state) = unit_state(&mut self.unit_states, position) {
                *state = FREED;
            }
        }
        while let Some(state) =
            unit_state(&mut self.unit_states, self.head).filter(|state| **state == FREED)
        {
            *state = EMPTY;
            self.head += 1;
        }
    }

    /// Returns `true` if a quarter of the ring was freed since the last published head: the writer may lack
    /// credits.
    #[must_use]
    pub fn should_publish_head(&self) -> bool {
        self.head - self.published_head >= u64::from(self.capacity() / 4)
    }

    /// Returns the head to publish now, and records the head as published.
    #[must_use]
    pub fn publish_head(&mut self) -> u64 {
        self.published_head = self.head;
        self.head
    }
}

/// Bounded FIFO of unit indices, in the order of arrival.
#[derive(Clone, Debug)]
pub struct UnitFifo<S> {
    /// Storage; its length is the maximum number of entries.
    units: S,
    first: usize,
    count: usize,
}

impl<S: DerefMut<Target = [u16]>> UnitFifo<S> {
    /// Creates an empty FIFO with the storage `slots`.
    #[must_use]
    pub fn new(slots: S) -> Self {
        Self {
            units: slots,
            first: 0,
            count: 0,
        }
    }

    /// Returns `true` if the FIFO is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the storage of the entry `index` places after the first.
    fn unit_mut(&mut self, index: usize) -> Option<&mut u16> {
        let position = (self.first + index).checked_rem(self.units.len())?;
        self.units.get_mut(position)
    }

    /// Appends an entry. Returns `false` if the FIFO is full.
    #[must_use]
    pub fn push(&mut self, unit: u16) -> bool {
        let (count, capacity) = (self.count, self.units.len());
        match self.unit_mut(count) {
            Some(slot) if count < capacity => *slot = unit,
            _ => return false,
        }
        self.count += 1;
        true
    }

    /// Removes and returns the first entry.
    pub fn pop(&mut self) -> Option<u16> {
        if self.count == 0 {
            return None;
        }
        let unit = *self.unit_mut(0)?;
        self.first = (self.first + 1).checked_rem(self.units.len())?;
        self.count -= 1;
        Some(unit)
    }

    /// Puts a removed entry back at the front. Returns `false` if the FIFO is full.
    #[must_use]
    pub fn push_front(&mut self, unit: u16) -> bool {
        let capacity = self.units.len();
        if self.count == capacity {
            return false;
        }
        self.first = if self.first == 0 {
            capacity
        } else {
            self.first
        } - 1;
        self.count += 1;
        self.unit_mut(0).map(|slot| *slot = unit).is_some()
    }
}

#[cfg(test)]
mod tests;
