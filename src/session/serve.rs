// SPDX-License-Identifier: GPL-2.0

//! RPC server: receiving calls and one-way messages to a region, and replying.
//!
//! # Operation
//!
//! [`Session::serve`] starts an RPC service for a region whose home is this node. [`Session::receive`] takes
//! a call, and [`Session::reply`] answers the call. A call with long data arrives as a [`RendezvousCall`],
//! whose data are then fetched from the caller's node.
//!
//! # Recovery
//!
//! A received call enters `accepted_calls` before the server learns the number of the call. When the server
//! ends, every caller without a reply therefore gets an error. If a reply fails with `EFAULT`, `EMSGSIZE` or
//! `ENOMEM` before its transmission, the server can reply again.
//!
//! # Locking
//!
//! `Handle::rpc_state` nests outside `served_regions`, which nests outside the locks of [`RpcService`].
//! `accepted_calls` is taken alone. Non-blocking receives find their handle and service with `try_lock`.

use super::{
    call_args::exceeds_max_data,
    handles::{Handle, HandleRpcState},
    rendezvous::is_caller_gone,
    AcceptedCall, Session,
};
use crate::{
    bindings, errno,
    rpc::{
        rendezvous::queue::RendezvousCall,
        server::{
            self, reply::PendingReply, PolledReceiver, RpcDelivery, RpcReceiveError, RpcService,
            RpcTryReceive,
        },
        Rpc,
    },
    sys::{buffer::Buffer, deadline::Deadline, memcg::gfp_nowait_account},
};
use core::mem::MaybeUninit;
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    prelude::*,
    rbtree::RBTreeNodeReservation,
    sync::{Arc, UniqueArc},
};
use kite_core::{rights::Rights, ring};

/// Default size of a ring in bytes.
const DEFAULT_RING_BYTES: u32 = 64 << 10;

/// Maximum number of retries per receive when buffer pages are reclaimed between fault-in and use.
const MAX_FAULT_RETRIES: u32 = 16;

/// Received call or one-way message. `call_id` is 0 if the caller expects no reply.
pub(crate) struct IncomingCall {
    pub(crate) len: u64,
    pub(crate) call_id: u64,
    pub(crate) function: u32,
    pub(crate) node: u32,
    pub(crate) uid: u32,
}

/// Result of a non-blocking receive.
pub(super) enum TryReceiveResult {
    /// No call is queued.
    Empty,
    /// Another thread is receiving, or no memory is available without blocking.
    Busy,
    Received(IncomingCall),
    /// A call whose data must be fetched first.
    Rendezvous(RendezvousCall),
}

/// Memory for an entry of `accepted_calls`, allocated before a call is received.
pub(super) struct CallReservation {
    pending_reply: UniqueArc<MaybeUninit<PendingReply>>,
    node: RBTreeNodeReservation<u64, AcceptedCall>,
}

impl CallReservation {
    /// Allocates without blocking.
    pub(super) fn try_new() -> Result<Self> {
        Self::new(gfp_nowait_account())
    }

    fn new(flags: Flags) -> Result<Self> {
        Ok(Self {
            pending_reply: UniqueArc::new_uninit(flags)?,
            node: RBTreeNodeReservation::new(flags)?,
        })
    }
}

impl Session {
    /// Makes the session the server of a region.
    ///
    /// # Errors
    ///
    /// See `struct kite_serve` in `include/uapi/kite.h`.
    pub(crate) fn serve(&self, handle_id: u64, ring_size: u32, max_data_bytes: u32) -> Result {
        let ring_bytes = if ring_size == 0 {
            DEFAULT_RING_BYTES
        } else {
            ring_size
        };
        ring::capacity_units(ring_bytes.into()).ok_or(EINVAL)?;
        let max_data_bytes = match max_data_bytes {
            0 => bindings::KITE_DATA_INLINE,
            len => len,
        };
        if max_data_bytes < bindings::KITE_DATA_INLINE || exceeds_max_data(max_data_bytes.into()) {
            return Err(EINVAL);
        }
        let handle = self.get(handle_id)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        let rpc = self.enter_rpc()?;
        drop(handle.mapping.access()?);
        if handle.mapping.home != rpc.memory_service.cluster.local_node()? {
            return Err(errno::remote());
        }
        let mut rpc_state = handle.lock_rpc_state()?;
        if rpc_state.service.is_some() {
            return Err(EBUSY);
        }
        let mut served = self.served_regions.lock();
        served.reserve(1, GFP_KERNEL)?;
        let region = handle.mapping.region;
        let service = rpc.serve_region(
            region,
            ring_bytes.into(),
            max_data_bytes.into(),
            &self.events,
        )?;
        rpc_state.service = Some(service.clone());
        Ok(served.push((handle_id, service), GFP_KERNEL)?)
    }

