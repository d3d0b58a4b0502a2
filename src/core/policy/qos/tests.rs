// SPDX-License-Identifier: GPL-2.0

//! Token buckets enforce their rate for any load. The controller protects high priority on a simulated link.

use super::{token_bucket::BURST_US, *};
use proptest::prelude::*;
use std::collections::VecDeque;

const SECOND: u64 = 1_000_000_000;

#[test]
fn bucket_without_rate_never_delays() {
    let mut bucket = TokenBucket::new();
    for now in [0, 5, SECOND] {
        assert_eq!(bucket.next_ready_at(now), now);
        bucket.charge(u64::MAX);
    }
}

#[test]
fn charge_beyond_the_burst_delays_the_next_request() {
    let mut bucket = TokenBucket::new();
    bucket.set_rate(0, 1000);
    bucket.charge(10);
    assert_eq!(
        bucket.next_ready_at(0),
        0,
        "ten of a thousand are the credit"
    );
    bucket.charge(100);
    let ready_at = bucket.next_ready_at(0);
    assert!((100_000_000..101_000_000).contains(&ready_at), "{ready_at}");
    assert_eq!(bucket.next_ready_at(ready_at), ready_at);
}

#[test]
fn removed_rate_ends_the_delay() {
    let mut bucket = TokenBucket::new();
    bucket.set_rate(0, 1);
    bucket.charge(1 << 40);
    assert!(bucket.next_ready_at(0) > SECOND);
    bucket.set_rate(0, 0);
    assert_eq!(bucket.next_ready_at(0), 0);
}

#[test]
fn raised_rate_shortens_a_pending_delay() {
    let mut bucket = TokenBucket::new();
    bucket.set_rate(0, 1000);
    bucket.charge(1000);
    let before = bucket.next_ready_at(0);
    bucket.set_rate(0, 10_000);
    assert!(bucket.next_ready_at(0) < before / 9);
}

proptest! {
    /// A caller that waits until the returned time, with any pauses, gets at most the rate and the burst.
    #[test]
    fn bucket_never_exceeds_rate_and_burst(
        rate in 1_u64..1 << 36,
        steps in prop::collection::vec((1_u64..1 << 20, 0_u64..3_000_000), 1..200),
    ) {
        let mut bucket = TokenBucket::new();
        bucket.set_rate(0, rate);
        let (mut now, mut gone, mut last) = (0, 0_u128, 0);
        for (cost, idle) in steps {
            now = bucket.next_ready_at(now + idle);
            bucket.charge(cost);
            gone += u128::from(cost);
            last = cost;
        }
        let allowed = u128::from(rate) * u128::from(now + BURST_US * 1000) / u128::from(SECOND);
        prop_assert!(gone <= allowed + u128::from(last) + 1, "{gone} of {allowed}");
    }

    /// For any measurements, low priority keeps its minimum rate, and no arithmetic overflows.
    #[test]
    fn low_priority_never_starves(events in prop::collection::vec((any::<u64>(), any::<u64>(), 0_u8..3), 0..300)) {
        let mut controller = RateController::new();
        let mut now = 0_u64;
        for (a, b, kind) in events {
            match kind {
                0 => controller.record_high(a, b),
                1 => controller.record_low(a),
                _ => {
                    now = now.saturating_add(a >> 20);
                    controller.update(now);
                }
            }
            let (rate, least) = (controller.low_rate(), controller.peak_rate / LOW_SHARE_DENOMINATOR);
            prop_assert!(rate == 0 || rate >= least.max(1));
        }
    }
}

/// Request on the simulated link.
#[derive(Clone, Copy)]
struct LinkRequest {
    is_high: bool,
    len: u64,
    queued_at: u64,
}

/// Link that carries one request at a time. Clients keep any number of requests in the queue.
struct SimulatedLink {
    /// Bandwidth in bytes per second.
    bytes_per_second: u64,
    now: u64,
    queue: VecDeque<LinkRequest>,
    controller: RateController,
    bucket: TokenBucket,
    is_controlled: bool,
    /// Bytes sent, of high and of low priority.
    sent_bytes: (u64, u64),
}

impl SimulatedLink {
    fn new(governed: bool) -> Self {
        Self {
            bytes_per_second: 1 << 30,
            now: 1,
            queue: VecDeque::new(),
            controller: RateController::new(),
            bucket: TokenBucket::new(),
            is_controlled: governed,
            sent_bytes: (0, 0),
        }
    }

    /// Runs `high` and `low` clients for `duration_ns`, each with one request at a time.
    ///
    /// High-priority clients send `len` bytes with a pause of `gap_ns` after each request. Low-priority
    /// clients send 64 KiB without pause.
    fn run(&mut self, duration_ns: u64, high: usize, len: u64, gap_ns: u64, low: usize) {
        let end = self.now + duration_ns;
        let mut idle: Vec<(u64, bool)> = vec![(self.now, true); high];
        idle.extend(vec![(self.now, false); low]);
        while self.now < end {
            idle.retain(|&(at, is_high)| !(at <= self.now && self.try_send(is_high, len)));
            let Some(request) = self.queue.pop_front() else {
                self.now += 1000;
                continue;
            };
            self.now += request.len * SECOND / self.bytes_per_second + 100;
            let next = if request.is_high {
                self.now + gap_ns
            } else {
                self.now
            };
            self.complete(request);
            idle.push((next, request.is_high));
        }
        self.queue.clear();
    }

