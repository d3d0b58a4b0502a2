// SPDX-License-Identifier: GPL-2.0

//! The credits of a small ring, tried exhaustively: every order in which messages are written, come, come
//! again, are known to have come and are freed, and in which the reader tells how far it is and the writer hears
//! of it, late or never.

use super::super::*;
use std::collections::{BTreeSet, HashSet};

const CAPACITY: u32 = 5;

/// Units of the longest message. As in the smallest ring that there is, two of them and what is not worth
/// telling fit.
const MAX_MESSAGE_UNITS: usize = 2;

/// Units that are written in all: the ring goes round, and on.
const MAX_POSITION: u64 = 8;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RingMessage {
    slot: RingSlot,
    /// A copy of it may still come.
    is_writable: bool,
    is_received: bool,
    is_freed: bool,
}

/// All that there is at a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RingModel {
    producer: RingProducer<Vec<u8>>,
    consumer: RingConsumer<Vec<u8>>,
    /// Those whose units are not another's yet.
    messages: Vec<RingMessage>,
    /// What the reader told and the writer may hear.
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

    /// Whether a unit has something that would be lost, or that a late copy would write over.
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
            is_received: come,
            ..
        } = self.messages[i];
        assert_eq!(
            self.consumer.receive(&place),
            !come,
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

    /// What may come next.
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
        for &told in &self.published {
            add_state(&|next| next.apply_credit(told));
        }
        states
    }

    /// When all has come and was freed, and the reader tells what is worth it, there is room for the longest.
    fn check_progress(&self) {
        let mut end = self.clone();
        for i in 0..end.messages.len() {
            let RingMessage {
                is_writable: writable,
                is_received: come,
                is_freed: freed,
                ..
            } = end.messages[i];
            if !come {
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
            .for_each(|&told| end.apply_credit(told));
        if end.consumer.should_publish_head() {
            let head = end.consumer.publish_head();
            end.apply_credit(head);
        }
        let slot = end.producer.clone().reserve(MAX_MESSAGE_UNITS * UNIT_BYTES);
        assert!(slot.is_some(), "no room after {self:#?}");
        let told = end.consumer.publish_head();
        end.apply_credit(told);
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
