// SPDX-License-Identifier: GPL-2.0

//! Calling whoever serves a region.
//!
//! The memory of a process is touched only while the RNIC does not wait for us, since its owner may let us
//! wait for it.

use super::{
    rendezvous::{exceeds_max_data, CallBuffers, PendingCall},
    Handle, HandleRpcState, Session,
};
use crate::{
    bindings, errno,
    fabric::qos::tenant::AdmissionTicket,
    rpc::{
        channel::RpcChannel,
        client::{call::stale_to_connreset, send_op::RpcSendOp},
        Rpc, RpcMessage,
    },
    sys::{buffer::Buffer, deadline::Deadline, memcg::gfp_nowait_account},
};
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    prelude::*,
    sync::Arc,
};
use kite_core::{
    rights::Rights,
    wire::ring::{MsgHeader, MsgType},
};

/// A call or message to make.
pub(crate) struct RpcRequest {
    pub(crate) function: u32,
    pub(crate) uid: u32,
    pub(crate) data: Buffer,
    pub(crate) len: u64,
    pub(crate) reply_buffer: Buffer,
    pub(crate) max_reply_len: u64,
    pub(crate) wants_reply: bool,
    pub(crate) deadline: Deadline,
}

impl RpcRequest {
    /// The line of its message.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn header(&self) -> Result<MsgHeader> {
        if exceeds_max_data(self.len) {
            return Err(errno::msgsize());
        }
        let msg_type = if self.wants_reply {
            MsgType::Call
        } else {
            MsgType::Oneway
        };
        Ok(MsgHeader {
            msg_type,
            code: self.function,
            uid: self.uid,
            len: self.len,
            max_reply_len: self.max_reply_len.min(bindings::KITE_DATA_MAX.into()),
            ..MsgHeader::default()
        })
    }

    /// It, with its data, in memory of that kind.
    ///
    /// # Errors
    ///
    /// `EFAULT`, `ENOMEM`.
    fn message(
        &self,
        header: MsgHeader,
        buffers: &CallBuffers,
        flags: Flags,
    ) -> Result<RpcMessage> {
        RpcMessage::new_with_bufs(flags, header, buffers.region_ids(), |data| {
            self.data.read_slice(0, data)
        })
    }

    /// It, to be sent by a link; if it is to be answered, with what waits for that.
    ///
    /// # Errors
    ///
    /// As for [`Self::message`].
    fn prepare_send(
        &self,
        rpc: &Arc<Rpc>,
        channel: Arc<RpcChannel>,
        (header, buffers): (MsgHeader, CallBuffers),
        high_priority: bool,
        flags: Flags,
    ) -> Result<(RpcSendOp, Option<PendingCall>)> {
        let mut message = self.message(header, &buffers, flags)?;
        message.high_priority = high_priority;
        let pending = match header.expects_answer() {
            true => {
                let waiter = rpc.register_call(&channel, &mut message, true, flags)?;
                Some(PendingCall { waiter, buffers })
            }
            false => None,
        };
        Ok((RpcSendOp::new(rpc.clone(), channel, message), pending))
    }
}

/// What became of a call or message at once.
pub(super) enum CallStartResult {
    /// It is to be sent; if it is to be answered, with what waits for that.
    Sending(RpcSendOp, Option<PendingCall>),
    /// Nothing: there is no way yet to whoever serves the region, or no memory now; or it needs relays.
    NeedsWorker,
}

impl Session {
    /// Makes a call, or sends a message. Returns the bytes of the reply.
    ///
    /// # Errors
    ///
    /// As `struct kite_call` in `include/uapi/kite.h` says.
    pub(crate) fn call(&self, handle_id: u64, request: &RpcRequest) -> Result<u64> {
        let result = self.do_call(handle_id, request);
        self.count_call_result(&result);
        result
    }

