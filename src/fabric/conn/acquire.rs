// SPDX-License-Identifier: GPL-2.0

//! Reservation of capacity on a connection, and its return.
//!
//! # Operation
//!
//! A [`ConnCreditRequest`] names the capacity that must fit at once: work requests, control requests, bytes
//! of virtual queue pairs. Without a deadline a reservation fails with [`TryError::WouldBlock`] instead of
//! sleeping. Sleepers and such callers alternate ([`kite_core::sync::fairness`]), since a caller that polls
//! would otherwise take all capacity before a woken thread runs.
//!
//! # Locking
//!
//! All functions take `Conn::state`. A sleeper waits on `Conn::state_changed`, which releases the lock
//! meanwhile.

use super::{credit::ConnCredit, Conn, ConnState};
use crate::{
    errno::{self, TryError, TryResult},
    fabric::{
        endpoint::{MAX_CONTROL_REQUESTS, MAX_LONG_REQUESTS, RC_SEND_DEPTH},
        Fabric,
    },
    sys::deadline::Deadline,
    trace,
};
use kernel::{
    prelude::*,
    sync::{Arc, CondVarTimeoutResult},
    time::msecs_to_jiffies,
};
use kite_core::proto::conn::ConnPhase;

/// Maximum bytes of virtual queue pairs in flight on a connection. A single larger batch is admitted when no
/// others are in flight. The limit bounds how long other requests queue behind them.
const MAX_INFLIGHT_VQP_BYTES: u64 = 16 << 20;

/// Capacity that a user requests.
struct ConnCreditRequest<'a> {
    /// Work requests that must fit.
    min_wrs: u32,
    /// Work requests to reserve if they fit. At least `min_wrs`.
    max_wrs: u32,
    /// Control requests.
    control_requests: u32,
    /// Control requests that take long. At most `control_requests`.
    long_requests: u32,
    /// Bytes of a virtual queue pair. 0 for other users.
    vqp_bytes: u64,
    /// Fabric with the slot quota that applies. `Some` only for segments of reads and writes.
    quota_fabric: Option<&'a Fabric>,
    /// ID of the only acceptable endpoint. `None` if any is acceptable.
    endpoint_id: Option<u32>,
}

impl<'a> ConnCreditRequest<'a> {
    /// Creates the request for `wr_count` work requests, and nothing else.
    fn new(wr_count: u32) -> Self {
        Self {
            min_wrs: wr_count,
            max_wrs: wr_count,
            control_requests: 0,
            long_requests: 0,
            vqp_bytes: 0,
            quota_fabric: None,
            endpoint_id: None,
        }
    }

    /// Creates the request for `wr_count` work requests of a virtual queue pair with `vqp_bytes` bytes.
    fn for_vqp(wr_count: u32, vqp_bytes: u64, fabric: &'a Fabric) -> Self {
        Self {
            vqp_bytes,
            quota_fabric: Some(fabric),
            ..Self::new(wr_count)
        }
    }

    /// Returns the limit of work requests for this request. Segments leave entries for control requests,
    /// which bypass fair admission.
    fn wr_limit(&self) -> u32 {
        match self.quota_fabric {
            Some(_) => RC_SEND_DEPTH - MAX_CONTROL_REQUESTS,
            None => RC_SEND_DEPTH,
        }
    }
}

impl Conn {
    /// Reserves work requests. Sleeps until a QP with sufficient capacity is ready.
    ///
    /// # Errors
    ///
    /// - The error passed to [`Self::close`], if the connection is closed.
    /// - [`TryError::WouldBlock`]: the caller would have to wait, and `deadline` is `None`.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `EINTR`: a signal arrived that may end the wait (see [`Deadline::check`]).
    pub(crate) fn acquire(
        self: &Arc<Self>,
        wr_count: u32,
        deadline: Option<Deadline>,
    ) -> TryResult<ConnCredit> {
        self.acquire_credits(&ConnCreditRequest::new(wr_count), deadline)
    }

