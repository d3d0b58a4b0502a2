// SPDX-License-Identifier: GPL-2.0

//! Sending end of a channel: the ring at the other end, its free space, and the writes to it.
//!
//! # Operation
//!
//! A sender ([`super::send_op`]) reserves a slot, encodes the message and writes the message to the slot.
//! Senders that sleep and senders that poll get slots in turns.
//!
//! # Recovery
//!
//! A failed message is written again to the same slot. If the sender gives up, a deferred write fills the
//! slot with a void message.
//!
//! # Locking
//!
//! `RpcChannel::tx_credits` (spinlock) protects [`TxCredits`]. A sender sleeps on `tx_credits_cv` with this
//! lock. Writes run without the lock.

use super::RpcChannel;
use crate::{
    control::{priority::WorkPriority, retry::CONTROL_TIMEOUT_MS},
    fabric::{
        send::{
            inflight::InflightOp,
            write_imm::{ImmPayload, ImmWrite, OrderedConn},
        },
        Fabric,
    },
    region::{
        lend::loan::LentChunk,
        map::{chunk_map::MappedChunk, remote::OwnedRemoteAccess, Mapping},
    },
    rpc::{
        backoff,
        ring::{local_chunk, ring_capacity, RingInfo},
        Rpc, RpcMessage,
    },
    sys::deadline::Deadline,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::{Arc, CondVarTimeoutResult},
    time::msecs_to_jiffies,
};
use kite_core::{
    ring::{RingProducer, RingSlot, UNIT_BYTES},
    sync::fairness::FairAdmission,
    wire::ring::{Immediate, MsgHeader, MsgType, MSG_HEADER_SIZE},
};

/// Ring at the other end, which this end writes.
pub(super) struct TxRing {
    pub(super) mapping: Arc<Mapping>,
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
pub(super) struct TxCredits {
    producer: RingProducer<KVec<u8>>,
    admission: FairAdmission,
}

impl TxCredits {
    pub(super) fn new(states: KVec<u8>) -> Self {
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

impl RpcChannel {
    /// Sets the ring at the other end. Called once.
    pub(in crate::rpc) fn set_tx_ring(
        &self,
        fabric: &Fabric,
        mapping: Arc<Mapping>,
        ring_id: u16,
    ) -> Result {
        let is_local = local_chunk(&mapping).is_ok();
        let ordered_conn = (!is_local)
            .then(|| OrderedConn::select(fabric, self.peer))
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

    /// Returns region and ID of the ring at the other end, or `None` before [`Self::set_tx_ring`].
    pub(in crate::rpc) fn peer_ring(&self) -> Option<RingInfo> {
        self.tx_ring.as_ref().map(|tx_ring| RingInfo {
            region: tx_ring.mapping.region,
            id: tx_ring.ring_id,
        })
    }

    pub(super) fn tx_ring(&self) -> Result<&TxRing> {
        self.tx_ring.as_ref().ok_or(EIO)
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
    ///
    /// # Errors
    ///
    /// See [`Self::send`].
    pub(super) fn reserve(
        &self,
        rpc: &Rpc,
        message: &RpcMessage,
        deadline: Deadline,
    ) -> Result<RingSlot> {
        let mut credits = self.tx_credits.lock();
        loop {
            if let Some(reservation) = credits.producer.reserve(message.bytes.len()) {
                credits.admission.note_admission(false);
                return Ok(reservation);
            }
            self.check_open()?;
            deadline.check()?;
            rpc.memory_service.stats.ring_waits.add(1);
            let slice_jiffies = msecs_to_jiffies(deadline.slice_ms());
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
    pub(super) fn slot_addr(&self, slot: u16) -> Result<RingSlotAddr> {
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

    /// Writes `content` to a slot, and waits for the completion.
    ///
    /// # Errors
    ///
    /// See [`Self::send`].
    pub(super) fn write(
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
                let fabric = rpc.fabric();
                conn.prepare(fabric, imm_write, content)
                    .execute(permit, deadline)
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
                let fabric = rpc.fabric();
                conn.prepare(fabric, imm_write, message.content())
                    .try_post(permit)
            }
            _ => Err(EIO),
        }
    }

    /// Marks a slot as written: no write to the slot is in flight.
    pub(super) fn complete_write(&self, reservation: &RingSlot) {
        if self.tx_credits.lock().producer.complete(reservation) {
            self.tx_credits_cv.notify_all();
        }
    }

    /// Handles a head update: the other end has freed its ring up to `head`.
    pub(super) fn on_peer_head(&self, head: u64) {
        if self.tx_credits.lock().producer.on_credit(head) {
            self.tx_credits_cv.notify_all();
        }
    }

    /// Fills the slot of a canceled message with a void message, on a workqueue.
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
                // Cannot fail: the buffer has the size of a header.
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
}
