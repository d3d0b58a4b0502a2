// SPDX-License-Identifier: GPL-2.0

//! Serving a region: taking calls and messages that come to it, and answering.
//!
//! What is taken is entered before its server hears of it, so that its caller is told if the server ends.

use super::{relay::is_too_long, Handle, Session, Taken, Uses};
use crate::{
    bindings, errno,
    rpc::{
        long::Long,
        open::Open,
        service::{self, Given, Glance, Refusal, Service, Waiting},
        Rpc,
    },
    sys::{deadline::Deadline, memory::Memory, payer::now},
};
use core::mem::MaybeUninit;
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    prelude::*,
    rbtree::RBTreeNodeReservation,
    sync::{Arc, UniqueArc},
};
use kite_core::{rights::Rights, ring};

/// Bytes of a ring, if who serves does not say.
const RING_SIZE: u32 = 64 << 10;

/// Times in a row that a server's memory may go away between being made present and being used.
const FAULTS_MAX: u32 = 16;

/// A call or message that was taken; its number is 0 if it wants no reply.
pub(crate) struct Incoming {
    pub(crate) len: u64,
    pub(crate) call: u64,
    pub(crate) function: u32,
    pub(crate) node: u32,
    pub(crate) uid: u32,
}

/// What a look for a call or message came to.
pub(super) enum Received {
    /// There is none.
    Nothing,
    /// Somebody else is just looking, or there is no memory now.
    Busy,
    Had(Incoming),
    /// Its data are to be brought first.
    Long(Long),
}

/// Memory for a call that is to be taken.
pub(super) struct BlankOpen {
    open: UniqueArc<MaybeUninit<Open>>,
    node: RBTreeNodeReservation<u64, Taken>,
}

impl BlankOpen {
    /// Without waiting for memory.
    pub(super) fn at_once() -> Result<Self> {
        Self::new(now())
    }

    fn new(flags: Flags) -> Result<Self> {
        Ok(Self {
            open: UniqueArc::new_uninit(flags)?,
            node: RBTreeNodeReservation::new(flags)?,
        })
    }
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

    /// What a handle serves, for a receive that waits for nothing: from now on the poller thread is woken for calls.
    ///
    /// # Errors
    ///
    /// As `struct kite_receive` in `include/uapi/kite.h` says; `EAGAIN` if somebody is just looking at that.
    pub(super) fn begin_waiting(&self, number: u64) -> Result<Waiting> {
        let (_, service) = self.try_service(number)?;
        Ok(Waiting::new(service))
    }

    /// Looks for a call or message, and waits for nothing. Long ones are taken if `longs`, and then are for
    /// [`Self::receive_long`]. If it is had, `blank` is used up; without one it is not.
    ///
    /// # Errors
    ///
    /// As for [`Self::receive`].
    pub(super) fn glance(
        &self,
        number: u64,
        memory: &Memory,
        room: u64,
        longs: bool,
        blank: &mut Option<BlankOpen>,
    ) -> Result<Received> {
        let rpc = self.rpc()?;
        let (handle, service) = match self.try_service(number) {
            Err(error) if error == EAGAIN => return Ok(Received::Busy),
            found => found?,
        };
        drop(handle.mapping.enter()?);
        let Some(spare) = blank.take() else {
            return Ok(Received::Busy);
        };
        let glance = service.glance(&rpc, memory, room, longs);
        if let Ok(Glance::Given(Given::Taken(taken))) = glance {
            return self.admit(&rpc, &handle, taken, spare).map(Received::Had);
        }
        *blank = Some(spare);
        match glance {
            Ok(Glance::Given(Given::Long(long))) => Ok(Received::Long(long)),
            Ok(Glance::Nothing) => Ok(Received::Nothing),
            Ok(_) | Err(Refusal::Absent(_)) => Ok(Received::Busy),
            Err(Refusal::TooLong) => Err(errno::msgsize()),
            Err(Refusal::Failed(error)) => Err(error),
        }
    }

    /// Brings the data of what a look has found. Returns nothing if it is not to be had, and the next is to be
    /// looked for.
    ///
    /// # Errors
    ///
    /// As for [`Self::receive`].
    pub(super) fn receive_long(
        &self,
        number: u64,
        long: Long,
        memory: &Memory,
        room: u64,
    ) -> Result<Option<Incoming>> {
        let handle = self.get(number)?;
        let service = handle
            .uses()?
            .service
            .clone()
            .ok_or_else(errno::opnotsupp)?;
        let blank = BlankOpen::new(GFP_KERNEL_ACCOUNT)?;
        let judged = service.judge(&*self.rpc()?, long, room);
        match judged.and_then(|long| self.had(&handle, long, memory, blank)) {
            Ok(incoming) => Ok(incoming),
            Err(Refusal::TooLong) => Err(errno::msgsize()),
            Err(Refusal::Absent(_)) => Ok(None),
            Err(Refusal::Failed(error)) => {
                // If the RNIC went, that is the reason.
                drop(self.rpc()?);
                Err(error)
            }
        }
    }

    /// Has a long call, if it is to be had.
    fn had(
        &self,
        handle: &Handle,
        long: Option<Long>,
        memory: &Memory,
        blank: BlankOpen,
    ) -> Result<Option<Incoming>, Refusal> {
        let Some(long) = long else { return Ok(None) };
        let Some(taken) = self.fetch(long, memory)? else {
            return Ok(None);
        };
        Ok(Some(self.admit(&*self.rpc()?, handle, taken, blank)?))
    }

    fn try_service(&self, number: u64) -> Result<(Arc<Handle>, Arc<Service>)> {
        let handle = self.try_get(number)?;
        let uses = handle.uses.try_lock().ok_or(EAGAIN)?;
        if uses.over {
            return Err(EBADF);
        }
        let service = uses.service.clone().ok_or_else(errno::opnotsupp)?;
        drop(uses);
        Ok((handle, service))
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
        // What is taken is not to be lost for want of memory.
        let blank = BlankOpen::new(GFP_KERNEL_ACCOUNT)?;
        let wanted = || handle.mapping.enter().map(drop);
        let take = || service.take(&*self.rpc()?, memory, room, patience, wanted);
        match take()? {
            Given::Taken(taken) => Ok(Some(self.admit(&*self.rpc()?, handle, taken, blank)?)),
            Given::Long(long) => self.had(handle, Some(long), memory, blank),
        }
    }

    /// Enters a call that was taken by a handle, or leaves it to nobody if that was given back meanwhile.
    fn admit(
        &self,
        rpc: &Arc<Rpc>,
        handle: &Handle,
        taken: service::Taken,
        blank: BlankOpen,
    ) -> Result<Incoming> {
        let call = match taken.open {
            Some(open) => self.add_open(blank, open, handle.number),
            None => 0,
        };
        if let Err(error) = handle.uses().map(drop) {
            // And its calls with it.
            let _ = self.abandon_call(call);
            return Err(error);
        }
        rpc.lmr.stats.rpcs_served.add(1);
        Ok(Incoming {
            len: taken.line.len,
            call,
            function: taken.line.code,
            node: taken.node,
            uid: taken.line.uid,
        })
    }

    fn add_open(&self, blank: BlankOpen, open: Open, by: u64) -> u64 {
        let number = self.next_number();
        let taken = Taken {
            open: blank.open.write(open).into(),
            by,
            answering: false,
        };
        self.open.lock().insert(blank.node.into_node(number, taken));
        number
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
