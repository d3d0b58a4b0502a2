// SPDX-License-Identifier: GPL-2.0

//! Kernel-side indices of an I/O queue: a ring in memory that a process shares with the kernel.
//!
//! # Operation
//!
//! A queue has a power of two of entries. The head counts consumed entries and the tail counts added entries.
//! Both wrap around at 2³². The kernel keeps its own index privately and only publishes copies.
//!
//! # Recovery
//!
//! The process publishes the other index, which may have any value. An invalid index makes the kernel consume
//! garbage entries, but never more entries than the queue has. The kernel's own index stays correct.

/// Returns `true` if a queue may have `entries` entries: a power of two, at most `max`.
#[must_use]
pub const fn is_valid_size(entries: u32, max: u32) -> bool {
    entries.is_power_of_two() && entries <= max
}

/// Kernel side of a queue from which the kernel consumes entries.
#[derive(Clone, Copy, Debug)]
pub struct IoQueueConsumer {
    entries: u32,
    head: u32,
}

impl IoQueueConsumer {
    /// Creates the consumer of an empty queue. [`is_valid_size`] must hold for `entries`.
    #[must_use]
    pub const fn new(entries: u32) -> Self {
        Self { entries, head: 0 }
    }

    /// Returns the number of entries to consume, given the `tail` that the process published.
    #[must_use]
    pub const fn available(&self, tail: u32) -> u32 {
        let published = tail.wrapping_sub(self.head);
        if published < self.entries {
            published
        } else {
            self.entries
        }
    }

    /// Returns the index of the next entry to consume.
    #[must_use]
    pub const fn next_index(&self) -> u32 {
        self.head & self.entries.wrapping_sub(1)
    }

    /// Consumes the entry at [`Self::next_index`]. Returns the new head.
    pub const fn advance(&mut self) -> u32 {
        self.head = self.head.wrapping_add(1);
        self.head
    }
}

/// Kernel side of a queue to which the kernel adds entries.
#[derive(Clone, Copy, Debug)]
pub struct IoQueueProducer {
    entries: u32,
    tail: u32,
}

impl IoQueueProducer {
    /// Creates the producer of an empty queue. [`is_valid_size`] must hold for `entries`.
    #[must_use]
    pub const fn new(entries: u32) -> Self {
        Self { entries, tail: 0 }
    }

    /// Returns the number of entries not yet consumed, given the `head` that the process published.
    #[must_use]
    pub const fn unconsumed(&self, head: u32) -> u32 {
        let unconsumed = self.tail.wrapping_sub(head);
        if unconsumed < self.entries {
            unconsumed
        } else {
            self.entries
        }
    }

    /// Returns the index of the next entry to add.
    #[must_use]
    pub const fn next_index(&self) -> u32 {
        self.tail & self.entries.wrapping_sub(1)
    }

    /// Adds the entry at [`Self::next_index`]. Returns the new tail.
    pub const fn advance(&mut self) -> u32 {
        self.tail = self.tail.wrapping_add(1);
        self.tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn valid_sizes_are_powers_of_two_up_to_the_limit() {
        let valid: Vec<u32> = (0..20).filter(|&n| is_valid_size(n, 8)).collect();
        assert_eq!(valid, [1, 2, 4, 8]);
    }

    #[test]
    fn counts_from_an_invalid_peer_index_are_clamped_to_the_size() {
        let consumer = IoQueueConsumer::new(8);
        assert_eq!(consumer.available(8), 8);
        assert_eq!(consumer.available(9), 8);
        assert_eq!(consumer.available(u32::MAX), 8);
        let producer = IoQueueProducer::new(8);
        assert_eq!(producer.unconsumed(0), 0);
        // A head one before the tail leaves one entry. An invalid head beyond the tail counts as a full
        // queue.
        assert_eq!(producer.unconsumed(u32::MAX), 1);
        assert_eq!(producer.unconsumed(1), 8);
    }

    proptest! {
        /// Entries of a correct process are consumed in order, including across index wraparound.
        #[test]
        fn entries_are_consumed_in_order_across_wraparound(
            start in prop_oneof![Just(0u32), Just(u32::MAX - 3), any::<u32>()],
            steps in prop::collection::vec((0u32..5, 0u32..5), 1..200),
        ) {
            let mut consumer = IoQueueConsumer { entries: 8, head: start };
            let mut producer = IoQueueProducer { entries: 8, tail: start };
            let (mut slots, mut sent) = ([0u32; 8], 0);
            let (mut head, mut tail) = (start, start);
            let mut expected = VecDeque::new();
            for (add, consume) in steps {
                for _ in 0..add.min(8 - producer.unconsumed(head)) {
                    slots[producer.next_index() as usize] = sent;
                    expected.push_back(sent);
                    sent += 1;
                    tail = producer.advance();
                }
                prop_assert_eq!(consumer.available(tail) as usize, expected.len());
                for _ in 0..consume.min(consumer.available(tail)) {
                    prop_assert_eq!(Some(slots[consumer.next_index() as usize]), expected.pop_front());
                    head = consumer.advance();
                }
                prop_assert_eq!(producer.unconsumed(head) as usize, expected.len());
            }
        }

        /// For any published index, no entry index and no count exceeds the queue size.
        #[test]
        fn arbitrary_peer_index_stays_within_the_queue(peer_indices in prop::collection::vec(any::<u32>(), 1..100)) {
            let (mut consumer, mut producer) = (IoQueueConsumer::new(16), IoQueueProducer::new(16));
            for peer_index in peer_indices {
                prop_assert!(consumer.available(peer_index) <= 16 && producer.unconsumed(peer_index) <= 16);
                prop_assert!(consumer.next_index() < 16 && producer.next_index() < 16);
                consumer.advance();
                producer.advance();
            }
        }
    }
}
