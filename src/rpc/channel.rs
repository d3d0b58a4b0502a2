// SPDX-License-Identifier: GPL-2.0

//! Channel between a calling node and a service: one ring in each direction.
//!
//! # Operation
//!
//! [`kite_core::ring`] decides which end may use which part of a ring. This module adds the memory and the
//! writes. A sender reserves a slot, encodes the message and writes the message to the slot. Each header
//! carries the consumed position (head) of the ring in the other direction. If a quarter of a ring was freed
//! without such a header, a deferred write publishes the head in unit 0.
//!
//! # Recovery
//!
//! A failed message is written again to the same slot. The consumer detects the duplicate by its position. If
//! the sender gives up, a deferred write fills the slot with a void message. So every reserved slot is
//! eventually filled, and the consumer can free the slot.
//!
//! # Locking
//!
//! - `tx_credits` (spinlock): producer state and admission. `tx_credits_cv` waits with this lock.
//! - `rx_ring` (spinlock): consumer state and pending calls.
//! - `rendezvous_queue` (spinlock): calls that have left the ring but not their sender's memory.
//! - `deferred_replies` (mutex): statuses to be sent by the deferred worker.
//! - `user_count` (mutex): handles of this node that use the channel.
//!
//! None of these locks is taken while another of them is held. `rx_ring` and `rendezvous_queue` nest inside
//! `RpcService::clients`. Writes run without any of these locks.
//!
//! `publish_scheduled` is set by the thread that schedules a publication. The worker clears the flag before
//! it reads the head. So a slot freed after that read schedules another publication.

use super::{
    backoff,
    connect::RingInfo,
    rendezvous::{
        mapping_cache::MappingCache,
        queue::{RendezvousCall, RendezvousQueue, RendezvousQueueFull},
    },
    server::RpcService,
    Rpc, RpcMessage, WAIT_SLICE_MS,
};
use crate::{
    fabric::{
        send::{
            inflight::InflightOp,
            write_imm::{ImmPayload, ImmWrite, OrderedConn},
        },
        Fabric,
    },
    region::{
        home::reclaim::WorkPriority,
        lend::loan::LentChunk,
        map::{chunk_map::MappedChunk, Mapping, OwnedRemoteAccess},
        CONTROL_TIMEOUT_MS,
    },
    sys::{adaptive_spin::AdaptiveSpin, deadline::Deadline},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_condvar, new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Full},
        Arc, CondVar, CondVarTimeoutResult, Mutex, SetOnce, SpinLock,
    },
    time::msecs_to_jiffies,
};
use kite_core::{
    ring::{self, RingConsumer, RingProducer, RingSlot, UnitFifo, UNIT_BYTES},
    sync::fairness::FairAdmission,
    view::NodeInstance,
    wire::ring::{
        Immediate, MsgHeader, MsgType, RendezvousBufs, MAX_BUFFER_IDS_SIZE, MSG_HEADER_SIZE,
    },
};

/// Ring at the other end, which this end writes.
struct TxRing {
    mapping: Arc<Mapping>,
    /// Ring ID at the other end.
    ring_id: u16,
    capacity: u32,
    /// Connection to the other node, or `None` if the ring is local. All messages use one connection, so they
    /// arrive in order.
    ordered_conn: Option<OrderedConn>,
}

impl TxRing {
    fn immediate(&self, slot: u16) -> Immediate {
        let ring = self.ring_id;
        Immediate {
            ring_id: ring,
            unit: slot,
        }
    }
}

/// Free space of the ring at the other end, and its admission order.
struct TxCredits {
    producer: RingProducer<KVec<u8>>,
    admission: FairAdmission,
}

impl TxCredits {
    fn new(states: KVec<u8>) -> Self {
        Self {
            producer: RingProducer::new(states),
            admission: FairAdmission::new(),
        }
    }