    /// Reserves one work request and one control request. A request that takes long leaves capacity to
    /// others: see [`MAX_LONG_REQUESTS`].
    ///
    /// # Errors
    ///
    /// See [`Self::acquire`].
    pub(crate) fn acquire_control(
        self: &Arc<Self>,
        is_long: bool,
        deadline: Deadline,
    ) -> TryResult<ConnCredit> {
        let request = ConnCreditRequest {
            control_requests: 1,
            long_requests: is_long.into(),
            ..ConnCreditRequest::new(1)
        };
        self.acquire_credits(&request, Some(deadline))
    }

    /// Reserves work requests for a segment of a read or write that needs a slot of `fabric`. The quota of
    /// [`Fabric::inflight_quota`] applies.
    ///
    /// # Errors
    ///
    /// See [`Self::acquire`].
    pub(crate) fn acquire_segment(
        self: &Arc<Self>,
        wr_count: u32,
        fabric: &Fabric,
        deadline: Option<Deadline>,
    ) -> TryResult<ConnCredit> {
        let request = ConnCreditRequest {
            quota_fabric: Some(fabric),
            ..ConnCreditRequest::new(wr_count)
        };
        self.acquire_credits(&request, deadline)
    }

    /// Like [`Self::acquire_segment`], for `vqp_bytes` bytes of a virtual queue pair, but never sleeps.
    ///
    /// # Errors
    ///
    /// See [`Self::acquire`] without a deadline.
    pub(crate) fn try_acquire_vqp(
        self: &Arc<Self>,
        wr_count: u32,
        vqp_bytes: u64,
        fabric: &Fabric,
    ) -> TryResult<ConnCredit> {
        self.acquire_credits(
            &ConnCreditRequest::for_vqp(wr_count, vqp_bytes, fabric),
            None,
        )
    }

    /// Returns `true` if the connection has the capacity that [`Self::try_acquire_vqp`] needs. Reserves
    /// nothing and ignores fair admission.
    ///
    /// # Errors
    ///
    /// - The error passed to [`Self::close`], if the connection is closed.
    pub(crate) fn can_acquire_vqp(
        &self,
        wr_count: u32,
        vqp_bytes: u64,
        fabric: &Fabric,
    ) -> Result<bool> {
        self.has_credits(
            &mut self.state.lock(),
            &ConnCreditRequest::for_vqp(wr_count, vqp_bytes, fabric),
        )
    }

    /// Like [`Self::acquire_segment`], for up to `max_wrs` requests that are posted together and share a
    /// slot. Never sleeps. The caller must return the unused requests with [`ConnCredit::release_unused`].
    ///
    /// # Errors
    ///
    /// See [`Self::acquire`] without a deadline.
    pub(crate) fn try_acquire_batch(
        self: &Arc<Self>,
        wr_count: u32,
        max_wrs: u32,
        fabric: &Fabric,
    ) -> TryResult<ConnCredit> {
        let request = ConnCreditRequest {
            max_wrs,
            quota_fabric: Some(fabric),
            ..ConnCreditRequest::new(wr_count)
        };
        self.acquire_credits(&request, None)
    }

    /// Reserves one work request on the endpoint with this ID.
    ///
    /// # Errors
    ///
    /// - `ENOTCONN`: the endpoint is no longer in use.
    /// - See [`Self::acquire`] for others.
    pub(crate) fn acquire_on_endpoint(
        self: &Arc<Self>,
        endpoint_id: u32,
        deadline: Deadline,
    ) -> TryResult<ConnCredit> {
        let request = ConnCreditRequest {
            endpoint_id: Some(endpoint_id),
            ..ConnCreditRequest::new(1)
        };
        self.acquire_credits(&request, Some(deadline))
    }

