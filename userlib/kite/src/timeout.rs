// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Timeouts in the units of the ABI.

use std::time::Duration;

use crate::sys;

/// Returns milliseconds for the ABI, rounded up, 1 … `u32::MAX`.
pub(crate) fn timeout_to_ms(timeout: Duration) -> u32 {
    let ms = timeout.as_nanos().div_ceil(1_000_000).max(1);
    u32::try_from(ms).unwrap_or(u32::MAX)
}

/// Returns the flags and the milliseconds of a wait for the ABI. `None` does not wait.
pub(crate) fn wait_to_raw(timeout: Option<Duration>) -> (u32, u32) {
    timeout.map_or((sys::KITE_NOWAIT, 0), |timeout| (0, timeout_to_ms(timeout)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_is_rounded_up_and_limited() {
        for (timeout, ms) in [
            (Duration::ZERO, 1),
            (Duration::from_nanos(1), 1),
            (Duration::from_micros(1001), 2),
            (Duration::MAX, u32::MAX),
        ] {
            assert_eq!(timeout_to_ms(timeout), ms, "{timeout:?}");
            assert_eq!(wait_to_raw(Some(timeout)), (0, ms), "{timeout:?}");
        }
        assert_eq!(wait_to_raw(None), (sys::KITE_NOWAIT, 0));
    }
}
