// SPDX-License-Identifier: GPL-2.0

//! Paces hold, whatever goes by them, and the governor protects high priority on a simulated link.

use super::{pace::CREDIT_US, *};
use proptest::prelude::*;
use std::collections::VecDeque;

const SECOND: u64 = 1_000_000_000;

#[test]
fn without_a_rate_anything_goes_at_once() {
    let mut pace = Pace::new();
    for now in [0, 5, SECOND] {
        assert_eq!(pace.ready(now), now);
        pace.take(u64::MAX);
    }
}

#[test]
fn what_goes_beyond_the_credit_has_to_wait() {
    let mut pace = Pace::new();
    pace.set(0, 1000);
    pace.take(10);
    assert_eq!(pace.ready(0), 0, "ten of a thousand are the credit");
    pace.take(100);
    let ready = pace.ready(0);
    assert!((100_000_000..101_000_000).contains(&ready), "{ready}");
    assert_eq!(pace.ready(ready), ready);
}

#[test]
fn a_lifted_pace_holds_nobody() {
    let mut pace = Pace::new();
    pace.set(0, 1);
    pace.take(1 << 40);
    assert!(pace.ready(0) > SECOND);
    pace.set(0, 0);
    assert_eq!(pace.ready(0), 0);
}

#[test]
fn a_higher_pace_shortens_the_wait_of_before() {
    let mut pace = Pace::new();
    pace.set(0, 1000);
    pace.take(1000);
    let before = pace.ready(0);
    pace.set(0, 10_000);
    assert!(pace.ready(0) < before / 9);
}

proptest! {
    /// Whoever goes when he is ready, whenever he looks, gets the rate and not more.
    #[test]
    fn a_pace_is_kept(
        rate in 1_u64..1 << 36,
        steps in prop::collection::vec((1_u64..1 << 20, 0_u64..3_000_000), 1..200),
    ) {
        let mut pace = Pace::new();
        pace.set(0, rate);
        let (mut now, mut gone, mut last) = (0, 0_u128, 0);
        for (cost, idle) in steps {
            now = pace.ready(now + idle);
            pace.take(cost);
            gone += u128::from(cost);
            last = cost;
        }
        let allowed = u128::from(rate) * u128::from(now + CREDIT_US * 1000) / u128::from(SECOND);
        prop_assert!(gone <= allowed + u128::from(last) + 1, "{gone} of {allowed}");
    }

    /// Whatever it is told, low priority gets something, and nothing overflows.
    #[test]
    fn low_priority_never_starves(events in prop::collection::vec((any::<u64>(), any::<u64>(), 0_u8..3), 0..300)) {
        let mut governor = Governor::new();
        let mut now = 0_u64;
        for (a, b, kind) in events {
            match kind {
                0 => governor.high_done(a, b),
                1 => governor.low_done(a),
                _ => {
                    now = now.saturating_add(a >> 20);
                    governor.look(now);
                }
            }
            let (rate, least) = (governor.rate(), governor.peak / WHOLE);
            prop_assert!(rate == 0 || rate >= least.max(1));
        }
    }
}

/// A request on a simulated link.
#[derive(Clone, Copy)]
struct Request {
    high: bool,
    len: u64,
    since: u64,
}

/// A link that carries requests one after the other, and users who send as many at a time as they like.
struct Link {
    /// Bytes in a second.
    speed: u64,
    now: u64,
    queue: VecDeque<Request>,
    governor: Governor,
    pace: Pace,
    governed: bool,
    /// Bytes that have gone, of high and of low priority.
    gone: (u64, u64),
}

impl Link {
    fn new(governed: bool) -> Self {
        Self {
            speed: 1 << 30,
            now: 1,
            queue: VecDeque::new(),
            governor: Governor::new(),
            pace: Pace::new(),
            governed,
            gone: (0, 0),
        }
    }

    /// Lets `high` and `low` users send requests of `len` bytes, each with `gap` ns after the last; those of low
    /// priority send 64 KiB without a pause.
    fn run(&mut self, length: u64, high: usize, len: u64, gap: u64, low: usize) {
        let end = self.now + length;
        let mut idle: Vec<(u64, bool)> = vec![(self.now, true); high];
        idle.extend(vec![(self.now, false); low]);
        while self.now < end {
            idle.retain(|&(at, is_high)| !(at <= self.now && self.try_send(is_high, len)));
            let Some(request) = self.queue.pop_front() else {
                self.now += 1000;
                continue;
            };
            self.now += request.len * SECOND / self.speed + 100;
            let next = if request.high {
                self.now + gap
            } else {
                self.now
            };
            self.done(request);
            idle.push((next, request.high));
        }
        self.queue.clear();
    }

