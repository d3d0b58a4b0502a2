// SPDX-License-Identifier: GPL-2.0

//! Tests of rings: the two ends against a model of the memory between them, at random here, and by trying all
//! that can happen in `model`.

use super::*;
use proptest::prelude::*;

mod model;

fn head(capacity: u32) -> Head<Vec<u8>> {
    Head::new(vec![0; capacity as usize])
}

fn tail(capacity: u32) -> Tail<Vec<u8>> {
    Tail::new(vec![0; capacity as usize])
}

#[test]
fn sizes_are_powers_of_two_that_an_immediate_can_name() {
    assert_eq!(capacity(SIZE_MIN), Some(511));
    assert_eq!(capacity(SIZE_MAX), Some(65535));
    for odd in [0, 1, SIZE_MIN / 2, SIZE_MIN + 1, 3 * SIZE_MIN, 2 * SIZE_MAX] {
        assert_eq!(capacity(odd), None, "{odd}");
    }
}

#[test]
fn a_message_that_does_not_fit_before_the_end_goes_to_the_start() {
    let (mut tail, mut head) = (tail(10), head(10));
    let first = tail.reserve(7 * UNIT).unwrap();
    assert_eq!((first.offset(10), first.skipped), (UNIT as u64, 0));
    assert_eq!(
        tail.reserve(4 * UNIT),
        None,
        "3 are free at the end, none at the start"
    );
    assert!(head.arrive(&first));
    head.free(&first);
    assert!(!tail.release(head.tell()), "it may still be written");
    assert!(tail.land(&first));
    let second = tail.reserve(4 * UNIT).unwrap();
    assert_eq!((second.first, second.skipped, second.unit(10)), (10, 3, 1));
    assert!(head.arrive(&second));
    head.free(&second);
    assert_eq!(head.tell(), 14, "what was skipped is free with it");
}

#[test]
fn a_copy_is_known_as_one_for_ever() {
    let (mut tail, mut head) = (tail(4), head(4));
    let place = tail.reserve(1).unwrap();
    tail.land(&place);
    assert!(head.arrive(&place));
    assert!(!head.arrive(&place), "while it is there");
    head.free(&place);
    assert!(!head.arrive(&place), "when it is free");
    for _ in 0..8 {
        assert!(tail.release(head.tell()));
        let next = tail.reserve(UNIT).unwrap();
        tail.land(&next);
        assert!(head.arrive(&next));
        assert!(!head.arrive(&place), "when others have its units");
        head.free(&next);
    }
}

#[test]
fn places_that_no_tail_gives_are_refused() {
    let mut head = head(10);
    let odd = [
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
    for (first, skipped, units) in odd {
        let place = Place {
            first,
            skipped,
            units,
        };
        assert!(!head.arrive(&place), "{place:?}");
        head.free(&place);
    }
    assert_eq!(head.tell(), 0);
}

#[test]
fn what_has_not_come_is_not_freed() {
    let (mut tail, mut head) = (tail(4), head(4));
    let place = tail.reserve(1).unwrap();
    head.free(&place);
    assert!(head.arrive(&place));
}

#[test]
fn a_writer_believes_no_head_beyond_its_tail() {
    let mut tail = tail(4);
    let place = tail.reserve(1).unwrap();
    tail.land(&place);
    assert!(!tail.release(2));
    assert!(tail.release(1));
    assert!(!tail.release(0), "old news");
}

#[test]
fn who_waits_is_served_in_order() {
    let mut fifo = Fifo::new(vec![0; 3]);
    for round in 0..4 {
        assert!(fifo.push(round) && fifo.push(round + 10));
        assert!(!fifo.is_empty());
        let first = fifo.pop().unwrap();
        assert_eq!(first, round);
        assert!(
            fifo.put_back(first) && fifo.push(round + 20) && !fifo.push(0) && !fifo.put_back(0)
        );
        let all: Vec<u16> = std::iter::from_fn(|| fifo.pop()).collect();
        assert_eq!(all, [round, round + 10, round + 20]);
        assert!(fifo.is_empty());
    }
    assert!(!Fifo::new(Vec::new()).push(1));
}

/// What may happen to a ring.
#[derive(Clone, Debug)]
enum Step {
    Write(usize),
    /// A message that may be written arrives, perhaps not for the first time.
    Arrive(prop::sample::Index),
    /// Its writer knows that it came.
    Land(prop::sample::Index),
    Free(prop::sample::Index),
    Tell,
    /// Something that was told arrives, perhaps late.
    Hear(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..=12 * UNIT).prop_map(Step::Write),
        4 => any::<prop::sample::Index>().prop_map(Step::Arrive),
        3 => any::<prop::sample::Index>().prop_map(Step::Land),
        3 => any::<prop::sample::Index>().prop_map(Step::Free),
        2 => Just(Step::Tell),
        2 => any::<prop::sample::Index>().prop_map(Step::Hear),
    ]
}

