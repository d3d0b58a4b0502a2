// SPDX-License-Identifier: GPL-2.0

//! RPC and one-way messages to the server of a region (LITE, section 5).
//!
//! # Operation
//!
//! A session at the home of a region *serves* the region ([`server`]). Every holder of a mapping with the
//! write right may call. Name, rights and lifetime of a service are those of its region.
//!
//! A calling node has one [`channel`] per service, shared by all its processes. A channel has two rings: one
//! for calls at the home, and one for replies at the caller. Each ring is a region that the other node maps.
//! So the revocation of regions guarantees that no message is written to a freed ring.
//!
//! A message is one RDMA WRITE with immediate. The immediate notifies the receive poller of the destination.
//! A call stays in its ring until a server takes the call. The call delays only calls from the same node to
//! the same service. The poller takes a reply from its ring at once ([`client`]). Data that do not fit into a
//! ring message are transferred through [`rendezvous`] buffers.
//!
//! # Recovery
//!
//! - A failed write is retried in the same slot. If the sender gives up, a void message fills the slot.
//! - The last server of a service ends: calls that no server has answered fail with `ECONNRESET`.
//! - A member is removed or fenced: [`Rpc::disconnect_fenced_members`] detaches its clients from all
//!   services. The mappings of its rings end, so channels to its services are closed. The next call opens new
//!   ones.
//! - This node leaves the cluster: [`Rpc::leave`] closes all services and disconnects their clients.
//!
//! # Locking
//!
//! - `services` (mutex): the map of services. Nests outside `RpcService::servers` and `RpcService::state`.
//! - `client_channels` (mutex): the map of channels to services. Nests with no other lock.
//! - `channels` (XArray lock, spinning): the map from ring IDs to channels. Nests with no other lock.
//! - `next_ring_id` (relaxed atomic) only proposes an ID. `register_channel` checks the ID under `channels`.
//!
//! [`Rpc::on_immediate`] runs in the receive poller or, for a local ring, in the sender. Its callees may take
//! mutexes and allocate memory, but wait for no other node.

pub(crate) mod channel;
pub(crate) mod client;
pub(crate) mod connect;
pub(crate) mod rendezvous;
pub(crate) mod ring;
pub(crate) mod server;

use self::{channel::RpcChannel, client::RpcCalls, server::RpcService};
use crate::{
    fabric::{send::write_imm::ImmPayload, Fabric},
    region::MemoryService,
    sys::event_counter::EventCounter,
};
use kernel::{
    alloc::Flags,
    new_mutex,
    prelude::*,
    rbtree::RBTree,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
    time::{delay::fsleep, Delta},
    xarray::{AllocKind, XArray},
};
use kite_core::{
    view::NodeInstance,
    wire::ring::{Immediate, MsgHeader, RendezvousBufs, MSG_HEADER_SIZE},
};

/// User ID of the kernels in requests to each other.
pub(crate) const ROOT_UID: u32 = 0;

/// Delay, in ms, before a failed background write is retried.
const RETRY_MS: i64 = 100;

/// Message with its data. A slot is assigned later.
pub(crate) struct RpcMessage {
    pub(crate) header: MsgHeader,
    /// Header space, followed by the payload.
    bytes: KVec<u8>,
    /// Set if a sender of high priority waits for the message.
    pub(crate) high_priority: bool,
}

impl RpcMessage {
    /// Returns the bytes to write, with their priority.
    fn content(&self) -> ImmPayload<'_> {
        ImmPayload {
            bytes: &self.bytes,
            high_priority: self.high_priority,
        }
    }

    /// Creates a message without rendezvous buffers. `fill` writes the data.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    /// - Errors of `fill`.
    pub(crate) fn new(header: MsgHeader, fill: impl FnOnce(&mut [u8]) -> Result) -> Result<Self> {
        Self::new_with_bufs(GFP_KERNEL, header, RendezvousBufs::default(), fill)
    }

    /// Creates a message with the rendezvous buffers that `header` needs, allocated with `flags`. `fill`
    /// writes the inline data, which may be empty.
    ///
    /// # Errors
    ///
    /// See [`Self::new`].
    pub(crate) fn new_with_bufs(
        flags: Flags,
        header: MsgHeader,
        bufs: RendezvousBufs,
        fill: impl FnOnce(&mut [u8]) -> Result,
    ) -> Result<Self> {
        let mut bytes = KVec::from_elem(0u8, MSG_HEADER_SIZE + header.payload_len(), flags)?;
        let payload = &mut bytes[MSG_HEADER_SIZE..];
        fill(&mut payload[..header.inline_len()])?;
        bufs.encode(&header, payload);
        Ok(Self {
            header,
            bytes,
            high_priority: false,
        })
    }
}

