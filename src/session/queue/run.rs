// SPDX-License-Identifier: GPL-2.0

//! What a submission asks for: the requests of [`super::super::ioctl`], without their results, which are in
//! the completion.

use super::{
    super::{
        abi::{self, Abi},
        caller::Caller,
        lock,
        request::{self, Answering, Copying},
        Session,
    },
    call::Call,
    push::Push,
    receive::Receive,
    short::Short,
    task::Job,
};
use crate::{
    bindings,
    fabric::flight::Direction,
    lmr::{atomic::Update, copy::Fill},
    sys::deadline::Deadline,
};
use kernel::prelude::*;
use kite_core::{atomic::WORD, lock::End};

/// What a worker does.
pub(super) enum Other {
    Set(u64, Fill),
    Copy(Copying),
    Update(u64, Update),
    Reply(Answering),
    Unlock(u64, End, Deadline),
}

/// The structure of a request.
fn body<T: Abi>(submission: &bindings::kite_submission) -> Result<T> {
    abi::bytes(&submission.body)
        .get(..size_of::<T>())
        .and_then(abi::parse)
        .ok_or(EINVAL)
}

fn short(
    caller: Caller<'_>,
    direction: Direction,
    submission: &bindings::kite_submission,
) -> Result<Job> {
    let rw: bindings::kite_rw = body(submission)?;
    let what = request::access(caller, direction, &rw)?;
    Ok(Job::Short(Short::new(rw.handle, what)))
}

fn call(caller: Caller<'_>, submission: &bindings::kite_submission) -> Result<Job> {
    let call: bindings::kite_call = body(submission)?;
    let out = request::outgoing(caller, &call)?;
    Ok(Job::Call(Call::new(call.handle, out)))
}

/// What is to be done.
///
/// # Errors
///
/// Why it cannot be: `ENOTTY` if it is no request that queues take.
pub(super) fn job(caller: Caller<'_>, submission: &bindings::kite_submission) -> Result<Job> {
    if submission.reserved != 0 {
        return Err(EINVAL);
    }
    let other = match submission.request {
        bindings::kite_command_KITE_CMD_READ => return short(caller, Direction::Read, submission),
        bindings::kite_command_KITE_CMD_WRITE => {
            return short(caller, Direction::Write, submission)
        }
        bindings::kite_command_KITE_CMD_CALL => return call(caller, submission),
        bindings::kite_command_KITE_CMD_RECEIVE => {
            let what = request::receiving(caller, &body(submission)?)?;
            return Ok(Job::Receive(Receive::new(what)));
        }
        // A module makes no system calls that this could save it.
        bindings::kite_command_KITE_CMD_PUSH if !matches!(caller, Caller::Module) => {
            return Ok(Job::Push(Push::new(submission.tag, body(submission)?)));
        }
        bindings::kite_command_KITE_CMD_SET => {
            let set: bindings::kite_set = body(submission)?;
            Other::Set(set.handle, request::fill(&set)?)
        }
        bindings::kite_command_KITE_CMD_COPY => Other::Copy(request::copying(&body(submission)?)?),
        bindings::kite_command_KITE_CMD_ATOMIC => {
            let atomic: bindings::kite_atomic = body(submission)?;
            Other::Update(atomic.handle, request::update(&atomic)?)
        }
        bindings::kite_command_KITE_CMD_REPLY => {
            Other::Reply(request::answering(caller, &body(submission)?)?)
        }
        bindings::kite_command_KITE_CMD_UNLOCK => {
            let unlock: bindings::kite_unlock = body(submission)?;
            let how = lock::end(unlock.flags)?;
            Other::Unlock(unlock.lock, how, request::deadline(unlock.timeout_ms))
        }
        _ => return Err(ENOTTY),
    };
    Ok(Job::Other(other))
}

impl Other {
    /// How many bytes it is about, unless it is done at any pace. What is no part of a region fails at once.
    pub(super) fn len(&self, session: &Session) -> Option<u64> {
        let within = |handle, len| {
            let whole = session.region_len(handle).ok()?;
            (len <= whole).then_some(len)
        };
        match self {
            Self::Set(handle, fill) => within(*handle, fill.len),
            Self::Copy(copying) => within(copying.from.0, copying.len),
            Self::Update(..) => Some(WORD),
            Self::Reply(answering) => Some(answering.len().min(bindings::KITE_DATA_MAX.into())),
            Self::Unlock(..) => None,
        }
    }

    /// When it gives up.
    pub(super) fn deadline(&self) -> Deadline {
        match self {
            Self::Set(_, fill) => fill.deadline,
            Self::Copy(copying) => copying.deadline,
            Self::Update(_, update) => update.deadline,
            Self::Reply(answering) => answering.deadline,
            Self::Unlock(_, _, deadline) => *deadline,
        }
    }

    /// It will not be done.
    pub(super) fn give_up(&self, session: &Session) {
        if let Self::Reply(answering) = self {
            answering.give_up(session);
        }
    }

    /// Does it, and waits for what it takes.
    pub(super) fn run(self, session: &Session) -> Result<u64> {
        match self {
            Self::Set(handle, fill) => session.set(handle, &fill).map(|()| 0),
            Self::Copy(copying) => copying.run(session).map(|()| 0),
            Self::Update(handle, update) => session.update(handle, &update),
            Self::Reply(answering) => answering.run_once(session).map(|()| 0),
            Self::Unlock(lock, how, deadline) => session.unlock(lock, how, deadline).map(|()| 0),
        }
    }
}