    fn try_send(&mut self, high: bool, len: u64) -> bool {
        let len = if high { len } else { 64 << 10 };
        if self.governed && !high {
            if self.governor.look(self.now) {
                self.pace.set(self.now, self.governor.rate());
            }
            if self.pace.ready(self.now) > self.now {
                return false;
            }
            self.pace.take(cost(len));
        }
        let since = self.now;
        self.queue.push_back(Request { high, len, since });
        true
    }

    fn done(&mut self, request: Request) {
        if request.high {
            self.gone.0 += request.len;
            self.governor
                .high_done(request.len, self.now - request.since);
        } else {
            self.gone.1 += request.len;
            self.governor.low_done(request.len);
        }
    }
}

/// Bytes of high priority, and of all, that go in a second when each user of high priority sends `len` bytes
/// with `gap` ns between.
fn shares(governed: bool, high: usize, len: u64, gap: u64, low: usize) -> (u64, u64) {
    let mut link = Link::new(governed);
    // Nobody knows at first what the link carries.
    link.run(SECOND / 4, high, len, gap, low);
    link.gone = (0, 0);
    link.run(SECOND, high, len, gap, low);
    (link.gone.0, link.gone.0 + link.gone.1)
}

#[test]
fn heavy_high_priority_keeps_its_bandwidth() {
    let (alone, _) = shares(false, 20, 64 << 10, 0, 0);
    let (beside, plain) = shares(false, 20, 64 << 10, 0, 20);
    assert!(beside < alone * 6 / 10, "there is something to protect");
    let (high, all) = shares(true, 20, 64 << 10, 0, 20);
    assert!(high >= alone * 9 / 10, "{high} of {alone}");
    assert!(all >= plain * 9 / 10, "{all} of {plain}");
    assert!(high < all, "low priority does not starve");
}

#[test]
fn light_high_priority_keeps_its_bandwidth_and_the_link_is_used() {
    // A tenth of the link.
    let gap = 600_000;
    let (alone, _) = shares(false, 1, 64 << 10, gap, 0);
    let (beside, _) = shares(false, 1, 64 << 10, gap, 20);
    assert!(beside < alone * 8 / 10, "there is something to protect");
    let (high, all) = shares(true, 1, 64 << 10, gap, 20);
    assert!(high >= alone * 9 / 10, "{high} of {alone}");
    assert!(all >= (1 << 30) / 3, "{all}");
}

#[test]
fn short_requests_keep_their_latency() {
    let (alone, _) = shares(false, 1, 64, 10_000, 0);
    let (beside, _) = shares(false, 1, 64, 10_000, 20);
    assert!(beside < alone / 10, "there is something to protect");
    let (high, _) = shares(true, 1, 64, 10_000, 20);
    assert!(high >= alone / 2, "{high} of {alone}");
}

#[test]
fn without_high_priority_low_priority_has_all() {
    let (_, plain) = shares(false, 0, 0, 0, 20);
    let (_, all) = shares(true, 0, 0, 0, 20);
    assert_eq!(all, plain);
}

/// One that is there, and idle, is no reason to forget or to overflow.
#[test]
fn days_beside_idle_low_priority_harm_nothing() {
    let (mut governor, mut now) = (Governor::new(), 0);
    governor.high_done(1 << 20, 1000);
    for _ in 0..1_000_000 {
        now += 10 * WINDOW_NS;
        (0..10).for_each(|_| governor.high_done(64, 1000));
        governor.high_done(64, u64::MAX);
        governor.look(now);
    }
    assert!(governor.rate() > 0);
}

#[test]
fn when_high_priority_ends_low_priority_has_all_again_soon() {
    let mut link = Link::new(true);
    link.run(SECOND / 4, 20, 64 << 10, 0, 20);
    assert_ne!(link.governor.rate(), 0);
    link.run(SECOND / 4, 0, 0, 0, 20);
    assert_eq!(link.governor.rate(), 0);
}
