// SPDX-License-Identifier: GPL-2.0

//! Send side of a VQP: state of its batches, and their completions.
//!
//! # Operation
//!
//! Batches are posted in order ([`post`]), and reaped when they have ended ([`recover`]). Completions are
//! delivered in the order of the requests ([`deliver`]).
//!
//! # Recovery
//!
//! If a request fails, all later requests fail with `ECANCELED`. If the DCI or connection fails for another
//! reason, the batches return to a state from which they are retried, or fail: see [`VqpBatchState`] and
//! [`VqpBatchOutcome`](complete::VqpBatchOutcome).
//!
//! # Locking
//!
//! All fields of [`VqpState`] are under `Vqp::state`, which [`crate::vqp`] documents.

pub(crate) mod batch;
pub(crate) mod check;
pub(crate) mod complete;
pub(crate) mod deliver;
pub(crate) mod kernel_atomic;
pub(crate) mod mr_cache;
mod post;
pub(crate) mod push_builder;
mod recover;
pub(crate) mod request;

use self::{
    batch::{VqpBatch, VqpBatchState},
    request::VqpRequest,
};
use super::{ids::EndpointIds, recv::RecvQueue, sink::CompletionSink, VqpCompletion, VqpEvent};
use crate::{
    errno,
    fabric::{conn::Conn, peer::PeerAddress},
    sys::memcg,
};
use kernel::{alloc::Flags, prelude::*, sync::Arc};
use kite_core::{
    policy::transport::{Transport, TransportSelector},
    proto::window::SendWindow,
    view::NodeInstance,
    wire::packet::{Packet, PacketBody, VqpPhase},
};

/// Maximum number of requests of a VQP whose completions were not popped.
pub(crate) const VQP_DEPTH: usize = crate::bindings::KITE_VQP_DEPTH as usize;

/// Requests, completions and messages of a VQP.
pub(super) struct VqpState {
    peer: NodeInstance,
    pub(super) batches: KVec<VqpBatch>,
    /// Number of the next batch.
    next_batch: u64,
    /// Transport of the requests. `dci_index` and `conn` are the DCI and the connection used last.
    transport_selector: TransportSelector,
    dci_index: Option<usize>,
    conn: Option<Arc<Conn>>,
    /// Address of the node, `None` until the first lookup.
    pub(super) address: Option<Arc<PeerAddress>>,
    pub(super) completions: KVec<VqpCompletion>,
    /// Number of requests in all batches without a delivered completion.
    pub(super) pending: usize,
    /// Statistics: pushed requests, their bytes, and received messages.
    pub(super) pushed_requests: u64,
    pub(super) pushed_bytes: u64,
    pub(super) received_messages: u64,
    pub(super) ids: EndpointIds,
    pub(super) send_window: SendWindow,
    pub(super) recv_queue: RecvQueue,
    /// Set if a process owns this endpoint.
    pub(super) accepted: bool,
    /// Set if the peer endpoint has reported that it is closed or that it rejected the connection.
    pub(super) peer_closed: bool,
    /// Set while a worker is queued that sends an update to the peer endpoint.
    pub(super) update_queued: bool,
    /// Set while a worker resolves a blocked batch.
    pub(super) resolving: bool,
    /// Set if an I/O queue waits for free entries.
    pub(super) push_blocked: bool,
    /// Reason why no further requests are posted, or `None` if the VQP is open.
    pub(super) closed_with: Option<Error>,
}

