// SPDX-License-Identifier: GPL-2.0

//! Serving a region, and calling who serves one.
//!
//! The memory of a process is touched only while the RNIC does not wait for us, since its owner may let us
//! wait for it.

use super::{
    relay::{is_too_long, Held, Pending},
    Handle, Session, Taken, Uses,
};
use crate::{
    bindings, errno,
    fabric::qos::tenant::Turn,
    rpc::{
        call::lost,
        link::Link,
        now,
        open::Open,
        sending::Sending,
        service::{Given, Refusal, Service},
        Message, Rpc,
    },
    sys::{deadline::Deadline, memory::Memory},
};
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    prelude::*,
    rbtree::RBTreeNode,
    sync::Arc,
};
use kite_core::{
    rights::Rights,
    ring,
    wire::ring::{Line, What},
};

/// Bytes of a ring, if who serves does not say.
const RING_SIZE: u32 = 64 << 10;

/// Times in a row that a server's memory may go away between being made present and being used.
const FAULTS_MAX: u32 = 16;

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

/// A call or message that was taken; its number is 0 if it wants no reply.
pub(crate) struct Incoming {
    pub(crate) len: u64,
    pub(crate) call: u64,
    pub(crate) function: u32,
    pub(crate) node: u32,
    pub(crate) uid: u32,
}

/// Whether an answer failed as nobody is there any more to hear it, which is no error.
pub(super) fn is_gone(error: Error) -> bool {
    error == errno::hostdown() || error == errno::stale()
}

impl Session {
    /// Makes the session a server of a region.
    ///
    /// # Errors
    ///
    /// As `struct kite_serve` in `include/uapi/kite.h` says.
    pub(crate) fn serve(&self, number: u64, ring_size: u32, data_max: u32) -> Result {
        let size = if ring_size == 0 { RING_SIZE } else { ring_size };
        ring::capacity(size.into()).ok_or(EINVAL)?;
        let data_max = match data_max {
            0 => bindings::KITE_DATA_INLINE,
            len => len,
        };
        if data_max < bindings::KITE_DATA_INLINE || is_too_long(data_max.into()) {
            return Err(EINVAL);
        }
        let handle = self.get(number)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        let rpc = self.rpc()?;
        drop(handle.mapping.enter()?);
        if handle.mapping.home != rpc.lmr.cluster.node()? {
            return Err(errno::remote());
        }
        let mut uses = handle.uses()?;
        if uses.service.is_some() {
            return Err(EBUSY);
        }
        let mut served = self.served.lock();
        served.reserve(1, GFP_KERNEL)?;
        let region = handle.mapping.region;
        let service = rpc.serve_region(region, size.into(), data_max.into(), &self.watch)?;
        uses.service = Some(service.clone());
        Ok(served.push((number, service), GFP_KERNEL)?)
    }

    /// Whether a call waits for this session.
    pub(super) fn has_calls(&self) -> bool {
        let served = self.served.lock();
        served.iter().any(|(_, service)| service.has_waiting())
    }

