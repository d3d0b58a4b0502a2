// SPDX-License-Identifier: GPL-2.0

//! Calling whoever serves a region.
//!
//! The memory of a process is touched only while the RNIC does not wait for us, since its owner may let us
//! wait for it.

use super::{
    relay::{is_too_long, Held, Pending},
    Handle, Session, Uses,
};
use crate::{
    bindings, errno,
    fabric::qos::tenant::Turn,
    rpc::{call::lost, link::Link, sending::Sending, Message, Rpc},
    sys::{deadline::Deadline, memory::Memory, payer::now},
};
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    prelude::*,
    sync::Arc,
};
use kite_core::{
    rights::Rights,
    wire::ring::{Line, What},
};

/// A call or message to make.
pub(crate) struct Outgoing {
    pub(crate) function: u32,
    pub(crate) uid: u32,
    pub(crate) data: Memory,
    pub(crate) len: u64,
    pub(crate) reply: Memory,
    pub(crate) room: u64,
    pub(crate) wants_reply: bool,
    pub(crate) deadline: Deadline,
}

impl Outgoing {
    /// The line of its message.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn line(&self) -> Result<Line> {
        if is_too_long(self.len) {
            return Err(errno::msgsize());
        }
        let what = if self.wants_reply {
            What::Call
        } else {
            What::Send
        };
        Ok(Line {
            what,
            code: self.function,
            uid: self.uid,
            len: self.len,
            room: self.room.min(bindings::KITE_DATA_MAX.into()),
            ..Line::default()
        })
    }

    /// It, with its data, in memory of that kind.
    ///
    /// # Errors
    ///
    /// `EFAULT`, `ENOMEM`.
    fn message(&self, line: Line, held: &Held, flags: Flags) -> Result<Message> {
        Message::new_in(flags, line, held.numbers(), |data| self.data.load(0, data))
    }

    /// It, to be sent by a link; if it is to be answered, with what waits for that.
    ///
    /// # Errors
    ///
    /// As for [`Self::message`].
    fn sending(
        &self,
        rpc: &Arc<Rpc>,
        link: Arc<Link>,
        (line, held): (Line, Held),
        high: bool,
        flags: Flags,
    ) -> Result<(Sending, Option<Pending>)> {
        let mut message = self.message(line, &held, flags)?;
        message.high = high;
        let pending = match line.has_answer() {
            true => {
                let calling = rpc.announce(&link, &mut message, true, flags)?;
                Some(Pending { calling, held })
            }
            false => None,
        };
        Ok((Sending::new(rpc.clone(), link, message), pending))
    }
}

/// What became of a call or message at once.
pub(super) enum BegunCall {
    /// It is to be sent; if it is to be answered, with what waits for that.
    Sending(Sending, Option<Pending>),
    /// Nothing: there is no way yet to whoever serves the region, or no memory now; or it needs relays.
    Long,
}

impl Session {
    /// Makes a call, or sends a message. Returns the bytes of the reply.
    ///
    /// # Errors
    ///
    /// As `struct kite_call` in `include/uapi/kite.h` says.
    pub(crate) fn call(&self, number: u64, out: &Outgoing) -> Result<u64> {
        let result = self.try_call(number, out);
        self.count_call(&result);
        result
    }

    /// Takes note of what came of a call or message.
    pub(super) fn count_call(&self, result: &Result<u64>) {
        let Ok(rnic) = self.rnic() else { return };
        match result {
            Ok(_) => rnic.stats.rpcs.add(1),
            Err(_) => rnic.stats.errors.add(1),
        }
    }

