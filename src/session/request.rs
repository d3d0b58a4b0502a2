// SPDX-License-Identifier: GPL-2.0

//! What requests ask for, from the structures of `include/uapi/kite.h` that system calls and queues have in common.
//!
//! Each is checked whole; what the values mean is for the session to check.

use super::{abi, call::Outgoing, caller::Caller, Session};
use crate::{
    bindings,
    fabric::flight::Direction,
    lmr::{atomic::Update, copy::Fill, io::Access},
    sys::{deadline::Deadline, memory::Memory},
};
use kernel::prelude::*;

/// What has to be zero.
pub(super) fn zero(reserved: u32) -> Result {
    if reserved == 0 {
        Ok(())
    } else {
        Err(EINVAL)
    }
}

/// The deadline of a request; 0 is the module's default.
pub(super) fn deadline(timeout_ms: u32) -> Deadline {
    Deadline::after_ms(match timeout_ms {
        0 => crate::params::timeout_ms(),
        ms => ms,
    })
}

/// What a read or write asks for, and its memory.
pub(super) fn access(
    caller: Caller<'_>,
    direction: Direction,
    rw: &bindings::kite_rw,
) -> Result<(Access, Memory)> {
    zero(rw.reserved)?;
    let access = Access {
        direction,
        offset: rw.offset,
        len: rw.len,
        deadline: deadline(rw.timeout_ms).interruptible(),
    };
    Ok((access, caller.memory(rw.addr)?))
}

/// What setting bytes asks for.
pub(super) fn fill(set: &bindings::kite_set) -> Result<Fill> {
    Ok(Fill {
        offset: set.offset,
        len: set.len,
        byte: u8::try_from(set.byte).map_err(|_| EINVAL)?,
        deadline: deadline(set.timeout_ms),
    })
}

/// Bytes to copy: handles and offsets.
pub(super) struct Copying {
    pub(super) from: (u64, u64),
    to: (u64, u64),
    pub(super) len: u64,
    pub(super) deadline: Deadline,
}

/// What copying asks for.
pub(super) fn copying(copy: &bindings::kite_copy) -> Result<Copying> {
    zero(copy.reserved)?;
    Ok(Copying {
        from: (copy.from, copy.from_offset),
        to: (copy.to, copy.to_offset),
        len: copy.len,
        deadline: deadline(copy.timeout_ms),
    })
}

impl Copying {
    /// Copies them.
    pub(super) fn run(&self, session: &Session) -> Result {
        session.copy(self.from, self.to, self.len, self.deadline)
    }
}

/// What an atomic operation asks for.
pub(super) fn update(a: &bindings::kite_atomic) -> Result<Update> {
    Ok(Update {
        offset: a.offset,
        atomic: abi::atomic(a.operation, a.operand, a.expected)?,
        deadline: deadline(a.timeout_ms),
    })
}

/// What a call or message asks for.
pub(super) fn outgoing(caller: Caller<'_>, call: &bindings::kite_call) -> Result<Outgoing> {
    let wants_reply = match call.flags {
        0 => true,
        bindings::KITE_CALL_SEND if call.reply_len == 0 => false,
        _ => return Err(EINVAL),
    };
    zero(call.reserved)?;
    Ok(Outgoing {
        function: call.function,
        uid: caller.uid(),
        data: caller.memory(call.addr)?,
        len: call.len,
        reply: caller.memory(call.reply)?,
        room: call.reply_len,
        wants_reply,
        deadline: deadline(call.timeout_ms),
    })
}

/// A receive by a queue.
pub(super) struct Receiving {
    pub(super) handle: u64,
    /// Where it is told what came, and behind that the data go.
    pub(super) head: Memory,
    pub(super) data: Memory,
    pub(super) room: u64,
    pub(super) deadline: Deadline,
}

/// What a receive by a queue asks for. There is memory where it is told what came.
pub(super) fn receiving(caller: Caller<'_>, r: &bindings::kite_receive) -> Result<Receiving> {
    const HEAD: usize = size_of::<bindings::kite_incoming>();
    zero(r.reserved | r.flags)?;
    let head = caller.memory(r.addr)?;
    head.store(0, &[0; HEAD])?;
    let data = r.addr.checked_add(HEAD as u64).ok_or(EFAULT)?;
    Ok(Receiving {
        handle: r.handle,
        head,
        data: caller.memory(data)?,
        room: r.len,
        deadline: deadline(r.timeout_ms),
    })
}

/// An answer to a call.
pub(super) struct Answering {
    call: u64,
    /// Where its data are, and how many; nothing if there is to be none.
    data: Option<(Memory, u64)>,
    pub(super) deadline: Deadline,
}

/// What answering asks for.
pub(super) fn answering(caller: Caller<'_>, reply: &bindings::kite_reply) -> Result<Answering> {
    let data = match reply.flags {
        0 => Some((caller.memory(reply.addr)?, reply.len)),
        bindings::KITE_REPLY_ABANDON if reply.len == 0 => None,
        _ => return Err(EINVAL),
    };
    Ok(Answering {
        call: reply.call,
        data,
        deadline: deadline(reply.timeout_ms),
    })
}

impl Answering {
    /// Bytes of its data.
    pub(super) fn len(&self) -> u64 {
        self.data.as_ref().map_or(0, |(_, len)| *len)
    }

    /// As [`Self::run`], but nobody else can answer if it fails, unless somebody does.
    pub(super) fn run_once(&self, session: &Session) -> Result {
        let answered = self.run(session);
        if answered.is_err_and(|error| error != EBADF) {
            self.give_up(session);
        }
        answered
    }

    /// Tells the caller that nobody will answer.
    pub(super) fn give_up(&self, session: &Session) {
        let _ = session.abandon_call(self.call);
    }

    /// Answers it.
    pub(super) fn run(&self, session: &Session) -> Result {
        match &self.data {
            Some((memory, len)) => session.reply(self.call, memory, *len, self.deadline),
            None => session.abandon_call(self.call),
        }
    }
}
