// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Looks at the whole table, while no worker changes it, and prints what is there, of each worker and of all.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{ensure, Result};
use serde::Serialize;

use crate::block::Block;
use crate::load::{Key, Sum};
use crate::place::Place;
use crate::table::Report;

/// Options of `kite-race check`.
#[derive(clap::Args)]
pub(crate) struct Check {
    #[command(flatten)]
    place: Place,
}

#[derive(Serialize)]
struct Checked {
    #[serde(flatten)]
    report: Report,
    /// By their owners; 0 is all together.
    owners: BTreeMap<u32, Owned>,
}

/// Keys of an owner.
#[derive(Default, Serialize)]
struct Owned {
    #[serde(flatten)]
    sum: Sum,
    /// Consecutive keys from number 0 on.
    unbroken: u32,
    /// Those that come after one that is missing so far.
    #[serde(skip)]
    numbers: BTreeSet<u32>,
}

impl Owned {
    fn add(&mut self, number: u32, block: &Block) {
        self.sum.add(&block.key, &block.value);
        self.numbers.insert(number);
        while self.numbers.remove(&self.unbroken) {
            self.unbroken += 1;
        }
    }
}

/// Checks all.
///
/// # Errors
/// Describes the first inconsistency.
pub(crate) fn run(check: &Check) -> Result<()> {
    let mut owners: BTreeMap<u32, Owned> = BTreeMap::new();
    let mut foreign = 0;
    let report = check.place.open()?.check(|block| {
        match Key::of_bytes(&block.key).filter(|key| key.has(&block.value)) {
            Some(key) => owners.entry(key.owner).or_default().add(key.number, block),
            None => foreign += 1,
        }
    })?;
    ensure!(
        foreign == 0,
        "{foreign} keys have a value that is not theirs"
    );
    println!("{}", serde_json::to_string(&Checked { report, owners })?);
    Ok(())
}
