// SPDX-License-Identifier: GPL-2.0

//! Send side of a VQP: state of its batches, and their completions.
//!
//! # Operation
//!
//! Batches are posted in order. Each batch is reaped as soon as it has ended, regardless of its position, so
//! none keeps resources longer than necessary. Completions are delivered in the order of the requests.
//!
//! # Recovery
//!
//! If a request fails, all later requests fail with `ECANCELED`. If the DCI or connection fails for another
//! reason, the batches return to a state from which they are posted again: see [`VqpBatchState`] and
//! [`VqpBatchOutcome`].
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
pub(crate) mod push_builder;
pub(crate) mod request;

use self::{
    batch::{RetryCause, VqpBatch, VqpBatchState},
    complete::VqpBatchOutcome,
    mr_cache::MrCache,
    request::VqpRequest,
};
use super::{ids::EndpointIds, recv::RecvQueue, sink::CompletionSink, VqpCompletion, VqpEvent};
use crate::{
    errno,
    fabric::{
        conn::Conn,
        dc::DcTransport,
        peer::{Peer, PeerAddress},
        send::{path::PostCredit, slots::SlotClass},
        Fabric,
    },
    sys::{deadline::Deadline, memcg},
};
use kernel::{
    alloc::Flags,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::{
    policy::transport::{Transport, TransportSelector},
    proto::window::SendWindow,
    view::NodeInstance,
    wire::packet::{Packet, PacketBody, VqpPhase},
};

/// Maximum number of requests of a VQP whose completions were not popped.
pub(crate) const VQP_DEPTH: usize = crate::bindings::KITE_VQP_DEPTH as usize;

/// Maximum number of retries of a batch that the peer or the local RNIC rejected on a connection. The request
/// whose completion reports the error need not be the faulty one.
const MAX_RC_RETRIES: u32 = 3;

/// Time in milliseconds after which packets of a failed connection can no longer arrive, if no new QP
/// replaces it.
const STALE_PACKET_LIFETIME_MS: u32 = 10_000;

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
    /// Reason why no more requests are posted, or `None` if the VQP is open.
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

    /// Returns `true` if events of the kind are available, or if no more events can follow.
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

    /// Updates posted batches that have ended. Returns the number of requests to be posted again.
    pub(super) fn reap_batches(&mut self) -> usize {
        let mut requeued = 0;
        for i in 0..self.batches.len() {
            if let Some(outcome) = self.batches[i].poll_outcome(self.peer) {
                self.apply_outcome(i, outcome);
                if !matches!(self.batches[i].state, VqpBatchState::Finished) {
                    requeued += self.batches[i].remaining().len();
                }
            }
        }
        requeued
    }

    /// Applies the outcome of batch `i`.
    fn apply_outcome(&mut self, i: usize, outcome: VqpBatchOutcome) {
        let batch = &mut self.batches[i];
        match outcome {
            VqpBatchOutcome::Done => {
                batch.done_count = batch.requests.len();
                batch.state = VqpBatchState::Finished;
            }
            VqpBatchOutcome::Failed { done, error } => {
                batch.done_count += done;
                self.fail_from(i, error);
            }
            VqpBatchOutcome::Retry {
                done,
                none_executed,
            } => {
                batch.done_count += done;
                match none_executed || self.can_requeue_from(i) {
                    true => self.requeue_from(i, VqpBatchState::Ready),
                    false => self.fail_from(i, ETIMEDOUT),
                }
            }
            VqpBatchOutcome::RetryExceeded {
                done,
                address,
                cause,
            } => {
                batch.done_count += done;
                let is_rnr = cause == RetryCause::Rnr;
                match is_rnr || self.can_requeue_from(i) {
                    true => self.requeue_from(i, VqpBatchState::AwaitingRetry(address, cause)),
                    false => self.fail_from(i, ETIMEDOUT),
                }
                self.batches[i].rnr_retries += u32::from(is_rnr);
            }
            VqpBatchOutcome::ConnFailed {
                done,
                stale_qp,
                refused,
            } => {
                batch.done_count += done;
                batch.rc_retries += u32::from(refused);
                let retries_exhausted = batch.rc_retries > MAX_RC_RETRIES;
                let error = match !retries_exhausted && self.can_requeue_from(i) {
                    true => None,
                    false => Some(if refused { EIO } else { ETIMEDOUT }),
                };
                let deadline = Deadline::after_ms(STALE_PACKET_LIFETIME_MS);
                self.requeue_from(i, VqpBatchState::Quiescing(stale_qp, deadline, error));
                // Return to DC, if there is DC: a faulty request is identified there.
                self.transport_selector = TransportSelector::default();
            }
        }
    }

    /// Returns `true` if the posted requests from batch `i` on are all idempotent.
    fn can_requeue_from(&self, i: usize) -> bool {
        let mut batches = self.batches[i..].iter();
        batches.all(|batch| !batch.is_posted() || batch.is_idempotent())
    }

    /// Ends the wait of a [`VqpBatchState::Quiescing`] batch, once packets of the failed connection can no
    /// longer arrive, or the node has left.
    pub(super) fn check_quiesced(&mut self, fabric: &Fabric) {
        let is_quiescing = |batch: &VqpBatch| matches!(batch.state, VqpBatchState::Quiescing(..));
        let Some(i) = self.batches.iter().position(is_quiescing) else {
            return;
        };
        let VqpBatchState::Quiescing(stale_qp, deadline, error) = &self.batches[i].state else {
            return;
        };
        let is_quiesced = stale_qp.is_fenced() || deadline.has_expired();
        let removed = fabric.peer_or_self(self.peer).err();
        match error.filter(|_| is_quiesced).or(removed) {
            Some(error) => self.fail_from(i, error),
            None if is_quiesced => self.batches[i].state = VqpBatchState::Ready,
            None => {}
        }
    }

    /// Moves batch `i` to `state`, and drains all later batches, which are then posted again. The caller must
    /// ensure that these batches are idempotent or were not executed, or that `state` ends in a failure.
    fn requeue_from(&mut self, i: usize, state: VqpBatchState) {
        for batch in &mut self.batches[i + 1..] {
            batch.drain(self.peer);
        }
        self.batches[i].state = state;
    }

    /// Fails the first incomplete request of batch `i` with `error`, and all later requests with `ECANCELED`.
    pub(super) fn fail_from(&mut self, i: usize, error: Error) {
        let mut batch_error = error;
        for batch in &mut self.batches[i..] {
            if batch.has_message() && self.closed_with.is_none() {
                // The peer endpoint would miss the sequence number of the message, and no later message can
                // be received.
                self.closed_with = Some(errno::connreset());
            }
            batch.fail(batch_error, self.peer);
            batch_error = errno::canceled();
        }
    }

    /// Applies the result of a resolution: the batch becomes ready, or fails.
    pub(super) fn apply_resolution(
        &mut self,
        (number, resolution): (u64, Result<bool>),
        mr_cache: &Mutex<MrCache>,
    ) {
        let Some(i) = self.batches.iter().position(|batch| batch.number == number) else {
            return;
        };
        let batch = &mut self.batches[i];
        let result = match (&batch.state, resolution) {
            (VqpBatchState::AwaitingRetry(_, RetryCause::NoAck), Ok(false)) => Err(ETIMEDOUT),
            (VqpBatchState::StaleMr, Ok(_)) => batch.revalidate_mrs(&mr_cache.lock()),
            (VqpBatchState::AwaitingRetry(..) | VqpBatchState::StaleMr, found) => found.map(drop),
            _ => return,
        };
        match result {
            Ok(()) => batch.state = VqpBatchState::Ready,
            // The READ of an entry took longer than its lease: the batch stays blocked.
            Err(error) if error == EAGAIN => {}
            Err(error) => self.fail_from(i, error),
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

    /// Posts ready batches, in order, as far as possible. Returns the number of posted batches.
    pub(super) fn post_ready(&mut self, fabric: &Fabric) -> usize {
        let mut posted = 0;
        for i in 0..self.batches.len() {
            match self.batches[i].state {
                VqpBatchState::Posted(..) | VqpBatchState::Finished => continue,
                VqpBatchState::AwaitingRetry(..)
                | VqpBatchState::StaleMr
                | VqpBatchState::Quiescing(..)
                | VqpBatchState::ViaKernel => break,
                VqpBatchState::Ready => {}
            }
            if self.closed_with.is_some() || !self.batches[i].can_post(&self.send_window) {
                break;
            }
            match self.post_batch(fabric, i) {
                Ok(()) => posted += 1,
                Err(error) if error == EAGAIN || error == ENOMEM => break,
                Err(error) => {
                    self.fail_from(i, error);
                    self.deliver_completions();
                    break;
                }
            }
        }
        posted
    }

    /// Posts batch `i`, on the QP of the posted batches before it.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the batch must wait, for example for another transport, a slot, a credit or a lease.
    /// - Any other error fails the batch.
    fn post_batch(&mut self, fabric: &Fabric, i: usize) -> Result {
        let address = self.address.clone().ok_or(EAGAIN)?;
        // Not cached: the peer object is valid for one view only.
        let peer = fabric.peer_or_self(self.peer)?;
        let follows_posted = self.batches[..i].iter().any(VqpBatch::is_posted);
        if !address.has_atomics && self.batches[i].is_atomic() {
            if !follows_posted {
                self.batches[i].state = VqpBatchState::ViaKernel;
            }
            return Err(EAGAIN);
        }
        let rc_only = address.dc_address.is_none();
        let rc_capable = rc_only || self.batches[i].is_rc_capable();
        let conn = match rc_only || rc_capable && peer.is_promoted() {
            true => self.select_conn(fabric, &peer, follows_posted),
            false => None,
        };
        let transport = match rc_only {
            true => conn.as_ref().map(|_| Transport::Rc),
            false => self
                .transport_selector
                .select(rc_capable, conn.is_some(), follows_posted),
        };
        let transport = transport.ok_or(EAGAIN)?;
        let slot = fabric.try_acquire_slot(SlotClass::Data)?;
        let (wr_count, bytes) = (self.batches[i].wr_count() as u32, self.batches[i].bytes());
        if let (Transport::Rc, Some(conn)) = (transport, &conn) {
            // Check for credits before the lease: the requests that fill the connection could delay the READ
            // of the entry.
            if !conn.can_acquire_vqp(wr_count, bytes, fabric)? {
                return Err(EAGAIN);
            }
        }
        // Last check before the RNIC receives the requests.
        if !self.batches[i].has_valid_leases() {
            self.batches[i].state = VqpBatchState::StaleMr;
            return Err(EAGAIN);
        }
        // Acquired last: an unused credit that is released counts as progress of the QP.
        let credit = match (transport, &conn) {
            (Transport::Rc, Some(conn)) => {
                PostCredit::Rc(conn.try_acquire_vqp(wr_count, bytes, fabric)?)
            }
            _ => self.acquire_dci(fabric, i, follows_posted)?,
        };
        self.record_transport(fabric, (&peer, i), (transport, rc_capable, rc_only));
        self.conn = conn;
        self.batches[i].post(fabric, &self.ids, (slot, credit), address)
    }

    /// Reserves a DCI for batch `i`. As with a connection, the quota leaves slots for other VQPs.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the quota is exhausted, no DCI has room, or there is no DC.
    fn acquire_dci(
        &mut self,
        fabric: &Fabric,
        i: usize,
        follows_posted: bool,
    ) -> Result<PostCredit> {
        let dc: &Arc<DcTransport> = fabric.dc().ok_or(EAGAIN)?;
        let posted = self.batches.iter().filter(|batch| batch.is_posted());
        if posted.count() >= fabric.inflight_quota() as usize {
            return Err(EAGAIN);
        }
        let batch = &self.batches[i];
        let size = (batch.wr_count() as u32, batch.bytes());
        let credit = dc.try_acquire(size, self.dci_index.filter(|_| follows_posted))?;
        self.dci_index = Some(credit.dci_index);
        Ok(PostCredit::Dc(credit))
    }

    /// Records that batch `i` uses `transport`. `rc_only` is set if the nodes have no DC in common.
    fn record_transport(
        &mut self,
        fabric: &Fabric,
        (peer, i): (&Peer, usize),
        (transport, rc_capable, rc_only): (Transport, bool, bool),
    ) {
        let count = self.batches[i].remaining().len() as u32;
        let switched = self.transport_selector.record(transport, rc_capable, count);
        if !rc_only {
            fabric.record_requests(peer, count);
            fabric.stats.transport_switches.add(switched.into());
        }
        if transport == Transport::Rc {
            fabric.stats.vqp_rc_requests.add(count.into());
        }
    }

    /// Returns the connection to use, if one is ready: the same for all posted batches.
    fn select_conn(&self, fabric: &Fabric, peer: &Peer, follows_posted: bool) -> Option<Arc<Conn>> {
        match &self.conn {
            Some(conn)
                if follows_posted && self.transport_selector.transport() == Transport::Rc =>
            {
                conn.is_ready().then(|| conn.clone())
            }
            _ => fabric.ready_conn(peer),
        }
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