proptest! {
    /// Whatever comes in whatever order, and however often: each message is taken once, no two that are
    /// not freed share a unit, none is written where another may still be written, and in the end all of
    /// the ring is free again.
    #[test]
    fn nothing_is_lost_or_taken_twice(steps in prop::collection::vec(step(), 0..400)) {
        const CAPACITY: u32 = 37;
        let (mut tail, mut head) = (tail(CAPACITY), head(CAPACITY));
        let (mut writing, mut come, mut taken, mut freed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut told = vec![0];
        let mut owners = [None; CAPACITY as usize];
        for step in steps {
            match step {
                Step::Write(bytes) => {
                    let Some(place) = tail.reserve(bytes) else { continue };
                    for unit in place.begin()..place.end() {
                        let owner = &mut owners[(unit % u64::from(CAPACITY)) as usize];
                        let reusable = owner.is_none_or(|(old, skipped): (Place, bool)| {
                            freed.contains(&old) && (skipped || !writing.contains(&old))
                        });
                        prop_assert!(reusable, "{place:?} takes what {owner:?} has");
                        *owner = Some((place, unit < place.first));
                    }
                    writing.push(place);
                }
                Step::Arrive(which) if !writing.is_empty() => {
                    let place = *which.get(&writing);
                    let first = !come.contains(&place);
                    prop_assert_eq!(head.arrive(&place), first);
                    if first {
                        come.push(place);
                        taken.push(place);
                    }
                }
                Step::Land(which) if !writing.is_empty() => {
                    let index = which.index(writing.len());
                    if come.contains(&writing[index]) {
                        tail.land(&writing.swap_remove(index));
                    }
                }
                Step::Free(which) if !taken.is_empty() => {
                    let place = taken.swap_remove(which.index(taken.len()));
                    head.free(&place);
                    freed.push(place);
                }
                Step::Tell => told.push(head.tell()),
                Step::Hear(which) => {
                    tail.release(told[which.index(told.len())]);
                }
                _ => {}
            }
        }
        for place in &writing {
            if head.arrive(place) {
                taken.push(*place);
            }
            tail.land(place);
        }
        taken.iter().for_each(|place| head.free(place));
        tail.release(head.tell());
        prop_assert_eq!((tail.free, head.head), (tail.next, tail.next));
    }

    /// A writer that waits for room always gets it when all was freed that it was not told of because it
    /// was too little to tell.
    #[test]
    fn what_is_not_worth_telling_does_not_block(lengths in prop::collection::vec(1..=MESSAGE_MAX, 1..200)) {
        let capacity = capacity(SIZE_MIN).unwrap();
        let (mut tail, mut head) = (tail(capacity), head(capacity));
        for len in lengths {
            let place = tail.reserve(len);
            prop_assert!(place.is_some(), "{len} bytes");
            let place = place.unwrap();
            prop_assert!(head.arrive(&place));
            tail.land(&place);
            head.free(&place);
            if head.owes() {
                tail.release(head.tell());
            }
        }
    }

    /// No place that a peer could name makes the reader fail or forget what it has.
    #[test]
    fn any_place_is_survived(first: u64, skipped: u32, units: u32) {
        let mut head = head(37);
        let place = Place { first, skipped, units };
        if head.arrive(&place) {
            prop_assert!(place.end() <= 37);
        }
        head.free(&place);
        prop_assert!(head.tell() <= 37);
    }
}
