// SPDX-License-Identifier: GPL-2.0

//! Ring tests: random sequences against a model of the memory between the two ends. The module `model` checks
//! all sequences exhaustively.

use super::*;
use proptest::prelude::*;

mod model;

fn new_consumer(capacity: u32) -> RingConsumer<Vec<u8>> {
    RingConsumer::new(vec![0; capacity as usize])
}

fn new_producer(capacity: u32) -> RingProducer<Vec<u8>> {
    RingProducer::new(vec![0; capacity as usize])
}

#[test]
fn capacity_of_invalid_ring_size_is_none() {
    assert_eq!(capacity_units(MIN_RING_BYTES), Some(511));
    assert_eq!(capacity_units(MAX_RING_BYTES), Some(65535));
    for odd in [
        0,
        1,
        MIN_RING_BYTES / 2,
        MIN_RING_BYTES + 1,
        3 * MIN_RING_BYTES,
        2 * MAX_RING_BYTES,
    ] {
        assert_eq!(capacity_units(odd), None, "{odd}");
    }
}

#[test]
fn message_beyond_the_end_wraps_to_the_start() {
    let (mut producer, mut consumer) = (new_producer(10), new_consumer(10));
    let first = producer.reserve(7 * UNIT_BYTES).unwrap();
    assert_eq!(
        (first.offset(10), first.skipped_units),
        (UNIT_BYTES as u64, 0)
    );
    assert_eq!(
        producer.reserve(4 * UNIT_BYTES),
        None,
        "3 are free at the end, none at the start"
    );
    assert!(consumer.receive(&first));
    consumer.free(&first);
    assert!(
        !producer.on_credit(consumer.publish_head()),
        "it may still be written"
    );
    assert!(producer.complete(&first));
    let second = producer.reserve(4 * UNIT_BYTES).unwrap();
    assert_eq!(
        (second.position, second.skipped_units, second.unit_index(10)),
        (10, 3, 1)
    );
    assert!(consumer.receive(&second));
    consumer.free(&second);
    assert_eq!(
        consumer.publish_head(),
        14,
        "what was skipped is free with it"
    );
}

#[test]
fn duplicate_message_is_never_received_again() {
    let (mut producer, mut consumer) = (new_producer(4), new_consumer(4));
    let slot = producer.reserve(1).unwrap();
    producer.complete(&slot);
    assert!(consumer.receive(&slot));
    assert!(!consumer.receive(&slot), "while it is there");
    consumer.free(&slot);
    assert!(!consumer.receive(&slot), "when it is free");
    for _ in 0..8 {
        assert!(producer.on_credit(consumer.publish_head()));
        let next = producer.reserve(UNIT_BYTES).unwrap();
        producer.complete(&next);
        assert!(consumer.receive(&next));
        assert!(!consumer.receive(&slot), "when others have its units");
        consumer.free(&next);
    }
}

#[test]
fn invalid_slot_is_rejected() {
    let mut consumer = new_consumer(10);
    let invalid = [
        (0, 0, 0),
        (0, 0, 11),
        (7, 0, 4),
        (5, 5, 1),
        (10, 11, 1),
        (10, 0, 1),
        (u64::MAX, 0, 2),
        (0, u32::MAX, 1),
        (0, 0, u32::MAX),
        (9, 0, u32::MAX),
    ];
    for (first, skipped, units) in invalid {
        let slot = RingSlot {
            position: first,
            skipped_units: skipped,
            units,
        };
        assert!(!consumer.receive(&slot), "{slot:?}");
        consumer.free(&slot);
    }
    assert_eq!(consumer.publish_head(), 0);
}

#[test]
fn free_of_unreceived_slot_has_no_effect() {
    let (mut producer, mut consumer) = (new_producer(4), new_consumer(4));
    let slot = producer.reserve(1).unwrap();
    consumer.free(&slot);
    assert!(consumer.receive(&slot));
}

#[test]
fn credit_beyond_the_tail_is_ignored() {
    let mut producer = new_producer(4);
    let slot = producer.reserve(1).unwrap();
    producer.complete(&slot);
    assert!(!producer.on_credit(2));
    assert!(producer.on_credit(1));
    assert!(!producer.on_credit(0), "old news");
}

#[test]
fn unit_fifo_returns_units_in_fifo_order() {
    let mut fifo = UnitFifo::new(vec![0; 3]);
    for round in 0..4 {
        assert!(fifo.push(round) && fifo.push(round + 10));
        assert!(!fifo.is_empty());
        let first = fifo.pop().unwrap();
        assert_eq!(first, round);
        assert!(
            fifo.push_front(first) && fifo.push(round + 20) && !fifo.push(0) && !fifo.push_front(0)
        );
        let all: Vec<u16> = std::iter::from_fn(|| fifo.pop()).collect();
        assert_eq!(all, [round, round + 10, round + 20]);
        assert!(fifo.is_empty());
    }
    assert!(!UnitFifo::new(Vec::new()).push(1));
}

