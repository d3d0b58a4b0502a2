// SPDX-License-Identifier: GPL-2.0

//! Selection of the peers that get an RC connection (KRCORE, section 4.6).
//!
//! The peers with the highest decayed request rate are promoted, at most [`MAX_PROMOTED`] for any cluster
//! size. The [`DecayingCounter`] of a peer halves every [`HALF_LIFE_MS`]. A peer above the threshold enters
//! [`PromotedPeers`] if a slot is free. A peer replaces the one of lowest demand in a full set if its demand
//! is at least `HYSTERESIS_FACTOR` times as high. Hence two equally busy peers do not evict each other.

use crate::view::NodeInstance;

/// Maximum number of promoted peers.
pub const MAX_PROMOTED: usize = 64;

/// Decayed request count from which on a peer may be promoted: about 4000 requests per second.
pub const PROMOTE_THRESHOLD_REQUESTS: u32 = 1024;

/// Half-life of the request count, in milliseconds.
pub const HALF_LIFE_MS: u64 = 128;

/// Factor by which the demand of a new peer must exceed the demand of the peer that is replaced.
const HYSTERESIS_FACTOR: u32 = 2;

/// Exponentially decaying count of the requests to one peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecayingCounter {
    requests: u32,
    /// Time up to which the count has decayed, in units of [`HALF_LIFE_MS`].
    decayed_until: u32,
    /// Time of the last report by [`Self::add`], in units of [`HALF_LIFE_MS`].
    last_reported: u32,
}

/// Converts a time to units of [`HALF_LIFE_MS`]. The result saturates after 17 years.
fn to_half_lives(now_ms: u64) -> u32 {
    u32::try_from(now_ms / HALF_LIFE_MS).unwrap_or(u32::MAX)
}

impl DecayingCounter {
    /// Returns the decayed count at `now_ms`.
    #[must_use]
    pub fn value_at(&self, now_ms: u64) -> u32 {
        let elapsed_half_lives = to_half_lives(now_ms).saturating_sub(self.decayed_until);
        self.requests.checked_shr(elapsed_half_lives).unwrap_or(0)
    }

    /// Adds requests. Returns the count if the threshold is reached, at most once per half-life.
    pub fn add(&mut self, now_ms: u64, requests: u32) -> Option<u32> {
        let now_half_lives = to_half_lives(now_ms);
        self.requests = self.value_at(now_ms).saturating_add(requests);
        self.decayed_until = self.decayed_until.max(now_half_lives);
        let should_report =
            self.requests >= PROMOTE_THRESHOLD_REQUESTS && self.last_reported < now_half_lives;
        if should_report {
            self.last_reported = now_half_lives;
        }
        should_report.then_some(self.requests)
    }
}

/// Result of [`PromotedPeers::consider`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromotionOutcome {
    /// The peer is promoted, in place of the contained peer if any.
    Promoted(Option<NodeInstance>),
    /// No slot is available, and no promoted peer has sufficiently lower demand.
    Rejected,
}

/// Set of promoted peers.
#[derive(Clone, Debug)]
pub struct PromotedPeers {
    slots: [Option<NodeInstance>; MAX_PROMOTED],
    /// Number of slots that may be used.
    capacity: usize,
}