    /// Returns `true` if a call waits for this session.
    pub(super) fn has_pending_calls(&self) -> bool {
        let served = self.served_regions.lock();
        served.iter().any(|(_, service)| service.has_ready_call())
    }

    /// Detaches the channel of a handle, aborts the calls received through the handle, and stops its RPC
    /// service.
    pub(super) fn close_rpc_state(&self, rpc: &Arc<Rpc>, handle: &Handle) {
        let closed = HandleRpcState {
            closed: true,
            ..HandleRpcState::default()
        };
        let HandleRpcState {
            channel, service, ..
        } = core::mem::replace(&mut *handle.rpc_state.lock(), closed);
        if let Some(channel) = channel {
            rpc.detach(channel);
        }
        if let Some(service) = service {
            self.abandon_calls(rpc, Some(handle.id));
            let mut served = self.served_regions.lock();
            served.retain(|(handle_id, _)| *handle_id != handle.id);
            drop(served);
            rpc.stop_serving(&service, &self.events);
        }
    }

    /// Receives a call or message to a region that this session serves. Stores the data, at most `max_len`
    /// bytes, in `memory`. Waits until `wait_until`, or not at all if `None`.
    ///
    /// # Errors
    ///
    /// See `struct kite_receive` in `include/uapi/kite.h`.
    pub(crate) fn receive(
        &self,
        handle_id: u64,
        memory: &Buffer,
        max_len: u64,
        wait_until: Option<Deadline>,
    ) -> Result<IncomingCall> {
        let handle = self.get(handle_id)?;
        let service = handle.lock_rpc_state()?.service.clone();
        let service = service.ok_or_else(errno::opnotsupp)?;
        let mut faults = 0;
        while faults < MAX_FAULT_RETRIES {
            match self.receive_call(&handle, &service, memory, max_len, wait_until) {
                Ok(Some(incoming)) => return Ok(incoming),
                Ok(None) => wait_until.ok_or(EAGAIN)?.check()?,
                Err(RpcReceiveError::FaultNeeded(len)) => {
                    memory.fault_in(0, len, true)?;
                    faults += 1;
                }
                Err(RpcReceiveError::BufferTooShort) => return Err(errno::msgsize()),
                Err(RpcReceiveError::Failed(error)) => {
                    // After RNIC removal report `ENODEV`, the cause.
                    drop(self.enter_rpc()?);
                    return Err(error);
                }
            }
        }
        Err(ENOMEM)
    }

    /// Registers a non-blocking receiver for a handle. As long as the receiver exists, arriving calls wake
    /// the poller thread.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the handle table or the RPC state of the handle is locked.
    /// - Otherwise see `struct kite_receive` in `include/uapi/kite.h`.
    pub(super) fn register_polled_receive(&self, handle_id: u64) -> Result<PolledReceiver> {
        let (_, service) = self.try_service(handle_id)?;
        Ok(PolledReceiver::new(service))
    }

    /// Receives a call or message without blocking. Calls with long data are taken only if
    /// `accept_rendezvous`, and must be passed to [`Self::receive_rendezvous`]. Consumes `reservation` if a
    /// call is received. Without a reservation returns [`TryReceiveResult::Busy`].
    ///
    /// # Errors
    ///
    /// See [`Self::receive`].
    pub(super) fn try_receive(
        &self,
        handle_id: u64,
        memory: &Buffer,
        max_len: u64,
        accept_rendezvous: bool,
        reservation: &mut Option<CallReservation>,
    ) -> Result<TryReceiveResult> {
        let rpc = self.enter_rpc()?;
        let (handle, service) = match self.try_service(handle_id) {
            Err(error) if error == EAGAIN => return Ok(TryReceiveResult::Busy),
            found => found?,
        };
        drop(handle.mapping.access()?);
        let Some(reserved) = reservation.take() else {
            return Ok(TryReceiveResult::Busy);
        };
        let polled = service.try_receive(&rpc, memory, max_len, accept_rendezvous);
        if let Ok(RpcTryReceive::Delivered(RpcDelivery::Received(received))) = polled {
            return self
                .accept_call(&rpc, &handle, received, reserved)
                .map(TryReceiveResult::Received);
        }
        *reservation = Some(reserved);
        match polled {
            Ok(RpcTryReceive::Delivered(RpcDelivery::Rendezvous(call))) => {
                Ok(TryReceiveResult::Rendezvous(call))
            }
            Ok(RpcTryReceive::Empty) => Ok(TryReceiveResult::Empty),
            Ok(_) | Err(RpcReceiveError::FaultNeeded(_)) => Ok(TryReceiveResult::Busy),
            Err(RpcReceiveError::BufferTooShort) => Err(errno::msgsize()),
            Err(RpcReceiveError::Failed(error)) => Err(error),
        }
    }