    fn try_send(&mut self, is_high: bool, len: u64) -> bool {
        let len = if is_high { len } else { 64 << 10 };
        if self.is_controlled && !is_high {
            if self.controller.update(self.now) {
                self.bucket.set_rate(self.now, self.controller.low_rate());
            }
            if self.bucket.next_ready_at(self.now) > self.now {
                return false;
            }
            self.bucket.charge(request_cost(len));
        }
        let since = self.now;
        self.queue.push_back(LinkRequest {
            is_high,
            len,
            queued_at: since,
        });
        true
    }

    fn complete(&mut self, request: LinkRequest) {
        if request.is_high {
            self.sent_bytes.0 += request.len;
            self.controller
                .record_high(request.len, self.now - request.queued_at);
        } else {
            self.sent_bytes.1 += request.len;
            self.controller.record_low(request.len);
        }
    }
}

/// Returns the bandwidth of high priority and of both, in bytes per second.
///
/// Each high-priority client sends `len` bytes with a pause of `gap_ns`.
fn measure_bandwidth(
    is_controlled: bool,
    high: usize,
    len: u64,
    gap_ns: u64,
    low: usize,
) -> (u64, u64) {
    let mut link = SimulatedLink::new(is_controlled);
    // Warm-up: the controller must first measure the capacity of the link.
    link.run(SECOND / 4, high, len, gap_ns, low);
    link.sent_bytes = (0, 0);
    link.run(SECOND, high, len, gap_ns, low);
    (link.sent_bytes.0, link.sent_bytes.0 + link.sent_bytes.1)
}

#[test]
fn heavy_high_priority_load_keeps_its_bandwidth() {
    let (alone, _) = measure_bandwidth(false, 20, 64 << 10, 0, 0);
    let (beside, plain) = measure_bandwidth(false, 20, 64 << 10, 0, 20);
    assert!(beside < alone * 6 / 10, "there is something to protect");
    let (high, all) = measure_bandwidth(true, 20, 64 << 10, 0, 20);
    assert!(high >= alone * 9 / 10, "{high} of {alone}");
    assert!(all >= plain * 9 / 10, "{all} of {plain}");
    assert!(high < all, "low priority does not starve");
}

#[test]
fn light_high_priority_load_keeps_its_bandwidth_and_the_link_is_used() {
    // High priority uses a tenth of the link.
    let gap_ns = 600_000;
    let (alone, _) = measure_bandwidth(false, 1, 64 << 10, gap_ns, 0);
    let (beside, _) = measure_bandwidth(false, 1, 64 << 10, gap_ns, 20);
    assert!(beside < alone * 8 / 10, "there is something to protect");
    let (high, all) = measure_bandwidth(true, 1, 64 << 10, gap_ns, 20);
    assert!(high >= alone * 9 / 10, "{high} of {alone}");
    assert!(all >= (1 << 30) / 3, "{all}");
}

#[test]
fn short_high_priority_requests_keep_their_latency() {
    let (alone, _) = measure_bandwidth(false, 1, 64, 10_000, 0);
    let (beside, _) = measure_bandwidth(false, 1, 64, 10_000, 20);
    assert!(beside < alone / 10, "there is something to protect");
    let (high, _) = measure_bandwidth(true, 1, 64, 10_000, 20);
    assert!(high >= alone / 2, "{high} of {alone}");
}

#[test]
fn low_priority_alone_gets_the_full_bandwidth() {
    let (_, plain) = measure_bandwidth(false, 0, 0, 0, 20);
    let (_, all) = measure_bandwidth(true, 0, 0, 0, 20);
    assert_eq!(all, plain);
}

/// Size classes that are idle for a long time do not overflow and are kept.
#[test]
fn controller_does_not_overflow_after_many_windows() {
    let (mut controller, mut now) = (RateController::new(), 0);
    controller.record_high(1 << 20, 1000);
    for _ in 0..1_000_000 {
        now += 10 * WINDOW_NS;
        (0..10).for_each(|_| controller.record_high(64, 1000));
        controller.record_high(64, u64::MAX);
        controller.update(now);
    }
    assert!(controller.low_rate() > 0);
}

#[test]
fn low_priority_limit_is_removed_when_high_priority_ends() {
    let mut link = SimulatedLink::new(true);
    link.run(SECOND / 4, 20, 64 << 10, 0, 20);
    assert_ne!(link.controller.low_rate(), 0);
    link.run(SECOND / 4, 0, 0, 0, 20);
    assert_eq!(link.controller.low_rate(), 0);
}
