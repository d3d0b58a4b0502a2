// SPDX-License-Identifier: GPL-2.0

//! Which nodes are worth a connection (KRCORE, section 4.6): those that get the most requests, and no more than a
//! bound, whatever the cluster's size.
//!
//! Each node's [`Demand`] fades by half every now and then. One with enough of it is [`Promoted`], if there is room, or
//! in place of one with much less: so two that are alike do not take turns.

use crate::view::Life;

/// Most nodes that are promoted at a time.
pub const BOUND: usize = 64;

/// Demand from which on a node is worth a connection: some four thousand requests in a second.
pub const ENOUGH: u32 = 1024;

/// Milliseconds in which demand fades by half.
pub const HALF_MS: u64 = 128;

/// How much more somebody must have than whose place he takes.
const MUCH: u32 = 2;

/// Requests to a node of late.
#[derive(Clone, Copy, Debug, Default)]
pub struct Demand {
    requests: u32,
    /// Until when they have faded, in [`HALF_MS`].
    faded: u32,
    /// When somebody was told last that there is enough, likewise.
    told: u32,
}

/// A time in [`HALF_MS`], of which there are 17 years.
fn half(now_ms: u64) -> u32 {
    u32::try_from(now_ms / HALF_MS).unwrap_or(u32::MAX)
}

impl Demand {
    /// What there is of it.
    #[must_use]
    pub fn at(&self, now_ms: u64) -> u32 {
        let halves = half(now_ms).saturating_sub(self.faded);
        self.requests.checked_shr(halves).unwrap_or(0)
    }

    /// So many more. Returns how much there is if that is enough, now and then.
    pub fn add(&mut self, now_ms: u64, requests: u32) -> Option<u32> {
        let half = half(now_ms);
        self.requests = self.at(now_ms).saturating_add(requests);
        self.faded = self.faded.max(half);
        let tells = self.requests >= ENOUGH && self.told < half;
        if tells {
            self.told = half;
        }
        tells.then_some(self.requests)
    }
}

/// What came of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is promoted, perhaps in place of another.
    Promoted(Option<Life>),
    /// Others are worth more, or nearly as much.
    Refused,
}

/// The nodes that are promoted.
#[derive(Clone, Debug)]
pub struct Promoted {
    places: [Option<Life>; BOUND],
    /// So many of the places may be taken.
    most: usize,
}

impl Promoted {
    /// None, and never more than `most`, nor than [`BOUND`].
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            places: [None; BOUND],
            most: most.min(BOUND),
        }
    }

    /// Promotes a node with so much demand, if it is worth that. `demand` says how much another has.
    pub fn offer(&mut self, peer: Life, own: u32, demand: impl Fn(Life) -> u32) -> Outcome {
        if self.places.contains(&Some(peer)) {
            return Outcome::Promoted(None);
        }
        let worth = |place: &Option<Life>| place.map_or(0, &demand);
        let coldest = self.places[..self.most]
            .iter_mut()
            .map(|place| (worth(place), place));
        let Some((worth, place)) = coldest.min_by_key(|(worth, place)| (*worth, place.is_some()))
        else {
            return Outcome::Refused;
        };
        if place.is_some() && worth.saturating_mul(MUCH) > own {
            return Outcome::Refused;
        }
        Outcome::Promoted(place.replace(peer))
    }

    /// A node has left.
    pub fn remove(&mut self, peer: Life) {
        for place in &mut self.places {
            if *place == Some(peer) {
                *place = None;
            }
        }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.places.iter().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn peer(node: u32) -> Life {
        Life {
            node,
            incarnation: 1,
        }
    }

    #[test]
    fn demand_fades() {
        let mut demand = Demand::default();
        assert_eq!(demand.add(1000 * HALF_MS, ENOUGH - 1), None);
        assert_eq!(demand.add(1000 * HALF_MS, 1), Some(ENOUGH));
        // It was said a moment ago.
        assert_eq!(demand.add(1000 * HALF_MS + 1, 1), None);
        assert_eq!(demand.at(1001 * HALF_MS), ENOUGH / 2);
        assert_eq!(demand.at(1010 * HALF_MS), 1);
        assert_eq!(demand.at(u64::MAX), 0);
        // A clock that goes back fades nothing.
        assert_eq!(demand.at(0), ENOUGH + 1);
    }

    #[test]
    fn there_is_room_for_so_many() {
        let mut promoted = Promoted::new(BOUND);
        for node in 1..=BOUND as u32 {
            let outcome = promoted.offer(peer(node), ENOUGH, |_| ENOUGH);
            assert_eq!(outcome, Outcome::Promoted(None));
        }
        assert_eq!(promoted.count(), BOUND);
        let late = peer(1000);
        let demand = |other: Life| if other.node == 7 { ENOUGH / 2 } else { ENOUGH };
        assert_eq!(promoted.offer(late, ENOUGH - 1, demand), Outcome::Refused);
        let outcome = promoted.offer(late, ENOUGH, demand);
        assert_eq!(outcome, Outcome::Promoted(Some(peer(7))));
        promoted.remove(late);
        assert_eq!(promoted.count(), BOUND - 1);
        assert_eq!(
            promoted.offer(peer(7), 0, demand),
            Outcome::Promoted(None),
            "there is room"
        );
    }

    #[test]
    fn no_more_are_promoted_than_may_be() {
        let mut none = Promoted::new(0);
        assert_eq!(none.offer(peer(1), u32::MAX, |_| 0), Outcome::Refused);
        let mut one = Promoted::new(1);
        one.offer(peer(1), ENOUGH, |_| ENOUGH);
        let outcome = one.offer(peer(2), 2 * ENOUGH, |_| ENOUGH);
        assert_eq!(outcome, Outcome::Promoted(Some(peer(1))));
        assert_eq!((none.count(), one.count()), (0, 1));
    }

    proptest! {
        #[test]
        fn none_is_there_twice(offers in prop::collection::vec((1..200u32, any::<u16>(), any::<bool>()), 0..1000)) {
            let (mut promoted, mut demand) = (Promoted::new(BOUND), [0u32; 200]);
            for (node, worth, leaves) in offers {
                demand[node as usize] = worth.into();
                if leaves {
                    promoted.remove(peer(node));
                    continue;
                }
                let of = |peer: Life| demand[peer.node as usize];
                let before = promoted.count();
                let outcome = promoted.offer(peer(node), worth.into(), of);
                if let Outcome::Promoted(Some(other)) = outcome {
                    prop_assert!(of(other).saturating_mul(MUCH) <= worth.into());
                    prop_assert_eq!(promoted.count(), before);
                }
                let mut all: Vec<_> = promoted.places.iter().flatten().collect();
                all.sort_unstable();
                prop_assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
            }
        }
    }
}
