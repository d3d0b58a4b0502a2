// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Many threads that do the same.

use anyhow::{anyhow, Result};

/// Lets each of `threads` do `operation` so many times, with the numbers of thread and operation. One that
/// fails does no more.
pub(crate) fn each(
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
