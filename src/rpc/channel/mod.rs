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
//! - `tx_credits` (spinlock): producer state and admission ([`tx`]).
//! - `rx_ring` (spinlock): consumer state and pending calls ([`rx`]).
//! - `rendezvous_queue` (spinlock): calls that have left the ring but not their sender's memory.
//! - `deferred_replies` (mutex): statuses to be sent by the deferred worker ([`deferred_replies`]).
//! - `user_count` (mutex): handles of this node that use the channel.
//!
//! None of these locks is taken while another of them is held. `rx_ring` and `rendezvous_queue` nest inside
//! `RpcService::clients`. Writes run without any of these locks.

pub(in crate::rpc) mod deferred_replies;
mod rx;
pub(crate) mod send_op;
mod tx;

use self::{
    deferred_replies::DeferredReplies,
    rx::RxRing,
    tx::{TxCredits, TxRing},
};
use super::{
    rendezvous::{mapping_cache::MappingCache, queue::RendezvousQueue},
    ring::ring_capacity,
    Rpc,
};
use crate::{region::map::Mapping, sys::adaptive_spin::AdaptiveSpin};
use kernel::{
    new_condvar, new_mutex, new_spinlock,
    prelude::*,
    sync::{atomic::AtomicFlag, Arc, CondVar, Mutex, SetOnce, SpinLock},
};
use kite_core::view::NodeInstance;

/// Receiver of the calls of a channel: the service at the home.
pub(super) trait CallReceiver: Send + Sync {
    /// Notifies the servers that a call has arrived.
    fn notify_arrival(&self);

    /// Detaches the client of `channel`: its node no longer uses the channel.
    fn detach_channel(&self, rpc: &Arc<Rpc>, channel: &Arc<RpcChannel>);
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
    receiver: Option<Arc<dyn CallReceiver>>,
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
    pub(super) deferred_replies: DeferredReplies,
    /// Cached mappings of rendezvous buffers at the other end.
    #[pin]
    pub(crate) mapping_cache: MappingCache,
    /// Handles that use the channel for calls. The last one closes the channel.
    #[pin]
    pub(super) user_count: Mutex<usize>,
    /// Adaptive spin of the threads that wait for replies.
    pub(super) reply_spin: AdaptiveSpin,
}

impl RpcChannel {
    /// Creates an end whose own ring is `rx_mapping`, a region of this node.
    pub(super) fn new(
        ring_id: u16,
        peer: NodeInstance,
        region: u64,
        receiver: Option<Arc<dyn CallReceiver>>,
        rx_mapping: Arc<Mapping>,
    ) -> Result<Arc<Self>> {
        let rx_capacity = ring_capacity(&rx_mapping)?;
        let rx_ring = RxRing::new(rx_capacity)?;
        let rendezvous_queue = RendezvousQueue::new()?;
        Arc::pin_init(
            pin_init!(Self {
                ring_id,
                peer,
                region,
                receiver,
                rx_mapping,
                rx_capacity,
                rendezvous_queue <- new_spinlock!(rendezvous_queue, "RpcChannel::rendezvous_queue"),
                tx_ring: SetOnce::new(),
                tx_credits <- new_spinlock!(TxCredits::new(KVec::new()), "RpcChannel::tx_credits"),
                tx_credits_cv <- new_condvar!("RpcChannel::tx_credits_cv"),
                rx_ring <- new_spinlock!(rx_ring, "RpcChannel::rx_ring"),
                publish_scheduled: AtomicFlag::new(false),
                deferred_replies <- DeferredReplies::new(),
                mapping_cache <- MappingCache::new(),
                user_count <- new_mutex!(1, "RpcChannel::user_count"),
                reply_spin: AdaptiveSpin::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the mappings of the ring at this end and, if set, of the ring at the other end.
    pub(super) fn ring_mappings(&self) -> (&Arc<Mapping>, Option<&Arc<Mapping>>) {
        let tx_ring = self.tx_ring.as_ref();
        (&self.rx_mapping, tx_ring.map(|tx_ring| &tx_ring.mapping))
    }

    /// Returns the service that receives the calls, or `None` at the calling end.
    pub(super) fn receiver(&self) -> Option<&Arc<dyn CallReceiver>> {
        self.receiver.as_ref()
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
}