    fn acquire_credits(
        self: &Arc<Self>,
        request: &ConnCreditRequest<'_>,
        deadline: Option<Deadline>,
    ) -> TryResult<ConnCredit> {
        let mut state = self.state.lock();
        while !self.has_credits(&mut state, request)?
            || (deadline.is_none() && !state.admission.can_admit_poller())
        {
            let deadline = deadline.ok_or(TryError::WouldBlock)?;
            deadline.check()?;
            // A control request also waits for replies to others. It does not compete for segment capacity,
            // so fair admission excludes it.
            let waits_for_credits = request.control_requests == 0;
            if waits_for_credits {
                state.admission.add_sleeper();
            }
            state.waiters += 1;
            let slice = msecs_to_jiffies(deadline.slice_ms());
            let woken = self
                .state_changed
                .wait_interruptible_timeout(&mut state, slice);
            state.waiters -= 1;
            if waits_for_credits {
                state.admission.remove_sleeper();
            }
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                // The signal is still pending if it does not end the wait. Sleep in `handle_signal`, or this
                // loop would spin.
                drop(state);
                deadline.handle_signal()?;
                state = self.state.lock();
            }
        }
        let endpoint = state.endpoint.clone().ok_or(EIO)?;
        state.admission.note_admission(deadline.is_none());
        let wr_count = request
            .max_wrs
            .min(request.wr_limit() - state.usage.wr_count());
        state.usage.add(wr_count, request.vqp_bytes);
        state.control_requests += request.control_requests;
        state.long_requests += request.long_requests;
        let segments = u32::from(request.quota_fabric.is_some());
        state.inflight_segments += segments;
        if request.max_wrs == request.min_wrs {
            trace::post(
                self.peer.node,
                self.index.into(),
                wr_count,
                state.usage.wr_count(),
            );
        }
        let (generation, rkey) = (state.fsm.generation(), state.rkey);
        Ok(ConnCredit {
            conn: self.clone(),
            endpoint,
            generation,
            rkey,
            wr_count,
            control_requests: request.control_requests,
            long_requests: request.long_requests,
            segments,
            vqp_bytes: request.vqp_bytes,
        })
    }

    /// Returns `true` if the request fits now. Requests a QP if none is ready.
    fn has_credits(&self, state: &mut ConnState, request: &ConnCreditRequest<'_>) -> Result<bool> {
        if let Some(error) = state.close_error {
            return Err(error);
        }
        if request
            .endpoint_id
            .is_some_and(|endpoint_id| !state.has_endpoint(endpoint_id))
        {
            return Err(errno::notconn());
        }
        if !state.is_ready() {
            self.request_connect_locked(state);
            return Ok(false);
        }
        let has_credits = state.usage.wr_count() + request.min_wrs <= request.wr_limit()
            && state.control_requests + request.control_requests <= MAX_CONTROL_REQUESTS
            && state.long_requests + request.long_requests <= MAX_LONG_REQUESTS
            && state
                .usage
                .has_room_for(request.vqp_bytes, MAX_INFLIGHT_VQP_BYTES)
            && request
                .quota_fabric
                .is_none_or(|fabric| state.inflight_segments < fabric.inflight_quota());
        if !has_credits {
            self.stats.credit_waits.add(1);
        }
        Ok(has_credits)
    }

    /// Returns the `unused` work requests of a credit. Its other `wr_count` requests are posted now.
    pub(super) fn release_unused(&self, wr_count: u32, unused: u32) {
        let mut state = self.state.lock();
        state.usage.remove_unposted(unused);
        trace::post(
            self.peer.node,
            self.index.into(),
            wr_count,
            state.usage.wr_count(),
        );
        let waiters = state.waiters;
        drop(state);
        if unused != 0 && waiters != 0 {
            self.state_changed.notify_all();
        }
    }

    pub(super) fn release_credits(
        &self,
        wr_count: u32,
        (control_requests, long_requests): (u32, u32),
        (segments, vqp_bytes): (u32, u64),
    ) {
        let mut state = self.state.lock();
        state.usage.remove_completed(wr_count, vqp_bytes);
        state.control_requests -= control_requests;
        state.long_requests -= long_requests;
        state.inflight_segments -= segments;
        let drained = state.fsm.phase() == ConnPhase::Draining && state.usage.is_idle();
        let waiters = state.waiters;
        drop(state);
        if drained {
            self.connector_waker.event.complete();
        }
        if waiters != 0 {
            self.state_changed.notify_all();
        }
    }
}
