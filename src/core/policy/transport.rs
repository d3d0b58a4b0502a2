// SPDX-License-Identifier: GPL-2.0

//! By which queue pairs the requests of a virtual one go: those of DC, which reach every node, or a connected one,
//! once its node is worth that (KRCORE, section 4.6).
//!
//! Requests keep their order, and two queue pairs keep none between them: so the way changes only when nothing is under
//! way. A connected queue pair does not take everything, and who has a bit of both would wait at each change. So only
//! who has long had nothing else goes over to it.

/// Requests in a row that a connected queue pair takes, after which it gets the next.
pub const SWITCH_AFTER_REQUESTS: u32 = 64;

/// A way to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// By an initiator of DC that all share.
    #[default]
    Dc,
    /// By a queue pair that is connected to the node.
    Rc,
}

/// Which way the requests of a virtual queue pair go.
#[derive(Clone, Copy, Debug, Default)]
pub struct TransportSelector {
    transport: Transport,
    /// Requests in a row that a connected queue pair would have taken.
    rc_capable_run: u32,
}

impl TransportSelector {
    /// The way that the last went.
    #[must_use]
    pub const fn transport(&self) -> Transport {
        self.transport
    }

    /// Which way the next go, if they may go now: `able` says whether a connected queue pair takes them, `ready` whether
    /// there is one that is to be used, and `busy` whether anything is under way.
    #[must_use]
    pub fn select(
        &self,
        rc_capable: bool,
        rc_ready: bool,
        has_inflight: bool,
    ) -> Option<Transport> {
        let prefers_rc =
            self.transport == Transport::Rc || self.rc_capable_run >= SWITCH_AFTER_REQUESTS;
        let transport = match rc_capable && rc_ready && prefers_rc {
            true => Transport::Rc,
            false => Transport::Dc,
        };
        (transport == self.transport || !has_inflight).then_some(transport)
    }

    /// So many went that way. Returns whether it is another than before.
    pub fn record(&mut self, transport: Transport, rc_capable: bool, count: u32) -> bool {
        self.rc_capable_run = match rc_capable {
            true => self.rc_capable_run.saturating_add(count),
            false => 0,
        };
        core::mem::replace(&mut self.transport, transport) != transport
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a virtual queue pair does with a request.
    fn submit(
        selector: &mut TransportSelector,
        rc_capable: bool,
        rc_ready: bool,
        has_inflight: bool,
    ) -> Option<Transport> {
        let transport = selector.select(rc_capable, rc_ready, has_inflight)?;
        selector.record(transport, rc_capable, 1);
        Some(transport)
    }

    #[test]
    fn selector_switches_to_rc_after_a_run_when_nothing_is_in_flight() {
        let mut selector = TransportSelector::default();
        for _ in 0..SWITCH_AFTER_REQUESTS {
            assert_eq!(submit(&mut selector, true, true, true), Some(Transport::Dc));
        }
        assert_eq!(submit(&mut selector, true, true, true), None);
        assert_eq!(
            submit(&mut selector, true, true, false),
            Some(Transport::Rc)
        );
        assert_eq!(submit(&mut selector, true, true, true), Some(Transport::Rc));
    }

    #[test]
    fn selector_returns_to_dc_for_a_request_that_rc_cannot_carry() {
        let mut selector = TransportSelector::default();
        selector.record(Transport::Rc, true, SWITCH_AFTER_REQUESTS);
        assert_eq!(submit(&mut selector, false, true, true), None);
        assert_eq!(
            submit(&mut selector, false, true, false),
            Some(Transport::Dc)
        );
        for _ in 0..SWITCH_AFTER_REQUESTS {
            assert_eq!(
                submit(&mut selector, true, true, false),
                Some(Transport::Dc)
            );
        }
        assert_eq!(
            submit(&mut selector, true, true, false),
            Some(Transport::Rc)
        );
    }

    #[test]
    fn selector_returns_to_dc_when_rc_is_not_ready() {
        let mut selector = TransportSelector::default();
        selector.record(Transport::Rc, true, SWITCH_AFTER_REQUESTS);
        assert_eq!(submit(&mut selector, true, false, true), None);
        assert_eq!(
            submit(&mut selector, true, false, false),
            Some(Transport::Dc)
        );
        // It is steady still.
        assert_eq!(
            submit(&mut selector, true, true, false),
            Some(Transport::Rc)
        );
    }

    proptest! {
        /// Whatever comes, the way never changes while something is under way, and nothing waits without that.
        #[test]
        fn selector_never_switches_while_requests_are_in_flight(steps in prop::collection::vec((any::<bool>(), any::<bool>(), 0..3u32), 0..400)) {
            let (mut selector, mut in_flight) = (TransportSelector::default(), 0u32);
            for (rc_capable, rc_ready, completed) in steps {
                in_flight = in_flight.saturating_sub(completed);
                let before = selector.transport();
                match submit(&mut selector, rc_capable, rc_ready, in_flight != 0) {
                    Some(way) => {
                        prop_assert!(way == before || in_flight == 0);
                        prop_assert!(way == Transport::Dc || (rc_capable && rc_ready));
                        in_flight += 1;
                    }
                    None => prop_assert!(in_flight != 0),
                }
            }
        }
    }
}
