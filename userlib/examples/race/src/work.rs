// SPDX-License-Identifier: GPL-2.0 OR MIT
//! One compute worker: it inserts keys of its own, and then searches, updates, deletes and inserts, those and keys that
//! all workers share.
//!
//! Of its own keys it knows what the table must say, each time. Of a shared key it knows only that a value is one of this
//! key.

use std::collections::HashMap;

use anyhow::{bail, ensure, Result};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::load::{Chooser, Key, Sum};
use crate::place::Place;
use crate::table::Table;
use crate::transport::Transport;

/// Inserted keys between two progress reports.
const STRIDE: u32 = 16;

/// Options of `kite-race work`.
#[derive(clap::Args)]
pub(crate) struct Work {
    #[command(flatten)]
    place: Place,
    /// Number of this worker, which no other has
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    worker: u32,
    /// Keys of its own that it inserts first
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Keys that all workers share
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    shared: u32,
    /// Operations afterwards
    #[arg(long, default_value_t = 1000)]
    operations: u64,
    /// Percent of these that search; of the others half update, and the rest deletes or inserts
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
    searches: u32,
    /// Percent of these that are on shared keys
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=100))]
    sharing: u32,
}

/// Result of a worker: its own keys.
#[derive(Debug, Serialize, Deserialize)]
struct Left {
    worker: u32,
    #[serde(flatten)]
    own: Sum,
}

/// Operation on a key.
#[derive(Clone, Copy, Debug)]
enum Act {
    Search,
    Update,
    Toggle,
}

struct Worker<'a> {
    work: &'a Work,
    table: Table<Box<dyn Transport>>,
    own: HashMap<u32, Vec<u8>>,
    /// The latest version of a value; all workers have different ones.
    version: u64,
}

/// Does all, and prints what the table has of its own keys in the end.
///
/// # Errors
/// If the table does not say what it must, or cannot be reached any more.
pub(crate) fn run(work: &Work) -> Result<()> {
    let mut worker = Worker {
        work,
        table: work.place.open()?,
        own: HashMap::new(),
        version: u64::from(work.worker) << 32,
    };
    println!("begun");
    worker.load()?;
    println!("loaded");
    worker.mix()?;
    let (worker, own) = (work.worker, worker.look()?);
    println!("{}", serde_json::to_string(&Left { worker, own })?);
    Ok(())
}

impl Worker<'_> {
    /// Inserts all its own keys in order, and prints its progress.
    fn load(&mut self) -> Result<()> {
        for number in 0..self.work.keys {
            self.act_on_own(number, Act::Toggle)?;
            if (number + 1) % STRIDE == 0 {
                println!("inserted {}", number + 1);
            }
        }
        Ok(())
    }

    /// Searches for all keys of its own, and sums up those that are there.
    fn look(&mut self) -> Result<Sum> {
        let mut sum = Sum::default();
        for number in 0..self.work.keys {
            self.act_on_own(number, Act::Search)?;
            if let Some(value) = self.own.get(&number) {
                sum.add(&self.own_key(number).bytes(), value);
            }
        }
        Ok(sum)
    }

    fn mix(&mut self) -> Result<()> {
        let seed = self.work.worker.into();
        let mut own = Chooser::new(self.work.keys, seed);
        let mut shared = Chooser::new(self.work.shared, seed);
        for _ in 0..self.work.operations {
            let act = match () {
                () if own.percent(self.work.searches) => Act::Search,
                () if own.percent(50) => Act::Update,
                () => Act::Toggle,
            };
            match own.percent(self.work.sharing) {
                true => self.act_on_shared(shared.key(), act)?,
                false => self.act_on_own(own.key(), act)?,
            }
        }
        Ok(())
    }

    fn own_key(&self, number: u32) -> Key {
        let owner = self.work.worker;
        Key { owner, number }
    }

    fn next_value(&mut self, key: Key) -> Vec<u8> {
        self.version += 1;
        key.value(self.version)
    }

    /// No other worker changes the key, so the result is known.
    fn act_on_own(&mut self, number: u32, act: Act) -> Result<()> {
        let key = self.own_key(number);
        let (bytes, value) = (key.bytes(), self.next_value(key));
        let is_there = self.own.contains_key(&number);
        match (act, is_there) {
            (Act::Search, _) => {
                let found = self.table.search(&bytes)?;
                ensure!(
                    found.as_ref() == self.own.get(&number),
                    "{key:?} has {found:?}"
                );
                return Ok(());
            }
            (Act::Update, true) => self.table.update(&bytes, &value)?,
            (Act::Toggle, true) => self.table.delete(&bytes)?,
            (Act::Update | Act::Toggle, false) => self.table.insert(&bytes, &value)?,
        }
        match (act, is_there) {
            (Act::Toggle, true) => self.own.remove(&number),
            _ => self.own.insert(number, value),
        };
        Ok(())
    }

    /// Others change it at the same time, so an update may find it, or not.
    fn act_on_shared(&mut self, number: u32, act: Act) -> Result<()> {
        let key = Key { owner: 0, number };
        let (bytes, value) = (key.bytes(), self.next_value(key));
        let found = self.table.search(&bytes)?;
        if let Some(found) = &found {
            ensure!(key.has(found), "{key:?} has {found:?}");
        }
        let done = match (act, found) {
            (Act::Search, _) => Ok(()),
            (Act::Update, _) => self.table.update(&bytes, &value),
            (Act::Toggle, Some(_)) => self.table.delete(&bytes),
            (Act::Toggle, None) => self.table.insert(&bytes, &value),
        };
        match done {
            Ok(()) | Err(Error::Exists | Error::NotFound) => Ok(()),
            Err(error) => bail!(error),
        }
    }
}
