// SPDX-License-Identifier: GPL-2.0

//! Accepted calls: received calls without a reply.
//!
//! # Operation
//!
//! A received call enters `accepted_calls` under a new number. [`Session::reply`] transfers the data of a
//! long reply, removes the call, and sends the reply. One thread at a time replies to a call.
//!
//! # Recovery
//!
//! If the data of a reply cannot be read or transferred, with `EFAULT`, `EMSGSIZE` or `ENOMEM`, the call
//! stays, and the server can reply again. With any other error, and when the server ends, the caller receives
//! `ECONNRESET`.
//!
//! # Locking
//!
//! The mutex `Session::accepted_calls` protects the table. The poller thread takes it with `PollClients::list` and
//! `IoQueue::state` held, so no holder sleeps. Memory for an entry is allocated before a call is received
//! ([`CallReservation`]).

use crate::{
    bindings, errno,
    rpc::{server::reply::PendingReply, Rpc},
    session::{rendezvous::is_caller_gone, Session},
    sys::{buffer::Buffer, deadline::Deadline, memcg::gfp_nowait_account},
};
use core::mem::MaybeUninit;
use kernel::{
    alloc::Flags,
    prelude::*,
    rbtree::RBTreeNodeReservation,
    sync::{Arc, UniqueArc},
};

/// Received call without a reply.
pub(in crate::session) struct AcceptedCall {
    pending_reply: Arc<PendingReply>,
    /// Handle through which the call was received.
    handle_id: u64,
    /// `true` while a thread sends the reply.
    is_being_answered: bool,
}

/// Memory for an entry of `accepted_calls`, allocated before a call is received.
pub(in crate::session) struct CallReservation {
    pending_reply: UniqueArc<MaybeUninit<PendingReply>>,
    node: RBTreeNodeReservation<u64, AcceptedCall>,
}

impl CallReservation {
    /// Allocates without blocking.
    pub(in crate::session) fn try_new() -> Result<Self> {
        Self::new(gfp_nowait_account())
    }

    /// Allocates with `flags`.
    pub(super) fn new(flags: Flags) -> Result<Self> {
        Ok(Self {
            pending_reply: UniqueArc::new_uninit(flags)?,
            node: RBTreeNodeReservation::new(flags)?,
        })
    }
}

impl Session {
    /// Enters a received call into `accepted_calls`, and returns the number of the call.
    pub(super) fn insert_accepted_call(
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
    pub(in crate::session) fn reply(
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
            // Fails if closing the handle has aborted the call, or the RNIC was removed.
            let _ = self.abort_call(call_id);
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
    pub(in crate::session) fn abort_call(&self, call_id: u64) -> Result {
        let rpc = self.enter_rpc()?;
        self.remove_accepted_call(call_id)
            .ok_or(EBADF)?
            .fail_deferred(&rpc);
        Ok(())
    }

    /// Aborts all calls, or the calls received through one handle.
    pub(in crate::session) fn abort_calls(&self, rpc: &Arc<Rpc>, handle_id: Option<u64>) {
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
