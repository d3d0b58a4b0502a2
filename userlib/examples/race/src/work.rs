// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Worker: inserts own keys, then searches, updates, deletes and inserts own keys and keys that all workers share.
//!
//! It checks each result for its own keys, which no other worker changes. For a shared key it checks only that a value
//! belongs to the key.

use std::collections::HashMap;

use anyhow::{bail, ensure, Result};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::member::TableArgs;
use crate::table::Table;
use crate::transport::Transport;
use crate::workload::{Digest, Key, KeyChooser};

/// Inserted keys between two progress reports.
const PROGRESS_INTERVAL: u32 = 16;

/// Options of `kite-race work`.
#[derive(clap::Args)]
pub(crate) struct WorkArgs {
    #[command(flatten)]
    table: TableArgs,
    /// Number of this worker, unique among all workers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    worker: u32,
    /// Own keys, inserted first
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Keys that all workers share
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    shared: u32,
    /// Operations after the inserts
    #[arg(long, default_value_t = 1000)]
    operations: u64,
    /// Percent of the operations that are searches; half of the others are updates, the rest deletes or inserts
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
    searches: u32,
    /// Percent of the operations that use shared keys
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=100))]
    sharing: u32,
}

/// Result of a worker: the digest of its own keys.
#[derive(Debug, Serialize, Deserialize)]
struct Summary {
    worker: u32,
    #[serde(flatten)]
    own: Digest,
}

/// Operation on a key. `Toggle` deletes a key that is in the table, and inserts another one.
#[derive(Clone, Copy, Debug)]
enum Op {
    Search,
    Update,
    Toggle,
}

/// State of the worker.
struct Worker<'a> {
    args: &'a WorkArgs,
    table: Table<Box<dyn Transport>>,
    /// Expected values of the own keys that are in the table.
    own: HashMap<u32, Vec<u8>>,
    /// Version of the last value: unique among all workers.
    version: u64,
}

/// Runs the worker, and prints the digest of its own keys.
///
/// # Errors
/// A result is wrong, or the table cannot be reached.
pub(crate) fn run(args: &WorkArgs) -> Result<()> {
    let mut worker = Worker {
        args,
        table: args.table.open()?,
        own: HashMap::new(),
        version: u64::from(args.worker) << 32,
    };
    println!("begun");
    worker.insert_own_keys()?;
    println!("loaded");
    worker.run_mix()?;
    let (worker, own) = (args.worker, worker.search_own_keys()?);
    println!("{}", serde_json::to_string(&Summary { worker, own })?);
    Ok(())
}

impl Worker<'_> {
    /// Inserts all own keys in order, and prints the progress.
    fn insert_own_keys(&mut self) -> Result<()> {
        for number in 0..self.args.keys {
            self.run_on_own_key(number, Op::Toggle)?;
            if (number + 1) % PROGRESS_INTERVAL == 0 {
                println!("inserted {}", number + 1);
            }
        }
        Ok(())
    }

    /// Searches for all own keys. Returns the digest of those in the table.
    fn search_own_keys(&mut self) -> Result<Digest> {
        let mut digest = Digest::default();
        for number in 0..self.args.keys {
            self.run_on_own_key(number, Op::Search)?;
            if let Some(value) = self.own.get(&number) {
                digest.add(&self.own_key(number).bytes(), value);
            }
        }
        Ok(digest)
    }

    /// Runs the mix of operations.
    fn run_mix(&mut self) -> Result<()> {
        let seed = self.args.worker.into();
        let mut own = KeyChooser::new(self.args.keys, seed);
        let mut shared = KeyChooser::new(self.args.shared, seed);
        for _ in 0..self.args.operations {
            let op = match () {
                () if own.chance(self.args.searches) => Op::Search,
                () if own.chance(50) => Op::Update,
                () => Op::Toggle,
            };
            match own.chance(self.args.sharing) {
                true => self.run_on_shared_key(shared.next_key(), op)?,
                false => self.run_on_own_key(own.next_key(), op)?,
            }
        }
        Ok(())
    }

    fn own_key(&self, number: u32) -> Key {
        let owner = self.args.worker;
        Key { owner, number }
    }

    fn next_value(&mut self, key: Key) -> Vec<u8> {
        self.version += 1;
        key.value(self.version)
    }

    /// Runs an operation on an own key. No other worker changes the key, so the result is known. An update of a key
    /// that is not in the table inserts it.
    fn run_on_own_key(&mut self, number: u32, op: Op) -> Result<()> {
        let key = self.own_key(number);
        let (bytes, value) = (key.bytes(), self.next_value(key));
        let exists = self.own.contains_key(&number);
        match (op, exists) {
            (Op::Search, _) => {
                let found = self.table.search(&bytes)?;
                ensure!(
                    found.as_ref() == self.own.get(&number),
                    "{key:?} has {found:?}"
                );
                return Ok(());
            }
            (Op::Update, true) => self.table.update(&bytes, &value)?,
            (Op::Toggle, true) => self.table.delete(&bytes)?,
            (Op::Update | Op::Toggle, false) => self.table.insert(&bytes, &value)?,
        }
        match (op, exists) {
            (Op::Toggle, true) => self.own.remove(&number),
            _ => self.own.insert(number, value),
        };
        Ok(())
    }

    /// Runs an operation on a shared key. Other workers change it concurrently, so the operation may fail.
    fn run_on_shared_key(&mut self, number: u32, op: Op) -> Result<()> {
        let key = Key { owner: 0, number };
        let (bytes, value) = (key.bytes(), self.next_value(key));
        let found = self.table.search(&bytes)?;
        if let Some(found) = &found {
            ensure!(key.has_value(found), "{key:?} has {found:?}");
        }
        let result = match (op, found) {
            (Op::Search, _) => Ok(()),
            (Op::Update, _) => self.table.update(&bytes, &value),
            (Op::Toggle, Some(_)) => self.table.delete(&bytes),
            (Op::Toggle, None) => self.table.insert(&bytes, &value),
        };
        match result {
            Ok(()) | Err(Error::Exists | Error::NotFound) => Ok(()),
            Err(error) => bail!(error),
        }
    }
}
