// SPDX-License-Identifier: GPL-2.0

//! A ring in the memory of one node that another node writes messages to (LITE, section 5.1: the LMR of an
//! RPC function).
//!
//! The writer owns the [`Tail`] and gives each message a [`Place`]; the reader owns the [`Head`] and frees
//! places in any order. The writer may write a message again, at its place, until it knows that it came.
//! Before, the place is given to no other, also if the reader has freed it: so a copy that comes late harms
//! nothing, and the reader tells it by its position, which no other message ever has.
//!
//! The first unit of the memory is no part of the ring: in it the reader of the ring in the *other*
//! direction tells how far it has come.

use core::ops::DerefMut;

/// Bytes of a unit, in which places are counted: a cache line.
pub const UNIT: usize = 64;

/// Bytes that the memory of a ring has at least: enough to tell of what was freed a quarter at a time while
/// two of the longest messages still fit.
pub const SIZE_MIN: u64 = 32 << 10;

/// Bytes that it has at most: an immediate has 16 bits to say which unit.
pub const SIZE_MAX: u64 = 4 << 20;

/// Bytes of the longest message: what has 4 KiB of data is one.
pub const MESSAGE_MAX: usize = 8192;

/// Units of the ring in memory of `size` bytes; `None` unless a power of two from [`SIZE_MIN`] to
/// [`SIZE_MAX`].
#[must_use]
pub const fn capacity(size: u64) -> Option<u32> {
    if size.is_power_of_two() && size >= SIZE_MIN && size <= SIZE_MAX {
        Some((size / UNIT as u64) as u32 - 1)
    } else {
        None
    }
}

/// Units that `bytes` take.
const fn units(bytes: usize) -> u32 {
    bytes.div_ceil(UNIT) as u32
}

/// Where a message is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub struct Place {
    /// Position of its first unit: units written to the ring before it, ever.
    pub first: u64,
    /// Units before it that were skipped, as it did not fit there, and that are freed with it.
    pub skipped: u32,
    /// Units of the message.
    pub units: u32,
}

impl Place {
    /// Bytes from the begin of the memory of a ring of this capacity.
    #[must_use]
    pub const fn offset(&self, capacity: u32) -> u64 {
        self.unit(capacity) as u64 * UNIT as u64
    }

    /// Units from the begin of the memory: 1 … `capacity`.
    #[must_use]
    pub const fn unit(&self, capacity: u32) -> u32 {
        match self.first.checked_rem(capacity as u64) {
            Some(at) => 1 + at as u32,
            None => 1,
        }
    }

    fn begin(&self) -> u64 {
        self.first.wrapping_sub(self.skipped.into())
    }

    fn end(&self) -> u64 {
        self.first.wrapping_add(self.units.into())
    }

    /// Whether it is a place that a [`Tail`] gives, in a ring of this capacity.
    fn is_valid(&self, capacity: u32) -> bool {
        let in_order = self.begin() <= self.first && self.first < self.end();
        let at_start = self.skipped == 0 || self.unit(capacity) == 1;
        let last = u64::from(self.unit(capacity)) - 1 + u64::from(self.units);
        in_order && at_start && last <= capacity.into()
    }
}

/// Of a unit, at either end: nothing is known.
const EMPTY: u8 = 0;
/// To the writer: the first of a message that may still be written.
const WRITING: u8 = 1;
/// To the reader: the first of a message that has come and is not freed.
const ARRIVED: u8 = 1;
/// To the reader: freed, while something before it is not.
const FREED: u8 = 2;

/// The state of the unit at a position.
fn state(states: &mut [u8], position: u64) -> Option<&mut u8> {
    let at = position.checked_rem(states.len() as u64)?;
    states.get_mut(at as usize)
}

/// The writer's end.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub struct Tail<S> {
    /// A byte for each unit.
    states: S,
    /// Position of the next message.
    next: u64,
    /// What the reader said last.
    head: u64,
    /// Position of the first unit that must not be used again. Not beyond `head`.
    free: u64,
}

impl<S: DerefMut<Target = [u8]>> Tail<S> {
    /// The end of an empty ring; `states` has a zero for each unit of its capacity.
    #[must_use]
    pub fn new(states: S) -> Self {
        Self {
            states,
            next: 0,
            head: 0,
            free: 0,
        }
    }

    /// A place for a message of that many bytes, at least 1; `None` while there is none. It may be written
    /// until [`Self::land`].
    #[must_use]
    pub fn reserve(&mut self, bytes: usize) -> Option<Place> {
        let (units, capacity) = (units(bytes), self.states.len() as u32);
        let at = self.next.checked_rem(capacity.into())? as u32;
        let skipped = if units > capacity - at {
            capacity - at
        } else {
            0
        };
        let place = Place {
            first: self.next + u64::from(skipped),
            skipped,
            units,
        };
        if units == 0 || place.end() - self.free > capacity.into() {
            return None;
        }
        *state(&mut self.states, place.first)? = WRITING;
        self.next = place.end();
        Some(place)
    }

