// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulated memories, and a scheduler of the workers that access them. A step is an access to one word by the worker
//! that has the turn.
//!
//! # Locking
//!
//! `Scheduler::state` has the memories and the turn. A worker sleeps on `Scheduler::changed` until it has the turn.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::error::TransportError;
use crate::layout::{bytes, memory_of, new_table, offset_in_memory, words, WORD_BYTES};
use crate::transport::{Request, Transport, BATCH_BYTES_MAX, BATCH_MAX};

/// Memories and workers.
#[derive(Debug)]
pub(super) struct Scheduler {
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
    /// Probability that the worker with the turn keeps it after a step.
    keep_turn: f64,
    /// Steps so far.
    now: u64,
    /// Workers that have not started.
    missing: usize,
    /// Workers that have started and not ended.
    alive: Vec<usize>,
    /// Worker that has the turn.
    turn: usize,
}

impl Scheduler {
    /// Creates memories of these sizes, in bytes, with an empty table.
    pub(super) fn new(sizes: &[u64], groups: u32, seed: u64) -> Arc<Self> {
        let memory = |&size: &u64| {
            let mut memory = words(&new_table(size, groups));
            memory.resize(size as usize / WORD_BYTES, u64::MAX);
            memory
        };
        let mut rng = SmallRng::seed_from_u64(seed);
        // A worker executes 2 … 316 steps in a row on average, depending on the seed.
        let keep_turn = 1.0 - 10_f64.powf(rng.random_range(-2.5..-0.3));
        Arc::new(Self {
            memories: sizes.len(),
            seed,
            state: Mutex::new(State {
                words: sizes.iter().map(memory).collect(),
                rng,
                keep_turn,
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

    /// Returns the number of steps so far.
    pub(super) fn now(&self) -> u64 {
        self.lock().now
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until a worker has the turn.
    fn wait_turn(&self, id: usize) -> MutexGuard<'_, State> {
        let must_wait = |state: &mut State| state.missing > 0 || state.turn != id;
        self.changed.wait_while(self.lock(), must_wait).unwrap()
    }
}

impl State {
    /// Passes the turn to a random worker, or keeps it.
    fn pass_turn(&mut self) {
        let keep = self.alive.contains(&self.turn) && self.rng.random_bool(self.keep_turn);
        if !keep && !self.alive.is_empty() {
            let next = self.rng.random_range(0..self.alive.len());
            self.turn = self.alive[next];
        }
    }

    fn word(&mut self, addr: u64) -> &mut u64 {
        assert_eq!(addr % WORD_BYTES as u64, 0, "a word is aligned to 8 bytes");
        &mut self.words[memory_of(addr)][offset_in_memory(addr) as usize / WORD_BYTES]
    }
}

/// Transport of one worker.
#[derive(Debug)]
pub(super) struct StepTransport {
    scheduler: Arc<Scheduler>,
    /// Number of the worker; `None` for a worker that does not wait for its turn.
    id: Option<usize>,
    /// Steps until the worker is killed; `None` for never.
    remaining_steps: Option<u64>,
    /// Selects the memory whose requests execute first.
    rng: SmallRng,
}

impl StepTransport {
    /// Creates the transport of a worker, which is killed after some steps, or never.
    pub(super) fn new(scheduler: &Arc<Scheduler>, id: usize, remaining_steps: Option<u64>) -> Self {
        Self {
            scheduler: scheduler.clone(),
            id: Some(id),
            remaining_steps,
            rng: SmallRng::seed_from_u64(scheduler.seed ^ id as u64),
        }
    }

    /// Creates the transport of a single worker, which does not wait for its turn.
    pub(super) fn alone(scheduler: &Arc<Scheduler>) -> Self {
        Self {
            scheduler: scheduler.clone(),
            id: None,
            remaining_steps: None,
            rng: SmallRng::seed_from_u64(scheduler.seed),
        }
    }

    /// Adds the worker to the schedule. The first step waits until all workers have started.
    pub(super) fn start(&mut self) {
        let mut state = self.scheduler.lock();
        state.missing -= 1;
        state.alive.extend(self.id);
        if state.missing == 0 {
            state.alive.sort_unstable();
            state.pass_turn();
        }
        drop(state);
        self.scheduler.changed.notify_all();
    }

    /// Executes a request, word by word.
    fn execute(&mut self, request: &mut Request<'_>) -> Result<(), TransportError> {
        match request {
            Request::Read { addr, into } => {
                let mut words = (*addr..)
                    .step_by(WORD_BYTES)
                    .zip(into.chunks_mut(WORD_BYTES));
                words.try_for_each(|(addr, into)| {
                    let word = self.access(addr, |word| word)?;
                    into.copy_from_slice(&bytes(&[word]));
                    Ok(())
                })
            }
            Request::Write { addr, from } => {
                let mut words = (*addr..).step_by(WORD_BYTES).zip(words(from));
                words.try_for_each(|(addr, word)| self.access(addr, |_| word).map(drop))
            }
            Request::CompareSwap {
                addr,
                expected,
                new,
                old_value,
            } => {
                let swapped = |word| if word == *expected { *new } else { word };
                self.access(*addr, swapped).map(|old| **old_value = old)
            }
            Request::FetchAdd {
                addr,
                operand,
                old_value,
            } => {
                let sum = |word: u64| word.wrapping_add(*operand);
                self.access(*addr, sum).map(|old| **old_value = old)
            }
        }
    }

    /// Changes a word, in one step. Returns its previous value.
    fn access(
        &mut self,
        addr: u64,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<u64, TransportError> {
        let mut old_value = 0;
        self.step(|state| {
            let word = state.word(addr);
            old_value = *word;
            *word = change(old_value);
        })?;
        Ok(old_value)
    }

    /// Waits for the turn, and calls `act`.
    ///
    /// # Errors
    /// The worker is killed.
    fn step(&mut self, act: impl FnOnce(&mut State)) -> Result<(), TransportError> {
        let mut state = match self.id {
            Some(id) => self.scheduler.wait_turn(id),
            None => self.scheduler.lock(),
        };
        match &mut self.remaining_steps {
            Some(0) => return Err(TransportError::new("killed")),
            Some(remaining) => *remaining -= 1,
            None => (),
        }
        state.now += 1;
        act(&mut state);
        let turn = state.turn;
        state.pass_turn();
        if state.turn != turn {
            self.scheduler.changed.notify_all();
        }
        Ok(())
    }
}

impl Drop for StepTransport {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let mut state = self.scheduler.lock();
            state.alive.retain(|other| *other != id);
            if state.turn == id {
                state.pass_turn();
            }
            drop(state);
            self.scheduler.changed.notify_all();
        }
    }
}

impl Transport for StepTransport {
    fn memories(&self) -> usize {
        self.scheduler.memories
    }

    /// Executes the requests to one memory in order, one memory after the other.
    fn run(&mut self, batch: &mut [Request<'_>]) -> Result<(), TransportError> {
        assert!(batch.len() <= BATCH_MAX);
        assert!(batch.iter().map(|request| request.len()).sum::<usize>() <= BATCH_BYTES_MAX);
        let first = self.rng.random_range(0..self.scheduler.memories);
        for i in 0..self.scheduler.memories {
            let number = (first + i) % self.scheduler.memories;
            let mut requests = batch
                .iter_mut()
                .filter(|request| memory_of(request.addr()) == number);
            requests.try_for_each(|request| self.execute(request))?;
        }
        Ok(())
    }
}
