// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Waiting for what a test expects to happen, for so long and no longer.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::kernel::patience;

/// Between two looks; a look at a node takes longer by itself.
const NAP: Duration = Duration::from_millis(20);

/// Waits until `condition` holds, and returns how long that took. `what` is for the message of the
/// failure.
///
/// # Errors
///
/// [`Error::Timeout`] after `limit`, and those of `condition`.
pub fn until(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<Duration> {
    let (start, limit) = (Instant::now(), patience(limit));
    while !condition()? {
        if start.elapsed() > limit {
            return Err(Error::Timeout {
                node: "the test".into(),
                command: what.into(),
                limit,
                output: String::new(),
            });
        }
        thread::sleep(NAP);
    }
    Ok(start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_waited_for_and_not_for_ever() {
        let mut looks = 0;
        let mut third = || {
            looks += 1;
            Ok(looks == 3)
        };
        assert!(until("three looks", Duration::from_secs(5), &mut third).is_ok());
        let never = until("never", Duration::from_millis(30), || Ok(false));
        assert!(matches!(never, Err(Error::Timeout { .. })));
    }
}
