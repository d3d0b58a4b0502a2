// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Model test of the table in simulated memories. A seed determines the order of all accesses to words. Workers may be
//! killed at any access. The results must be linearizable.

mod history;
mod scheduler;

use std::sync::Arc;
use std::thread;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::error::Error;
use crate::layout::{entry_addr, Entry, ALLOC_START};
use crate::table::{Report, Table};
use crate::transport::{Request, Transport};
use history::{Call, Event, Outcome};
use scheduler::{Scheduler, StepTransport};

/// Groups of a segment. One group has two bucket pairs and 21 slots.
const GROUPS: u32 = 1;

/// Bytes of each memory.
const SIZES: [u64; 2] = [2 << 20; 2];

/// Operations of a worker.
type Script = Vec<(Call, u8)>;

fn key(number: u8) -> Vec<u8> {
    vec![b'k', number]
}

/// Executes an operation. Returns its result, or `None` if the worker was killed meanwhile.
fn execute(table: &mut Table<StepTransport>, call: Call, number: u8) -> Option<Outcome> {
    let key = key(number);
    let result = match call {
        Call::Search => {
            let value = table.search(&key);
            return match value {
                Ok(value) => Some(Outcome::Value(value.map(|value| value[0]))),
                Err(Error::Transport(_)) => None,
                Err(other) => panic!("{other}"),
            };
        }
        Call::Insert(value) => table.insert(&key, &[value]),
        Call::Update(value) => table.update(&key, &[value]),
        Call::Delete => table.delete(&key),
    };
    match result {
        Ok(()) => Some(Outcome::Done),
        Err(Error::Exists | Error::NotFound) => Some(Outcome::Rejected),
        Err(Error::Transport(_)) => None,
        Err(other) => panic!("{other}"),
    }
}

/// Executes a script until its end, or until the worker is killed.
fn run_script(mut transport: StepTransport, script: Script, scheduler: &Scheduler) -> Vec<Event> {
    transport.start();
    let Ok(mut table) = Table::open(transport) else {
        return Vec::new();
    };
    let mut events = Vec::new();
    for (call, key) in script {
        let start = scheduler.now();
        let outcome = execute(&mut table, call, key);
        events.push(Event {
            key,
            call,
            outcome,
            start,
            end: scheduler.now(),
        });
        if outcome.is_none() {
            break;
        }
    }
    events
}

/// Runs scripts concurrently on a table with `initial` keys, which must remain. The worker of a script is killed after
/// a number of steps, or never.
fn run(seed: u64, initial: u8, scripts: &[Script], kills: &[Option<u64>]) -> (Vec<Event>, Report) {
    let scheduler = Scheduler::new(&SIZES, GROUPS, seed);
    let mut table = Table::open(StepTransport::alone(&scheduler)).unwrap();
    for number in 0..initial {
        table.insert(&key(100 + number), &[number]).unwrap();
    }
    scheduler.expect(scripts.len());
    let workers: Vec<_> = (0..)
        .zip(scripts.iter().cloned().zip(kills))
        .map(|(id, (script, kill))| {
            let (transport, scheduler) = (
                StepTransport::new(&scheduler, id, *kill),
                Arc::clone(&scheduler),
            );
            thread::spawn(move || run_script(transport, script, &scheduler))
        })
        .collect();
    let events = workers
        .into_iter()
        .flat_map(|worker| worker.join().unwrap())
        .collect();
    let mut table = Table::open(StepTransport::alone(&scheduler)).unwrap();
    for number in 0..initial {
        assert_eq!(
            table.search(&key(100 + number)).unwrap(),
            Some(vec![number])
        );
    }
    (
        search_all_keys(&mut table, &scheduler, events),
        table.check(|_| ()).unwrap(),
    )
}

/// Appends a search of each key: the final content of the table must match the history.
fn search_all_keys(
    table: &mut Table<StepTransport>,
    scheduler: &Scheduler,
    mut events: Vec<Event>,
) -> Vec<Event> {
    let mut keys: Vec<_> = events.iter().map(|event| event.key).collect();
    keys.sort_unstable();
    keys.dedup();
    for key in keys {
        let start = scheduler.now();
        let outcome = execute(table, Call::Search, key);
        let end = scheduler.now();
        events.push(Event {
            key,
            call: Call::Search,
            outcome,
            start,
            end,
        });
    }
    events
}

fn calls(keys: u8, len: usize) -> impl Strategy<Value = Script> {
    let call = prop_oneof![
        Just(Call::Search),
        any::<u8>().prop_map(Call::Insert),
        any::<u8>().prop_map(Call::Update),
        Just(Call::Delete),
    ];
    prop::collection::vec((call, 0..keys), 1..=len)
}

/// Inserts of keys that no other worker has, so that segments split.
fn inserts(worker: u8) -> impl Strategy<Value = Script> {
    let first = 10 + worker * 12;
    (1..12u8).prop_map(move |count| {
        (first..first + count)
            .map(|key| (Call::Insert(key), key))
            .collect()
    })
}

