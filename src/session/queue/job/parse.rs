// SPDX-License-Identifier: GPL-2.0

//! Parser for submissions.
//!
//! Submissions use the argument structures of [`crate::session::ioctl`]. Results go to the completion
//! instead.

use super::{
    access::AccessJob, blocking::BlockingJob, call::CallJob, push::VqpPushJob, receive::ReceiveJob,
    Job,
};
use crate::{
    bindings,
    fabric::send::inflight::Direction,
    session::{
        args, lock,
        source::Requester,
        uapi::{self, Abi},
    },
};
use kernel::prelude::*;

/// Returns the argument structure of a submission.
fn parse_body<T: Abi>(sqe: &bindings::kite_sqe) -> Result<T> {
    uapi::as_bytes(&sqe.body)
        .get(..size_of::<T>())
        .and_then(uapi::from_bytes)
        .ok_or(EINVAL)
}

fn parse_access_job(
    caller: Requester<'_>,
    direction: Direction,
    sqe: &bindings::kite_sqe,
) -> Result<Job> {
    let rw: bindings::kite_rw = parse_body(sqe)?;
    let args = args::parse_access(caller, direction, &rw)?;
    Ok(Job::Access(AccessJob::new(rw.handle, args)))
}

fn parse_call_job(caller: Requester<'_>, sqe: &bindings::kite_sqe) -> Result<Job> {
    let call: bindings::kite_call = parse_body(sqe)?;
    let request = args::parse_call(caller, &call)?;
    Ok(Job::Call(CallJob::new(call.handle, request)))
}

/// Parses a submission.
///
/// # Errors
///
/// - `ENOTTY`: I/O queues do not accept the request.
/// - Otherwise see the parsers in [`args`].
pub(in crate::session::queue) fn parse_job(
    caller: Requester<'_>,
    sqe: &bindings::kite_sqe,
) -> Result<Job> {
    if sqe.reserved != 0 {
        return Err(EINVAL);
    }
    let blocking = match sqe.request {
        bindings::kite_command_KITE_CMD_READ => {
            return parse_access_job(caller, Direction::Read, sqe)
        }
        bindings::kite_command_KITE_CMD_WRITE => {
            return parse_access_job(caller, Direction::Write, sqe)
        }
        bindings::kite_command_KITE_CMD_CALL => return parse_call_job(caller, sqe),
        bindings::kite_command_KITE_CMD_RECEIVE => {
            let args = args::parse_receive(caller, &parse_body(sqe)?)?;
            return Ok(Job::Receive(ReceiveJob::new(args)));
        }
        // For a module a queued push would save no system call.
        bindings::kite_command_KITE_CMD_PUSH if !matches!(caller, Requester::KernelModule) => {
            return Ok(Job::Push(VqpPushJob::new(sqe.tag, parse_body(sqe)?)));
        }
        bindings::kite_command_KITE_CMD_FILL => {
            let set: bindings::kite_fill = parse_body(sqe)?;
            BlockingJob::FillRegion(set.handle, args::parse_fill(&set)?)
        }
        bindings::kite_command_KITE_CMD_COPY => {
            BlockingJob::Copy(args::parse_copy(&parse_body(sqe)?)?)
        }
        bindings::kite_command_KITE_CMD_ATOMIC => {
            let atomic: bindings::kite_atomic = parse_body(sqe)?;
            BlockingJob::AtomicUpdate(atomic.handle, args::parse_atomic_update(&atomic)?)
        }
        bindings::kite_command_KITE_CMD_REPLY => {
            BlockingJob::Reply(args::parse_reply(caller, &parse_body(sqe)?)?)
        }
        bindings::kite_command_KITE_CMD_UNLOCK => {
            let unlock: bindings::kite_unlock = parse_body(sqe)?;
            let reason = lock::parse_release_reason(unlock.flags)?;
            BlockingJob::Unlock(unlock.lock, reason, args::deadline(unlock.timeout_ms))
        }
        _ => return Err(ENOTTY),
    };
    Ok(Job::Blocking(blocking))
}