    /// Fetches the data of a rendezvous call. Returns `None` if the call is lost: the caller of this function
    /// must receive the next call.
    ///
    /// # Errors
    ///
    /// See [`Self::receive`].
    pub(super) fn receive_rendezvous(
        &self,
        handle_id: u64,
        call: RendezvousCall,
        memory: &Buffer,
        max_len: u64,
    ) -> Result<Option<IncomingCall>> {
        let handle = self.get(handle_id)?;
        let service = handle
            .lock_rpc_state()?
            .service
            .clone()
            .ok_or_else(errno::opnotsupp)?;
        let reservation = CallReservation::new(GFP_KERNEL_ACCOUNT)?;
        let checked = service.check_size(&*self.enter_rpc()?, call, max_len);
        match checked.and_then(|call| self.fetch_and_accept(&handle, call, memory, reservation)) {
            Ok(incoming) => Ok(incoming),
            Err(RpcReceiveError::BufferTooShort) => Err(errno::msgsize()),
            Err(RpcReceiveError::FaultNeeded(_)) => Ok(None),
            Err(RpcReceiveError::Failed(error)) => {
                // After RNIC removal report `ENODEV`, the cause.
                drop(self.enter_rpc()?);
                Err(error)
            }
        }
    }

    /// Fetches the data of a rendezvous call and accepts the call. Returns `None` if the call is lost.
    fn fetch_and_accept(
        &self,
        handle: &Handle,
        call: Option<RendezvousCall>,
        memory: &Buffer,
        reservation: CallReservation,
    ) -> Result<Option<IncomingCall>, RpcReceiveError> {
        let Some(call) = call else { return Ok(None) };
        let Some(received) = self.fetch_data(call, memory)? else {
            return Ok(None);
        };
        Ok(Some(self.accept_call(
            &*self.enter_rpc()?,
            handle,
            received,
            reservation,
        )?))
    }

    fn try_service(&self, handle_id: u64) -> Result<(Arc<Handle>, Arc<RpcService>)> {
        let handle = self.try_get(handle_id)?;
        let rpc_state = handle.rpc_state.try_lock().ok_or(EAGAIN)?;
        if rpc_state.closed {
            return Err(EBADF);
        }
        let service = rpc_state.service.clone().ok_or_else(errno::opnotsupp)?;
        drop(rpc_state);
        Ok((handle, service))
    }

    /// Receives a call. Returns `None` if the data of the call are lost: the caller of this function must try
    /// again.
    fn receive_call(
        &self,
        handle: &Handle,
        service: &RpcService,
        memory: &Buffer,
        max_len: u64,
        wait_until: Option<Deadline>,
    ) -> Result<Option<IncomingCall>, RpcReceiveError> {
        // Allocate first: a dequeued call must not be lost because memory is short.
        let reservation = CallReservation::new(GFP_KERNEL_ACCOUNT)?;
        let check_mapped = || handle.mapping.access().map(drop);
        let receive = || {
            service.receive(
                &*self.enter_rpc()?,
                memory,
                max_len,
                wait_until,
                check_mapped,
            )
        };
        match receive()? {
            RpcDelivery::Received(received) => Ok(Some(self.accept_call(
                &*self.enter_rpc()?,
                handle,
                received,
                reservation,
            )?)),
            RpcDelivery::Rendezvous(call) => {
                self.fetch_and_accept(handle, Some(call), memory, reservation)
            }
        }
    }

    /// Enters a received call into `accepted_calls`. Aborts the call if the handle was closed meanwhile.
    fn accept_call(
        &self,
        rpc: &Arc<Rpc>,
        handle: &Handle,
        received: server::ReceivedCall,
        reservation: CallReservation,
    ) -> Result<IncomingCall> {
        let call_id = match received.pending_reply {
            Some(pending_reply) => self.insert_accepted_call(reservation, pending_reply, handle.id),
            None => 0,
        };
        if let Err(error) = handle.lock_rpc_state().map(drop) {
            // Closing the handle may have missed the new entry.
            let _ = self.abandon_call(call_id);
            return Err(error);
        }
        rpc.memory_service.stats.rpcs_served.add(1);
        Ok(IncomingCall {
            len: received.header.len,
            call_id,
            function: received.header.code,
            node: received.node,
            uid: received.header.uid,
        })
    }

