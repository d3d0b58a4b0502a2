// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Waits for a condition, with a timeout.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::machine::kernel::patience;

/// Interval of checks. A check on a node takes longer itself.
const NAP: Duration = Duration::from_millis(20);

/// Waits until `condition` holds. Returns the elapsed time. `what` names the condition in the error.
///
/// # Errors
///
/// - [`Error::Timeout`] after `limit`.
/// - The errors of `condition`.
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
    fn until_waits_for_the_condition_and_times_out() {
        let mut checks = 0;
        let mut third = || {
            checks += 1;
            Ok(checks == 3)
        };
        assert!(until("three checks", Duration::from_secs(5), &mut third).is_ok());
        let never = until("never", Duration::from_millis(30), || Ok(false));
        assert!(matches!(never, Err(Error::Timeout { .. })));
    }
}
