// SPDX-License-Identifier: GPL-2.0

//! RPC server: starting a service for a region, and receiving calls and one-way messages.
//!
//! # Operation
//!
//! [`Session::serve`] starts an RPC service for a region whose home is this node. [`Session::receive`] takes
//! a call, and [`Session::reply`] answers the call ([`accepted`]). A call with long data arrives as a
//! [`RendezvousCall`], whose data are then fetched from the caller's node.
//!
//! # Recovery
//!
//! A received call enters `accepted_calls` before the server learns the number of the call. When the server
//! ends, every caller without a reply therefore gets an error. A lost rendezvous call is skipped, and the
//! receive continues with the next call.
//!
//! # Locking
//!
//! `Handle::rpc_state` nests outside `served_regions`, which nests outside the locks of [`RpcService`].
//! Non-blocking receives find their handle and service with `try_lock`. They take `accepted_calls` to enter a
//! call; no holder of `accepted_calls` sleeps.

pub(super) mod accepted;

use self::accepted::CallReservation;
use super::{
    call_args::exceeds_max_data,
    handles::{Handle, HandleRpcState},
    Session,
};
use crate::{
    bindings,
    errno::{self, TryError, TryResult},
    rpc::{
        rendezvous::call::RendezvousCall,
        server::{self, PolledReceiver, RpcDelivery, RpcReceiveError, RpcService, RpcTryReceive},
        Rpc,
    },
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{rights::Rights, ring};

/// Default size of a ring in bytes.
const DEFAULT_RING_BYTES: u32 = 64 << 10;

/// Maximum number of retries per receive when buffer pages are reclaimed between fault-in and use.
const MAX_FAULT_RETRIES: u32 = 16;

/// Received call or one-way message. `call_id` is 0 if the caller expects no reply.
pub(in crate::session) struct IncomingCall {
    pub(in crate::session) len: u64,
    pub(in crate::session) call_id: u64,
    pub(in crate::session) function: u32,
    pub(in crate::session) node: u32,
    pub(in crate::session) uid: u32,
}

impl IncomingCall {
    /// Stores the description of the call in `received`.
    pub(in crate::session) fn store_in(&self, received: &mut bindings::kite_receive) {
        received.len = self.len;
        received.call = self.call_id;
        received.function = self.function;
        received.node = self.node;
        received.uid = self.uid;
    }
}

/// Result of a non-blocking receive.
pub(in crate::session) enum TryReceiveResult {
    /// No call is queued.
    Empty,
    /// Another thread is receiving, or no memory is available without blocking.
    Busy,
    Received(IncomingCall),
    /// A call whose data must be fetched first.
    Rendezvous(RendezvousCall),
}

impl Session {
    /// Makes the session the server of a region.
    ///
    /// # Errors
    ///
    /// See `struct kite_serve` in `include/uapi/kite.h`.
    pub(in crate::session) fn serve(
        &self,
        handle_id: u64,
        ring_size: u32,
        max_data_bytes: u32,
    ) -> Result {
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
    pub(in crate::session) fn has_pending_calls(&self) -> bool {
        let served = self.served_regions.lock();
        served.iter().any(|(_, service)| service.has_ready_call())
    }

    /// Detaches the channel of a handle, aborts the calls received through the handle, and stops its RPC
    /// service.
    pub(in crate::session) fn close_rpc_state(&self, rpc: &Arc<Rpc>, handle: &Handle) {
        let HandleRpcState { channel, service } = handle.take_rpc_state();
        if let Some(channel) = channel {
            rpc.detach(channel);
        }
        if let Some(service) = service {
            self.abort_calls(rpc, Some(handle.id));
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
    pub(in crate::session) fn receive(
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
                Err(RpcReceiveError::Failed(error)) => return Err(self.or_device_gone(error)),
            }
        }
        Err(ENOMEM)
    }

    /// Registers a non-blocking receiver for a handle. As long as the receiver exists, arriving calls wake
    /// the poller thread.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the handle table or the RPC state of the handle is locked.
    /// - Otherwise see `struct kite_receive` in `include/uapi/kite.h`.
    pub(in crate::session) fn register_polled_receive(
        &self,
        handle_id: u64,
    ) -> TryResult<PolledReceiver> {
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
    pub(in crate::session) fn try_receive(
        &self,
        handle_id: u64,
        memory: &Buffer,
        max_len: u64,
        accept_rendezvous: bool,
        reservation: &mut Option<CallReservation>,
    ) -> Result<TryReceiveResult> {
        let rpc = self.enter_rpc()?;
        let (handle, service) = match self.try_service(handle_id) {
            Err(TryError::WouldBlock) => return Ok(TryReceiveResult::Busy),
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
    pub(in crate::session) fn receive_rendezvous(
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
            Err(RpcReceiveError::Failed(error)) => Err(self.or_device_gone(error)),
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

    fn try_service(&self, handle_id: u64) -> TryResult<(Arc<Handle>, Arc<RpcService>)> {
        let handle = self.try_get(handle_id)?;
        let rpc_state = handle.rpc_state.try_lock().ok_or(TryError::WouldBlock)?;
        handle.check_open()?;
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
        let check_open = || {
            handle.check_open()?;
            handle.mapping.access().map(drop)
        };
        let receive =
            || service.receive(&*self.enter_rpc()?, memory, max_len, wait_until, check_open);
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
        if let Err(error) = handle.check_open() {
            // The close of the handle may have missed the new entry. `accepted_calls` orders the two: if the
            // close scanned the table before, the flag was set before.
            let _ = self.abort_call(call_id);
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
}
