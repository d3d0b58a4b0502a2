// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The table without machines: workers take turns for each word, in an order that a seed determines, and may be killed
//! in each turn. The results must be linearizable.

mod history;
mod memory;

use std::sync::Arc;
use std::thread;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::error::Error;
use crate::layout::{entry_place, Entry, ALLOCATED};
use crate::table::{Report, Table};
use crate::transport::{Request, Transport};
use history::{Call, Event, Outcome};
use memory::{Turns, World};

/// One group: two pairs, and 21 slots in all.
const GROUPS: u32 = 1;

/// Bytes of the memories.
const SIZES: [u64; 2] = [2 << 20; 2];

/// Operations of a worker.
type Script = Vec<(Call, u8)>;

fn key(number: u8) -> Vec<u8> {
    vec![b'k', number]
}

/// Executes an operation. Returns its result, or `None` if the worker was killed meanwhile.
fn act(table: &mut Table<Turns>, call: Call, number: u8) -> Option<Outcome> {
    let key = key(number);
    let done = match call {
        Call::Search => {
            let value = table.search(&key);
            return match value {
                Ok(value) => Some(Outcome::Value(value.map(|value| value[0]))),
                Err(Error::Lost(_)) => None,
                Err(other) => panic!("{other}"),
            };
        }
        Call::Insert(value) => table.insert(&key, &[value]),
        Call::Update(value) => table.update(&key, &[value]),
        Call::Delete => table.delete(&key),
    };
    match done {
        Ok(()) => Some(Outcome::Done),
        Err(Error::Exists | Error::NotFound) => Some(Outcome::Refused),
        Err(Error::Lost(_)) => None,
        Err(other) => panic!("{other}"),
    }
}

/// Does a script, unless the worker is killed before its end.
fn work(mut turns: Turns, script: Script, world: &World) -> Vec<Event> {
    turns.begin();
    let Ok(mut table) = Table::open(turns) else {
        return Vec::new();
    };
    let mut events = Vec::new();
    for (call, key) in script {
        let start = world.now();
        let outcome = act(&mut table, call, key);
        events.push(Event {
            key,
            call,
            outcome,
            start,
            end: world.now(),
        });
        if outcome.is_none() {
            break;
        }
    }
    events
}

/// Runs scripts beside each other on a table that has some keys; each worker is killed after so many steps, if any.
fn run(seed: u64, kept: u8, scripts: &[Script], kills: &[Option<u64>]) -> (Vec<Event>, Report) {
    let world = World::new(&SIZES, GROUPS, seed);
    let mut table = Table::open(Turns::alone(&world)).unwrap();
    for number in 0..kept {
        table.insert(&key(100 + number), &[number]).unwrap();
    }
    world.expect(scripts.len());
    let workers: Vec<_> = (0..)
        .zip(scripts.iter().cloned().zip(kills))
        .map(|(id, (script, kill))| {
            let (turns, world) = (Turns::new(&world, id, *kill), Arc::clone(&world));
            thread::spawn(move || work(turns, script, &world))
        })
        .collect();
    let events = workers
        .into_iter()
        .flat_map(|worker| worker.join().unwrap())
        .collect();
    let mut table = Table::open(Turns::alone(&world)).unwrap();
    for number in 0..kept {
        assert_eq!(
            table.search(&key(100 + number)).unwrap(),
            Some(vec![number])
        );
    }
    (
        look_at_the_end(&mut table, &world, events),
        table.check(|_| ()).unwrap(),
    )
}

/// Appends a search of each key: the final content of the table must match the history.
fn look_at_the_end(table: &mut Table<Turns>, world: &World, mut events: Vec<Event>) -> Vec<Event> {
    let mut keys: Vec<_> = events.iter().map(|event| event.key).collect();
    keys.sort_unstable();
    keys.dedup();
    for key in keys {
        let start = world.now();
        let outcome = act(table, Call::Search, key);
        let end = world.now();
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

/// Inserts of keys of its own, for a table that grows.
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

    /// Few keys, so that all want the same; the table splits in some.
    #[test]
    fn operations_are_as_if_each_was_one_step(
        seed: u64,
        kept in 0..22u8,
        scripts in prop::collection::vec(calls(2, 6), 3),
        kills in prop::collection::vec(kill(), 3),
    ) {
        let (events, _) = run(seed, kept, &scripts, &kills);
        history::check(&events).unwrap();
    }

    /// A worker that only searches has an old copy of the directory.
    #[test]
    fn searches_find_what_is_there_by_now(
        seed: u64,
        kept in 18..22u8,
        first in inserts(0),
        then in calls(1, 8),
        searches in 1..20usize,
    ) {
        let changes = [vec![(Call::Insert(0), 0)], first, then].concat();
        let searches = vec![(Call::Search, 0); searches];
        let scripts = [changes, searches.clone(), searches];
        let (events, _) = run(seed, kept, &scripts, &[None; 3]);
        history::check(&events).unwrap();
    }

    /// Segments split while their keys are changed.
    #[test]
    fn splits_lose_nothing(
        seed: u64,
        kept in 16..22u8,
        inserts in inserts(0),
        others in (calls(2, 8), calls(2, 8)),
        killed: Index,
        kill in kill(),
    ) {
        let scripts = [inserts, others.0, others.1];
        let mut kills = [None; 3];
        kills[killed.index(3)] = kill;
        let (events, _) = run(seed, kept, &scripts, &kills);
        history::check(&events).unwrap();
    }
}

/// At whichever step a worker that splits is killed, the next one does what is left.
#[test]
fn who_is_killed_in_a_split_holds_up_nobody() {
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
        assert!(done >= fill.len(), "the other worker has ended its script");
        history::check(&events).unwrap();
    }
    assert!(half_split > 0, "none was killed in the middle");
}

/// Far more than there is memory for.
#[test]
fn what_is_refused_takes_no_memory() {
    let world = World::new(&[512 << 10], GROUPS, 0);
    let mut table = Table::open(Turns::alone(&world)).unwrap();
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

/// The last key that is inserted before there is no room, and what there is in the table then.
fn fill(sizes: &[u64]) -> (u32, Report) {
    let world = World::new(sizes, 8, 0);
    let mut table = Table::open(Turns::alone(&world)).unwrap();
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
    unreachable!("memory has an end")
}

#[test]
fn a_table_takes_all_its_memories() {
    let (few, _) = fill(&[512 << 10]);
    let (more, report) = fill(&[512 << 10, 1 << 20, 512 << 10]);
    let blocks = |i: usize| report.memories[i].blocks;
    assert!(more > 3 * few, "{few}, {more}");
    assert!(blocks(1) > blocks(0).max(blocks(2)), "{report:?}");
}

#[test]
fn a_table_is_spread_over_its_memories() {
    let (_, report) = fill(&[1 << 20; 3]);
    let even = |part: usize, all: usize| (all / 6..=all / 2).contains(&part);
    for share in &report.memories {
        assert!(even(share.blocks, report.keys), "{report:?}");
        assert!(even(share.segments, report.segments), "{report:?}");
    }
}

#[test]
fn a_directory_that_leads_nowhere_is_noticed() {
    let world = World::new(&SIZES, GROUPS, 0);
    let mut turns = Turns::alone(&world);
    let entry = Entry::new(1, ALLOCATED).0.to_le_bytes();
    let (place, from) = (entry_place(0), &entry[..]);
    turns.run(&mut [Request::Write { place, from }]).unwrap();
    let found = Table::open(turns).unwrap().search(&key(1));
    assert!(matches!(found, Err(Error::Damaged(_))), "{found:?}");
}
