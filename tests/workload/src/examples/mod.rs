// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `examples`: the examples of the crate `kite` that need a node, which the build script extracts.
//!
//! # Operation
//!
//! Each example runs in a process of its own, which first creates what the example needs ([`plan`]). The process
//! fails if the example or a thread that was prepared for the example fails.
//!
//! The examples expect to run on node 2 of a cluster of two nodes, as root.

mod need;
mod plan;

use std::env;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure, Context, Result};
use clap::Args;
use kite::{Cluster, Error, Rights};

use need::Need;
use plan::{ERRORS, EXCLUDED, NEEDS, REGIONS};

include!(concat!(env!("OUT_DIR"), "/examples.rs"));

/// Maximum time of an example.
const LIMIT: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(5);

/// Runs the examples of the crate `kite`
#[derive(Args, Clone, Debug)]
pub(crate) struct Examples {
    /// Runs only this example, in this process
    #[arg(long)]
    only: Option<String>,
}

impl Examples {
    pub(crate) fn run(&self) -> Result<()> {
        match &self.only {
            Some(name) => run_here(name),
            None => run_all(),
        }
    }
}

/// Runs all examples. The error has the names of all that failed.
fn run_all() -> Result<()> {
    ensure!(
        unknown_names().is_empty(),
        "no such examples: {:?}",
        unknown_names()
    );
    free_regions()?;
    let mut failures = Vec::new();
    for (name, _) in EXAMPLES {
        if find(EXCLUDED, name).is_none() {
            let result = run_in_process(name).and(clean_up(name));
            failures.extend(result.err().map(|error| format!("{name}: {error:#}")));
        }
    }
    ensure!(
        failures.is_empty(),
        "examples failed: {}",
        failures.join("; ")
    );
    Ok(())
}

/// Runs an example in this process.
fn run_here(name: &str) -> Result<()> {
    let example = find(EXAMPLES, name).context("no such example")?;
    let mut helpers = Vec::new();
    for need in needs_of(name) {
        helpers.extend(need.prepare().with_context(|| format!("{need:?}"))?);
    }
    let expected = find(ERRORS, name).map_or(Ok(()), |&error| Err(error));
    let result = example();
    ensure!(result == expected, "{result:?} instead of {expected:?}");
    for helper in helpers {
        let result = helper.join().map_err(|_| anyhow!("panic"))?;
        result.context("thread beside the example")?;
    }
    Ok(())
}

/// Runs an example in a process of its own.
fn run_in_process(name: &str) -> Result<()> {
    let mut process = Command::new(env::current_exe()?)
        .args(["examples", "--only", name])
        .stdout(Stdio::null())
        .spawn()?;
    let status = wait(&mut process)?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// Waits for the end of a process, which is killed at the time limit.
fn wait(process: &mut Child) -> Result<ExitStatus> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = process.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > deadline {
            process.kill()?;
            process.wait()?;
            bail!("no end within {LIMIT:?}");
        }
        thread::sleep(POLL);
    }
}

/// Removes what an example and its preparations left.
fn clean_up(name: &str) -> Result<()> {
    for need in needs_of(name) {
        need.clean_up()?;
    }
    free_regions()
}

fn free_regions() -> Result<()> {
    let cluster = Cluster::open()?;
    for name in REGIONS {
        match cluster.map(name, Rights::MASTER) {
            Err(Error::NotFound) => (),
            region => region?.free()?,
        }
    }
    Ok(())
}

fn needs_of(name: &str) -> &'static [Need] {
    find(NEEDS, name).copied().unwrap_or_default()
}

/// Returns the value of a name in a table.
fn find<'a, T>(table: &'a [(&str, T)], name: &str) -> Option<&'a T> {
    let mut rows = table.iter();
    rows.find(|(row, _)| *row == name).map(|(_, value)| value)
}

/// Returns the names in the tables of [`plan`] that are not names of examples.
fn unknown_names() -> Vec<&'static str> {
    let needs = NEEDS.iter().map(|(name, _)| *name);
    let errors = ERRORS.iter().map(|(name, _)| *name);
    let excluded = EXCLUDED.iter().map(|(name, _)| *name);
    let names = needs.chain(errors).chain(excluded);
    names
        .filter(|name| find(EXAMPLES, name).is_none())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_name_existing_examples() {
        assert_eq!(unknown_names(), [""; 0]);
    }
}