/// Step of a random ring history.
#[derive(Clone, Debug)]
enum RingStep {
    Write(usize),
    /// A message in flight arrives, possibly as a copy.
    Receive(prop::sample::Index),
    /// The writer receives the confirmation that a message arrived.
    Complete(prop::sample::Index),
    Free(prop::sample::Index),
    PublishHead,
    /// A published head arrives at the writer, possibly late.
    ApplyCredit(prop::sample::Index),
}

fn ring_steps() -> impl Strategy<Value = RingStep> {
    prop_oneof![
        3 => (1..=12 * UNIT_BYTES).prop_map(RingStep::Write),
        4 => any::<prop::sample::Index>().prop_map(RingStep::Receive),
        3 => any::<prop::sample::Index>().prop_map(RingStep::Complete),
        3 => any::<prop::sample::Index>().prop_map(RingStep::Free),
        2 => Just(RingStep::PublishHead),
        2 => any::<prop::sample::Index>().prop_map(RingStep::ApplyCredit),
    ]
}

proptest! {
    /// Steps in any order and any number: each message is received once, and no two unfreed messages share a
    /// unit. No message is written where another may still be written. In the end all of the ring is free.
    #[test]
    fn messages_are_received_once_and_all_units_are_freed(steps in prop::collection::vec(ring_steps(), 0..400)) {
        const CAPACITY: u32 = 37;
        let (mut producer, mut consumer) = (new_producer(CAPACITY), new_consumer(CAPACITY));
        let (mut writing, mut received, mut unfreed, mut freed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut published = vec![0];
        let mut owners = [None; CAPACITY as usize];
        for step in steps {
            match step {
                RingStep::Write(bytes) => {
                    let Some(place) = producer.reserve(bytes) else { continue };
                    for unit in place.start_position()..place.end_position() {
                        let owner = &mut owners[(unit % u64::from(CAPACITY)) as usize];
                        let reusable = owner.is_none_or(|(old, skipped): (RingSlot, bool)| {
                            freed.contains(&old) && (skipped || !writing.contains(&old))
                        });
                        prop_assert!(reusable, "{place:?} takes what {owner:?} has");
                        *owner = Some((place, unit < place.position));
                    }
                    writing.push(place);
                }
                RingStep::Receive(which) if !writing.is_empty() => {
                    let slot = *which.get(&writing);
                    let is_first = !received.contains(&slot);
                    prop_assert_eq!(consumer.receive(&slot), is_first);
                    if is_first {
                        received.push(slot);
                        unfreed.push(slot);
                    }
                }
                RingStep::Complete(which) if !writing.is_empty() => {
                    let index = which.index(writing.len());
                    if received.contains(&writing[index]) {
                        producer.complete(&writing.swap_remove(index));
                    }
                }
                RingStep::Free(which) if !unfreed.is_empty() => {
                    let place = unfreed.swap_remove(which.index(unfreed.len()));
                    consumer.free(&place);
                    freed.push(place);
                }
                RingStep::PublishHead => published.push(consumer.publish_head()),
                RingStep::ApplyCredit(which) => {
                    producer.on_credit(published[which.index(published.len())]);
                }
                _ => {}
            }
        }
        for place in &writing {
            if consumer.receive(place) {
                unfreed.push(*place);
            }
            producer.complete(place);
        }
        unfreed.iter().for_each(|place| consumer.free(place));
        producer.on_credit(consumer.publish_head());
        prop_assert_eq!((producer.reuse_limit, consumer.head), (producer.tail, producer.tail));
    }

    /// A waiting writer always gets a slot once the reader has freed all messages. The reader does not
    /// publish a head that advanced by less than a quarter of the ring.
    #[test]
    fn unpublished_head_never_blocks_the_producer(lengths in prop::collection::vec(1..=MAX_MESSAGE_BYTES, 1..200)) {
        let capacity = capacity_units(MIN_RING_BYTES).unwrap();
        let (mut producer, mut consumer) = (new_producer(capacity), new_consumer(capacity));
        for len in lengths {
            let place = producer.reserve(len);
            prop_assert!(place.is_some(), "{len} bytes");
            let place = place.unwrap();
            prop_assert!(consumer.receive(&place));
            producer.complete(&place);
            consumer.free(&place);
            if consumer.should_publish_head() {
                producer.on_credit(consumer.publish_head());
            }
        }
    }

    /// No slot sent by a peer makes the reader fail or lose messages.
    #[test]
    fn arbitrary_slot_is_survived(position: u64, skipped_units: u32, units: u32) {
        let mut consumer = new_consumer(37);
        let slot = RingSlot { position, skipped_units, units };
        if consumer.receive(&slot) {
            prop_assert!(slot.end_position() <= 37);
        }
        consumer.free(&slot);
        prop_assert!(consumer.publish_head() <= 37);
    }
}
