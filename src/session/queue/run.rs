// SPDX-License-Identifier: GPL-2.0

//! What a submission asks for: the requests of [`super::super::ioctl`], without their results, which are in
//! the completion.

use super::{
    super::{
        abi::{self, Abi},
        caller::Caller,
        ioctl, Session,
    },
    task::Short,
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
    if submission.reserved != 0 {
        return Err(EINVAL);
    }
    let direction = match submission.request {
        bindings::kite_command_KITE_CMD_READ => Direction::Read,
        bindings::kite_command_KITE_CMD_WRITE => Direction::Write,
        _ => return Ok(None),
    };
    let rw: bindings::kite_rw = body(submission)?;
    let (access, memory) = ioctl::access(caller, direction, &rw)?;
    Ok(Some(Short {
        handle: rw.handle,
        access,
        memory,
    }))
}

/// Does what a submission asks for, if it is no read or write.
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
        bindings::kite_command_KITE_CMD_CALL => {
            ioctl::call(session, caller, body(submission)?).map(|call| call.reply_len)
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
