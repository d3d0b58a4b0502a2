// SPDX-License-Identifier: GPL-2.0

//! Cost of requests: what limits and the low-priority class are charged at admission.

use kite_core::policy::qos::request_cost;

/// Requests and bytes that are admitted together.
#[derive(Clone, Copy)]
pub(crate) struct RequestCost {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
}

impl RequestCost {
    /// Returns the cost in units of [`request_cost`], including the overhead of each request.
    pub(super) fn tokens(self) -> u64 {
        let Self { requests, bytes } = self;
        request_cost(bytes)
            .saturating_add(request_cost(0).saturating_mul(requests.saturating_sub(1)))
    }
}

/// Cost of one request of the given number of bytes.
impl From<u64> for RequestCost {
    fn from(bytes: u64) -> Self {
        Self { requests: 1, bytes }
    }
}