    /// Takes note of what came of a call or message.
    pub(super) fn count_call_result(&self, result: &Result<u64>) {
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
    pub(super) fn try_start_call(
        &self,
        handle_id: u64,
        request: &RpcRequest,
        ticket: &mut AdmissionTicket,
    ) -> Result<CallStartResult> {
        let rpc = self.enter_rpc()?;
        let handle = self.try_get(handle_id)?;
        if !handle.rights.contains(Rights::WRITE) {
            return Err(EACCES);
        }
        let header = request.header()?;
        drop(handle.mapping.access()?);
        let channel = handle.rpc_state.try_lock().ok_or(EAGAIN)?.live_channel();
        let Some(channel) = channel.filter(|_| header.buffer_ids_len() == 0) else {
            return Ok(CallStartResult::NeedsWorker);
        };
        let tenant = self.tenant()?;
        if !tenant.try_admit(ticket, request.len, request.deadline)? {
            return Err(EAGAIN);
        }
        let high_priority = !tenant.is_low_priority();
        match request.prepare_send(
            &rpc,
            channel,
            (header, CallBuffers::default()),
            high_priority,
            gfp_nowait_account(),
        ) {
            Ok((sending, pending)) => Ok(CallStartResult::Sending(sending, pending)),
            // Who waits gets what others give back.
            Err(error) if error == ENOMEM => Ok(CallStartResult::NeedsWorker),
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
        handle_id: u64,
        request: &RpcRequest,
    ) -> Result<(RpcSendOp, Option<PendingCall>)> {
        let handle = self.handle_for_call(handle_id)?;
        let header = request.header()?;
        let high_priority = self.wait_message_admitted(request.len, request.deadline)?;
        let buffers = self.prepare_buffers(request, &header)?;
        let rpc = self.enter_rpc()?;
        let channel = self.ensure_channel(&rpc, &handle, request.deadline)?;
        request.prepare_send(
            &rpc,
            channel,
            (header, buffers),
            high_priority,
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Waits until a message of so many bytes may go by the session's priority and limits. Returns whether it has
    /// high priority.
    pub(super) fn wait_message_admitted(&self, len: u64, deadline: Deadline) -> Result<bool> {
        let tenant = self.tenant()?;
        tenant.admit(len, deadline)?;
        Ok(!tenant.is_low_priority())
    }

    /// The handle of that number, if who serves its region may be called by it.
    fn handle_for_call(&self, handle_id: u64) -> Result<Arc<Handle>> {
        let handle = self.get(handle_id)?;
        let is_allowed = handle.rights.contains(Rights::WRITE);
        is_allowed.then_some(handle).ok_or(EACCES)
    }

    fn do_call(&self, handle_id: u64, request: &RpcRequest) -> Result<u64> {
        let handle = self.handle_for_call(handle_id)?;
        let header = request.header()?;
        let high_priority = self.wait_message_admitted(request.len, request.deadline)?;
        let buffers = self.prepare_buffers(request, &header)?;
        let mut message = request.message(header, &buffers, GFP_KERNEL)?;
        message.high_priority = high_priority;
        let rpc = self.enter_rpc()?;
        let channel = self.ensure_channel(&rpc, &handle, request.deadline)?;
        if !header.expects_answer() {
            let sent = channel.send(&rpc, &mut message, request.deadline);
            return sent.map(|()| 0).map_err(stale_to_connreset);
        }
        let reply = rpc.call(&channel, message, request.deadline)?;
        drop(rpc);
        self.store_reply(&reply, buffers, &request.reply_buffer)
    }

    /// The way to whoever serves a region: a new one if that of before has ended.
    fn ensure_channel(
        &self,
        rpc: &Arc<Rpc>,
        handle: &Handle,
        deadline: Deadline,
    ) -> Result<Arc<RpcChannel>> {
        drop(handle.mapping.access()?);
        if let Some(channel) = handle.lock_rpc_state()?.live_channel() {
            return Ok(channel);
        }
        // Nobody waits for this with the lock held. Of those who are here at once one is faster.
        let attached = rpc.attach(&handle.mapping, deadline)?;
        let (channel, surplus) = match handle.lock_rpc_state() {
            Ok(mut uses) => match uses.live_channel() {
                Some(channel) => (Ok(channel), Some(attached)),
                None => (Ok(attached.clone()), uses.channel.replace(attached)),
            },
            Err(error) => (Err(error), Some(attached)),
        };
        if let Some(surplus) = surplus {
            rpc.detach(surplus);
        }
        channel
    }
}

impl HandleRpcState {
    /// The way to whoever serves the region, if it has not ended.
    fn live_channel(&self) -> Option<Arc<RpcChannel>> {
        let channel = self.channel.as_ref();
        channel
            .filter(|channel| channel.check_open().is_ok())
            .cloned()
    }
}

impl Handle {
    /// What it is used for.
    ///
    /// # Errors
    ///
    /// `EBADF` if it was given back.
    pub(super) fn lock_rpc_state(
        &self,
    ) -> Result<impl core::ops::DerefMut<Target = HandleRpcState> + '_> {
        let rpc_state = self.rpc_state.lock();
        if rpc_state.closed {
            Err(EBADF)
        } else {
            Ok(rpc_state)
        }
    }
}
