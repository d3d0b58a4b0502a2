// SPDX-License-Identifier: GPL-2.0

//! The credits of a small ring, tried exhaustively: every order in which messages are written, come, come
//! again, are known to have come and are freed, and in which the reader tells how far it is and the writer hears
//! of it, late or never.

use super::super::*;
use std::collections::{BTreeSet, HashSet};

const CAPACITY: u32 = 5;

/// Units of the longest message. As in the smallest ring that there is, two of them and what is not worth
/// telling fit.
const LONGEST: usize = 2;

/// Units that are written in all: the ring goes round, and on.
const END: u64 = 8;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Message {
    place: Place,
    /// A copy of it may still come.
    writable: bool,
    come: bool,
    freed: bool,
}

/// All that there is at a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    tail: Tail<Vec<u8>>,
    head: Head<Vec<u8>>,
    /// Those whose units are not another's yet.
    messages: Vec<Message>,
    /// What the reader told and the writer may hear.
    told: BTreeSet<u64>,
}

impl World {
    fn new() -> Self {
        Self {
            tail: Tail::new(vec![0; CAPACITY as usize]),
            head: Head::new(vec![0; CAPACITY as usize]),
            messages: Vec::new(),
            told: BTreeSet::new(),
        }
    }

    /// Whether a unit has something that would be lost, or that a late copy would write over.
    fn is_taken(&self, unit: u64) -> bool {
        let at = |position: u64| position % u64::from(CAPACITY);
        self.messages.iter().any(|message| {
            let Place { first, .. } = message.place;
            let mine = |range: core::ops::Range<u64>| range.map(at).any(|other| other == at(unit));
            let written = mine(first..message.place.end()) && message.writable;
            written || (mine(message.place.begin()..message.place.end()) && !message.freed)
        })
    }

    fn write(&self, units: usize) -> Option<Self> {
        let mut next = self.clone();
        if next.tail.next + units as u64 > END {
            return None;
        }
        let place = next.tail.reserve(units * UNIT)?;
        for unit in place.begin()..place.end() {
            assert!(!self.is_taken(unit), "{place:?} in {self:#?}");
        }
        next.messages.push(Message {
            place,
            writable: true,
            come: false,
            freed: false,
        });
        Some(next)
    }

    fn arrive(&mut self, i: usize) {
        let Message { place, come, .. } = self.messages[i];
        assert_eq!(self.head.arrive(&place), !come, "{place:?} in {self:#?}");
        self.messages[i].come = true;
    }

    fn land(&mut self, i: usize) {
        self.tail.land(&self.messages[i].place);
        self.messages[i].writable = false;
    }

    fn free(&mut self, i: usize) {
        self.head.free(&self.messages[i].place);
        self.messages[i].freed = true;
    }

    fn hear(&mut self, told: u64) {
        self.tail.release(told);
        self.told.retain(|other| *other > told);
    }

    /// What may come next.
    fn successors(&self) -> Vec<Self> {
        let mut all: Vec<Self> = (1..=LONGEST)
            .filter_map(|units| self.write(units))
            .collect();
        let mut then = |act: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            act(&mut next);
            next.messages
                .retain(|message| message.writable || !message.freed);
            all.push(next);
        };
        for (i, message) in self.messages.iter().enumerate() {
            if message.writable {
                then(&|next| next.arrive(i));
            }
            if message.writable && message.come {
                then(&|next| next.land(i));
            }
            if message.come && !message.freed {
                then(&|next| next.free(i));
            }
        }
        then(&|next| {
            let told = next.head.tell();
            next.told.insert(told);
        });
        for &told in &self.told {
            then(&|next| next.hear(told));
        }
        all
    }

    /// When all has come and was freed, and the reader tells what is worth it, there is room for the longest.
    fn check_room(&self) {
        let mut last = self.clone();
        for i in 0..last.messages.len() {
            let Message {
                writable,
                come,
                freed,
                ..
            } = last.messages[i];
            if !come {
                last.arrive(i);
            }
            if writable {
                last.land(i);
            }
            if !freed {
                last.free(i);
            }
        }
        self.told.iter().for_each(|&told| last.hear(told));
        if last.head.owes() {
            let told = last.head.tell();
            last.hear(told);
        }
        let room = last.tail.clone().reserve(LONGEST * UNIT);
        assert!(room.is_some(), "no room after {self:#?}");
        let told = last.head.tell();
        last.hear(told);
        assert_eq!(
            (last.tail.free, last.head.head),
            (last.tail.next, last.tail.next)
        );
    }
}

#[test]
fn whatever_happens_to_a_ring_nothing_is_lost_and_nobody_is_stuck() {
    let mut seen = HashSet::from([World::new()]);
    let mut open = vec![World::new()];
    while let Some(world) = open.pop() {
        world.check_room();
        for next in world.successors() {
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    assert!(seen.len() > 100_000, "{} states", seen.len());
}