fn kill() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![Just(None), (0..1500u64).prop_map(Some)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Workers use the same few keys. Segments split for some values of `initial`.
    #[test]
    fn concurrent_operations_on_few_keys_are_linearizable(
        seed: u64,
        initial in 0..22u8,
        scripts in prop::collection::vec(calls(2, 6), 3),
        kills in prop::collection::vec(kill(), 3),
    ) {
        let (events, _) = run(seed, initial, &scripts, &kills);
        history::check(&events).unwrap();
    }

    /// Workers that only search have an outdated copy of the directory.
    #[test]
    fn searches_with_an_outdated_directory_are_linearizable(
        seed: u64,
        initial in 18..22u8,
        first in inserts(0),
        then in calls(1, 8),
        searches in 1..20usize,
    ) {
        let changes = [vec![(Call::Insert(0), 0)], first, then].concat();
        let searches = vec![(Call::Search, 0); searches];
        let scripts = [changes, searches.clone(), searches];
        let (events, _) = run(seed, initial, &scripts, &[None; 3]);
        history::check(&events).unwrap();
    }

    /// Segments split while their keys are changed.
    #[test]
    fn operations_during_splits_are_linearizable(
        seed: u64,
        initial in 16..22u8,
        inserts in inserts(0),
        others in (calls(2, 8), calls(2, 8)),
        killed: Index,
        kill in kill(),
    ) {
        let scripts = [inserts, others.0, others.1];
        let mut kills = [None; 3];
        kills[killed.index(3)] = kill;
        let (events, _) = run(seed, initial, &scripts, &kills);
        history::check(&events).unwrap();
    }
}

/// The next worker completes a split, at whichever step its worker was killed.
#[test]
fn worker_killed_in_a_split_does_not_block_others() {
    let fill: Script = (0..40).map(|key| (Call::Insert(key), key)).collect();
    let mut half_split = 0;
    for steps in (0..1600).step_by(7) {
        let scripts = [fill.clone(), vec![]];
        let (events, report) = run(steps, 18, &scripts, &[Some(steps), None]);
        history::check(&events).unwrap();
        half_split += report.frozen;
        let scripts = [fill.clone(), fill.clone()];
        let (events, _) = run(steps, 18, &scripts, &[Some(steps), None]);
        let done = events
            .iter()
            .filter(|event| event.outcome.is_some())
            .count();
        assert!(
            done >= fill.len(),
            "the other worker did not end its script"
        );
        history::check(&events).unwrap();
    }
    assert!(half_split > 0, "no worker was killed during a split");
}

/// The rejected operations would need more memory than there is.
#[test]
fn rejected_insert_and_update_allocate_no_memory() {
    let scheduler = Scheduler::new(&[512 << 10], GROUPS, 0);
    let mut table = Table::open(StepTransport::alone(&scheduler)).unwrap();
    table.insert(&key(1), &[1]).unwrap();
    for _ in 0..10_000 {
        let exists = table.insert(&key(1), &[2]);
        assert!(matches!(exists, Err(Error::Exists)), "{exists:?}");
        let missing = table.update(&key(2), &[2]);
        assert!(matches!(missing, Err(Error::NotFound)), "{missing:?}");
    }
    table.insert(&key(2), &[2]).unwrap();
    assert_eq!(table.search(&key(1)).unwrap(), Some(vec![1]));
    assert_eq!(table.search(&key(2)).unwrap(), Some(vec![2]));
}

/// Inserts keys until the table is full. Returns their number, and the content of the table.
fn fill(sizes: &[u64]) -> (u32, Report) {
    let scheduler = Scheduler::new(sizes, 8, 0);
    let mut table = Table::open(StepTransport::alone(&scheduler)).unwrap();
    for number in 0.. {
        match table.insert(&u32::to_le_bytes(number), &[0; 200]) {
            Ok(()) => (),
            Err(Error::Full) => {
                let report = table.check(|_| ()).unwrap();
                assert_eq!(report.keys, number as usize);
                return (number, report);
            }
            Err(other) => panic!("{other}"),
        }
    }
    unreachable!("the memories are finite")
}

#[test]
fn full_table_uses_memories_of_different_sizes() {
    let (few, _) = fill(&[512 << 10]);
    let (more, report) = fill(&[512 << 10, 1 << 20, 512 << 10]);
    let blocks = |i: usize| report.memories[i].blocks;
    assert!(more > 3 * few, "{few}, {more}");
    assert!(blocks(1) > blocks(0).max(blocks(2)), "{report:?}");
}

#[test]
fn table_is_spread_evenly_over_equal_memories() {
    let (_, report) = fill(&[1 << 20; 3]);
    let even = |part: usize, all: usize| (all / 6..=all / 2).contains(&part);
    for share in &report.memories {
        assert!(even(share.blocks, report.keys), "{report:?}");
        assert!(even(share.segments, report.segments), "{report:?}");
    }
}

#[test]
fn directory_without_a_segment_is_damaged() {
    let scheduler = Scheduler::new(&SIZES, GROUPS, 0);
    let mut transport = StepTransport::alone(&scheduler);
    let entry = Entry::new(1, ALLOC_START).0.to_le_bytes();
    let (addr, from) = (entry_addr(0), &entry[..]);
    transport.run(&mut [Request::Write { addr, from }]).unwrap();
    let found = Table::open(transport).unwrap().search(&key(1));
    assert!(matches!(found, Err(Error::Damaged(_))), "{found:?}");
}