impl VqpState {
    /// Creates the state. `is_passive` marks an endpoint that a message of the peer has created and no
    /// process has accepted.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new(
        peer: NodeInstance,
        ids: EndpointIds,
        is_passive: bool,
        gfp: Flags,
    ) -> Result<Self> {
        Ok(Self {
            peer,
            batches: KVec::new(),
            next_batch: 0,
            transport_selector: TransportSelector::default(),
            dci_index: None,
            conn: None,
            address: None,
            completions: KVec::with_capacity(VQP_DEPTH, gfp)?,
            pending: 0,
            pushed_requests: 0,
            pushed_bytes: 0,
            received_messages: 0,
            ids,
            send_window: SendWindow::new(is_passive),
            recv_queue: RecvQueue::new(gfp)?,
            accepted: !is_passive,
            peer_closed: false,
            update_queued: false,
            resolving: false,
            push_blocked: false,
            closed_with: None,
        })
    }

    /// Returns the transport of the last requests.
    pub(super) fn transport(&self) -> Transport {
        self.transport_selector.transport()
    }

    /// Returns `true` if events of the kind are available, or if no further events can follow.
    pub(super) fn is_ready_for(&self, event: VqpEvent) -> bool {
        let (empty, may_follow) = match event {
            VqpEvent::Completion => (self.completions.is_empty(), self.pending != 0),
            VqpEvent::Message => (self.recv_queue.is_empty(), self.recv_queue.is_popping()),
        };
        !empty || self.closed_with.is_some() && !may_follow
    }

    /// Closes this endpoint, because the peer endpoint is closed or has rejected the connection.
    pub(super) fn on_peer_closed(&mut self, error: Error) {
        self.peer_closed = true;
        self.closed_with = self.closed_with.or(Some(error));
        if !self.accepted {
            self.recv_queue.clear();
        }
    }

    pub(super) fn first_posted(&self) -> Option<&VqpBatchState> {
        let posted = self.batches.iter().find(|batch| batch.is_posted());
        posted.map(|batch| &batch.state)
    }

    /// Returns the packet that sends the receive window of this endpoint in the given phase.
    pub(super) fn make_update_packet(&self, phase: VqpPhase) -> Packet {
        self.ids.make_packet(PacketBody::WindowUpdate(
            self.recv_queue.recv_window.window_update(phase),
        ))
    }

    /// Checks that requests could be admitted now.
    ///
    /// # Errors
    ///
    /// - `ENOBUFS`: there are not enough free entries.
    /// - `EINVAL`: this endpoint takes no messages, and a request has one.
    /// - The reason of the close, if this endpoint is closed.
    pub(super) fn check_requests(&self, requests: &[VqpRequest]) -> Result {
        if let Some(error) = self.closed_with {
            return Err(error);
        }
        if requests.len() > self.free_entries() {
            return Err(errno::nobufs());
        }
        requests
            .iter()
            .try_for_each(|request| self.check_request(request))
    }

    /// Replaces the address of the node, unless the present address is of a later epoch.
    pub(super) fn update_address(&mut self, address: &Arc<PeerAddress>) {
        let is_newer = |current: &Arc<PeerAddress>| current.epoch > address.epoch;
        if !self.address.as_ref().is_some_and(is_newer) {
            self.address = Some(address.clone());
        }
    }

    /// Moves batches of checked requests out of `new_batches`, and numbers their messages.
    ///
    /// Completions go to `sink`, or are kept for [`Vqp::pop`](crate::vqp::Vqp::pop). The call does not sleep
    /// for memory, because the poller may wait for the lock.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the memory cannot be charged without waiting.
    /// - `ENOBUFS`: there are not enough free entries.
    /// - The reason of the close, if this endpoint is closed.
    pub(super) fn admit(
        &mut self,
        new_batches: &mut KVec<VqpBatch>,
        sink: Option<&Arc<dyn CompletionSink>>,
    ) -> Result {
        if let Some(error) = self.closed_with {
            return Err(error);
        }
        let count: usize = new_batches.iter().map(|batch| batch.requests.len()).sum();
        if count > self.free_entries() {
            return Err(errno::nobufs());
        }
        self.batches
            .reserve(new_batches.len(), memcg::gfp_nowait_account())?;
        for mut batch in new_batches.drain_all() {
            self.assign_sequences(&mut batch);
            batch.sink = sink.cloned();
            self.pushed_bytes = self.pushed_bytes.saturating_add(batch.bytes());
            self.batches
                .push_within_capacity(batch)
                .map_err(|_| ENOMEM)?;
        }
        self.pending += count;
        self.pushed_requests += count as u64;
        Ok(())
    }

    /// Numbers a batch and its messages.
    fn assign_sequences(&mut self, batch: &mut VqpBatch) {
        batch.number = self.next_batch;
        self.next_batch += 1;
        for request in batch
            .requests
            .iter_mut()
            .filter(|request| request.has_message())
        {
            request.msg_sequence = Some(self.send_window.allocate_sequence());
        }
    }

    /// Delivers the completions of all requests that have ended, in order.
    pub(super) fn deliver_completions(&mut self) {
        while let Some(batch) = self.batches.first_mut() {
            let reported_before = batch.reported_count;
            batch.deliver_completions(&self.send_window, self.closed_with, &mut self.completions);
            self.pending -= batch.reported_count - reported_before;
            if batch.reported_count < batch.done_count {
                return;
            }
            match (&batch.state, self.closed_with) {
                (VqpBatchState::Finished, _) => self.remove_first_batch(),
                (VqpBatchState::Posted(..), _) | (_, None) => return,
                // The peer's kernel may still execute the atomics, so do not report them yet.
                (VqpBatchState::ViaKernel, _) if self.resolving => return,
                (_, Some(error)) => self.fail_from(0, error),
            }
        }
    }

    /// Removes the first batch, which has ended. Its incomplete requests fail.
    fn remove_first_batch(&mut self) {
        let Ok(batch) = self.batches.remove(0) else {
            return;
        };
        batch.complete_remaining(&mut self.completions);
        self.pending -= batch.remaining().len();
    }

    /// Removes the first completions, up to `max`.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: there is no memory for the list.
    pub(super) fn pop_completions(&mut self, max: usize) -> Result<KVec<VqpCompletion>> {
        let count = max.min(self.completions.len());
        let mut popped = KVec::new();
        let (first, remaining) = self.completions.split_at(count);
        popped.extend_from_slice(first, GFP_KERNEL)?;
        let remaining_len = remaining.len();
        self.completions.as_mut_slice().copy_within(count.., 0);
        self.completions.truncate(remaining_len);
        Ok(popped)
    }

    /// Returns `true` if work is left that no completion will trigger.
    pub(super) fn needs_poller(&self) -> bool {
        let is_postable =
            |batch: &VqpBatch| self.closed_with.is_none() && batch.can_post(&self.send_window);
        self.needs_resolve() || self.batches.iter().any(is_postable)
    }

    /// Returns `true` if a batch is blocked, and no worker resolves it.
    pub(super) fn needs_resolve(&self) -> bool {
        let is_blocked = |batch: &VqpBatch| {
            matches!(
                batch.state,
                VqpBatchState::AwaitingRetry(..)
                    | VqpBatchState::StaleMr
                    | VqpBatchState::ViaKernel
            )
        };
        !self.resolving && self.batches.iter().any(is_blocked)
    }
}
