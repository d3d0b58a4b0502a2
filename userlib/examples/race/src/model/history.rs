// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Whether what workers saw is possible: whether there is an order of all operations of a key, each between its
//! beginning and its end, in which a plain variable gives the same answers (linearisability, by the search of Wing and
//! Gong).

use std::collections::{BTreeMap, HashSet};

/// Operation of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Search,
    Insert(u8),
    Update(u8),
    Delete,
}

/// Result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// The key exists, or does not.
    Refused,
    Value(Option<u8>),
}

/// An operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) key: u8,
    pub(super) call: Call,
    /// Nothing if its worker was killed: then it was done, or will be at any time, or never.
    pub(super) outcome: Option<Outcome>,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// Returns the result of an operation on a variable, and its new value.
fn step(value: Option<u8>, call: Call) -> (Outcome, Option<u8>) {
    match (call, value) {
        (Call::Search, _) => (Outcome::Value(value), value),
        (Call::Insert(new), None) | (Call::Update(new), Some(_)) => (Outcome::Done, Some(new)),
        (Call::Delete, Some(_)) => (Outcome::Done, None),
        _ => (Outcome::Refused, value),
    }
}

/// Returns a history that is not linearizable.
pub(super) fn check(events: &[Event]) -> Result<(), String> {
    let mut keys: BTreeMap<u8, Vec<Event>> = BTreeMap::new();
    for event in events {
        keys.entry(event.key).or_default().push(*event);
    }
    for events in keys.values() {
        if !is_possible(events, 0, None, &mut HashSet::new()) {
            return Err(format!("no order of these is possible: {events:#?}"));
        }
    }
    Ok(())
}

/// Returns `true` if there is an order of the events that are not in `done`.
fn is_possible(
    events: &[Event],
    done: u64,
    value: Option<u8>,
    dead: &mut HashSet<(u64, Option<u8>)>,
) -> bool {
    let left = || (0..events.len()).filter(|i| done & (1 << i) == 0);
    if left().all(|i| events[i].outcome.is_none()) {
        return true;
    }
    if !dead.insert((done, value)) {
        return false;
    }
    let ends = left()
        .filter(|&i| events[i].outcome.is_some())
        .map(|i| events[i].end);
    let first_end = ends.min().unwrap_or(u64::MAX);
    // An event that starts in the turn in which another ends acts in the next turn at the earliest.
    left().filter(|&i| events[i].start < first_end).any(|i| {
        let (answer, next) = step(value, events[i].call);
        let fits = events[i].outcome.is_none_or(|outcome| outcome == answer);
        fits && is_possible(events, done | (1 << i), next, dead)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(call: Call, outcome: Option<Outcome>, start: u64, end: u64) -> Event {
        Event {
            key: 0,
            call,
            outcome,
            start,
            end,
        }
    }

    #[test]
    fn two_cannot_both_insert() {
        let insert = |start, end| event(Call::Insert(1), Some(Outcome::Done), start, end);
        assert!(check(&[insert(0, 5)]).is_ok());
        assert!(check(&[insert(0, 5), insert(3, 9)]).is_err());
        let delete = event(Call::Delete, Some(Outcome::Done), 2, 7);
        assert!(check(&[insert(0, 5), delete, insert(3, 9)]).is_ok());
    }

    #[test]
    fn what_has_ended_stays_done() {
        let insert = event(Call::Insert(1), Some(Outcome::Done), 0, 5);
        let search = |start, value| event(Call::Search, Some(Outcome::Value(value)), start, 9);
        assert!(check(&[insert, search(4, None)]).is_ok());
        assert!(check(&[insert, search(5, None)]).is_err());
        assert!(check(&[insert, search(6, None)]).is_err());
        assert!(check(&[insert, search(6, Some(2))]).is_err());
    }

    #[test]
    fn what_was_replaced_is_gone() {
        let insert = event(Call::Insert(1), Some(Outcome::Done), 0, 3);
        let update = event(Call::Update(2), Some(Outcome::Done), 3, 5);
        let search = |start| event(Call::Search, Some(Outcome::Value(Some(1))), start, 9);
        assert!(check(&[insert, update, search(4)]).is_ok());
        assert!(check(&[insert, update, search(5)]).is_err());
    }

    #[test]
    fn who_was_killed_may_have_done_it_or_not() {
        let insert = event(Call::Insert(1), None, 0, 5);
        for value in [None, Some(1)] {
            let search = event(Call::Search, Some(Outcome::Value(value)), 6, 9);
            assert!(check(&[insert, search]).is_ok());
        }
    }
}