    /// Begins a call or message, without waiting.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Self::call`].
    pub(super) fn begin_call(
        &self,
        number: u64,
        out: &Outgoing,
        turn: &mut Turn,
    ) -> Result<BegunCall> {
        let rpc = self.rpc()?;
        let handle = self.try_get(number)?;
        if !handle.rights.contains(Rights::WRITE) {
            return Err(EACCES);
        }
        let line = out.line()?;
        drop(handle.mapping.enter()?);
        let link = handle.uses.try_lock().ok_or(EAGAIN)?.usable();
        let Some(link) = link.filter(|_| line.relays_len() == 0) else {
            return Ok(BegunCall::Long);
        };
        let tenant = self.tenant()?;
        if !tenant.may_go(turn, out.len, out.deadline)? {
            return Err(EAGAIN);
        }
        let high = !tenant.is_low();
        match out.sending(&rpc, link, (line, Held::default()), high, now()) {
            Ok((sending, pending)) => Ok(BegunCall::Sending(sending, pending)),
            // Who waits gets what others give back.
            Err(error) if error == ENOMEM => Ok(BegunCall::Long),
            Err(error) => Err(error),
        }
    }

    /// Begins a call or message, and waits for what it takes, but not for the reply.
    ///
    /// # Errors
    ///
    /// As for [`Self::call`].
    pub(super) fn prepare_call(
        &self,
        number: u64,
        out: &Outgoing,
    ) -> Result<(Sending, Option<Pending>)> {
        let handle = self.callable(number)?;
        let line = out.line()?;
        let high = self.wait_to_send(out.len, out.deadline)?;
        let held = self.hold(out, &line)?;
        let rpc = self.rpc()?;
        let link = self.link(&rpc, &handle, out.deadline)?;
        out.sending(&rpc, link, (line, held), high, GFP_KERNEL_ACCOUNT)
    }

    /// Waits until a message of so many bytes may go by the session's priority and limits. Returns whether it has
    /// high priority.
    pub(super) fn wait_to_send(&self, len: u64, deadline: Deadline) -> Result<bool> {
        let tenant = self.tenant()?;
        tenant.wait(len, deadline)?;
        Ok(!tenant.is_low())
    }

    /// The handle of that number, if who serves its region may be called by it.
    fn callable(&self, number: u64) -> Result<Arc<Handle>> {
        let handle = self.get(number)?;
        let allowed = handle.rights.contains(Rights::WRITE);
        allowed.then_some(handle).ok_or(EACCES)
    }

    fn try_call(&self, number: u64, out: &Outgoing) -> Result<u64> {
        let handle = self.callable(number)?;
        let line = out.line()?;
        let high = self.wait_to_send(out.len, out.deadline)?;
        let held = self.hold(out, &line)?;
        let mut message = out.message(line, &held, GFP_KERNEL)?;
        message.high = high;
        let rpc = self.rpc()?;
        let link = self.link(&rpc, &handle, out.deadline)?;
        if !line.has_answer() {
            let sent = link.send(&rpc, &mut message, out.deadline);
            return sent.map(|()| 0).map_err(lost);
        }
        let answered = rpc.call(&link, message, out.deadline)?;
        drop(rpc);
        self.store_reply(&answered, held, &out.reply)
    }

    /// The way to whoever serves a region: a new one if that of before has ended.
    fn link(&self, rpc: &Arc<Rpc>, handle: &Handle, deadline: Deadline) -> Result<Arc<Link>> {
        drop(handle.mapping.enter()?);
        if let Some(link) = handle.uses()?.usable() {
            return Ok(link);
        }
        // Nobody waits for this with the lock held. Of those who are here at once one is faster.
        let made = rpc.attach(&handle.mapping, deadline)?;
        let (link, spare) = match handle.uses() {
            Ok(mut uses) => match uses.usable() {
                Some(link) => (Ok(link), Some(made)),
                None => (Ok(made.clone()), uses.link.replace(made)),
            },
            Err(error) => (Err(error), Some(made)),
        };
        if let Some(spare) = spare {
            rpc.detach(spare);
        }
        link
    }
}

impl Uses {
    /// The way to whoever serves the region, if it has not ended.
    fn usable(&self) -> Option<Arc<Link>> {
        let link = self.link.as_ref();
        link.filter(|link| link.check().is_ok()).cloned()
    }
}

impl Handle {
    /// What it is used for.
    ///
    /// # Errors
    ///
    /// `EBADF` if it was given back.
    pub(super) fn uses(&self) -> Result<impl core::ops::DerefMut<Target = Uses> + '_> {
        let uses = self.uses.lock();
        if uses.over {
            Err(EBADF)
        } else {
            Ok(uses)
        }
    }
}