    /// Ends what a handle is used for besides memory.
    pub(super) fn stop_uses(&self, rpc: &Arc<Rpc>, handle: &Handle) {
        let ended = Uses {
            over: true,
            ..Uses::default()
        };
        let Uses { link, service, .. } = core::mem::replace(&mut *handle.uses.lock(), ended);
        if let Some(link) = link {
            rpc.detach(link);
        }
        if let Some(service) = service {
            self.abandon_calls(rpc, Some(handle.number));
            let mut served = self.served.lock();
            served.retain(|(number, _)| *number != handle.number);
            drop(served);
            rpc.stop_serving(&service, &self.watch);
        }
    }

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
    fn wait_to_send(&self, len: u64, deadline: Deadline) -> Result<bool> {
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
        self.store_reply(&answered, &held, &out.reply)
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

    /// Takes a call or message to a region that this session serves; its data go to `memory`, which has
    /// `room` bytes. Without patience it waits for none.
    ///
    /// # Errors
    ///
    /// As `struct kite_receive` in `include/uapi/kite.h` says.
    pub(crate) fn receive(
        &self,
        number: u64,
        memory: &Memory,
        room: u64,
        patience: Option<Deadline>,
    ) -> Result<Incoming> {
        let handle = self.get(number)?;
        let service = handle.uses()?.service.clone();
        let service = service.ok_or_else(errno::opnotsupp)?;
        let mut faults = 0;
        while faults < FAULTS_MAX {
            match self.take_call(&handle, &service, memory, room, patience) {
                Ok(Some(incoming)) => return Ok(incoming),
                Ok(None) => patience.ok_or(EAGAIN)?.check()?,
                Err(Refusal::Absent(len)) => {
                    memory.fault_in(0, len, true)?;
                    faults += 1;
                }
                Err(Refusal::TooLong) => return Err(errno::msgsize()),
                Err(Refusal::Failed(error)) => {
                    // If the RNIC went, that is the reason.
                    drop(self.rpc()?);
                    return Err(error);
                }
            }
        }
        Err(ENOMEM)
    }

    /// Takes a call. Returns nothing if its data are not to be had, and the next is to be taken.
    fn take_call(
        &self,
        handle: &Handle,
        service: &Service,
        memory: &Memory,
        room: u64,
        patience: Option<Deadline>,
    ) -> Result<Option<Incoming>, Refusal> {
        let wanted = || handle.mapping.enter().map(drop);
        let take = || service.take(&*self.rpc()?, memory, room, patience, wanted);
        let taken = match take()? {
            Given::Taken(taken) => taken,
            Given::Long(long) => match self.fetch(long, memory)? {
                Some(taken) => taken,
                None => return Ok(None),
            },
        };
        let rpc = self.rpc()?;
        let call = match taken.open {
            Some(open) => self.add_open(&rpc, open, handle.number)?,
            None => 0,
        };
        if let Err(error) = handle.uses().map(drop) {
            // It was given back meanwhile, and its calls with it.
            let _ = self.abandon_call(call);
            return Err(error.into());
        }
        rpc.lmr.stats.rpcs_served.add(1);
        Ok(Some(Incoming {
            len: taken.line.len,
            call,
            function: taken.line.code,
            node: taken.node,
            uid: taken.line.uid,
        }))
    }

    fn add_open(&self, rpc: &Arc<Rpc>, open: Open, by: u64) -> Result<u64> {
        let number = self.next_number();
        let spare = open.clone();
        let enter = || -> Result {
            let taken = Taken {
                open: Arc::new(open, GFP_KERNEL_ACCOUNT)?,
                by,
                answering: false,
            };
            let node = RBTreeNode::new(number, taken, GFP_KERNEL_ACCOUNT)?;
            self.open.lock().insert(node);
            Ok(())
        };
        enter().inspect_err(|_| spare.abandon(rpc))?;
        Ok(number)
    }

    /// Answers a call that the session has taken.
    ///
    /// # Errors
    ///
    /// As `struct kite_reply` in `include/uapi/kite.h` says.
    pub(crate) fn reply(&self, call: u64, memory: &Memory, len: u64, deadline: Deadline) -> Result {
        // What goes by a relay asks by itself.
        let long = len > bindings::KITE_DATA_INLINE.into();
        let high = self.wait_to_send(if long { 0 } else { len }, deadline)?;
        let open = self.begin_answer(call)?;
        let deposited = self.deposit(&open, len, memory, deadline);
        let answer = |wanted: bool| {
            let message = wanted.then(|| open.answer(len, high, |data| memory.load(0, data)));
            message.transpose()
        };
        let message = deposited.and_then(answer);
        let message = match message {
            Ok(message) => message,
            Err(error) => {
                self.answer_failed(call, error);
                return Err(error);
            }
        };
        let rpc = self.rpc()?;
        // Unless it was abandoned meanwhile.
        self.take_open(call).ok_or(EBADF)?;
        let sent = message.map_or(Ok(()), |message| open.send(&rpc, message, deadline));
        match sent {
            Err(error) if is_gone(error) => Ok(()),
            sent => sent,
        }
    }

    /// The call of that number, which nobody else may answer now.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none, or somebody does.
    fn begin_answer(&self, call: u64) -> Result<Arc<Open>> {
        let mut all = self.open.lock();
        let taken = all.get_mut(&call).ok_or(EBADF)?;
        if core::mem::replace(&mut taken.answering, true) {
            return Err(EBADF);
        }
        Ok(taken.open.clone())
    }

    /// A call was not answered for want of data. It can still be, unless that is not why.
    fn answer_failed(&self, call: u64, error: Error) {
        if ![EFAULT, errno::msgsize(), ENOMEM].contains(&error) {
            let _ = self.abandon_call(call);
        } else if let Some(taken) = self.open.lock().get_mut(&call) {
            taken.answering = false;
        }
    }

    /// Tells the caller that nobody will answer.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is no such call.
    pub(super) fn abandon_call(&self, call: u64) -> Result {
        let rpc = self.rpc()?;
        self.take_open(call).ok_or(EBADF)?.abandon(&rpc);
        Ok(())
    }

    /// Tells the callers of all calls, or of those taken by one handle, that nobody will answer.
    pub(super) fn abandon_calls(&self, rpc: &Arc<Rpc>, by: Option<u64>) {
        let take = || {
            let mut all = self.open.lock();
            let mut calls = all
                .iter()
                .filter(|(_, taken)| by.is_none_or(|by| taken.by == by));
            let number = *calls.next()?.0;
            all.remove_node(&number)
        };
        while let Some(node) = take() {
            node.to_key_value().1.open.abandon(rpc);
        }
    }

    fn take_open(&self, call: u64) -> Option<Arc<Open>> {
        let node = self.open.lock().remove_node(&call)?;
        Some(node.to_key_value().1.open)
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
    fn uses(&self) -> Result<impl core::ops::DerefMut<Target = Uses> + '_> {
        let uses = self.uses.lock();
        if uses.over {
            Err(EBADF)
        } else {
            Ok(uses)
        }
    }
}
