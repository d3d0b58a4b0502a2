// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What signals do to reads and writes: neither end nor prolong them.
//!
//! The kernel gives a transfer up when a signal comes, and does not say how far it got. It is asked
//! again, for what is left of the time, and for ever smaller pieces: sooner or later one is done
//! between two signals, so that a program with a timer makes progress.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Smallest piece: smaller ones take as long.
const PIECE_MIN: usize = 4096;

/// The deadline that the module gives by default. It cannot be asked whether it was loaded with
/// another `timeout_ms`.
const DEFAULT: Duration = Duration::from_millis(10_000);

/// Calls `request` with offset, length and `timeout_ms`, until all of `len` bytes are moved.
pub(crate) fn in_pieces(
    len: usize,
    timeout_ms: u32,
    mut request: impl FnMut(usize, usize, u32) -> Result<()>,
) -> Result<()> {
    let start = Instant::now();
    let (mut done, mut most, mut left_ms) = (0, len, timeout_ms);
    loop {
        let piece = most.min(len - done);
        match request(done, piece, left_ms) {
            Ok(()) if done + piece == len => return Ok(()),
            Ok(()) => done += piece,
            Err(Error::Interrupted) => most = (most / 2).max(PIECE_MIN),
            Err(error) => return Err(error),
        }
        left_ms = left(timeout_ms, start.elapsed())?;
    }
}

/// Milliseconds that are left after `spent`, at least 1.
fn left(timeout_ms: u32, spent: Duration) -> Result<u32> {
    let all = match timeout_ms {
        0 => DEFAULT,
        ms => Duration::from_millis(ms.into()),
    };
    let left = all.saturating_sub(spent).as_nanos().div_ceil(1_000_000);
    match u32::try_from(left) {
        Ok(0) => Err(Error::TimedOut),
        left => Ok(left.unwrap_or(u32::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_signals_there_is_one_request() {
        for len in [0, 1, 10_000_000] {
            let mut asked = Vec::new();
            in_pieces(len, 0, |at, len, ms| {
                asked.push((at, len, ms));
                Ok(())
            })
            .unwrap();
            assert_eq!(asked, [(0, len, 0)]);
        }
    }

    #[test]
    fn all_is_moved_between_signals_that_leave_time_for_little() {
        let len = 1_000_003;
        let mut moved = 0;
        in_pieces(len, 60_000, |at, piece, _| match piece {
            5000.. => Err(Error::Interrupted),
            _ => {
                assert_eq!(at, moved);
                moved += piece;
                Ok(())
            }
        })
        .unwrap();
        assert_eq!(moved, len);
    }

    #[test]
    fn signals_do_not_prolong_a_deadline() {
        let (start, mut last) = (Instant::now(), u32::MAX);
        let result = in_pieces(8, 50, |_, _, ms| {
            assert!((1..=50).contains(&ms) && ms <= last, "{ms} after {last}");
            last = ms;
            std::thread::sleep(Duration::from_millis(1));
            Err(Error::Interrupted)
        });
        assert_eq!(result, Err(Error::TimedOut));
        assert!(start.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn the_default_ends_too() {
        let ms = Duration::from_millis;
        assert_eq!(left(0, ms(1)), Ok(9_999));
        assert_eq!(left(0, ms(10_000)), Err(Error::TimedOut));
        assert_eq!(left(u32::MAX, ms(0)), Ok(u32::MAX));
    }

    #[test]
    fn other_errors_are_told() {
        let result = in_pieces(8, 0, |_, _, _| Err(Error::Stale));
        assert_eq!(result, Err(Error::Stale));
    }
}