    /// Reserves a slot of `bytes` bytes without waiting. Returns `None` if the ring is full, or if a sleeping
    /// sender is next.
    fn try_reserve(&mut self, bytes: usize) -> Option<RingSlot> {
        if !self.admission.can_admit_poller() {
            return None;
        }
        let reservation = self.producer.reserve(bytes)?;
        self.admission.note_admission(true);
        Some(reservation)
    }
}

/// Write address of a ring slot.
pub(super) struct RingSlotAddr {
    slot: u16,
    /// Version of the ring's chunk map, from which `path` was computed.
    map_version: u32,
    pub(super) path: WritePath,
}

pub(super) enum WritePath {
    /// The ring is on this node.
    Local(Arc<LentChunk>),
    Remote(ImmWrite),
}

/// Call that was taken from a channel.
pub(super) enum DequeuedCall {
    /// The data are in the ring until the slot is freed.
    Inline(MsgHeader),
    Rendezvous(RendezvousCall),
}

/// Result of a call that is sent without data.
#[derive(Clone, Copy)]
pub(super) struct DeferredReply {
    pub(super) call_id: u64,
    /// Errno as a positive number, or 0.
    pub(super) errno: u32,
}

/// Ring at this end, which the other end writes.
struct RxRing {
    consumer: RingConsumer<KVec<u8>>,
    /// First units of the received calls that no server has taken, in order of arrival.
    pending: UnitFifo<KVec<u16>>,
}

/// One end of a channel.
#[pin_data]
pub(crate) struct RpcChannel {
    /// ID of the ring at this end.
    pub(crate) ring_id: u16,
    /// Node at the other end, which may be this one.
    pub(crate) peer: NodeInstance,
    /// Region that is called.
    pub(crate) region: u64,
    /// Service that receives the calls. `None` at the calling end.
    service: Option<Arc<RpcService>>,
    rx_mapping: Arc<Mapping>,
    rx_capacity: u32,
    tx_ring: SetOnce<TxRing>,
    #[pin]
    tx_credits: SpinLock<TxCredits>,
    /// Signaled when slots of the ring at the other end become free.
    #[pin]
    tx_credits_cv: CondVar,
    #[pin]
    rx_ring: SpinLock<RxRing>,
    /// Received rendezvous calls that have left the ring.
    #[pin]
    pub(super) rendezvous_queue: SpinLock<RendezvousQueue>,
    /// Set while a publication of the consumer head is scheduled.
    publish_scheduled: AtomicFlag,
    /// Results to be sent to the other end by a deferred worker.
    #[pin]
    deferred_replies: Mutex<KVec<DeferredReply>>,
    /// Cached mappings of rendezvous buffers at the other end.
    #[pin]
    pub(crate) mapping_cache: MappingCache,
    /// Handles that use the channel for calls. The last one closes the channel.
    #[pin]
    pub(super) user_count: Mutex<usize>,
    /// Adaptive spin of the threads that wait for replies.
    pub(super) reply_spin: AdaptiveSpin,
}

/// Returns the only chunk of a ring at this node.
fn local_chunk(mapping: &Mapping) -> Result<Arc<LentChunk>> {
    match mapping.access_chunks()?.chunks.first() {
        Some(MappedChunk::Local(chunk)) => Ok(chunk.clone()),
        _ => Err(EIO),
    }
}

/// Returns the capacity, in units, of the ring in a mapped region.
///
/// # Errors
///
/// - `ENOMEM`: the region has several chunks, since no contiguous memory was free.
/// - `EIO`: the length is not that of a ring.
fn ring_capacity(mapping: &Mapping) -> Result<u32> {
    let layout = mapping.layout()?;
    if layout.chunk_count() != 1 {
        return Err(ENOMEM);
    }
    ring::capacity_units(layout.len()).ok_or(EIO)
}

