// SPDX-License-Identifier: GPL-2.0

//! Requests that were pushed together: what they are, and how they are posted.

use super::{
    deliver::CompletionSink,
    kernel_atomic::KernelAtomic,
    mr_cache::{CachedMr, MrCache, MrLease},
    EndpointIds,
};
use crate::{
    fabric::{
        conn::credit::StaleQp,
        dc::MAX_INFLIGHT_DCI_BYTES,
        mr::table::{mr_access_errno, UserMr},
        peer::PeerAddress,
        send::{
            path::PostCredit,
            slots::{SlotGuard, MAX_WRS_PER_SLOT, STUCK_AFTER_MS},
        },
        Fabric,
    },
    sys::deadline::Deadline,
    verbs::{
        cq::WcStatus,
        work::{RdmaOp, RdmaOpcode, RemoteAddr, Sge},
    },
};
use kernel::{alloc::Flags, prelude::*, sync::Arc};
use kite_core::{
    proto::window::{SendWindow, MAX_BURST_MESSAGES},
    rights::Rights,
    view::NodeInstance,
    wire::packet::{
        Packet, PacketBody, Payload, VqpMessage, MAX_INLINE_PAYLOAD_BYTES,
        MAX_RC_INLINE_PAYLOAD_BYTES, PACKET_HEADER_SIZE,
    },
};

/// Bytes of a batch that goes by a connection: others wait behind it.
const RC_BATCH_MAX_BYTES: u64 = 1 << 20;

/// How much later than a node a view may come to us in which it is reached by another name.
const VIEW_LAG_MS: u32 = 4000;

/// How long a node without room for a message is left alone, at first, and how often that is doubled.
const RNR_BACKOFF_MS: u32 = 300;
const RNR_BACKOFF_MAX_SHIFT: u32 = 3;

/// A request that was checked.
pub(crate) struct VqpRequest {
    pub(crate) tag: u64,
    pub(crate) signaled: bool,
    pub(in crate::vqp) fenced: bool,
    pub(in crate::vqp) verb: RdmaOpcode,
    /// Its local memory, and where in that.
    pub(in crate::vqp) mr: Arc<UserMr>,
    pub(in crate::vqp) local_addr: u64,
    pub(in crate::vqp) len: u32,
    pub(in crate::vqp) remote: RemoteAddr,
    /// What it does with remote memory, if it names any, and since when a record is trusted that allows it.
    pub(in crate::vqp) remote_use: Option<MrUse>,
    pub(in crate::vqp) lease: Option<MrLease>,
    /// What the process at the other end is told besides.
    pub(in crate::vqp) immediate: Option<u32>,
    /// The number of its message, if it has one, and so many bytes of it come with it if they are no more.
    pub(in crate::vqp) msg_sequence: Option<u64>,
    pub(in crate::vqp) max_inline_bytes: usize,
}

/// Remote memory, and what is done with it.
#[derive(Clone, Copy)]
pub(in crate::vqp) struct MrUse {
    pub(in crate::vqp) key: u32,
    pub(in crate::vqp) uid: u32,
    pub(in crate::vqp) needed_rights: Rights,
}

impl VqpRequest {
    /// Uses remote memory as a record allows.
    ///
    /// # Errors
    ///
    /// `EACCES`, `ERANGE`.
    pub(in crate::vqp) fn validate_mr(&mut self, mr_use: MrUse, cached: CachedMr) -> Result {
        let (entry, addr) = (cached.entry, self.remote.addr);
        entry
            .check_access(mr_use.uid, mr_use.needed_rights, addr, self.len.into())
            .map_err(mr_access_errno)?;
        self.remote.rkey = entry.rkey;
        self.lease = Some(cached.lease);
        Ok(())
    }

    /// Whether the process at the other end hears of it.
    pub(in crate::vqp) fn has_message(&self) -> bool {
        self.verb == RdmaOpcode::Send || self.immediate.is_some()
    }

    /// Bytes that it moves.
    pub(crate) fn bytes(&self) -> u64 {
        self.len.into()
    }

    pub(in crate::vqp) fn is_atomic(&self) -> bool {
        self.verb.is_atomic()
    }

    /// Requests of the RNIC that it takes: what is written is followed by its message.
    pub(in crate::vqp) fn wr_count(&self) -> usize {
        1 + usize::from(self.verb == RdmaOpcode::Write && self.immediate.is_some())
    }

    fn payload(&self) -> Payload {
        let len = self.len;
        match self.verb {
            RdmaOpcode::Send if len as usize <= self.max_inline_bytes => Payload::Inline { len },
            RdmaOpcode::Send => Payload::Remote {
                mr_key: self.mr.entry.key,
                addr: self.local_addr,
                len,
            },
            _ => Payload::Placed { len },
        }
    }

