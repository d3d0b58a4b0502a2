// SPDX-License-Identifier: GPL-2.0

//! Request of a virtual queue pair (VQP) submitted through an I/O queue.
//!
//! The queue passes the request on to the VQP ([`super::super::push`]), which completes the request.

use crate::{
    bindings,
    fabric::qos::tenant::{AdmissionTicket, Tenant},
    session::args,
    sys::deadline::Deadline,
    vqp::send::push_builder::PushError,
};
use kernel::prelude::*;

/// State of a request.
pub(in crate::session::queue) enum PushJobState {
    /// Queued.
    Queued,
    /// Queued, while a worker waits for a prerequisite. The value is the number of the wait.
    AwaitingWorker(u64),
    /// Submitted to the VQP, or rejected.
    Done(Result),
}

/// Request of a VQP.
pub(in crate::session::queue) struct VqpPushJob {
    pub(in crate::session::queue) vqp_id: u64,
    pub(in crate::session::queue) wr: bindings::kite_send_wr,
    pub(in crate::session::queue) state: PushJobState,
    /// Deadline for admission by the session's priority and limits. Set at the first delay.
    deadline: Option<Deadline>,
}

impl VqpPushJob {
    /// Returns the request of a submission with the tag `tag`.
    pub(super) fn new(tag: u64, wr: bindings::kite_send_wr) -> Self {
        Self {
            vqp_id: wr.tag,
            wr: bindings::kite_send_wr { tag, ..wr },
            state: PushJobState::Queued,
            deadline: None,
        }
    }

    /// Checks that the session's priority and limits admit the request now.
    ///
    /// # Errors
    ///
    /// - `PushError::Busy`: not yet admitted.
    /// - `PushError::Refused(ETIMEDOUT)`: not admitted before the deadline.
    /// - Otherwise see [`Tenant::try_admit`].
    pub(in crate::session::queue) fn check_admission(
        &mut self,
        tenant: &Tenant,
        ticket: &mut AdmissionTicket,
    ) -> Result<(), PushError> {
        let deadline = self.deadline.unwrap_or_else(|| args::deadline(0));
        let len = u64::from(self.wr.len);
        if tenant.try_admit(ticket, len, deadline)? {
            tenant.charge_unmeasured(len);
            return Ok(());
        }
        if deadline.has_expired() {
            return Err(PushError::Refused(ETIMEDOUT));
        }
        self.deadline = Some(deadline);
        Err(PushError::Busy)
    }

    /// Returns `true` if the request is queued, and no worker waits for it.
    pub(in crate::session::queue) fn is_queued(&self) -> bool {
        matches!(self.state, PushJobState::Queued)
    }
}
