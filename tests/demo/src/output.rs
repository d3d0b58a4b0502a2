// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Output of the demonstration.

use std::fmt::Display;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Prints the name of a step, runs it, and adds the name to its error.
pub(crate) fn step<T>(what: &str, act: impl FnOnce() -> Result<T>) -> Result<T> {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    println!("\n{}. {what}.", NEXT.fetch_add(1, Ordering::Relaxed));
    act().with_context(|| what.to_string())
}

/// Prints a command that a node runs.
pub(crate) fn command(node: &str, line: &str) {
    println!("   {node}$ {line}");
}

/// Prints the output of a command.
pub(crate) fn detail(text: &str) {
    for line in text.lines() {
        println!("          {line}");
    }
}

/// Prints the result of a step, and its time.
pub(crate) fn done(what: &str, time: impl Into<Elapsed>) {
    println!("   => {what} ({})", seconds(time.into().0));
}

/// A time, or the time since an instant.
pub(crate) struct Elapsed(Duration);

impl From<Duration> for Elapsed {
    fn from(time: Duration) -> Self {
        Self(time)
    }
}

impl From<Instant> for Elapsed {
    fn from(start: Instant) -> Self {
        Self(start.elapsed())
    }
}

pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// Results of the demonstration.
pub(crate) struct Summary {
    start: Instant,
    lines: Vec<String>,
}

impl Summary {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            lines: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, line: impl Display) {
        self.lines.push(line.to_string());
    }

    pub(crate) fn print(&self) {
        println!(
            "\nAll steps succeeded, in {}:",
            seconds(self.start.elapsed())
        );
        for line in &self.lines {
            println!("  - {line}");
        }
    }
}