    fn make_packet(&self, ids: &EndpointIds) -> Option<Packet> {
        let message = VqpMessage {
            sequence: self.msg_sequence?,
            port: ids.port,
            uid: ids.uid,
            immediate: self.immediate,
            payload: self.payload(),
        };
        Some(ids.make_packet(PacketBody::Message(message)))
    }

    /// Whether nothing more of it is needed, once it is done.
    pub(in crate::vqp) fn is_acknowledged(&self, send_window: &SendWindow) -> bool {
        let is_rendezvous = matches!(self.payload(), Payload::Remote { .. });
        self.msg_sequence
            .is_none_or(|number| send_window.is_acknowledged(number, is_rendezvous))
    }

    /// What the RNIC is to do, and then, if anything. `sges` are its message, unless it has none, and its local memory.
    fn build_ops<'a>(&self, sges: &'a [Sge; 2]) -> (RdmaOp<'a>, Option<RdmaOp<'a>>) {
        let [header, data] = [&sges[..1], &sges[1..]];
        let sges = match (self.verb, self.payload()) {
            (RdmaOpcode::Send, Payload::Inline { .. }) => &sges[..],
            (RdmaOpcode::Send, _) => header,
            _ => data,
        };
        let op = RdmaOp {
            opcode: self.verb,
            sges,
            remote: self.remote,
            fence: self.fenced,
        };
        let message_op = RdmaOp {
            opcode: RdmaOpcode::Send,
            sges: header,
            remote: RemoteAddr { addr: 0, rkey: 0 },
            fence: false,
        };
        (op, (self.wr_count() == 2).then_some(message_op))
    }

    /// Whether a connected queue pair takes it where there is DC, too: drivers leave atomic operations out, and
    /// messages have a pool of buffers by DC alone.
    fn is_rc_capable(&self) -> bool {
        matches!(self.verb, RdmaOpcode::Read | RdmaOpcode::Write) && self.immediate.is_none()
    }

    /// Its message, which is put in the `i`th place of the claim's buffer, or else its local memory; and that.
    fn build_sges(
        &self,
        index: usize,
        fabric: &Fabric,
        ids: &EndpointIds,
        slot: &SlotGuard,
    ) -> Result<[Sge; 2]> {
        let data = Sge::new(self.local_addr, self.len, self.mr.local_key());
        let Some(packet) = self.make_packet(ids) else {
            return Ok([data, data]);
        };
        let offset = index * PACKET_HEADER_SIZE;
        slot.buffer().write(offset, &packet.encode())?;
        let header = slot
            .buffer()
            .sge(fabric.local_key(), offset, PACKET_HEADER_SIZE)
            .ok_or(EINVAL)?;
        Ok([header, data])
    }
}

/// How far a batch has come.
pub(in crate::vqp) enum VqpBatchState {
    /// It is to be posted.
    Ready,
    /// It is to be posted once it is known that the remote memory is still there.
    StaleMr,
    /// The rest of it is posted, to where the node was reached.
    Posted(SlotGuard, PostCredit, Arc<PeerAddress>),
    /// The node did not answer, or had no room. Perhaps it is reached by another name than this by now.
    AwaitingRetry(Arc<PeerAddress>, RetryCause),
    /// The connection failed by which it went. What was sent by that may still come, for so long at most; then it
    /// goes again, or has failed.
    Quiescing(StaleQp, Deadline, Option<Error>),
    /// It is not posted: the kernel of the node is asked for it.
    ViaKernel,
    /// Nothing more of it will be posted.
    Finished,
}

/// Why a node did not do what it was asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::vqp) enum RetryCause {
    /// It did not answer.
    NoAck,
    /// It had no room for a message, and may have some soon.
    Rnr,
}

/// Requests that were pushed together, and are posted with one doorbell.
pub(in crate::vqp) struct VqpBatch {
    pub(in crate::vqp) number: u64,
    pub(in crate::vqp) requests: KVec<VqpRequest>,
    /// So many of them are done.
    pub(in crate::vqp) done_count: usize,
    /// Of so many it is known what became of them.
    pub(in crate::vqp) reported_count: usize,
    pub(in crate::vqp) state: VqpBatchState,
    /// Times that it was refused on a connection, and that there was no room for it.
    pub(in crate::vqp) rc_retries: u32,
    pub(in crate::vqp) rnr_retries: u32,
    /// Until when what is posted should have ended, and whether it was made to fail for that.
    pub(in crate::vqp) completion_deadline: Deadline,
    pub(in crate::vqp) force_failed: bool,
    /// What became of the first that is not done, once it has ended.
    pub(in crate::vqp) error: Option<Error>,
    /// Who hears what became of them, if nobody pops that.
    pub(in crate::vqp) sink: Option<Arc<dyn CompletionSink>>,
}

