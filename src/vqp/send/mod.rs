// SPDX-License-Identifier: GPL-2.0

//! What was pushed to a virtual queue pair, and what came of it.
//!
//! Batches are posted in their order, and looked at wherever they stand, so that none keeps what it needs no more; what
//! became of their requests is said in their order. When one fails, those after it are not done.

pub(crate) mod batch;
pub(crate) mod check;
pub(crate) mod complete;
pub(crate) mod deliver;
pub(crate) mod kernel_atomic;
pub(crate) mod mr_cache;
pub(crate) mod push_builder;

use self::{
    batch::{RetryCause, VqpBatch, VqpBatchState, VqpRequest},
    complete::VqpBatchOutcome,
    deliver::CompletionSink,
    mr_cache::MrCache,
};
use super::recv::RecvQueue;
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

/// Requests of a queue pair that were not popped.
pub(crate) const VQP_DEPTH: usize = crate::bindings::KITE_VQP_DEPTH as usize;

/// Times that a batch goes again that the peer or our RNIC refused on a connection: the request that is blamed there
/// need not be the one at fault.
const MAX_RC_RETRIES: u32 = 3;

/// How long what was sent by a connection that failed may take to come, if no other takes its place.
const STALE_PACKET_LIFETIME_MS: u32 = 10_000;

/// What somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum VqpEvent {
    Completion,
    Message,
}

/// What became of a request.
pub(crate) type VqpCompletion = (u64, Result);

/// By what the two ends know each other.
pub(super) struct EndpointIds {
    pub(super) local_node: NodeInstance,
    /// Of this end, or 0 if it takes no messages.
    pub(super) local_vqpn: u64,
    /// Of the other end, or 0 if it has not told it yet.
    pub(super) peer_vqpn: u64,
    pub(super) port: u32,
    /// Whose this end is.
    pub(super) uid: u32,
}

impl EndpointIds {
    pub(super) fn make_packet(&self, body: PacketBody) -> Packet {
        Packet {
            sender: self.local_node,
            source_vqp: self.local_vqpn,
            destination_vqp: self.peer_vqpn,
            body,
        }
    }
}

/// What is pushed, and what came of it.
pub(super) struct VqpState {
    peer: NodeInstance,
    pub(super) batches: KVec<VqpBatch>,
    /// Number of the next.
    next_batch: u64,
    /// Which way they go, and by which initiator or connection.
    transport_selector: TransportSelector,
    dci_index: Option<usize>,
    conn: Option<Arc<Conn>>,
    /// By what the node is reached, once a process has asked.
    pub(super) address: Option<Arc<PeerAddress>>,
    pub(super) completions: KVec<VqpCompletion>,
    /// Requests of all batches of which nobody knows yet what became of them.
    pub(super) pending: usize,
    /// Requests that were pushed, and their bytes; messages that were received.
    pub(super) pushed_requests: u64,
    pub(super) pushed_bytes: u64,
    pub(super) received_messages: u64,
    pub(super) ids: EndpointIds,
    pub(super) send_window: SendWindow,
    pub(super) recv_queue: RecvQueue,
    /// A process has this end.
    pub(super) accepted: bool,
    /// The other end was heard to be over.
    pub(super) peer_closed: bool,
    /// Somebody tells the other end how this one is.
    pub(super) update_queued: bool,
    /// Somebody finds out about a doubt.
    pub(super) resolving: bool,
    /// A queue waits for room.
    pub(super) push_blocked: bool,
    /// Nothing is posted any more, for this reason.
    pub(super) closed_with: Option<Error>,
}

impl VqpState {
    /// Nothing. `open` says whether the other end has made this one, which no process has yet.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
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

    /// Which way requests go.
    pub(super) fn transport(&self) -> Transport {
        self.transport_selector.transport()
    }

    /// Whether there is something of that kind, or nothing more will come.
    pub(super) fn is_ready_for(&self, event: VqpEvent) -> bool {
        let (empty, may_follow) = match event {
            VqpEvent::Completion => (self.completions.is_empty(), self.pending != 0),
            VqpEvent::Message => (self.recv_queue.is_empty(), self.recv_queue.is_popping()),
        };
        !empty || self.closed_with.is_some() && !may_follow
    }

    /// The other end is over.
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

    /// What tells the other end how this one is.
    pub(super) fn make_update_packet(&self, phase: VqpPhase) -> Packet {
        self.ids.make_packet(PacketBody::WindowUpdate(
            self.recv_queue.recv_window.window_update(phase),
        ))
    }

