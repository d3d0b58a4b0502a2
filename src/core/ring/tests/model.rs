// SPDX-License-Identifier: GPL-2.0

//! Exhaustive check of the credits of a small ring.
//!
//! The steps of the writer are to write a message, to confirm its arrival, and to apply a head. The steps of
//! the reader are to receive a message or a copy, to free a message, and to publish its head. All orders are
//! explored. A published head may arrive late or never.

use super::super::*;
use std::collections::{BTreeSet, HashSet};

const CAPACITY: u32 = 5;

/// Maximum message length in units. As in the smallest real ring, two of them fit beside the unpublished
/// freed units.
const MAX_MESSAGE_UNITS: usize = 2;

/// Total number of units that are written: enough for the ring to wrap around.
const MAX_POSITION: u64 = 8;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RingMessage {
    slot: RingSlot,
    /// A copy of the message may still arrive.
    is_writable: bool,
    is_received: bool,
    is_freed: bool,
}

/// State of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RingModel {
    producer: RingProducer<Vec<u8>>,
    consumer: RingConsumer<Vec<u8>>,
    /// Messages that are not yet both freed and complete.
    messages: Vec<RingMessage>,
    /// Published heads that the writer may still receive.
    published: BTreeSet<u64>,
}

impl RingModel {
    fn new() -> Self {
        Self {
            producer: RingProducer::new(vec![0; CAPACITY as usize]),
            consumer: RingConsumer::new(vec![0; CAPACITY as usize]),
            messages: Vec::new(),
            published: BTreeSet::new(),
        }
    }

    /// Returns `true` if writing to a unit would destroy a message, or if a late copy could overwrite the
    /// unit.
    fn is_unit_in_use(&self, unit: u64) -> bool {
        let index = |position: u64| position % u64::from(CAPACITY);
        self.messages.iter().any(|message| {
            let RingSlot {
                position: first, ..
            } = message.slot;
            let covers =
                |range: core::ops::Range<u64>| range.map(index).any(|other| other == index(unit));
            let is_writable = covers(first..message.slot.end_position()) && message.is_writable;
            is_writable
                || (covers(message.slot.start_position()..message.slot.end_position())
                    && !message.is_freed)
        })
    }

    fn write(&self, units: usize) -> Option<Self> {
        let mut next = self.clone();
        if next.producer.tail + units as u64 > MAX_POSITION {
            return None;
        }
        let slot = next.producer.reserve(units * UNIT_BYTES)?;
        for unit in slot.start_position()..slot.end_position() {
            assert!(!self.is_unit_in_use(unit), "{slot:?} in {self:#?}");
        }
        next.messages.push(RingMessage {
            slot,
            is_writable: true,
            is_received: false,
            is_freed: false,
        });
        Some(next)
    }

    fn receive(&mut self, i: usize) {
        let RingMessage {
            slot: place,
            is_received: received,
            ..
        } = self.messages[i];
        assert_eq!(
            self.consumer.receive(&place),
            !received,
            "{place:?} in {self:#?}"
        );
        self.messages[i].is_received = true;
    }

    fn complete(&mut self, i: usize) {
        self.producer.complete(&self.messages[i].slot);
        self.messages[i].is_writable = false;
    }

    fn free(&mut self, i: usize) {
        self.consumer.free(&self.messages[i].slot);
        self.messages[i].is_freed = true;
    }

    fn apply_credit(&mut self, head: u64) {
        self.producer.on_credit(head);
        self.published.retain(|other| *other > head);
    }

    /// Returns all possible next states.
    fn successors(&self) -> Vec<Self> {
        let mut states: Vec<Self> = (1..=MAX_MESSAGE_UNITS)
            .filter_map(|units| self.write(units))
            .collect();
        let mut add_state = |act: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            act(&mut next);
            next.messages
                .retain(|message| message.is_writable || !message.is_freed);
            states.push(next);
        };
        for (i, message) in self.messages.iter().enumerate() {
            if message.is_writable {
                add_state(&|next| next.receive(i));
            }
            if message.is_writable && message.is_received {
                add_state(&|next| next.complete(i));
            }
            if message.is_received && !message.is_freed {
                add_state(&|next| next.free(i));
            }
        }
        add_state(&|next| {
            let head = next.consumer.publish_head();
            next.published.insert(head);
        });
        for &credit in &self.published {
            add_state(&|next| next.apply_credit(credit));
        }
        states
    }

    /// Checks for deadlock: a message of maximum length fits after all messages were received and freed.
    ///
    /// The reader publishes its head only if a publication is due.
    fn check_progress(&self) {
        let mut end = self.clone();
        for i in 0..end.messages.len() {
            let RingMessage {
                is_writable: writable,
                is_received: received,
                is_freed: freed,
                ..
            } = end.messages[i];
            if !received {
                end.receive(i);
            }
            if writable {
                end.complete(i);
            }
            if !freed {
                end.free(i);
            }
        }
        self.published
            .iter()
            .for_each(|&credit| end.apply_credit(credit));
        if end.consumer.should_publish_head() {
            let head = end.consumer.publish_head();
            end.apply_credit(head);
        }
        let slot = end.producer.clone().reserve(MAX_MESSAGE_UNITS * UNIT_BYTES);
        assert!(slot.is_some(), "no room after {self:#?}");
        let credit = end.consumer.publish_head();
        end.apply_credit(credit);
        assert_eq!(
            (end.producer.reuse_limit, end.consumer.head),
            (end.producer.tail, end.producer.tail)
        );
    }
}

#[test]
fn ring_model_loses_no_message_and_never_deadlocks() {
    let mut seen = HashSet::from([RingModel::new()]);
    let mut unexplored = vec![RingModel::new()];
    while let Some(world) = unexplored.pop() {
        world.check_progress();
        for next in world.successors() {
            if seen.insert(next.clone()) {
                unexplored.push(next);
            }
        }
    }
    assert!(seen.len() > 100_000, "{} states", seen.len());
}
