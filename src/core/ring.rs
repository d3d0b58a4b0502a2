// SPDX-License-Identifier: GPL-2.0

//! A ring in the memory of one node that another node writes messages to (LITE, section 5.1: the LMR of an
//! RPC function).
//!
//! The writer owns the [`RingProducer`] and gives each message a [`RingSlot`]; the reader owns the [`RingConsumer`] and frees
//! places in any order. The writer may write a message again, at its place, until it knows that it came.
//! Before, the place is given to no other, also if the reader has freed it: so a copy that comes late harms
//! nothing, and the reader tells it by its position, which no other message ever has.
//!
//! The first unit of the memory is no part of the ring: in it the reader of the ring in the *other*
//! direction tells how far it has come.

use core::ops::DerefMut;

/// Bytes of a unit, in which places are counted: a cache line.
pub const UNIT_BYTES: usize = 64;

/// Bytes that the memory of a ring has at least: enough to tell of what was freed a quarter at a time while
/// two of the longest messages still fit.
pub const MIN_RING_BYTES: u64 = 32 << 10;

/// Bytes that it has at most: an immediate has 16 bits to say which unit.
pub const MAX_RING_BYTES: u64 = 4 << 20;

/// Bytes of the longest message: what has 4 KiB of data is one.
pub const MAX_MESSAGE_BYTES: usize = 8192;

/// Units of the ring in memory of `size` bytes; `None` unless a power of two from [`MIN_RING_BYTES`] to
/// [`MAX_RING_BYTES`].
#[must_use]
pub const fn capacity_units(size: u64) -> Option<u32> {
    if size.is_power_of_two() && size >= MIN_RING_BYTES && size <= MAX_RING_BYTES {
        Some((size / UNIT_BYTES as u64) as u32 - 1)
    } else {
        None
    }
}

/// Units that `bytes` take.
const fn units_for(bytes: usize) -> u32 {
    bytes.div_ceil(UNIT_BYTES) as u32
}

/// Where a message is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub struct RingSlot {
    /// Position of its first unit: units written to the ring before it, ever.
    pub position: u64,
    /// Units before it that were skipped, as it did not fit there, and that are freed with it.
    pub skipped_units: u32,
    /// Units of the message.
    pub units: u32,
}

impl RingSlot {
    /// Bytes from the begin of the memory of a ring of this capacity.
    #[must_use]
    pub const fn offset(&self, capacity: u32) -> u64 {
        self.unit_index(capacity) as u64 * UNIT_BYTES as u64
    }

    /// Units from the begin of the memory: 1 … `capacity`.
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

    /// Whether it is a place that a [`Tail`] gives, in a ring of this capacity.
    fn is_valid(&self, capacity: u32) -> bool {
        let in_order =
            self.start_position() <= self.position && self.position < self.end_position();
        let at_start = self.skipped_units == 0 || self.unit_index(capacity) == 1;
        let last = u64::from(self.unit_index(capacity)) - 1 + u64::from(self.units);
        in_order && at_start && last <= capacity.into()
    }
}

/// Of a unit, at either end: nothing is known.
const EMPTY: u8 = 0;
/// To the writer: the first of a message that may still be written.
const IN_FLIGHT: u8 = 1;
/// To the reader: the first of a message that has come and is not freed.
const RECEIVED: u8 = 1;
/// To the reader: freed, while something before it is not.
const FREED: u8 = 2;

/// The state of the unit at a position.
fn unit_state(states: &mut [u8], position: u64) -> Option<&mut u8> {
    let index = position.checked_rem(states.len() as u64)?;
    states.get_mut(index as usize)
}

/// The writer's end.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub struct RingProducer<S> {
    /// A byte for each unit.
    unit_states: S,
    /// Position of the next message.
    tail: u64,
    /// What the reader said last.
    consumer_head: u64,
    /// Position of the first unit that must not be used again. Not beyond `head`.
    reuse_limit: u64,
}

impl<S: DerefMut<Target = [u8]>> RingProducer<S> {
    /// The end of an empty ring; `states` has a zero for each unit of its capacity.
    #[must_use]
    pub fn new(states: S) -> Self {
        Self {
            unit_states: states,
            tail: 0,
            consumer_head: 0,
            reuse_limit: 0,
        }
    }

    /// A place for a message of that many bytes, at least 1; `None` while there is none. It may be written
    /// until [`Self::complete`].
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

    /// Nothing is written to a place any more, not even late. Returns whether there may be more room.
    pub fn complete(&mut self, slot: &RingSlot) -> bool {
        if let Some(state) = unit_state(&mut self.unit_states, slot.position) {
            *state = EMPTY;
        }
        self.advance_reuse_limit()
    }

    /// The reader has come as far as `head`. Returns whether there may be more room.
    pub fn on_credit(&mut self, head: u64) -> bool {
        if self.consumer_head < head && head <= self.tail {
            self.consumer_head = head;
        }
        self.advance_reuse_limit()
    }

    /// A place that its reader has freed may still be written to by a copy of what it held.
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

/// The reader's end.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub struct RingConsumer<S> {
    /// A byte for each unit.
    unit_states: S,
    /// Position of the first unit that is not free.
    head: u64,
    /// What the writer was told last.
    published_head: u64,
}

impl<S: DerefMut<Target = [u8]>> RingConsumer<S> {
    /// The end of an empty ring; `states` has a zero for each unit of its capacity.
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

    /// Whether a place may hold a message, or a copy of one, that is not freed with all before it.
    fn is_in_window(&self, slot: &RingSlot) -> bool {
        let capacity = self.capacity();
        capacity != 0
            && slot.is_valid(capacity)
            && slot.start_position() >= self.head
            && slot.end_position() - self.head <= capacity.into()
    }

    /// A message has come. Returns whether it is the first time.
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

    /// Frees the place of a message that has come; anything else has no effect.
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

    /// Whether so much was freed since the writer was told that it may be waiting to hear of it.
    #[must_use]
    pub fn should_publish_head(&self) -> bool {
        self.head - self.published_head >= u64::from(self.capacity() / 4)
    }

    /// What to tell the writer, who is told now.
    #[must_use]
    pub fn publish_head(&mut self) -> u64 {
        self.published_head = self.head;
        self.head
    }
}

/// Units that wait for somebody, in the order in which they came.
#[derive(Clone, Debug)]
pub struct UnitFifo<S> {
    /// Room for as many as there may be.
    units: S,
    first: usize,
    count: usize,
}

impl<S: DerefMut<Target = [u16]>> UnitFifo<S> {
    /// None; `slots` is the room for them.
    #[must_use]
    pub fn new(slots: S) -> Self {
        Self {
            units: slots,
            first: 0,
            count: 0,
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The slot that many places after the first.
    fn unit_mut(&mut self, index: usize) -> Option<&mut u16> {
        let position = (self.first + index).checked_rem(self.units.len())?;
        self.units.get_mut(position)
    }

    /// Adds one, at the end. Returns whether there was room.
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

    /// Takes the first.
    pub fn pop(&mut self) -> Option<u16> {
        if self.count == 0 {
            return None;
        }
        let unit = *self.unit_mut(0)?;
        self.first = (self.first + 1).checked_rem(self.units.len())?;
        self.count -= 1;
        Some(unit)
    }

    /// Puts one back that was taken, as the first. Returns whether there was room.
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