impl RpcChannel {
    /// Creates an end whose own ring is `rx_mapping`, a region of this node.
    pub(super) fn new(
        ring_id: u16,
        peer: NodeInstance,
        region: u64,
        service: Option<Arc<RpcService>>,
        rx_mapping: Arc<Mapping>,
    ) -> Result<Arc<Self>> {
        let rx_capacity = ring_capacity(&rx_mapping)?;
        let rx_ring = RxRing {
            consumer: RingConsumer::new(KVec::from_elem(
                0u8,
                rx_capacity as usize,
                GFP_KERNEL_ACCOUNT,
            )?),
            pending: UnitFifo::new(KVec::from_elem(
                0u16,
                rx_capacity as usize,
                GFP_KERNEL_ACCOUNT,
            )?),
        };
        let rendezvous_queue = RendezvousQueue::new()?;
        Arc::pin_init(
            pin_init!(Self {
                ring_id,
                peer,
                region,
                service,
                rx_mapping,
                rx_capacity,
                rendezvous_queue <- new_spinlock!(rendezvous_queue),
                tx_ring: SetOnce::new(),
                tx_credits <- new_spinlock!(TxCredits::new(KVec::new())),
                tx_credits_cv <- new_condvar!(),
                rx_ring <- new_spinlock!(rx_ring),
                publish_scheduled: AtomicFlag::new(false),
                deferred_replies <- new_mutex!(KVec::new()),
                mapping_cache <- MappingCache::new(),
                user_count <- new_mutex!(1),
                reply_spin: AdaptiveSpin::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Sets the ring at the other end. Called once.
    pub(super) fn set_tx_ring(
        &self,
        fabric: &Fabric,
        mapping: Arc<Mapping>,
        ring_id: u16,
    ) -> Result {
        let is_local = local_chunk(&mapping).is_ok();
        let ordered_conn = (!is_local)
            .then(|| fabric.ordered_conn(self.peer))
            .transpose()?;
        let capacity = ring_capacity(&mapping)?;
        let states = KVec::from_elem(0u8, capacity as usize, GFP_KERNEL_ACCOUNT)?;
        *self.tx_credits.lock() = TxCredits::new(states);
        self.tx_ring.populate(TxRing {
            mapping,
            ring_id,
            capacity,
            ordered_conn,
        });
        Ok(())
    }

    /// Returns the mappings of the ring at this end and, if set, of the ring at the other end.
    pub(super) fn ring_mappings(&self) -> (&Arc<Mapping>, Option<&Arc<Mapping>>) {
        let tx_ring = self.tx_ring.as_ref();
        (&self.rx_mapping, tx_ring.map(|tx_ring| &tx_ring.mapping))
    }

    /// Returns region and ID of the ring at the other end, or `None` before [`Self::set_tx_ring`].
    pub(super) fn peer_ring(&self) -> Option<RingInfo> {
        self.tx_ring.as_ref().map(|tx_ring| RingInfo {
            region: tx_ring.mapping.region,
            id: tx_ring.ring_id,
        })
    }

    /// Returns the service that receives the calls, or `None` at the calling end.
    pub(super) fn service(&self) -> Option<Arc<RpcService>> {
        self.service.clone()
    }

    fn tx_ring(&self) -> Result<&TxRing> {
        self.tx_ring.as_ref().ok_or(EIO)
    }

    /// Checks that both ends are open.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the other end closed its ring.
    /// - `EHOSTDOWN`: the other node died.
    /// - `EIO`: the ring at the other end is not set yet.
    pub(crate) fn check_open(&self) -> Result {
        self.tx_ring()?.mapping.access().map(drop)
    }

    /// Returns the memory of the ring at this end.
    pub(crate) fn rx_memory(&self) -> Result<Arc<LentChunk>> {
        local_chunk(&self.rx_mapping)
    }

    /// Returns the offset of a received message's data in the ring at this end.
    pub(crate) fn data_offset(&self, reservation: &RingSlot) -> usize {
        reservation.offset(self.rx_capacity) as usize + MSG_HEADER_SIZE
    }

    /// Writes a message to the other end. After an error, the other end may still receive the message.
    ///
    /// # Errors
    ///
    /// - See [`Self::check_open`].
    /// - `ETIMEDOUT`: the deadline expired, possibly while the ring was full.
    /// - `EINTR`: a signal arrived, and the deadline is interruptible.
    /// - `EIO`: the RNIC or the peer rejected the write.
    /// - `ENOMEM`: no memory.
    pub(crate) fn send(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        message: &mut RpcMessage,
        deadline: Deadline,
    ) -> Result {
        let reservation = self.reserve(rpc, message.bytes.len(), deadline)?;
        self.send_reserved(rpc, message, reservation, deadline)
    }

    /// Writes a message to the other end, without waiting for a free slot. See [`Self::send`].
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the ring is full.
    /// - Errors of [`Self::send`].
    pub(super) fn try_send(self: &Arc<Self>, rpc: &Arc<Rpc>, message: &mut RpcMessage) -> Result {
        let reservation = self.tx_credits.lock().try_reserve(message.bytes.len());
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        self.send_reserved(rpc, message, reservation.ok_or(EAGAIN)?, deadline)
    }

    fn send_reserved(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        message: &mut RpcMessage,
        reservation: RingSlot,
        deadline: Deadline,
    ) -> Result {
        let slot_addr = self.encode_at(message, reservation)?;
        let sent = self.write(rpc, &slot_addr, message.content(), deadline);
        match sent {
            Ok(()) => self.complete_write(&reservation),
            Err(_) => self.write_void_deferred(rpc, slot_addr, message.header),
        }
        sent
    }

    /// Assigns a slot to a message and encodes its header. Returns the write address.
    pub(super) fn encode_at(
        &self,
        message: &mut RpcMessage,
        reservation: RingSlot,
    ) -> Result<RingSlotAddr> {
        let slot_addr = self.slot_addr(reservation.unit_index(self.tx_ring()?.capacity) as u16)?;
        message.header.slot = reservation;
        message.header.head = self.rx_ring.lock().consumer.publish_head();
        let written = message.header.encode(&mut message.bytes);
        written.map(|_| slot_addr).ok_or(EIO)
    }

    /// Reserves a slot for a message, without waiting. Returns `None` if none is free.
    ///
    /// # Errors
    ///
    /// If no slot is free, see [`Self::check_open`].
    pub(super) fn try_reserve(&self, message: &RpcMessage) -> Result<Option<RingSlot>> {
        let reservation = self.tx_credits.lock().try_reserve(message.bytes.len());
        if reservation.is_none() {
            self.check_open()?;
        }
        Ok(reservation)
    }

    /// Reserves a slot for a message. Waits while none is free.
    fn reserve(&self, rpc: &Rpc, len: usize, deadline: Deadline) -> Result<RingSlot> {
        let mut credits = self.tx_credits.lock();
        loop {
            if let Some(reservation) = credits.producer.reserve(len) {
                credits.admission.note_admission(false);
                return Ok(reservation);
            }
            self.check_open()?;
            deadline.check()?;
            rpc.memory_service.stats.ring_waits.add(1);
            let slice_jiffies = msecs_to_jiffies(deadline.remaining_ms().min(WAIT_SLICE_MS));
            credits.admission.add_sleeper();
            let woken = self
                .tx_credits_cv
                .wait_interruptible_timeout(&mut credits, slice_jiffies);
            credits.admission.remove_sleeper();
            if matches!(woken, CondVarTimeoutResult::Signal { .. }) {
                drop(credits);
                deadline.handle_signal()?;
                credits = self.tx_credits.lock();
            }
        }
    }

    /// Returns the write address of unit `slot` of the ring at the other end.
    fn slot_addr(&self, slot: u16) -> Result<RingSlotAddr> {
        let tx_ring = self.tx_ring()?;
        let chunk_map = tx_ring.mapping.access_chunks()?;
        let path = match chunk_map.chunks.first().ok_or(EIO)? {
            MappedChunk::Local(ring) => WritePath::Local(ring.clone()),
            MappedChunk::Remote(location) => {
                let addr = location.addr + u64::from(slot) * UNIT_BYTES as u64;
                let immediate = tx_ring.immediate(slot).to_u32();
                WritePath::Remote(ImmWrite::new(location.instance, addr, immediate))
            }
        };
        let map_version = chunk_map.version;
        Ok(RingSlotAddr {
            slot,
            map_version,
            path,
        })
    }

    fn write(
        &self,
        rpc: &Arc<Rpc>,
        slot_addr: &RingSlotAddr,
        content: ImmPayload<'_>,
        deadline: Deadline,
    ) -> Result {
        let tx_ring = self.tx_ring()?;
        match (&slot_addr.path, &tx_ring.ordered_conn) {
            (WritePath::Remote(imm_write), Some(conn)) => {
                let permit = || tx_ring.mapping.start_remote_access(slot_addr.map_version);
                let fabric = &rpc.memory_service.cluster.fabric;
                fabric.write_imm(conn, imm_write, content, permit, deadline)
            }
            (WritePath::Local(ring), _) => {
                let _chunk_map = tx_ring.mapping.access_chunks_at(slot_addr.map_version)?;
                ring.write(usize::from(slot_addr.slot) * UNIT_BYTES, content.bytes)?;
                rpc.on_immediate(self.peer, tx_ring.immediate(slot_addr.slot));
                Ok(())
            }
            _ => Err(EIO),
        }
    }

    /// Posts a message that has a slot at another node, without waiting. Returns `None` if posting would have
    /// to wait.
    ///
    /// # Errors
    ///
    /// See [`Self::send`].
    pub(super) fn post(
        &self,
        rpc: &Rpc,
        slot_addr: &RingSlotAddr,
        message: &RpcMessage,
    ) -> Result<Option<InflightOp<OwnedRemoteAccess>>> {
        let tx_ring = self.tx_ring()?;
        match (&slot_addr.path, &tx_ring.ordered_conn) {
            (WritePath::Remote(imm_write), Some(conn)) => {
                let permit = || {
                    tx_ring
                        .mapping
                        .start_owned_remote_access(slot_addr.map_version)
                };
                let fabric = &rpc.memory_service.cluster.fabric;
                fabric.try_post_write_imm(conn, imm_write, message.content(), permit)
            }
            _ => Err(EIO),
        }
    }

    /// Writes a message that has a slot, and waits for the completion.
    ///
    /// # Errors
    ///
    /// See [`Self::send`].
    pub(super) fn write_message(
        &self,
        rpc: &Arc<Rpc>,
        slot_addr: &RingSlotAddr,
        message: &RpcMessage,
        deadline: Deadline,
    ) -> Result {
        self.write(rpc, slot_addr, message.content(), deadline)
    }

    /// Marks a slot as written: no write to the slot is in flight.
    pub(super) fn complete_write(&self, reservation: &RingSlot) {
        if self.tx_credits.lock().producer.complete(reservation) {
            self.tx_credits_cv.notify_all();
        }
    }

    /// Handles a head update: the other end has freed its ring up to `head`.
    fn on_peer_head(&self, head: u64) {
        if self.tx_credits.lock().producer.on_credit(head) {
            self.tx_credits_cv.notify_all();
        }
    }

    /// Fills the slot of an abandoned message with a void message, on a workqueue.
    pub(super) fn write_void_deferred(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        slot_addr: RingSlotAddr,
        header: MsgHeader,
    ) {
        let (channel, rpc) = (self.clone(), rpc.clone());
        let header = MsgHeader {
            msg_type: MsgType::Void,
            ..header
        };
        rpc.clone()
            .defer(self.peer.node, WorkPriority::Foreground, move || {
                let mut bytes = [0; MSG_HEADER_SIZE];
                let _ = header.encode(&mut bytes);
                while channel.check_open().is_ok() {
                    let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
                    if channel
                        .write(&rpc, &slot_addr, ImmPayload::internal(&bytes), deadline)
                        .is_ok()
                    {
                        return channel.complete_write(&header.slot);
                    }
                    backoff();
                }
            });
    }

    /// Handles an immediate: the ring at this end contains a new message or, for unit 0, a new head. If this
    /// end is closed, the immediate is dropped.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the message is malformed.
    pub(super) fn on_immediate(self: &Arc<Self>, rpc: &Arc<Rpc>, slot: u16) -> Result {
        let Ok(ring) = self.rx_memory() else {
            rpc.memory_service.stats.unmatched_completions.add(1);
            return Ok(());
        };
        if slot == 0 {
            let mut head = [0; 8];
            ring.read(0, &mut head)?;
            self.on_peer_head(u64::from_le_bytes(head));
            return Ok(());
        }
        let header = self.read_header(&ring, slot)?;
        self.on_peer_head(header.head);
        if !self.rx_ring.lock().consumer.receive(&header.slot) {
            rpc.memory_service.stats.duplicate_messages.add(1);
            return Ok(());
        }
        match (header.msg_type, &self.service) {
            (MsgType::Call | MsgType::Oneway, Some(service)) => {
                // Cannot fail: each call has a unit of its own.
                let _ = self.rx_ring.lock().pending.push(slot);
                service.notify_arrival();
            }
            (MsgType::Reply, None) => {
                if rpc.calls.on_reply(self, &header, &ring) {
                    // No thread sleeps on the reply. The poller thread checks for it.
                    rpc.memory_service
                        .cluster
                        .fabric
                        .poller_waker
                        .event
                        .complete();
                }
                self.free_slots(rpc, &header.slot);
            }
            _ => self.free_slots(rpc, &header.slot),
        }
        Ok(())
    }

    /// Reads the header of the message at a unit of the ring at this end.
    fn read_header(&self, ring: &LentChunk, slot: u16) -> Result<MsgHeader> {
        let mut bytes = [0; MSG_HEADER_SIZE];
        ring.read(usize::from(slot) * UNIT_BYTES, &mut bytes)?;
        let header = MsgHeader::decode(&bytes).map_err(|_| EINVAL)?;
        let is_at_slot = header.slot.unit_index(self.rx_capacity) == u32::from(slot);
        is_at_slot.then_some(header).ok_or(EINVAL)
    }

    /// Queues a result. Returns `true` if the queue was empty, so that the caller must schedule the worker.
    pub(super) fn queue_deferred_reply(&self, reply: DeferredReply) -> Result<bool> {
        let mut replies = self.deferred_replies.lock();
        let is_first = replies.is_empty();
        replies.push(reply, GFP_KERNEL)?;
        Ok(is_first)
    }

    /// Returns the first queued result.
    pub(super) fn first_deferred_reply(&self) -> Option<DeferredReply> {
        self.deferred_replies.lock().first().copied()
    }

    /// Removes the first queued result: it was sent, or the channel is closed.
    pub(super) fn pop_deferred_reply(&self) {
        let _ = self.deferred_replies.lock().remove(0);
    }

    /// Reads the rendezvous buffers of a message at this end.
    pub(super) fn read_rendezvous_bufs(
        &self,
        ring: &LentChunk,
        header: &MsgHeader,
    ) -> Result<RendezvousBufs> {
        let mut bytes = [0; MAX_BUFFER_IDS_SIZE];
        let bytes = bytes.get_mut(..header.buffer_ids_len()).ok_or(EINVAL)?;
        ring.read(self.data_offset(&header.slot) + header.inline_len(), bytes)?;
        Ok(RendezvousBufs::decode(header, bytes))
    }

    /// Returns `true` if a call can be taken now.
    pub(super) fn has_ready_call(&self) -> bool {
        let in_ring = !self.rx_ring.lock().pending.is_empty();
        in_ring || self.rendezvous_queue.lock().has_fetchable()
    }

    /// Returns `true` if a call is queued, including parked ones that must not be fetched now.
    pub(super) fn has_pending_call(&self) -> bool {
        self.has_ready_call() || self.rendezvous_queue.lock().has_parked()
    }

    /// Takes the next call. The oldest parked call and the oldest call in the ring come first in turns.
    /// Skips rendezvous calls that must not be fetched now. If `allow_rendezvous` is `false`, skips all of
    /// them, and parks those in the ring.
    pub(super) fn dequeue(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        allow_rendezvous: bool,
    ) -> Option<DequeuedCall> {
        if !allow_rendezvous {
            return self.dequeue_from_ring(rpc, allow_rendezvous);
        }
        let resume = || RendezvousCall::resume_parked(self).map(DequeuedCall::Rendezvous);
        let parked_first = self.rendezvous_queue.lock().toggle_parked_first();
        let first = parked_first.then(resume).flatten();
        first
            .or_else(|| self.dequeue_from_ring(rpc, allow_rendezvous))
            .or_else(resume)
    }

    fn dequeue_from_ring(
        self: &Arc<Self>,
        rpc: &Arc<Rpc>,
        allow_rendezvous: bool,
    ) -> Option<DequeuedCall> {
        loop {
            let (header, ring) = self.pop()?;
            if !header.has_data_buffer() {
                return Some(DequeuedCall::Inline(header));
            }
            // Cannot fail: the message was checked on arrival.
            let bufs = self
                .read_rendezvous_bufs(&ring, &header)
                .unwrap_or_default();
            match RendezvousCall::admit(self, header, bufs, allow_rendezvous) {
                Ok(call) => {
                    self.free_slots(rpc, &header.slot);
                    if let Some(call) = call {
                        return Some(DequeuedCall::Rendezvous(call));
                    }
                }
                Err(RendezvousQueueFull) => {
                    self.requeue(&header);
                    // The end of a fetch notifies the service if calls remain in the ring. A fetch that has
                    // ended before the requeue may have missed this call: retry.
                    if self.rendezvous_queue.lock().is_full() {
                        return None;
                    }
                }
            }
        }
    }

    /// Takes the oldest call from the ring. Returns its header and the ring.
    fn pop(&self) -> Option<(MsgHeader, Arc<LentChunk>)> {
        let slot = self.rx_ring.lock().pending.pop()?;
        let ring = self.rx_memory().ok()?;
        // Until the slot is freed, its message is unchanged or replaced by a void one.
        let header = self.read_header(&ring, slot).ok()?;
        Some((header, ring))
    }

    /// Takes the next call in order to drop it.
    pub(super) fn discard_next(&self) -> Option<MsgHeader> {
        let parked = self.rendezvous_queue.lock().pop_parked();
        parked.or_else(|| self.pop().map(|(header, _)| header))
    }

    /// Returns a call to the front of the queue. Its message is still in the ring.
    pub(super) fn requeue(&self, header: &MsgHeader) {
        let slot = header.slot.unit_index(self.rx_capacity) as u16;
        let _ = self.rx_ring.lock().pending.push_front(slot);
    }

    /// Frees the slot of a received message. Schedules a publication of the head if one is due.
    pub(crate) fn free_slots(self: &Arc<Self>, rpc: &Arc<Rpc>, reservation: &RingSlot) {
        let mut rx_ring = self.rx_ring.lock();
        rx_ring.consumer.free(reservation);
        let publish_due = rx_ring.consumer.should_publish_head();
        drop(rx_ring);
        if publish_due && !self.publish_scheduled.xchg(true, Full) {
            let (channel, rpc) = (self.clone(), rpc.clone());
            rpc.clone()
                .defer(self.peer.node, WorkPriority::Foreground, move || {
                    channel.publish_head(&rpc)
                });
        }
    }

    /// Publishes the consumer head to the other end. Retries until the write succeeds or the channel closes.
    fn publish_head(&self, rpc: &Arc<Rpc>) {
        self.publish_scheduled.xchg(false, Full);
        let Ok(slot_addr) = self.slot_addr(0) else {
            return;
        };
        while self.check_open().is_ok() {
            let head = self.rx_ring.lock().consumer.publish_head();
            let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
            let written = self.write(
                rpc,
                &slot_addr,
                ImmPayload::internal(&head.to_le_bytes()),
                deadline,
            );
            if written.is_ok() {
                return;
            }
            backoff();
        }
    }
}