    /// Nothing is written to a place any more, not even late. Returns whether there may be more room.
    pub fn land(&mut self, place: &Place) -> bool {
        if let Some(state) = state(&mut self.states, place.first) {
            *state = EMPTY;
        }
        self.advance()
    }

    /// The reader has come as far as `head`. Returns whether there may be more room.
    pub fn release(&mut self, head: u64) -> bool {
        if self.head < head && head <= self.next {
            self.head = head;
        }
        self.advance()
    }

    /// A place that its reader has freed may still be written to by a copy of what it held.
    fn advance(&mut self) -> bool {
        let before = self.free;
        while self.free < self.head {
            match state(&mut self.states, self.free) {
                Some(state) if *state == EMPTY => self.free += 1,
                _ => break,
            }
        }
        self.free != before
    }
}

/// The reader's end.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub struct Head<S> {
    /// A byte for each unit.
    states: S,
    /// Position of the first unit that is not free.
    head: u64,
    /// What the writer was told last.
    told: u64,
}

impl<S: DerefMut<Target = [u8]>> Head<S> {
    /// The end of an empty ring; `states` has a zero for each unit of its capacity.
    #[must_use]
    pub fn new(states: S) -> Self {
        Self {
            states,
            head: 0,
            told: 0,
        }
    }

    fn capacity(&self) -> u32 {
        self.states.len() as u32
    }

    /// Whether a place may hold a message, or a copy of one, that is not freed with all before it.
    fn is_open(&self, place: &Place) -> bool {
        let capacity = self.capacity();
        capacity != 0
            && place.is_valid(capacity)
            && place.begin() >= self.head
            && place.end() - self.head <= capacity.into()
    }

    /// A message has come. Returns whether it is the first time.
    #[must_use]
    pub fn arrive(&mut self, place: &Place) -> bool {
        let open = self.is_open(place);
        match state(&mut self.states, place.first).filter(|state| **state == EMPTY) {
            Some(state) if open => {
                *state = ARRIVED;
                true
            }
            _ => false,
        }
    }

    /// Frees the place of a message that has come; anything else has no effect.
    pub fn free(&mut self, place: &Place) {
        let arrived = state(&mut self.states, place.first).map(|state| *state) == Some(ARRIVED);
        if !arrived || !self.is_open(place) {
            return;
        }
        for position in place.begin()..place.end() {
            if let Some(state) = state(&mut self.states, position) {
                *state = FREED;
            }
        }
        while let Some(state) = state(&mut self.states, self.head).filter(|state| **state == FREED)
        {
            *state = EMPTY;
            self.head += 1;
        }
    }

    /// Whether so much was freed since the writer was told that it may be waiting to hear of it.
    #[must_use]
    pub fn owes(&self) -> bool {
        self.head - self.told >= u64::from(self.capacity() / 4)
    }

    /// What to tell the writer, who is told now.
    #[must_use]
    pub fn tell(&mut self) -> u64 {
        self.told = self.head;
        self.head
    }
}

/// Units that wait for somebody, in the order in which they came.
#[derive(Clone, Debug)]
pub struct Fifo<S> {
    /// Room for as many as there may be.
    slots: S,
    first: usize,
    count: usize,
}

impl<S: DerefMut<Target = [u16]>> Fifo<S> {
    /// None; `slots` is the room for them.
    #[must_use]
    pub fn new(slots: S) -> Self {
        Self {
            slots,
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
    fn slot(&mut self, after: usize) -> Option<&mut u16> {
        let at = (self.first + after).checked_rem(self.slots.len())?;
        self.slots.get_mut(at)
    }

    /// Adds one, at the end. Returns whether there was room.
    #[must_use]
    pub fn push(&mut self, unit: u16) -> bool {
        let (count, room) = (self.count, self.slots.len());
        match self.slot(count) {
            Some(slot) if count < room => *slot = unit,
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
        let unit = *self.slot(0)?;
        self.first = (self.first + 1).checked_rem(self.slots.len())?;
        self.count -= 1;
        Some(unit)
    }

    /// Puts one back that was taken, as the first. Returns whether there was room.
    #[must_use]
    pub fn put_back(&mut self, unit: u16) -> bool {
        let room = self.slots.len();
        if self.count == room {
            return false;
        }
        self.first = if self.first == 0 { room } else { self.first } - 1;
        self.count += 1;
        self.slot(0).map(|slot| *slot = unit).is_some()
    }
}

#[cfg(test)]
mod tests;
