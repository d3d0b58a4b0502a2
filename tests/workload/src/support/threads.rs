// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Threads that repeat one operation.

use anyhow::{anyhow, Result};

/// Runs `operation` for `operations` times on each of `threads` threads. Its arguments are the numbers of the thread
/// and of the operation. A thread stops at its first error.
pub(crate) fn run_threads(
    threads: u64,
    operations: u64,
    operation: impl Fn(u64, u64) -> Result<()> + Sync,
) -> Result<()> {
    let run = |thread| (0..operations).try_for_each(|i| operation(thread, i));
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || run(thread)))
            .collect();
        let panicked = |_| Err(anyhow!("a thread panicked"));
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(panicked))
    })
}
