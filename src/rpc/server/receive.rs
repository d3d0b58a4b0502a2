// SPDX-License-Identifier: GPL-2.0

//! Receive of a call by a server, which may wait.
//!
//! # Operation
//!
//! A server waits by busy polling, then on `arrival_cv`. The data of an inline call are copied from the ring
//! to the buffer of the server. The data of a rendezvous call are fetched by the caller of
//! [`RpcService::receive`]. A receive on an I/O queue is polled by the poller thread instead
//! ([`super::try_receive`]).
//!
//! # Recovery
//!
//! The buffer of a server is too short or not present: an inline call returns to the front of its queue, a
//! rendezvous call to the end.
//!
//! # Locking
//!
//! `RpcService::state` (spinlock) protects `arrival_seq`, which is read before the poll. An arrival during
//! the poll makes the counter differ, so the server does not sleep. Data are copied without a lock.

use super::{dequeue::DequeuedCall, received::ReceivedCall, RpcService};
use crate::{
    errno::{self, TryError},
    rpc::{
        channel::{CallReceiver, RpcChannel},
        rendezvous::call::RendezvousCall,
        Rpc,
    },
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{
    prelude::*,
    sync::{Arc, CondVarTimeoutResult},
    time::msecs_to_jiffies,
};
use kite_core::wire::ring::{MsgHeader, MsgType};

/// Interval, in ms, at which a waiting server rechecks that its region and handle exist.
const RECHECK_MS: u32 = 1000;

/// Message handed to a server.
pub(crate) enum RpcDelivery {
    Received(ReceivedCall),
    Rendezvous(RendezvousCall),
}

/// Reason why a server received no call.
pub(crate) enum RpcReceiveError {
    Failed(Error),
    /// The server's buffer is too short. The call remains queued.
    BufferTooShort,
    /// Pages are not present in the first `n` bytes of the server's buffer, where `n` is the value. The call
    /// remains queued.
    FaultNeeded(usize),
}

impl From<Error> for RpcReceiveError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl RpcService {
    /// Returns `true` if a call can be taken now.
    pub(crate) fn has_ready_call(&self) -> bool {
        self.clients.lock().has_ready_call()
    }

    /// Takes a call and copies its data to the first `buffer_len` bytes of `memory`. Waits until `wait_until`
    /// if no call is queued, and rechecks `check_open` at least every [`RECHECK_MS`]. Does not wait if
    /// `wait_until` is `None`.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the service has ended.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `EINTR`: a signal arrived, and the deadline is interruptible.
    /// - `EAGAIN`: no call was received, and `wait_until` is `None`.
    /// - Errors of `check_open`.
    /// - [`RpcReceiveError::BufferTooShort`], [`RpcReceiveError::FaultNeeded`]: the call remains queued.
    pub(crate) fn receive(
        &self,
        rpc: &Arc<Rpc>,
        memory: &Buffer,
        buffer_len: u64,
        wait_until: Option<Deadline>,
        check_open: impl Fn() -> Result,
    ) -> Result<RpcDelivery, RpcReceiveError> {
        loop {
            check_open()?;
            let seen_seq = self.state.lock().arrival_seq;
            let dequeued = self.clients.lock().dequeue_next(rpc, true);
            let Some((channel, call)) = dequeued else {
                self.reap_clients(rpc);
                let deadline = wait_until.ok_or(EAGAIN)?;
                let waited = self.wait_for_arrival(rpc, seen_seq, deadline, &check_open);
                // The failed waiter may have consumed the wakeup of a call. Pass it on.
                waited.inspect_err(|_| self.wake_next_server())?;
                continue;
            };
            self.wake_next_server();
            let delivery = match call {
                DequeuedCall::Rendezvous(rendezvous) => self
                    .check_size(rpc, rendezvous, buffer_len)?
                    .map(RpcDelivery::Rendezvous),
                DequeuedCall::Inline(header) => {
                    self.deliver(rpc, &channel, header, memory, buffer_len)?
                }
            };
            if let Some(delivery) = delivery {
                return Ok(delivery);
            }
            wait_until.ok_or(EAGAIN)?.check()?;
        }
    }

    /// Checks the length of a rendezvous call. Rejects the call with `EMSGSIZE` if its data exceed the limit
    /// of the service, and returns `None`.
    ///
    /// # Errors
    ///
    /// - [`RpcReceiveError::BufferTooShort`]: the call remains queued.
    pub(crate) fn check_size(
        &self,
        rpc: &Arc<Rpc>,
        call: RendezvousCall,
        buffer_len: u64,
    ) -> Result<Option<RendezvousCall>, RpcReceiveError> {
        if call.len() > self.max_data_bytes {
            call.reject(rpc, errno::msgsize());
            Ok(None)
        } else if call.len() > buffer_len {
            Err(RpcReceiveError::BufferTooShort)
        } else {
            Ok(Some(call))
        }
    }

    /// Waits until `arrival_seq` differs from `seen_seq`, for at most [`RECHECK_MS`].
    fn wait_for_arrival(
        &self,
        rpc: &Rpc,
        seen_seq: u64,
        deadline: Deadline,
        check_open: impl Fn() -> Result,
    ) -> Result {
        self.state.lock().pollers += 1;
        let _spin_sample = rpc.fabric().busy_poll(&self.receive_spin, || {
            self.state.lock().arrival_seq != seen_seq
        });
        self.state.lock().pollers -= 1;
        check_open()?;
        let mut state = self.state.lock();
        if state.closed {
            return Err(errno::stale());
        }
        if state.arrival_seq != seen_seq {
            return Ok(());
        }
        deadline.check()?;
        let slice_jiffies = msecs_to_jiffies(deadline.remaining_ms().min(RECHECK_MS));
        let woken = self
            .arrival_cv
            .wait_interruptible_timeout(&mut state, slice_jiffies);
        drop(state);
        match woken {
            CondVarTimeoutResult::Signal { .. } => deadline.handle_signal(),
            _ => Ok(()),
        }
    }

    /// Wakes another server if calls remain: each server takes only one.
    fn wake_next_server(&self) {
        if self.has_ready_call() {
            self.arrival_cv.notify_one();
        }
    }

    /// Copies the data of an inline call to the server's buffer, and frees its slot. Returns `None` if the
    /// message is void or this end is closed.
    pub(super) fn deliver(
        &self,
        rpc: &Arc<Rpc>,
        channel: &Arc<RpcChannel>,
        header: MsgHeader,
        memory: &Buffer,
        buffer_len: u64,
    ) -> Result<Option<RpcDelivery>, RpcReceiveError> {
        let ring = channel
            .rx_memory()
            .ok()
            .filter(|_| header.msg_type != MsgType::Void);
        let Some(ring) = ring else {
            // Also a call of a detached client, which was made void.
            channel.free_slots(rpc, &header.slot);
            return Ok(None);
        };
        if header.len > buffer_len {
            self.requeue(channel, &header);
            return Err(RpcReceiveError::BufferTooShort);
        }
        // Cannot fail: the message was checked on arrival.
        let bufs = channel
            .read_rendezvous_bufs(&ring, &header)
            .unwrap_or_default();
        let len = header.inline_len();
        let copied = memory.try_copy_from_pages(&ring, channel.data_offset(&header.slot), 0, len);
        if let Err(error) = copied {
            self.requeue(channel, &header);
            return Err(match error {
                TryError::WouldBlock => RpcReceiveError::FaultNeeded(len),
                error => Error::from(error).into(),
            });
        }
        channel.free_slots(rpc, &header.slot);
        Ok(Some(RpcDelivery::Received(ReceivedCall::new(
            channel, header, bufs,
        ))))
    }

    fn requeue(&self, channel: &RpcChannel, header: &MsgHeader) {
        channel.requeue(header);
        self.notify_arrival();
    }
}
