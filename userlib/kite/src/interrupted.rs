// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reads and writes that signals interrupt.
//!
//! # Recovery
//!
//! A signal interrupts a transfer of the kernel at an unknown position. This file repeats the transfer in smaller
//! chunks with the remaining time, so that a chunk completes between two signals of a program with a timer.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Minimum chunk. A smaller chunk takes as long.
const MIN_CHUNK_BYTES: usize = 4096;

/// Default of the module parameter `default_timeout_ms`. This crate does not read the parameter.
const DEFAULT_TIMEOUT: Duration = Duration::from_millis(10_000);

/// Calls `request` with offset, length and milliseconds, until `len` bytes are transferred.
pub(crate) fn transfer_chunked(
    len: usize,
    timeout_ms: u32,
    mut request: impl FnMut(usize, usize, u32) -> Result<()>,
) -> Result<()> {
    let start = Instant::now();
    let (mut done, mut chunk_max, mut remaining_ms) = (0, len, timeout_ms);
    loop {
        let chunk_len = chunk_max.min(len - done);
        match request(done, chunk_len, remaining_ms) {
            Ok(()) if done + chunk_len == len => return Ok(()),
            Ok(()) => done += chunk_len,
            Err(Error::Interrupted) => chunk_max = (chunk_max / 2).max(MIN_CHUNK_BYTES),
            Err(error) => return Err(error),
        }
        remaining_ms = time_left_ms(timeout_ms, start.elapsed())?;
    }
}

/// Returns the remaining milliseconds, at least 1.
fn time_left_ms(timeout_ms: u32, elapsed: Duration) -> Result<u32> {
    let total = match timeout_ms {
        0 => DEFAULT_TIMEOUT,
        ms => Duration::from_millis(ms.into()),
    };
    let remaining = total.saturating_sub(elapsed).as_nanos().div_ceil(1_000_000);
    match u32::try_from(remaining) {
        Ok(0) => Err(Error::TimedOut),
        ms => Ok(ms.unwrap_or(u32::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_without_signals_is_one_request() {
        for len in [0, 1, 10_000_000] {
            let mut requests = Vec::new();
            transfer_chunked(len, 0, |at, len, ms| {
                requests.push((at, len, ms));
                Ok(())
            })
            .unwrap();
            assert_eq!(requests, [(0, len, 0)]);
        }
    }

    #[test]
    fn transfer_with_interrupted_large_chunks_completes_in_small_chunks() {
        let len = 1_000_003;
        let mut moved = 0;
        transfer_chunked(len, 60_000, |at, chunk_len, _| match chunk_len {
            5000.. => Err(Error::Interrupted),
            _ => {
                assert_eq!(at, moved);
                moved += chunk_len;
                Ok(())
            }
        })
        .unwrap();
        assert_eq!(moved, len);
    }

    #[test]
    fn transfer_interrupted_until_the_deadline_returns_timed_out() {
        let (start, mut last) = (Instant::now(), u32::MAX);
        let result = transfer_chunked(8, 50, |_, _, ms| {
            assert!((1..=50).contains(&ms) && ms <= last, "{ms} after {last}");
            last = ms;
            std::thread::sleep(Duration::from_millis(1));
            Err(Error::Interrupted)
        });
        assert_eq!(result, Err(Error::TimedOut));
        assert!(start.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn time_left_without_timeout_uses_the_default() {
        let ms = Duration::from_millis;
        assert_eq!(time_left_ms(0, ms(1)), Ok(9_999));
        assert_eq!(time_left_ms(0, ms(10_000)), Err(Error::TimedOut));
        assert_eq!(time_left_ms(u32::MAX, ms(0)), Ok(u32::MAX));
    }

    #[test]
    fn error_other_than_interrupted_is_returned() {
        let result = transfer_chunked(8, 0, |_, _, _| Err(Error::Stale));
        assert_eq!(result, Err(Error::Stale));
    }
}
