// SPDX-License-Identifier: GPL-2.0

//! Transport of a virtual QP (VQP): shared DC QPs, or an RC connection once the peer is promoted (KRCORE,
//! section 4.6).
//!
//! DC QPs reach every node. The requests of a VQP keep their order, but two QPs have no order between them.
//! Hence the transport changes only while no request is in flight. RC cannot carry every request, and a VQP
//! with mixed requests would wait at each change. Hence a VQP switches to RC only after a long run of
//! requests that RC can carry.

/// Length of a run of RC-capable requests after which a VQP switches to RC.
pub const SWITCH_AFTER_REQUESTS: u32 = 64;

/// Transport to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// DCI that all VQPs share.
    #[default]
    Dc,
    /// RC connection to the node.
    Rc,
}

/// Selects the transport of the requests of a VQP.
#[derive(Clone, Copy, Debug, Default)]
pub struct TransportSelector {
    transport: Transport,
    /// Length of the current run of requests that RC can carry.
    rc_capable_run: u32,
}

impl TransportSelector {
    /// Returns the transport of the last request.
    #[must_use]
    pub const fn transport(&self) -> Transport {
        self.transport
    }

    /// Returns the transport of the next requests, or `None` if they must wait for requests in flight.
    ///
    /// `rc_capable` is `true` if RC can carry the requests. `rc_ready` is `true` if an RC connection exists
    /// and should be used. `has_inflight` is `true` while requests are in flight.
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

    /// Records `count` requests that use `transport`. Returns `true` if the transport changed.
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

    /// Selects the transport of one request and records the request, as a VQP does.
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
        // The run of RC-capable requests still counts.
        assert_eq!(
            submit(&mut selector, true, true, false),
            Some(Transport::Rc)
        );
    }

    proptest! {
        /// For any requests, the transport never changes while requests are in flight, and no request waits
        /// otherwise.
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
