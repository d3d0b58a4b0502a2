// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Used fraction of the receive memory, with request sizes of Facebook's key-value stores: in a ring, and in receive
//! queues whose buffers have fixed sizes (LITE, figure 12).
//!
//! The fraction is computed with the code of the ring.

use kite_core::ring::{capacity_units, RingProducer, MAX_MESSAGE_BYTES};
use kite_core::wire::ring::MSG_HEADER_SIZE;
use serde::{Deserialize, Serialize};

/// Number of requests.
const REQUESTS: usize = 100_000;

/// Size of the ring in bytes: the default of the module.
const RING_BYTES: u64 = 64 << 10;

/// Numbers of receive queues, each with buffers of one size.
const QUEUE_COUNTS: [usize; 4] = [1, 2, 3, 4];

/// Distribution of request sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SizeDistribution {
    Keys,
    Values,
}

/// Used fraction of the receive memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RingUse {
    pub(crate) sizes: SizeDistribution,
    /// With a ring.
    pub(crate) ring: f64,
    /// With 1 to 4 receive queues, whose buffer sizes are optimal for the requests.
    pub(crate) queues: [f64; QUEUE_COUNTS.len()],
}

/// Computes the fractions of all distributions.
pub(crate) fn all() -> [RingUse; 2] {
    [SizeDistribution::Keys, SizeDistribution::Values].map(|distribution| {
        let sizes = random_sizes(distribution);
        RingUse {
            sizes: distribution,
            ring: ring_use(&sizes),
            queues: QUEUE_COUNTS.map(|count| queue_use(&sizes, count)),
        }
    })
}

/// Returns random sizes of the distributions in "Workload Analysis of a Large-Scale Key-Value Store"
/// (SIGMETRICS 2012, section 5).
fn random_sizes(distribution: SizeDistribution) -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(12);
    let mut size = || {
        // Exclude 0 and 1, whose sizes are infinite.
        let uniform = (random.f64() + 1e-9).min(1.0 - 1e-9);
        let size = match distribution {
            // Generalised extreme value distribution.
            SizeDistribution::Keys => {
                30.7984 + 8.20449 * ((-uniform.ln()).powf(-0.078688) - 1.0) / 0.078688
            }
            // Generalised Pareto distribution.
            SizeDistribution::Values => {
                214.476 * ((1.0 - uniform).powf(-0.348238) - 1.0) / 0.348238
            }
        };
        (size as usize).clamp(1, MAX_MESSAGE_BYTES - MSG_HEADER_SIZE)
    };
    (0..REQUESTS).map(|_| size()).collect()
}

/// Returns the fraction of a full ring that requests occupy. Their headers do not count, here and in [`queue_use`].
fn ring_use(sizes: &[usize]) -> f64 {
    let mut ring = empty_ring();
    let (mut used, mut fractions) = (0, Vec::new());
    for &size in sizes {
        if ring.reserve(MSG_HEADER_SIZE + size).is_none() {
            fractions.push(used as f64 / RING_BYTES as f64);
            (ring, used) = (empty_ring(), 0);
        } else {
            used += size;
        }
    }
    fractions.iter().sum::<f64>() / fractions.len() as f64
}

fn empty_ring() -> RingProducer<Vec<u8>> {
    RingProducer::new(vec![0; capacity_units(RING_BYTES).unwrap_or(0) as usize])
}

/// Returns the fraction of receive buffers that requests occupy. A request uses a buffer of the smallest sufficient
/// size. The sizes are the best `count` powers of two from 128 to 4096, and include 4096.
fn queue_use(sizes: &[usize], count: usize) -> f64 {
    let powers: Vec<usize> = (7..=12).map(|power| 1 << power).collect();
    // One bit for each size except the last, which is always included.
    let choices =
        (0..1_usize << (powers.len() - 1)).filter(|bits| bits.count_ones() as usize == count - 1);
    let fraction = |bits: usize| {
        let is_included = |i: usize| i == powers.len() - 1 || bits & (1 << i) != 0;
        let buffers = sizes.iter().map(|&size| {
            let fits = |&i: &usize| is_included(i) && powers[i] >= MSG_HEADER_SIZE + size;
            (0..powers.len())
                .find(fits)
                .map_or(MAX_MESSAGE_BYTES, |i| powers[i])
        });
        sizes.iter().sum::<usize>() as f64 / buffers.sum::<usize>() as f64
    };
    choices.map(fraction).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_remainders_of_buffers_are_unused() {
        let fraction = ring_use(&vec![3 * MSG_HEADER_SIZE; 100_000]);
        assert!((fraction - 0.75).abs() < 0.01, "{fraction}");
        assert_eq!(queue_use(&[64, 64], 1), 64.0 / 4096.0);
        assert_eq!(queue_use(&[64, 64], 2), 0.5);
        assert_eq!(queue_use(&[65, 4032], 2), 4097.0 / (256.0 + 4096.0));
    }

    #[test]
    fn use_grows_with_queues_and_ring_exceeds_one_queue() {
        for RingUse {
            sizes,
            ring,
            queues,
        } in all()
        {
            assert!(
                queues.windows(2).all(|pair| pair[0] <= pair[1]),
                "{queues:?}"
            );
            assert!(
                ring > queues[0] && ring < 1.0,
                "{sizes:?}: {ring}, {queues:?}"
            );
        }
    }

    #[test]
    fn mean_sizes_match_the_published_values() {
        let mean = |distribution| {
            random_sizes(distribution).iter().sum::<usize>() as f64 / REQUESTS as f64
        };
        // 35 and 329 bytes in the paper, whose sizes have no maximum.
        assert!(
            (mean(SizeDistribution::Keys) - 36.0).abs() < 2.0,
            "{}",
            mean(SizeDistribution::Keys)
        );
        assert!(
            (mean(SizeDistribution::Values) - 320.0).abs() < 15.0,
            "{}",
            mean(SizeDistribution::Values)
        );
    }
}
