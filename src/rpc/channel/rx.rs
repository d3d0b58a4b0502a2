// SPDX-License-Identifier: GPL-2.0

//! Receiving end of a channel: the ring at this end, and the calls that wait in it.
//!
//! # Operation
//!
//! The receive poller handles the immediate of each message. A call waits in the ring until a server takes
//! the call. A reply is copied to its call at once. If a quarter of the ring was freed without a message in
//! the other direction, a deferred write publishes the head.
//!
//! # Recovery
//!
//! The publication of the head is retried until the write succeeds or the channel closes.
//!
//! # Locking
//!
//! `RpcChannel::rx_ring` (spinlock) protects [`RxRing`].
//!
//! `publish_scheduled` is set by the thread that schedules a publication. The worker clears the flag before
//! it reads the head. So a slot freed after that read schedules another publication.

use super::RpcChannel;
use crate::{
    control::{priority::WorkPriority, retry::CONTROL_TIMEOUT_MS},
    fabric::send::write_imm::ImmPayload,
    region::lend::loan::LentChunk,
    rpc::{backoff, ring::local_chunk, Rpc},
    sys::deadline::Deadline,
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::{atomic::Full, Arc},
};
use kite_core::{
    ring::{RingConsumer, RingSlot, UnitFifo, UNIT_BYTES},
    wire::ring::{MsgHeader, MsgType, RendezvousBufs, MAX_BUFFER_IDS_SIZE, MSG_HEADER_SIZE},
};

/// Ring at this end, which the other end writes.
pub(super) struct RxRing {
    pub(super) consumer: RingConsumer<KVec<u8>>,
    /// First units of the received calls that no server has taken, in order of arrival.
    pending: UnitFifo<KVec<u16>>,
}

impl RxRing {
    /// Creates an empty ring of `capacity` units.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    pub(super) fn new(capacity: u32) -> Result<Self> {
        Ok(Self {
            consumer: RingConsumer::new(KVec::from_elem(
                0u8,
                capacity as usize,
                GFP_KERNEL_ACCOUNT,
            )?),
            pending: UnitFifo::new(KVec::from_elem(
                0u16,
                capacity as usize,
                GFP_KERNEL_ACCOUNT,
            )?),
        })
    }
}

impl RpcChannel {
    /// Returns the memory of the ring at this end.
    pub(crate) fn rx_memory(&self) -> Result<Arc<LentChunk>> {
        local_chunk(&self.rx_mapping)
    }

    /// Returns the offset of a received message's data in the ring at this end.
    pub(crate) fn data_offset(&self, reservation: &RingSlot) -> usize {
        reservation.offset(self.rx_capacity) as usize + MSG_HEADER_SIZE
    }

    /// Handles an immediate: the ring at this end contains a new message or, for unit 0, a new head. If this
    /// end is closed, the immediate is dropped.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the message is malformed.
    pub(in crate::rpc) fn on_immediate(self: &Arc<Self>, rpc: &Arc<Rpc>, slot: u16) -> Result {
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
        match (header.msg_type, &self.receiver) {
            (MsgType::Call | MsgType::Oneway, Some(receiver)) => {
                // Cannot fail: each call has a unit of its own.
                let _ = self.rx_ring.lock().pending.push(slot);
                receiver.notify_arrival();
            }
            (MsgType::Reply, None) => {
                if rpc.calls.on_reply(self, &header, &ring) {
                    // No thread sleeps on the reply. The poller thread checks for it.
                    rpc.fabric().poller_waker.event.complete();
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

    /// Reads the rendezvous buffers of a message at this end.
    pub(in crate::rpc) fn read_rendezvous_bufs(
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
    pub(in crate::rpc) fn has_ready_call(&self) -> bool {
        let in_ring = !self.rx_ring.lock().pending.is_empty();
        in_ring || self.rendezvous_queue.lock().has_fetchable()
    }

    /// Returns `true` if a call is queued, including parked ones that must not be fetched now.
    pub(in crate::rpc) fn has_pending_call(&self) -> bool {
        self.has_ready_call() || self.rendezvous_queue.lock().has_parked()
    }

    /// Takes the oldest call from the ring. Returns its header and the ring.
    pub(in crate::rpc) fn pop(&self) -> Option<(MsgHeader, Arc<LentChunk>)> {
        let slot = self.rx_ring.lock().pending.pop()?;
        let ring = self.rx_memory().ok()?;
        // Until the slot is freed, its message is unchanged or replaced by a void one.
        let header = self.read_header(&ring, slot).ok()?;
        Some((header, ring))
    }

    /// Takes the next call in order to drop it.
    pub(in crate::rpc) fn discard_next(&self) -> Option<MsgHeader> {
        let parked = self.rendezvous_queue.lock().pop_parked();
        parked.or_else(|| self.pop().map(|(header, _)| header))
    }

    /// Returns a call to the front of the queue. Its message is still in the ring.
    pub(in crate::rpc) fn requeue(&self, header: &MsgHeader) {
        let slot = header.slot.unit_index(self.rx_capacity) as u16;
        // Cannot fail: each call has a unit of its own.
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
