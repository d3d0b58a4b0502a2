// SPDX-License-Identifier: GPL-2.0

//! Requests of an I/O queue that always run on a worker.

use crate::{
    bindings,
    region::map::{atomic::AtomicRequest, copy::FillRequest},
    session::{
        args::{CopyArgs, ReplyArgs},
        Session,
    },
    sys::deadline::Deadline,
};
use kernel::prelude::*;
use kite_core::{atomic::WORD_BYTES, sync::lock::ReleaseReason};

/// Request that always runs on a worker.
pub(in crate::session::queue) enum BlockingJob {
    FillRegion(u64, FillRequest),
    Copy(CopyArgs),
    AtomicUpdate(u64, AtomicRequest),
    Reply(ReplyArgs),
    Unlock(u64, ReleaseReason, Deadline),
}

impl BlockingJob {
    /// Returns the number of bytes for admission, or `None` if no admission is needed. A range outside of its
    /// region needs none, because the request fails at once.
    pub(super) fn len(&self, session: &Session) -> Option<u64> {
        let len_if_within = |handle, len| {
            let region_len = session.region_len(handle).ok()?;
            (len <= region_len).then_some(len)
        };
        match self {
            Self::FillRegion(handle, fill) => len_if_within(*handle, fill.len),
            Self::Copy(copying) => len_if_within(copying.from.0, copying.len),
            Self::AtomicUpdate(..) => Some(WORD_BYTES),
            Self::Reply(answering) => Some(answering.len().min(bindings::KITE_DATA_MAX.into())),
            Self::Unlock(..) => None,
        }
    }

    /// Returns the deadline.
    pub(super) fn deadline(&self) -> Deadline {
        match self {
            Self::FillRegion(_, fill) => fill.deadline,
            Self::Copy(copying) => copying.deadline,
            Self::AtomicUpdate(_, update) => update.deadline,
            Self::Reply(answering) => answering.deadline,
            Self::Unlock(_, _, deadline) => *deadline,
        }
    }

    /// Aborts the call, if the request is a reply.
    pub(in crate::session::queue) fn abort(&self, session: &Session) {
        if let Self::Reply(answering) = self {
            answering.abort(session);
        }
    }

    /// Executes the request. May block.
    pub(super) fn run(self, session: &Session) -> Result<u64> {
        match self {
            Self::FillRegion(handle, fill) => session.fill(handle, &fill).map(|()| 0),
            Self::Copy(copying) => copying.run(session).map(|()| 0),
            Self::AtomicUpdate(handle, update) => session.atomic_update(handle, &update),
            Self::Reply(answering) => answering.run_or_abort(session).map(|()| 0),
            Self::Unlock(lock, how, deadline) => session.unlock(lock, how, deadline).map(|()| 0),
        }
    }
}
