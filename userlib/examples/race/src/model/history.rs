// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Check of a history for linearizability (algorithm of Wing and Gong).
//!
//! A history is linearizable if the operations of each key have an order in which a plain variable returns the same
//! results. An operation is ordered at some time between its start and its end.

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
    /// `Exists` or `NotFound`.
    Rejected,
    Value(Option<u8>),
}

/// Operation with its result and its time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) key: u8,
    pub(super) call: Call,
    /// `None` if its worker was killed: the operation then takes effect at any later time, or never.
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
        _ => (Outcome::Rejected, value),
    }
}

/// Checks a history.
///
/// # Errors
/// Describes the operations of a key that have no order.
pub(super) fn check(events: &[Event]) -> Result<(), String> {
    let mut keys: BTreeMap<u8, Vec<Event>> = BTreeMap::new();
    for event in events {
        keys.entry(event.key).or_default().push(*event);
    }
    for events in keys.values() {
        if !is_linearizable(events, 0, None, &mut HashSet::new()) {
            return Err(format!("not linearizable: {events:#?}"));
        }
    }
    Ok(())
}

/// Returns `true` if the events that are not in the bit set `done` have an order that starts at `value`. `visited` has
/// the states without an order.
fn is_linearizable(
    events: &[Event],
    done: u64,
    value: Option<u8>,
    visited: &mut HashSet<(u64, Option<u8>)>,
) -> bool {
    let remaining = || (0..events.len()).filter(|i| done & (1 << i) == 0);
    if remaining().all(|i| events[i].outcome.is_none()) {
        return true;
    }
    if !visited.insert((done, value)) {
        return false;
    }
    let ends = remaining()
        .filter(|&i| events[i].outcome.is_some())
        .map(|i| events[i].end);
    let first_end = ends.min().unwrap_or(u64::MAX);
    // An event that starts at the step at which another one ends takes effect one step later at the earliest.
    remaining()
        .filter(|&i| events[i].start < first_end)
        .any(|i| {
            let (result, next) = step(value, events[i].call);
            let fits = events[i].outcome.is_none_or(|outcome| outcome == result);
            fits && is_linearizable(events, done | (1 << i), next, visited)
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
    fn two_inserts_without_a_delete_are_rejected() {
        let insert = |start, end| event(Call::Insert(1), Some(Outcome::Done), start, end);
        assert!(check(&[insert(0, 5)]).is_ok());
        assert!(check(&[insert(0, 5), insert(3, 9)]).is_err());
        let delete = event(Call::Delete, Some(Outcome::Done), 2, 7);
        assert!(check(&[insert(0, 5), delete, insert(3, 9)]).is_ok());
    }

    #[test]
    fn search_after_an_insert_must_find_its_value() {
        let insert = event(Call::Insert(1), Some(Outcome::Done), 0, 5);
        let search = |start, value| event(Call::Search, Some(Outcome::Value(value)), start, 9);
        assert!(check(&[insert, search(4, None)]).is_ok());
        assert!(check(&[insert, search(5, None)]).is_err());
        assert!(check(&[insert, search(6, None)]).is_err());
        assert!(check(&[insert, search(6, Some(2))]).is_err());
    }

    #[test]
    fn search_after_an_update_must_not_find_the_old_value() {
        let insert = event(Call::Insert(1), Some(Outcome::Done), 0, 3);
        let update = event(Call::Update(2), Some(Outcome::Done), 3, 5);
        let search = |start| event(Call::Search, Some(Outcome::Value(Some(1))), start, 9);
        assert!(check(&[insert, update, search(4)]).is_ok());
        assert!(check(&[insert, update, search(5)]).is_err());
    }

    #[test]
    fn unfinished_insert_may_take_effect_or_not() {
        let insert = event(Call::Insert(1), None, 0, 5);
        for value in [None, Some(1)] {
            let search = event(Call::Search, Some(Outcome::Value(value)), 6, 9);
            assert!(check(&[insert, search]).is_ok());
        }
    }
}
