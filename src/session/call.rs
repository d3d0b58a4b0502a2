// SPDX-License-Identifier: GPL-2.0

//! RPC client: calls and one-way messages to the server of a region.
//!
//! # Operation
//!
//! The session's priority and limits admit each call. If the data or the reply may be too long for the ring,
//! the call gets rendezvous buffers. The call is sent through the channel of its handle. The first call
//! through a handle attaches the channel. After the end of the channel, the next call attaches a new one.
//!
//! # Locking
//!
//! Unpinned user memory is accessed only while no service guard is held. A page fault can block as long as
//! the process likes, for example with userfaultfd, and RNIC removal waits for all guards.
//!
//! The channel is attached with `Handle::rpc_state` unlocked. Of concurrent attachments one is kept.

use super::{
    call_args::RpcRequest,
    handles::Handle,
    rendezvous::{CallBuffers, PendingCall},
    Session,
};
use crate::{
    errno::{TryError, TryResult},
    fabric::qos::tenant::AdmissionTicket,
    rpc::{
        channel::{send_op::RpcSendOp, RpcChannel},
        client::stale_to_connreset,
        Rpc, RpcMessage,
    },
    sys::{deadline::Deadline, memcg::gfp_nowait_account},
};
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    prelude::*,
    sync::Arc,
};
use kite_core::{rights::Rights, wire::ring::MsgHeader};

impl RpcRequest {
    /// Returns the message with its data, in memory allocated with `flags`.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the data cannot be read.
    /// - `ENOMEM`: out of memory.
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

    /// Prepares the transmission through a channel. If the message expects a reply, registers a waiter.
    ///
    /// # Errors
    ///
    /// See [`Self::message`].
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

/// Result of starting an RPC or a message without blocking.
pub(super) enum CallStartResult {
    /// The message can be sent. If the message expects a reply, with the pending call.
    Sending(RpcSendOp, Option<PendingCall>),
    /// Nothing was started: no channel is attached, no memory is available without blocking, or the call
    /// needs rendezvous buffers.
    NeedsWorker,
}

impl Session {
    /// Makes a call, or sends a one-way message. Returns the length of the reply in bytes.
    ///
    /// # Errors
    ///
    /// See `struct kite_call` in `include/uapi/kite.h`.
    pub(super) fn call(&self, handle_id: u64, request: &RpcRequest) -> Result<u64> {
        let result = self.do_call(handle_id, request);
        self.count_call_result(&result);
        result
    }

    /// Counts the result of a call or message in the statistics.
    pub(super) fn count_call_result(&self, result: &Result<u64>) {
        let Ok(rnic) = self.rnic() else { return };
        match result {
            Ok(_) => rnic.stats.rpcs.add(1),
            Err(_) => rnic.stats.errors.add(1),
        }
    }

    /// Starts a call or message without blocking.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the call would block.
    /// - Otherwise see [`Self::call`].
    pub(super) fn try_start_call(
        &self,
        handle_id: u64,
        request: &RpcRequest,
        ticket: &mut AdmissionTicket,
    ) -> TryResult<CallStartResult> {
        let rpc = self.enter_rpc()?;
        let handle = self.try_get(handle_id)?;
        if !handle.rights.contains(Rights::WRITE) {
            return Err(EACCES.into());
        }
        let header = request.header()?;
        drop(handle.mapping.access()?);
        let channel = handle
            .rpc_state
            .try_lock()
            .ok_or(TryError::WouldBlock)?
            .live_channel();
        let Some(channel) = channel.filter(|_| header.buffer_ids_len() == 0) else {
            return Ok(CallStartResult::NeedsWorker);
        };
        let tenant = self.tenant()?;
        if !tenant.try_admit(ticket, request.len, request.deadline)? {
            return Err(TryError::WouldBlock);
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
            // A worker allocates with blocking, which can reclaim memory.
            Err(error) if error == ENOMEM => Ok(CallStartResult::NeedsWorker),
            Err(error) => Err(error.into()),
        }
    }

    /// Prepares the transmission of a call or message. May block, but does not wait for the reply.
    ///
    /// # Errors
    ///
    /// See [`Self::call`].
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

    /// Waits until the session's priority and limits admit a message of `len` bytes. Returns `true` if the
    /// session has high priority.
    pub(super) fn wait_message_admitted(&self, len: u64, deadline: Deadline) -> Result<bool> {
        let tenant = self.tenant()?;
        tenant.admit(len, deadline)?;
        Ok(!tenant.is_low_priority())
    }

    /// Returns the handle if its rights permit calls.
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
            let sent = channel.send(&rpc, message, request.deadline);
            return sent.map(|()| 0).map_err(stale_to_connreset);
        }
        let reply = rpc.call(&channel, message, request.deadline)?;
        drop(rpc);
        self.store_reply(&reply, buffers, &request.reply_buffer)
    }

    /// Returns the channel to the server of a region. Attaches a new channel if none is open.
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
        // Attach without the lock, because the peer may be slow. If several threads attach, the first stores
        // its channel, and the others detach theirs.
        let attached = rpc.attach(&handle.mapping, deadline)?;
        let (channel, surplus) = match handle.lock_rpc_state() {
            Ok(mut rpc_state) => match rpc_state.live_channel() {
                Some(channel) => (Ok(channel), Some(attached)),
                None => (Ok(attached.clone()), rpc_state.channel.replace(attached)),
            },
            Err(error) => (Err(error), Some(attached)),
        };
        if let Some(surplus) = surplus {
            rpc.detach(surplus);
        }
        channel
    }
}
