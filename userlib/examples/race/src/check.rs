// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Looks at the whole table, while no worker changes it, and prints what is there, of each worker and of all.

use std::collections::BTreeMap;

use anyhow::{ensure, Result};
use serde::Serialize;

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
    owners: BTreeMap<u32, Sum>,
}

/// Checks all.
///
/// # Errors
/// If something is wrong: it says what.
pub(crate) fn run(check: &Check) -> Result<()> {
    let mut owners: BTreeMap<u32, Sum> = BTreeMap::new();
    let mut foreign = 0;
    let report = check.place.open()?.check(|block| {
        match Key::of_bytes(&block.key).filter(|key| key.has(&block.value)) {
            Some(key) => owners
                .entry(key.owner)
                .or_default()
                .add(&block.key, &block.value),
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
