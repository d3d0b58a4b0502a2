// SPDX-License-Identifier: GPL-2.0

//! Credit of a connection: the right to post work requests on its current QP.
//!
//! # Operation
//!
//! A user acquires a [`ConnCredit`] ([`super::acquire`]), posts with it, and drops it when its work requests
//! have completed. The drop returns the capacity to other users.
//!
//! # Recovery
//!
//! A user reports a failed QP ([`ConnCredit::report_failure`]), and keeps a [`StaleQp`] while late packets of
//! the QP could change memory that is reused. The connector destroys the failed QP after all its credits are
//! dropped.

use super::Conn;
use crate::{
    fabric::{
        endpoint::Endpoint,
        send::slots::{Recovery, SlotGuard},
    },
    verbs::{
        cq::WcStatus,
        work::{RdmaOp, RdmaOpcode, RemoteAddr, SendWr, Sge},
    },
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// QP that failed. Its packets may still arrive late at the memory of the peer, until another QP is connected
/// in its place.
#[derive(Clone)]
pub(crate) struct StaleQp {
    pub(in crate::fabric) conn: Arc<Conn>,
    pub(in crate::fabric) generation: u32,
}

impl StaleQp {
    /// Returns `true` if another QP was connected in its place, so that no packet of the QP can arrive. Stays
    /// `false` if the peer is fenced first.
    pub(crate) fn is_fenced(&self) -> bool {
        self.conn.is_stale_generation(self.generation)
    }

    /// Returns the peer of the QP, and the admission of the connection.
    pub(crate) fn peer(&self) -> (NodeInstance, u64) {
        (self.conn.peer, self.conn.admission)
    }
}

/// Right to post a number of work requests on the QP of a connection.
pub(crate) struct ConnCredit {
    pub(in crate::fabric) conn: Arc<Conn>,
    pub(in crate::fabric) endpoint: Arc<Endpoint>,
    /// Generation of the QP of `endpoint`.
    pub(in crate::fabric) generation: u32,
    /// Key to the memory of the peer.
    pub(in crate::fabric) rkey: u32,
    /// Work requests that are not returned yet.
    pub(in crate::fabric) wr_count: u32,
    /// Control requests that receive their replies on the QP.
    pub(in crate::fabric) control_requests: u32,
    /// Those of them that take long.
    pub(in crate::fabric) long_requests: u32,
    /// 1 for a segment of a read or write, otherwise 0.
    pub(in crate::fabric) segments: u32,
    /// Bytes of a virtual queue pair.
    pub(in crate::fabric) vqp_bytes: u64,
}

impl ConnCredit {
    /// Posts a work request with the local memory `sges` and the memory at `addr` of the peer. Accounts the
    /// request to `slot`.
    ///
    /// # Safety
    ///
    /// `sges` must name the buffer of `slot`, or memory that is attached to `slot`. For an inline WRITE,
    /// `sges` must have addresses of kernel memory that is valid for reads.
    ///
    /// # Errors
    ///
    /// - The error of the driver if it rejects the request.
    pub(crate) unsafe fn post(
        &self,
        slot: &SlotGuard,
        opcode: RdmaOpcode,
        sges: &[Sge],
        addr: u64,
    ) -> Result {
        let rkey = self.rkey;
        let op = RdmaOp {
            opcode,
            sges,
            remote: RemoteAddr { addr, rkey },
            fence: false,
        };
        slot.account_post(1);
        // SAFETY: `slot` keeps the memory mapped until the work request completes. By the safety
        // requirements, inline data is valid during the call.
        unsafe { self.endpoint.qp().post(&SendWr::new(&op, slot.wr_id())) }
            .inspect_err(|_| slot.unaccount_post(1))
    }

    /// Reports that a work request failed with `status`, and with it the QP.
    pub(crate) fn report_failure(&self, status: WcStatus) {
        if status == WcStatus::RetryExceeded {
            self.conn.report_no_response(self.generation);
        } else {
            self.conn.report_failure(self.generation);
        }
    }

    /// Returns the QP as a failed QP.
    pub(crate) fn stale_qp(&self) -> StaleQp {
        StaleQp {
            conn: self.conn.clone(),
            generation: self.generation,
        }
    }

    /// Returns the maximum bytes of an inline work request.
    pub(crate) fn inline_max(&self) -> usize {
        self.endpoint.qp().max_inline_data()
    }

    /// Returns the capacity of all work requests but `wr_count`, which are posted now.
    pub(in crate::fabric) fn release_unused(&mut self, wr_count: u32) {
        let unused = self.wr_count.saturating_sub(wr_count);
        self.wr_count -= unused;
        self.conn.release_unused(wr_count, unused);
    }

    /// Returns the capacity of all work requests, which must have completed. Control requests keep waiting
    /// for their replies.
    pub(crate) fn release_wrs(&mut self) {
        let wr_count = core::mem::take(&mut self.wr_count);
        self.conn.release_credits(wr_count, (0, 0), (0, 0));
    }

    /// Returns `true` if a reply can still arrive on the QP.
    pub(crate) fn is_current(&self) -> bool {
        self.conn.is_current(self.generation)
    }

    /// Fails the QP, because completions are missing.
    ///
    /// # Errors
    ///
    /// - The error of the RNIC if it rejects the QP transition.
    pub(crate) fn recover(&self, recovery: Recovery) -> Result {
        self.conn.report_failure(self.generation);
        match recovery {
            Recovery::ToError => self.endpoint.qp().modify_to_err(),
            Recovery::ToReset => self.endpoint.qp().modify_to_reset(),
        }
    }
}

impl Drop for ConnCredit {
    fn drop(&mut self) {
        let requests = (self.control_requests, self.long_requests);
        let segments_and_bytes = (self.segments, self.vqp_bytes);
        self.conn
            .release_credits(self.wr_count, requests, segments_and_bytes);
    }
}
