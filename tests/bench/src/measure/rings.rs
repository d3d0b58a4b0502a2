// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Fraction of the request memory that holds requests, with the sizes of Facebook's key-value stores: in a ring, and
//! in buffers that are posted before the sizes are known (LITE, figure 12).
//!
//! This is reckoned, with the ring's own code, and not timed.

use kite_core::ring::{capacity_units, RingProducer, MAX_MESSAGE_BYTES};
use kite_core::wire::ring::MSG_HEADER_SIZE;
use serde::Serialize;

/// Requests of each measurement.
const REQUESTS: usize = 100_000;

/// Bytes of the ring, which is the default.
const RING: u64 = 64 << 10;

/// Receive queues, each with buffers of a size of its own.
const QUEUES: [usize; 4] = [1, 2, 3, 4];

/// Distribution of sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RingMeasure {
    Keys,
    Values,
}

/// Parts of memory that hold requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Use {
    pub(crate) what: RingMeasure,
    pub(crate) ring: f64,
    /// With 1, 2, … receive queues, the sizes of whose buffers suit the requests best.
    pub(crate) queues: [f64; QUEUES.len()],
}

pub(crate) fn all() -> [Use; 2] {
    [RingMeasure::Keys, RingMeasure::Values].map(|what| {
        let sizes = sizes(what);
        Use {
            what,
            ring: ring(&sizes),
            queues: QUEUES.map(|count| queues(&sizes, count)),
        }
    })
}

/// Sizes at random, of the distributions in "Workload Analysis of a Large-Scale Key-Value Store"
/// (SIGMETRICS 2012, section 5).
fn sizes(what: RingMeasure) -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(12);
    let mut size = || {
        // Neither 0 nor 1.
        let part = (random.f64() + 1e-9).min(1.0 - 1e-9);
        let size = match what {
            // A generalised distribution of extreme values.
            RingMeasure::Keys => {
                30.7984 + 8.20449 * ((-part.ln()).powf(-0.078688) - 1.0) / 0.078688
            }
            // A generalised Pareto distribution.
            RingMeasure::Values => 214.476 * ((1.0 - part).powf(-0.348238) - 1.0) / 0.348238,
        };
        (size as usize).clamp(1, MAX_MESSAGE_BYTES - MSG_HEADER_SIZE)
    };
    (0..REQUESTS).map(|_| size()).collect()
}

/// The part of a ring that holds requests when no more fit. Each has a line before it, here and below.
fn ring(sizes: &[usize]) -> f64 {
    let mut tail = empty();
    let (mut held, mut parts) = (0, Vec::new());
    for &size in sizes {
        if tail.reserve(MSG_HEADER_SIZE + size).is_none() {
            parts.push(held as f64 / RING as f64);
            (tail, held) = (empty(), 0);
        } else {
            held += size;
        }
    }
    parts.iter().sum::<f64>() / parts.len() as f64
}

fn empty() -> RingProducer<Vec<u8>> {
    RingProducer::new(vec![0; capacity_units(RING).unwrap_or(0) as usize])
}

/// The same of receive buffers: each request is in one of the least size that it fits. Sizes are powers of
/// two, and those that waste least.
fn queues(sizes: &[usize], count: usize) -> f64 {
    let powers: Vec<usize> = (7..=12).map(|power| 1 << power).collect();
    // A bit for each size but the last, which is always included.
    let choices =
        (0..1_usize << (powers.len() - 1)).filter(|bits| bits.count_ones() as usize == count - 1);
    let part = |bits: usize| {
        let has = |i: usize| i == powers.len() - 1 || bits & (1 << i) != 0;
        let taken = sizes.iter().map(|&size| {
            let fits = |&i: &usize| has(i) && powers[i] >= MSG_HEADER_SIZE + size;
            (0..powers.len())
                .find(fits)
                .map_or(MAX_MESSAGE_BYTES, |i| powers[i])
        });
        sizes.iter().sum::<usize>() as f64 / taken.sum::<usize>() as f64
    };
    choices.map(part).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_one_size_waste_what_is_over() {
        let part = ring(&vec![3 * MSG_HEADER_SIZE; 100_000]);
        assert!((part - 0.75).abs() < 0.01, "{part}");
        assert_eq!(queues(&[64, 64], 1), 64.0 / 4096.0);
        assert_eq!(queues(&[64, 64], 2), 0.5);
        assert_eq!(queues(&[65, 4032], 2), 4097.0 / (256.0 + 4096.0));
    }

    #[test]
    fn more_queues_waste_less_and_a_ring_least() {
        for Use { what, ring, queues } in all() {
            assert!(
                queues.windows(2).all(|pair| pair[0] <= pair[1]),
                "{queues:?}"
            );
            assert!(
                ring > queues[0] && ring < 1.0,
                "{what:?}: {ring}, {queues:?}"
            );
        }
    }

    #[test]
    fn mean_sizes_match_the_published_values() {
        let mean = |what| sizes(what).iter().sum::<usize>() as f64 / REQUESTS as f64;
        // 35 and 329 bytes in the paper, whose values may be of any size.
        assert!(
            (mean(RingMeasure::Keys) - 36.0).abs() < 2.0,
            "{}",
            mean(RingMeasure::Keys)
        );
        assert!(
            (mean(RingMeasure::Values) - 320.0).abs() < 15.0,
            "{}",
            mean(RingMeasure::Values)
        );
    }
}
