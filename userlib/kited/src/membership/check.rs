// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Check of a node over RDMA, by requests of several kernels.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A kernel received a reply.
    Responds,
    /// No kernel received a reply, and at least one received none in time.
    Silent,
    /// No probe is evidence.
    Unknown,
}

/// Check of a node over RDMA. `K` identifies a probe: the node that sends it, or its target.
#[derive(Debug)]
pub(super) struct RdmaCheck<K> {
    deadline: Instant,
    pending: BTreeSet<K>,
    evidence: BTreeMap<K, bool>,
}

impl<K: Ord + Copy> RdmaCheck<K> {
    /// Starts a check that ends when all probes have ended, or at the deadline.
    pub(super) fn new(deadline: Instant, probes: impl IntoIterator<Item = K>) -> Self {
        Self {
            deadline,
            pending: probes.into_iter().collect(),
            evidence: BTreeMap::new(),
        }
    }

    /// Records the end of a probe. Returns `false` if the check does not contain the probe.
    pub(super) fn record(&mut self, probe: K, evidence: Option<bool>) -> bool {
        let is_known = self.pending.remove(&probe);
        if let (true, Some(answered)) = (is_known, evidence) {
            self.evidence.insert(probe, answered);
        }
        is_known
    }

    /// Returns the evidence of a probe.
    pub(super) fn evidence(&self, probe: K) -> Option<bool> {
        self.evidence.get(&probe).copied()
    }

    /// Returns the number of probes that satisfy `includes` and received no reply in time.
    pub(super) fn silent_count(&self, includes: impl Fn(K) -> bool) -> usize {
        let silent = self.evidence.iter().filter(|(_, &answered)| !answered);
        silent.filter(|(&probe, _)| includes(probe)).count()
    }

    /// Returns `true` if all probes have ended, or the deadline has passed.
    pub(super) fn has_ended(&self, now: Instant) -> bool {
        self.pending.is_empty() || self.deadline <= now
    }

    /// Returns the verdict of the probes that satisfy `includes`, as far as they have ended.
    pub(super) fn verdict(&self, includes: impl Fn(K) -> bool) -> Verdict {
        let included = self.evidence.iter().filter(|(&probe, _)| includes(probe));
        included.fold(Verdict::Unknown, |verdict, (_, &answered)| {
            match (verdict, answered) {
                (Verdict::Responds, _) | (_, true) => Verdict::Responds,
                _ => Verdict::Silent,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn one_answer_outweighs_all_other_evidence() {
        let now = Instant::now();
        let mut check = RdmaCheck::new(now + Duration::from_secs(1), [1, 2, 3, 4]);
        check.record(1, None);
        assert_eq!(check.verdict(|_| true), Verdict::Unknown);
        check.record(2, Some(false));
        assert_eq!(check.verdict(|_| true), Verdict::Silent);
        check.record(3, Some(true));
        assert!(!check.record(3, Some(false)), "the probe has ended");
        assert!(!check.has_ended(now));
        assert!(check.has_ended(now + Duration::from_secs(1)));
        check.record(4, Some(false));
        assert!(check.has_ended(now));
        assert_eq!(check.verdict(|_| true), Verdict::Responds);
        assert_eq!(check.verdict(|probe| probe != 3), Verdict::Silent);
        assert_eq!(check.evidence(3), Some(true));
        assert_eq!(check.silent_count(|_| true), 2);
        assert_eq!(check.silent_count(|probe| probe != 2), 1);
    }
}