impl PromotedPeers {
    /// Creates an empty set of at most `capacity` peers, limited to [`MAX_PROMOTED`].
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            slots: [None; MAX_PROMOTED],
            capacity: capacity.min(MAX_PROMOTED),
        }
    }

    /// Promotes `peer` if its demand `own_demand` is sufficient. `demand_of` returns the demand of a promoted
    /// peer.
    pub fn consider(
        &mut self,
        peer: NodeInstance,
        own_demand: u32,
        demand_of: impl Fn(NodeInstance) -> u32,
    ) -> PromotionOutcome {
        if self.slots.contains(&Some(peer)) {
            return PromotionOutcome::Promoted(None);
        }
        let demand_in = |place: &Option<NodeInstance>| place.map_or(0, &demand_of);
        let by_demand = self.slots[..self.capacity]
            .iter_mut()
            .map(|place| (demand_in(place), place));
        let Some((coldest_demand, coldest_slot)) =
            by_demand.min_by_key(|(worth, place)| (*worth, place.is_some()))
        else {
            return PromotionOutcome::Rejected;
        };
        if coldest_slot.is_some() && coldest_demand.saturating_mul(HYSTERESIS_FACTOR) > own_demand {
            return PromotionOutcome::Rejected;
        }
        PromotionOutcome::Promoted(coldest_slot.replace(peer))
    }

    /// Removes a peer that left the cluster.
    pub fn remove(&mut self, peer: NodeInstance) {
        for slot in &mut self.slots {
            if *slot == Some(peer) {
                *slot = None;
            }
        }
    }

    /// Returns the number of promoted peers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slots.iter().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn peer(node: u32) -> NodeInstance {
        NodeInstance {
            node,
            incarnation: 1,
        }
    }

    #[test]
    fn counter_halves_every_half_life() {
        let mut demand = DecayingCounter::default();
        assert_eq!(
            demand.add(1000 * HALF_LIFE_MS, PROMOTE_THRESHOLD_REQUESTS - 1),
            None
        );
        assert_eq!(
            demand.add(1000 * HALF_LIFE_MS, 1),
            Some(PROMOTE_THRESHOLD_REQUESTS)
        );
        // The threshold was already reported in this half-life.
        assert_eq!(demand.add(1000 * HALF_LIFE_MS + 1, 1), None);
        assert_eq!(
            demand.value_at(1001 * HALF_LIFE_MS),
            PROMOTE_THRESHOLD_REQUESTS / 2
        );
        assert_eq!(demand.value_at(1010 * HALF_LIFE_MS), 1);
        assert_eq!(demand.value_at(u64::MAX), 0);
        // A clock that goes back does not decay the count.
        assert_eq!(demand.value_at(0), PROMOTE_THRESHOLD_REQUESTS + 1);
    }

    #[test]
    fn full_set_replaces_only_a_peer_of_much_lower_demand() {
        let mut promoted = PromotedPeers::new(MAX_PROMOTED);
        for node in 1..=MAX_PROMOTED as u32 {
            let outcome = promoted.consider(peer(node), PROMOTE_THRESHOLD_REQUESTS, |_| {
                PROMOTE_THRESHOLD_REQUESTS
            });
            assert_eq!(outcome, PromotionOutcome::Promoted(None));
        }
        assert_eq!(promoted.count(), MAX_PROMOTED);
        let newcomer = peer(1000);
        let demand = |other: NodeInstance| {
            if other.node == 7 {
                PROMOTE_THRESHOLD_REQUESTS / 2
            } else {
                PROMOTE_THRESHOLD_REQUESTS
            }
        };
        assert_eq!(
            promoted.consider(newcomer, PROMOTE_THRESHOLD_REQUESTS - 1, demand),
            PromotionOutcome::Rejected
        );
        let outcome = promoted.consider(newcomer, PROMOTE_THRESHOLD_REQUESTS, demand);
        assert_eq!(outcome, PromotionOutcome::Promoted(Some(peer(7))));
        promoted.remove(newcomer);
        assert_eq!(promoted.count(), MAX_PROMOTED - 1);
        assert_eq!(
            promoted.consider(peer(7), 0, demand),
            PromotionOutcome::Promoted(None),
            "there is room"
        );
    }

    #[test]
    fn promoted_peers_never_exceed_the_capacity() {
        let mut none = PromotedPeers::new(0);
        assert_eq!(
            none.consider(peer(1), u32::MAX, |_| 0),
            PromotionOutcome::Rejected
        );
        let mut one = PromotedPeers::new(1);
        one.consider(peer(1), PROMOTE_THRESHOLD_REQUESTS, |_| {
            PROMOTE_THRESHOLD_REQUESTS
        });
        let outcome = one.consider(peer(2), 2 * PROMOTE_THRESHOLD_REQUESTS, |_| {
            PROMOTE_THRESHOLD_REQUESTS
        });
        assert_eq!(outcome, PromotionOutcome::Promoted(Some(peer(1))));
        assert_eq!((none.count(), one.count()), (0, 1));
    }

    proptest! {
        #[test]
        fn promoted_peers_have_no_duplicates(offers in prop::collection::vec((1..200u32, any::<u16>(), any::<bool>()), 0..1000)) {
            let (mut promoted, mut demand) = (PromotedPeers::new(MAX_PROMOTED), [0u32; 200]);
            for (node, demand_of_node, removes) in offers {
                demand[node as usize] = demand_of_node.into();
                if removes {
                    promoted.remove(peer(node));
                    continue;
                }
                let demand_of = |peer: NodeInstance| demand[peer.node as usize];
                let before = promoted.count();
                let outcome = promoted.consider(peer(node), demand_of_node.into(), demand_of);
                if let PromotionOutcome::Promoted(Some(other)) = outcome {
                    prop_assert!(demand_of(other).saturating_mul(HYSTERESIS_FACTOR) <= demand_of_node.into());
                    prop_assert_eq!(promoted.count(), before);
                }
                let mut all: Vec<_> = promoted.slots.iter().flatten().collect();
                all.sort_unstable();
                prop_assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
            }
        }
    }
}