/// What is to be found out before a batch can be posted, or instead of that.
pub(in crate::vqp) enum BatchBlocker {
    /// Whether the node is reached by another name than this, within so many milliseconds.
    AddressChange(Arc<PeerAddress>, u32),
    /// Whether remote memory is there and may be used.
    StaleMrs(KVec<MrUse>),
    /// What words were that are to be changed.
    KernelAtomics(KVec<KernelAtomic>),
}

impl VqpBatch {
    fn new(requests: KVec<VqpRequest>) -> Self {
        Self {
            number: 0,
            requests,
            done_count: 0,
            reported_count: 0,
            state: VqpBatchState::Ready,
            rc_retries: 0,
            rnr_retries: 0,
            completion_deadline: Deadline::after_ms(STUCK_AFTER_MS),
            force_failed: false,
            error: None,
            sink: None,
        }
    }

    /// Whether there are no more requests than can be posted at a time: the RNIC takes so many, and the other end
    /// lets so many messages in. Those that are asked for `apart` are not posted with others.
    fn fits_limits(requests: &[VqpRequest], (max_bytes, separate_atomics): (u64, bool)) -> bool {
        let atomics = requests.iter().filter(|request| request.is_atomic());
        let is_uniform =
            !separate_atomics || matches!(atomics.count(), n if n == 0 || n == requests.len());
        let wr_count: usize = requests.iter().map(VqpRequest::wr_count).sum();
        let messages = requests.iter().filter(|request| request.has_message());
        let bytes: u64 = requests.iter().map(VqpRequest::bytes).sum();
        is_uniform
            && wr_count <= MAX_WRS_PER_SLOT as usize
            && messages.count() <= MAX_BURST_MESSAGES as usize
            && (bytes <= max_bytes || requests.len() == 1)
    }

