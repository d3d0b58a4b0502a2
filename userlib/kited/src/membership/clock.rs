// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Clock of a state machine, which stands still while the process does not run.

use std::time::{Duration, Instant};

use super::Timing;

/// Clock of a state machine. A pause of the process, by a signal or of its virtual machine, is no silence of the other
/// nodes. The clock excludes each pause, which extends all deadlines by its length.
#[derive(Debug)]
pub struct MachineClock {
    /// Time of the machine at the last reading.
    now: Instant,
    /// Monotonic time of the last reading.
    last_reading: Instant,
    max_gap: Duration,
}

impl MachineClock {
    /// Creates a clock that shows `now`. The daemon reads the clock at least once per heartbeat interval.
    pub fn new(timing: &Timing, now: Instant) -> Self {
        Self {
            now,
            last_reading: now,
            max_gap: timing.dead_after / 2,
        }
    }

    /// Returns the time of the machine at the monotonic time `reading`, and the length of the pause before, if any.
    pub fn read(&mut self, reading: Instant) -> (Instant, Option<Duration>) {
        let gap = reading.saturating_duration_since(self.last_reading);
        self.last_reading = self.last_reading.max(reading);
        let is_pause = gap > self.max_gap;
        if !is_pause {
            self.now += gap;
        }
        (self.now, is_pause.then_some(gap))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_does_not_advance_the_clock() {
        let timing = Timing {
            heartbeat_interval: Duration::from_millis(500),
            dead_after: Duration::from_millis(3000),
        };
        let start = Instant::now();
        let mut clock = MachineClock::new(&timing, start);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(clock.read(at(1500)), (at(1500), None));
        let pause = Duration::from_millis(1501);
        assert_eq!(clock.read(at(3001)), (at(1500), Some(pause)));
        assert_eq!(clock.read(at(3251)), (at(1750), None));
        assert_eq!(clock.read(at(3000)), (at(1750), None), "never decreases");
    }
}
