// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memories that several workers share, and their scheduler. A turn is an access to one word.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::error::Lost;
use crate::layout::{bytes, memory, new_table, within, words, WORD};
use crate::transport::{Request, Transport, BATCH, BYTES};

/// The memories and the workers.
#[derive(Debug)]
pub(super) struct World {
    memories: usize,
    seed: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Words of each memory.
    words: Vec<Vec<u64>>,
    rng: SmallRng,
    /// Probability that the worker with the turn keeps it.
    stay: f64,
    /// Turns that were taken.
    now: u64,
    /// Workers that are not there yet.
    missing: usize,
    /// Workers that are there and have not ended.
    alive: Vec<usize>,
    /// Whose turn it is.
    turn: usize,
}

impl World {
    /// With an empty table in memories of these sizes.
    pub(super) fn new(sizes: &[u64], groups: u32, seed: u64) -> Arc<Self> {
        let memory = |&size: &u64| {
            let mut memory = words(&new_table(size, groups));
            memory.resize(size as usize / WORD, u64::MAX);
            memory
        };
        let mut rng = SmallRng::seed_from_u64(seed);
        // Sometimes all go on side by side, sometimes others do much while one does little.
        let stay = 1.0 - 10_f64.powf(rng.random_range(-2.5..-0.3));
        Arc::new(Self {
            memories: sizes.len(),
            seed,
            state: Mutex::new(State {
                words: sizes.iter().map(memory).collect(),
                rng,
                stay,
                now: 0,
                missing: 0,
                alive: Vec::new(),
                turn: 0,
            }),
            changed: Condvar::new(),
        })
    }

    /// Sets the number of workers.
    pub(super) fn expect(&self, workers: usize) {
        self.lock().missing = workers;
    }

    pub(super) fn now(&self) -> u64 {
        self.lock().now
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits for the turn of a worker.
    fn turn(&self, id: usize) -> MutexGuard<'_, State> {
        let waits = |state: &mut State| state.missing > 0 || state.turn != id;
        self.changed.wait_while(self.lock(), waits).unwrap()
    }
}

impl State {
    /// Passes the turn to a random worker.
    fn pass(&mut self) {
        let stays = self.alive.contains(&self.turn) && self.rng.random_bool(self.stay);
        if !stays && !self.alive.is_empty() {
            let next = self.rng.random_range(0..self.alive.len());
            self.turn = self.alive[next];
        }
    }

    fn word(&mut self, place: u64) -> &mut u64 {
        assert_eq!(place % WORD as u64, 0, "a word begins elsewhere");
        &mut self.words[memory(place)][within(place) as usize / WORD]
    }
}

/// The hold of one worker.
#[derive(Debug)]
pub(super) struct Turns {
    world: Arc<World>,
    /// Its number, unless it is alone.
    id: Option<usize>,
    /// Turns until it is killed.
    left: Option<u64>,
    /// Chooses which memory is faster.
    rng: SmallRng,
}

impl Turns {
    pub(super) fn new(world: &Arc<World>, id: usize, left: Option<u64>) -> Self {
        Self {
            world: world.clone(),
            id: Some(id),
            left,
            rng: SmallRng::seed_from_u64(world.seed ^ id as u64),
        }
    }

    /// Returns the turns of a single worker, which never waits.
    pub(super) fn alone(world: &Arc<World>) -> Self {
        Self {
            world: world.clone(),
            id: None,
            left: None,
            rng: SmallRng::seed_from_u64(world.seed),
        }
    }

    /// Waits until all workers are there.
    pub(super) fn begin(&mut self) {
        let mut state = self.world.lock();
        state.missing -= 1;
        state.alive.extend(self.id);
        if state.missing == 0 {
            state.alive.sort_unstable();
            state.pass();
        }
        drop(state);
        self.world.changed.notify_all();
    }

    fn request(&mut self, request: &mut Request<'_>) -> Result<(), Lost> {
        match request {
            Request::Read { place, into } => {
                let mut words = (*place..).step_by(WORD).zip(into.chunks_mut(WORD));
                words.try_for_each(|(place, into)| {
                    let word = self.change(place, |word| word)?;
                    into.copy_from_slice(&bytes(&[word]));
                    Ok(())
                })
            }
            Request::Write { place, from } => {
                let mut words = (*place..).step_by(WORD).zip(words(from));
                words.try_for_each(|(place, word)| self.change(place, |_| word).map(drop))
            }
            Request::CompareSwap {
                place,
                expected,
                new,
                found,
            } => {
                let swapped = |word| if word == *expected { *new } else { word };
                self.change(*place, swapped).map(|was| **found = was)
            }
            Request::FetchAdd {
                place,
                operand,
                found,
            } => {
                let sum = |word: u64| word.wrapping_add(*operand);
                self.change(*place, sum).map(|was| **found = was)
            }
        }
    }

    /// Takes a turn for a word, and returns what it was.
    fn change(&mut self, place: u64, change: impl FnOnce(u64) -> u64) -> Result<u64, Lost> {
        let mut was = 0;
        self.step(|state| {
            let word = state.word(place);
            was = *word;
            *word = change(was);
        })?;
        Ok(was)
    }

    fn step(&mut self, act: impl FnOnce(&mut State)) -> Result<(), Lost> {
        let mut state = match self.id {
            Some(id) => self.world.turn(id),
            None => self.world.lock(),
        };
        match &mut self.left {
            Some(0) => return Err(Lost::because("killed")),
            Some(left) => *left -= 1,
            None => (),
        }
        state.now += 1;
        act(&mut state);
        let turn = state.turn;
        state.pass();
        if state.turn != turn {
            self.world.changed.notify_all();
        }
        Ok(())
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let mut state = self.world.lock();
            state.alive.retain(|other| *other != id);
            if state.turn == id {
                state.pass();
            }
            drop(state);
            self.world.changed.notify_all();
        }
    }
}

impl Transport for Turns {
    fn memories(&self) -> usize {
        self.world.memories
    }

    /// Does those of one memory in their order, and one memory after the other.
    fn run(&mut self, batch: &mut [Request<'_>]) -> Result<(), Lost> {
        assert!(batch.len() <= BATCH);
        assert!(batch.iter().map(|request| request.len()).sum::<usize>() <= BYTES);
        let first = self.rng.random_range(0..self.world.memories);
        for turn in 0..self.world.memories {
            let number = (first + turn) % self.world.memories;
            let mut here = batch
                .iter_mut()
                .filter(|request| memory(request.place()) == number);
            here.try_for_each(|request| self.request(request))?;
        }
        Ok(())
    }
}