    fn insert_accepted_call(
        &self,
        reservation: CallReservation,
        pending_reply: PendingReply,
        handle_id: u64,
    ) -> u64 {
        let call_id = self.alloc_id();
        let accepted = AcceptedCall {
            pending_reply: reservation.pending_reply.write(pending_reply).into(),
            handle_id,
            is_being_answered: false,
        };
        self.accepted_calls
            .lock()
            .insert(reservation.node.into_node(call_id, accepted));
        call_id
    }

    /// Replies to a received call.
    ///
    /// # Errors
    ///
    /// See `struct kite_reply` in `include/uapi/kite.h`.
    pub(crate) fn reply(
        &self,
        call_id: u64,
        memory: &Buffer,
        len: u64,
        deadline: Deadline,
    ) -> Result {
        // The rendezvous transfer passes admission itself.
        let is_rendezvous = len > bindings::KITE_DATA_INLINE.into();
        let high_priority =
            self.wait_message_admitted(if is_rendezvous { 0 } else { len }, deadline)?;
        let pending_reply = self.claim_reply(call_id)?;
        let is_wanted = self.write_reply(&pending_reply, len, memory, deadline);
        let build_message = |is_wanted: bool| {
            let message = is_wanted.then(|| {
                pending_reply.build_reply(len, high_priority, |data| memory.read_slice(0, data))
            });
            message.transpose()
        };
        let message = is_wanted.and_then(build_message);
        let message = match message {
            Ok(message) => message,
            Err(error) => {
                self.on_reply_failed(call_id, error);
                return Err(error);
            }
        };
        let rpc = self.enter_rpc()?;
        // `EBADF` if the call was aborted meanwhile.
        self.remove_accepted_call(call_id).ok_or(EBADF)?;
        let sent = message.map_or(Ok(()), |message| {
            pending_reply.send(&rpc, message, deadline)
        });
        match sent {
            Err(error) if is_caller_gone(error) => Ok(()),
            sent => sent,
        }
    }

    /// Returns the call, and reserves the right to reply.
    ///
    /// # Errors
    ///
    /// - `EBADF`: no such call, or another thread is replying.
    fn claim_reply(&self, call_id: u64) -> Result<Arc<PendingReply>> {
        let mut accepted_calls = self.accepted_calls.lock();
        let accepted = accepted_calls.get_mut(&call_id).ok_or(EBADF)?;
        if core::mem::replace(&mut accepted.is_being_answered, true) {
            return Err(EBADF);
        }
        Ok(accepted.pending_reply.clone())
    }

    /// Handles a reply whose data could not be read or transferred. Allows another reply after `EFAULT`,
    /// `EMSGSIZE` and `ENOMEM`. Aborts the call after any other error.
    fn on_reply_failed(&self, call_id: u64, error: Error) {
        if ![EFAULT, errno::msgsize(), ENOMEM].contains(&error) {
            let _ = self.abandon_call(call_id);
        } else if let Some(accepted) = self.accepted_calls.lock().get_mut(&call_id) {
            accepted.is_being_answered = false;
        }
    }

    /// Aborts a call: the caller receives `ECONNRESET`.
    ///
    /// # Errors
    ///
    /// - `EBADF`: no such call.
    /// - `ENODEV`: the RNIC was removed.
    pub(super) fn abandon_call(&self, call_id: u64) -> Result {
        let rpc = self.enter_rpc()?;
        self.remove_accepted_call(call_id)
            .ok_or(EBADF)?
            .fail_deferred(&rpc);
        Ok(())
    }

    /// Aborts all calls, or the calls received through one handle.
    pub(super) fn abandon_calls(&self, rpc: &Arc<Rpc>, handle_id: Option<u64>) {
        let remove_next = || {
            let mut accepted_calls = self.accepted_calls.lock();
            let mut calls = accepted_calls.iter().filter(|(_, accepted)| {
                handle_id.is_none_or(|handle_id| accepted.handle_id == handle_id)
            });
            let call_id = *calls.next()?.0;
            accepted_calls.remove_node(&call_id)
        };
        while let Some(node) = remove_next() {
            node.to_key_value().1.pending_reply.fail_deferred(rpc);
        }
    }

    fn remove_accepted_call(&self, call_id: u64) -> Option<Arc<PendingReply>> {
        let node = self.accepted_calls.lock().remove_node(&call_id)?;
        Some(node.to_key_value().1.pending_reply)
    }
}
