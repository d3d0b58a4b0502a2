// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Check of the whole table, which no worker may change meanwhile. Prints a summary for each owner of keys.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{ensure, Result};
use serde::Serialize;

use crate::block::Block;
use crate::member::TableArgs;
use crate::table::Report;
use crate::workload::{Digest, Key};

/// Options of `kite-race check`.
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    table: TableArgs,
}

/// Printed result.
#[derive(Serialize)]
struct Output {
    #[serde(flatten)]
    report: Report,
    /// Keys by owner; 0 is the owner of shared keys.
    owners: BTreeMap<u32, OwnerReport>,
}

/// Keys of an owner.
#[derive(Default, Serialize)]
struct OwnerReport {
    #[serde(flatten)]
    sum: Digest,
    /// Number of consecutive keys from number 0 on.
    unbroken: u32,
    /// Found keys behind the first missing one.
    #[serde(skip)]
    numbers: BTreeSet<u32>,
}

impl OwnerReport {
    fn add(&mut self, number: u32, block: &Block) {
        self.sum.add(&block.key, &block.value);
        self.numbers.insert(number);
        while self.numbers.remove(&self.unbroken) {
            self.unbroken += 1;
        }
    }
}

/// Checks the table, and prints the result.
///
/// # Errors
/// The table is inconsistent, or cannot be reached.
pub(crate) fn run(check: &CheckArgs) -> Result<()> {
    let mut owners: BTreeMap<u32, OwnerReport> = BTreeMap::new();
    let mut foreign = 0;
    let report = check.table.open()?.check(|block| {
        match Key::from_bytes(&block.key).filter(|key| key.has_value(&block.value)) {
            Some(key) => owners.entry(key.owner).or_default().add(key.number, block),
            None => foreign += 1,
        }
    })?;
    ensure!(foreign == 0, "{foreign} keys have a value of another key");
    println!("{}", serde_json::to_string(&Output { report, owners })?);
    Ok(())
}