    /// Cuts requests into as many batches as it takes to be posted to where the node is reached, with memory by those
    /// flags.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(in crate::vqp) fn split(
        mut requests: KVec<VqpRequest>,
        address: &PeerAddress,
        gfp: Flags,
    ) -> Result<KVec<Self>> {
        let (max_inline, max_bytes) = match address.dc_address {
            Some(_) => (MAX_INLINE_PAYLOAD_BYTES, MAX_INFLIGHT_DCI_BYTES),
            None => (MAX_RC_INLINE_PAYLOAD_BYTES, RC_BATCH_MAX_BYTES),
        };
        let limits = (max_bytes, !address.has_atomics);
        requests
            .iter_mut()
            .for_each(|request| request.max_inline_bytes = max_inline);
        let mut batches = KVec::new();
        let mut current = KVec::new();
        if Self::fits_limits(&requests, limits) {
            batches.push(Self::new(requests), gfp)?;
            return Ok(batches);
        }
        for request in requests {
            current.push(request, gfp)?;
            if !Self::fits_limits(&current, limits) {
                let mut next = KVec::new();
                if let Some(last) = current.pop() {
                    next.push(last, gfp)?;
                }
                batches.push(Self::new(core::mem::replace(&mut current, next)), gfp)?;
            }
        }
        batches.push(Self::new(current), gfp)?;
        Ok(batches)
    }

    /// Those that are not done.
    pub(in crate::vqp) fn remaining(&self) -> &[VqpRequest] {
        &self.requests[self.done_count..]
    }

    /// What the RNIC has to do for them.
    pub(in crate::vqp) fn wr_count(&self) -> usize {
        self.remaining().iter().map(VqpRequest::wr_count).sum()
    }

    /// Bytes that they move.
    pub(in crate::vqp) fn bytes(&self) -> u64 {
        self.remaining().iter().map(VqpRequest::bytes).sum()
    }

    pub(in crate::vqp) fn is_posted(&self) -> bool {
        matches!(self.state, VqpBatchState::Posted(..))
    }

    /// Whether it waits until what was sent before can come no more.
    pub(in crate::vqp) fn is_quiescing(&self) -> bool {
        matches!(self.state, VqpBatchState::Quiescing(..))
    }

    /// Whether it may be posted: the other end keeps its messages.
    pub(in crate::vqp) fn can_post(&self, send_window: &SendWindow) -> bool {
        let numbers = self
            .remaining()
            .iter()
            .filter_map(|request| request.msg_sequence);
        matches!(self.state, VqpBatchState::Ready)
            && numbers.max().is_none_or(|last| send_window.can_send(last))
    }

    /// Whether all remote memory that it names may still be.
    pub(in crate::vqp) fn has_valid_leases(&self) -> bool {
        let mut leases = self.remaining().iter().filter_map(|request| request.lease);
        leases.all(MrLease::is_valid)
    }

    /// What is to be found out, if anything.
    pub(in crate::vqp) fn blocker(&self) -> Option<BatchBlocker> {
        match &self.state {
            VqpBatchState::AwaitingRetry(address, cause) => {
                let timeout_ms = match cause {
                    RetryCause::NoAck => VIEW_LAG_MS,
                    RetryCause::Rnr => {
                        RNR_BACKOFF_MS << self.rnr_retries.min(RNR_BACKOFF_MAX_SHIFT)
                    }
                };
                Some(BatchBlocker::AddressChange(address.clone(), timeout_ms))
            }
            VqpBatchState::StaleMr => {
                let mut uses = KVec::new();
                // Without memory what is missing fails.
                for mr_use in self
                    .remaining()
                    .iter()
                    .filter_map(|request| request.remote_use)
                {
                    let _ = uses.push(mr_use, GFP_KERNEL);
                }
                Some(BatchBlocker::StaleMrs(uses))
            }
            VqpBatchState::ViaKernel => Some(BatchBlocker::KernelAtomics(self.kernel_atomics())),
            _ => None,
        }
    }

    /// Trusts what is known of remote memory by now.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if that is not enough; `EACCES`, `ERANGE`.
    pub(in crate::vqp) fn revalidate_mrs(&mut self, mr_cache: &MrCache) -> Result {
        for request in &mut self.requests[self.done_count..] {
            if let Some(mr_use) = request.remote_use {
                request.validate_mr(mr_use, mr_cache.get(mr_use.key).ok_or(EAGAIN)?)?;
            }
        }
        Ok(())
    }

    /// It has ended, and what is left of it is not done, for this reason.
    pub(in crate::vqp) fn fail(&mut self, error: Error, peer: NodeInstance) {
        self.drain(peer);
        self.error = Some(error);
        self.state = VqpBatchState::Finished;
    }

    pub(in crate::vqp) fn has_message(&self) -> bool {
        self.remaining().iter().any(VqpRequest::has_message)
    }

    /// Whether it does no harm to do once more what may have been done.
    pub(in crate::vqp) fn is_idempotent(&self) -> bool {
        !self
            .remaining()
            .iter()
            .any(|request| request.verb.is_atomic())
    }

    /// Waits until nothing of it is under way. It goes again.
    pub(in crate::vqp) fn drain(&mut self, peer: NodeInstance) {
        if let VqpBatchState::Posted(slot, credit, _) = &self.state {
            let status = slot.wait(|recovery| credit.recover(recovery));
            if status != WcStatus::Success {
                // Others wait to hear whose it was.
                credit.report_failure(status, peer);
            }
            self.state = VqpBatchState::Ready;
        }
    }

    /// Whether a connected queue pair takes what is not done.
    pub(in crate::vqp) fn is_rc_capable(&self) -> bool {
        self.bytes() <= RC_BATCH_MAX_BYTES && self.remaining().iter().all(VqpRequest::is_rc_capable)
    }

    /// Posts what is not done.
    pub(in crate::vqp) fn post(
        &mut self,
        fabric: &Fabric,
        ids: &EndpointIds,
        (slot, credit): (SlotGuard, PostCredit),
        address: Arc<PeerAddress>,
    ) -> Result {
        // SAFETY: The memory is registered for as long as the batch has it, which waits for its end; headers are in
        // the claim's buffer.
        let post =
            |ops: &[RdmaOp<'_>]| unsafe { credit.post(&slot, address.dc_address.as_ref(), ops) };
        let remaining = self.remaining();
        if let [request] = remaining {
            // Most are alone.
            let sges = request.build_sges(0, fabric, ids, &slot)?;
            slot.buffer().sync_for_device(PACKET_HEADER_SIZE);
            match request.build_ops(&sges) {
                (op, None) => post(&[op])?,
                (op, Some(message_op)) => post(&[op, message_op])?,
            }
        } else {
            let mut sges = KVec::with_capacity(remaining.len(), GFP_KERNEL)?;
            for (i, request) in remaining.iter().enumerate() {
                sges.push(request.build_sges(i, fabric, ids, &slot)?, GFP_KERNEL)?;
            }
            slot.buffer()
                .sync_for_device(remaining.len() * PACKET_HEADER_SIZE);
            let mut ops = KVec::with_capacity(self.wr_count(), GFP_KERNEL)?;
            for (request, sges) in remaining.iter().zip(&sges) {
                let (op, message_op) = request.build_ops(sges);
                ops.push(op, GFP_KERNEL)?;
                message_op.map_or(Ok(()), |message_op| ops.push(message_op, GFP_KERNEL))?;
            }
            post(&ops)?;
        }
        self.state = VqpBatchState::Posted(slot, credit, address);
        (self.completion_deadline, self.force_failed) = (Deadline::after_ms(STUCK_AFTER_MS), false);
        Ok(())
    }
}