    /// Whether requests could be admitted now.
    ///
    /// # Errors
    ///
    /// `ENOBUFS`, `EINVAL`; why this end is over.
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

    /// By what the node is reached, if nothing newer is known.
    pub(super) fn update_address(&mut self, address: &Arc<PeerAddress>) {
        let is_newer = |current: &Arc<PeerAddress>| current.epoch > address.epoch;
        if !self.address.as_ref().is_some_and(is_newer) {
            self.address = Some(address.clone());
        }
    }

    /// Takes batches of checked requests to be posted, out of `fresh`, and numbers their messages. What becomes of them is popped, unless
    /// they came by a queue. It waits for no memory, since the poller waits for it.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if whoever pays cannot have it at once; `ENOBUFS`; why this end is over.
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

    /// Numbers a batch, and its messages.
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

    /// Takes note of posted batches that have ended. Returns how many requests of them go again.
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

    /// Takes note of how the `i`th batch ended.
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
                // If a request is to blame that will be clear, where there is DC.
                self.transport_selector = TransportSelector::default();
            }
        }
    }

    /// Whether no harm is done if what is posted, from the `i`th batch on, goes again.
    fn can_requeue_from(&self, i: usize) -> bool {
        let mut batches = self.batches[i..].iter();
        batches.all(|batch| !batch.is_posted() || batch.is_idempotent())
    }

    /// What was sent by a connection that failed can come no more, or the node is gone: says so of the batch that
    /// waits for that.
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

    /// Has the `i`th batch go again, from that stage on, and all others after it: what carried them failed, and
    /// none of their requests was done.
    fn requeue_from(&mut self, i: usize, state: VqpBatchState) {
        for batch in &mut self.batches[i + 1..] {
            batch.drain(self.peer);
        }
        self.batches[i].state = state;
    }

    /// The first request of the `i`th batch that is not done has failed. Those after it are not done.
    pub(super) fn fail_from(&mut self, i: usize, error: Error) {
        let mut batch_error = error;
        for batch in &mut self.batches[i..] {
            if batch.has_message() && self.closed_with.is_none() {
                // Its number is missing at the other end, to which nothing can be said any more.
                self.closed_with = Some(errno::connreset());
            }
            batch.fail(batch_error, self.peer);
            batch_error = errno::canceled();
        }
    }

    /// What was in doubt goes again if that was settled to the good, or else has failed.
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
            // To hear of it took longer than that is trusted.
            Err(error) if error == EAGAIN => {}
            Err(error) => self.fail_from(i, error),
        }
    }

    /// Says what became of requests, in their order, as far as that is known.
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
                // Nobody is told yet what the node may do meanwhile.
                (VqpBatchState::ViaKernel, _) if self.resolving => return,
                (_, Some(error)) => self.fail_from(0, error),
            }
        }
    }

    /// The first batch has ended. What is not done of it never will be.
    fn remove_first_batch(&mut self) {
        let Ok(batch) = self.batches.remove(0) else {
            return;
        };
        batch.complete_remaining(&mut self.completions);
        self.pending -= batch.remaining().len();
    }

    /// Posts batches as far as possible, in their order. Returns how many.
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

    /// Posts the `i`th batch, by what carries those before it that are posted.
    fn post_batch(&mut self, fabric: &Fabric, i: usize) -> Result {
        let address = self.address.clone().ok_or(EAGAIN)?;
        // Not kept: it ends with the view.
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
            // Nothing is asked of the node before there is room: what fills a connection may hold up the answer.
            if !conn.can_acquire_vqp(wr_count, bytes, fabric)? {
                return Err(EAGAIN);
            }
        }
        // The last look before the RNIC has it.
        if !self.batches[i].has_valid_leases() {
            self.batches[i].state = VqpBatchState::StaleMr;
            return Err(EAGAIN);
        }
        // Taken last: what is given back unused would pass for something that ended.
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

    /// Takes an initiator of DC for the `i`th batch. As a connection does, it leaves slots to others.
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

    /// The `i`th batch goes that way, which may be the only one.
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

    /// The connection by which to go, if any: the same for all that is under way.
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

    /// Takes the first completions.
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

    /// Whether something is left to do that no completion will remind anybody of.
    pub(super) fn needs_poller(&self) -> bool {
        let is_postable =
            |batch: &VqpBatch| self.closed_with.is_none() && batch.can_post(&self.send_window);
        self.needs_resolve() || self.batches.iter().any(is_postable)
    }

    /// Whether a batch is in doubt, or to be asked for, and nobody does so yet.
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