/// RPC services and calls of one RNIC.
#[pin_data]
pub(crate) struct Rpc {
    /// Channels by local ring ID, to dispatch immediates.
    #[pin]
    channels: XArray<Arc<RpcChannel>>,
    next_ring_id: Atomic<u32>,
    /// Channels to services, by home and region.
    #[pin]
    client_channels: Mutex<RBTree<(NodeInstance, u64), Arc<RpcChannel>>>,
    /// Services of this node, by region.
    #[pin]
    services: Mutex<RBTree<u64, Arc<RpcService>>>,
    #[pin]
    calls: RpcCalls,
    /// Event counter for rings and rendezvous buffers. Its events are ignored, since each user checks the
    /// mapping.
    pub(crate) ignored_events: Arc<EventCounter>,
    pub(crate) memory_service: Arc<MemoryService>,
}

impl Rpc {
    /// Creates the state, without services or channels.
    pub(crate) fn new(memory_service: Arc<MemoryService>) -> Result<Arc<Self>> {
        Arc::pin_init(
            try_pin_init!(Self {
                channels <- XArray::new(AllocKind::Alloc),
                next_ring_id: Atomic::new(0u32),
                client_channels <- new_mutex!(RBTree::new(), "Rpc::client_channels"),
                services <- new_mutex!(RBTree::new(), "Rpc::services"),
                calls <- RpcCalls::new(),
                ignored_events: EventCounter::new()?,
                memory_service,
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the fabric of the RNIC.
    pub(crate) fn fabric(&self) -> &Arc<Fabric> {
        self.memory_service.fabric()
    }

    /// Assigns a ring ID to the channel that `make` creates, and registers the channel for immediates.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory, or all 65536 ring IDs are in use.
    /// - Errors of `make`.
    fn register_channel(
        &self,
        make: impl Fn(u16) -> Result<Arc<RpcChannel>>,
    ) -> Result<Arc<RpcChannel>> {
        for _ in 0..=u16::MAX {
            let ring_id = self.next_ring_id.fetch_add(1u32, Relaxed) as u16;
            if self.channel_by_ring(ring_id).is_some() {
                continue;
            }
            let channel = make(ring_id)?;
            let mut channels = self.channels.lock();
            if channels.get(ring_id.into()).is_none() {
                let stored = channels.store(ring_id.into(), channel.clone(), GFP_ATOMIC);
                return stored.map(|_| channel).map_err(|error| error.error);
            }
        }
        Err(ENOMEM)
    }

    /// Returns the channel with a local ring ID.
    fn channel_by_ring(&self, ring_id: u16) -> Option<Arc<RpcChannel>> {
        self.channels.lock().get(ring_id.into()).map(Into::into)
    }

    /// Unregisters the channel. Later immediates for its ring are dropped.
    fn unregister_channel(&self, channel: &RpcChannel) {
        let removed = self.channels.lock().remove(channel.ring_id.into());
        drop(removed);
    }

    /// Handles an immediate from a peer or from this node, which has written to a local ring.
    pub(crate) fn on_immediate(self: &Arc<Self>, from: NodeInstance, immediate: Immediate) {
        let channel = self.channel_by_ring(immediate.ring_id);
        let Some(channel) = channel.filter(|channel| channel.peer == from) else {
            return self.memory_service.stats.unmatched_completions.add(1);
        };
        if channel.on_immediate(self, immediate.unit).is_err() {
            self.memory_service.stats.malformed_messages.add(1);
        }
    }

    /// Handles a view change: detaches the clients of nodes that were removed or fenced.
    pub(crate) fn disconnect_fenced_members(self: &Arc<Self>) {
        let cluster = &self.memory_service.cluster;
        let mut next = 0;
        while let Some(service) = self.service_at_or_after(next) {
            next = service.region + 1;
            service.detach_clients(self, |client| {
                !cluster.is_connected(client.instance, client.admission)
            });
        }
    }

    /// Leaves the cluster: leaves the memory service, closes all services and disconnects their clients.
    pub(crate) fn leave(self: &Arc<Self>) {
        self.memory_service.leave();
        while let Some(service) = self.service_at_or_after(0) {
            let removed = self.services.lock().remove(&service.region);
            drop(removed);
            service.close();
            service.disconnect_clients(self);
        }
    }

    fn service_at_or_after(&self, region: u64) -> Option<Arc<RpcService>> {
        let services = self.services.lock();
        let cursor = services.cursor_lower_bound(&region)?;
        Some(cursor.current().1.clone())
    }
}

/// Sleeps for [`RETRY_MS`] before a retry.
fn backoff() {
    fsleep(Delta::from_millis(RETRY_MS));
}
