// SPDX-License-Identifier: GPL-2.0

//! What a submission asks for: the requests of [`super::super::ioctl`], without their results, which are in
//! the completion.

use super::{
    super::{
        abi::{self, Abi},
        caller::Caller,
        ioctl, Session,
    },
    call::Call,
    short::Short,
    Queue,
};
use crate::{bindings, fabric::flight::Direction};
use kernel::prelude::*;

/// The structure of a request.
fn body<T: Abi>(submission: &bindings::kite_submission) -> Result<T> {
    abi::bytes(&submission.body)
        .get(..size_of::<T>())
        .and_then(abi::parse)
        .ok_or(EINVAL)
}

/// The read or write that a submission is, if it is one.
///
/// # Errors
///
/// Why it cannot be one.
pub(super) fn short(
    caller: Caller<'_>,
    submission: &bindings::kite_submission,
) -> Result<Option<Short>> {
    let direction = match submission.request {
        bindings::kite_command_KITE_CMD_READ => Direction::Read,
        bindings::kite_command_KITE_CMD_WRITE => Direction::Write,
        _ => return Ok(None),
    };
    let rw: bindings::kite_rw = body(submission)?;
    let what = ioctl::access(caller, direction, &rw)?;
    Ok(Some(Short::new(rw.handle, what)))
}

/// The call or message that a submission is, if it is one.
///
/// # Errors
///
/// Why it cannot be one.
pub(super) fn call(
    caller: Caller<'_>,
    submission: &bindings::kite_submission,
) -> Result<Option<Call>> {
    if submission.request != bindings::kite_command_KITE_CMD_CALL {
        return Ok(None);
    }
    let call: bindings::kite_call = body(submission)?;
    let out = ioctl::outgoing(caller, &call)?;
    Ok(Some(Call::new(call.handle, out)))
}

/// Does what a submission asks for, if it is none of these.
pub(super) fn run(queue: &Queue, submission: &bindings::kite_submission) -> Result<u64> {
    let (session, caller): (&Session, _) = (&queue.session, queue.caller());
    match submission.request {
        bindings::kite_command_KITE_CMD_SET => ioctl::set(session, &body(submission)?).map(|()| 0),
        bindings::kite_command_KITE_CMD_COPY => {
            ioctl::copy(session, &body(submission)?).map(|()| 0)
        }
        bindings::kite_command_KITE_CMD_ATOMIC => {
            ioctl::atomic(session, body(submission)?).map(|atomic| atomic.value)
        }
        bindings::kite_command_KITE_CMD_REPLY => {
            ioctl::reply(session, caller, &body(submission)?).map(|()| 0)
        }
        bindings::kite_command_KITE_CMD_UNLOCK => {
            ioctl::unlock(session, &body(submission)?).map(|()| 0)
        }
        _ => Err(ENOTTY),
    }
}
