// SPDX-License-Identifier: GPL-2.0

//! By which queue pairs the requests of a virtual one go: those of DC, which reach every node, or a connected one,
//! once its node is worth that (KRCORE, section 4.6).
//!
//! Requests keep their order, and two queue pairs keep none between them: so the way changes only when nothing is under
//! way. A connected queue pair does not take everything, and who has a bit of both would wait at each change. So only
//! who has long had nothing else goes over to it.

/// Requests in a row that a connected queue pair takes, after which it gets the next.
pub const STEADY: u32 = 64;

/// A way to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// By an initiator of DC that all share.
    #[default]
    Dynamic,
    /// By a queue pair that is connected to the node.
    Connected,
}

/// Which way the requests of a virtual queue pair go.
#[derive(Clone, Copy, Debug, Default)]
pub struct Path {
    way: Way,
    /// Requests in a row that a connected queue pair would have taken.
    steady: u32,
}

impl Path {
    /// The way that the last went.
    #[must_use]
    pub const fn way(&self) -> Way {
        self.way
    }

    /// Which way the next go, if they may go now: `able` says whether a connected queue pair takes them, `ready` whether
    /// there is one that is to be used, and `busy` whether anything is under way.
    #[must_use]
    pub fn next(&self, able: bool, ready: bool, busy: bool) -> Option<Way> {
        let steady = self.way == Way::Connected || self.steady >= STEADY;
        let way = match able && ready && steady {
            true => Way::Connected,
            false => Way::Dynamic,
        };
        (way == self.way || !busy).then_some(way)
    }

    /// So many went that way. Returns whether it is another than before.
    pub fn went(&mut self, way: Way, able: bool, count: u32) -> bool {
        self.steady = match able {
            true => self.steady.saturating_add(count),
            false => 0,
        };
        core::mem::replace(&mut self.way, way) != way
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a virtual queue pair does with a request.
    fn go(path: &mut Path, able: bool, ready: bool, busy: bool) -> Option<Way> {
        let way = path.next(able, ready, busy)?;
        path.went(way, able, 1);
        Some(way)
    }

    #[test]
    fn who_is_steady_goes_over_when_nothing_is_under_way() {
        let mut path = Path::default();
        for _ in 0..STEADY {
            assert_eq!(go(&mut path, true, true, true), Some(Way::Dynamic));
        }
        assert_eq!(go(&mut path, true, true, true), None);
        assert_eq!(go(&mut path, true, true, false), Some(Way::Connected));
        assert_eq!(go(&mut path, true, true, true), Some(Way::Connected));
    }

    #[test]
    fn what_a_connected_one_does_not_take_goes_back_and_stays() {
        let mut path = Path::default();
        path.went(Way::Connected, true, STEADY);
        assert_eq!(go(&mut path, false, true, true), None);
        assert_eq!(go(&mut path, false, true, false), Some(Way::Dynamic));
        for _ in 0..STEADY {
            assert_eq!(go(&mut path, true, true, false), Some(Way::Dynamic));
        }
        assert_eq!(go(&mut path, true, true, false), Some(Way::Connected));
    }

    #[test]
    fn a_connection_that_is_gone_is_left() {
        let mut path = Path::default();
        path.went(Way::Connected, true, STEADY);
        assert_eq!(go(&mut path, true, false, true), None);
        assert_eq!(go(&mut path, true, false, false), Some(Way::Dynamic));
        // It is steady still.
        assert_eq!(go(&mut path, true, true, false), Some(Way::Connected));
    }

    proptest! {
        /// Whatever comes, the way never changes while something is under way, and nothing waits without that.
        #[test]
        fn order_is_kept(steps in prop::collection::vec((any::<bool>(), any::<bool>(), 0..3u32), 0..400)) {
            let (mut path, mut busy) = (Path::default(), 0u32);
            for (able, ready, end) in steps {
                busy = busy.saturating_sub(end);
                let before = path.way();
                match go(&mut path, able, ready, busy != 0) {
                    Some(way) => {
                        prop_assert!(way == before || busy == 0);
                        prop_assert!(way == Way::Dynamic || (able && ready));
                        busy += 1;
                    }
                    None => prop_assert!(busy != 0),
                }
            }
        }
    }
}
