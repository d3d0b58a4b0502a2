// SPDX-License-Identifier: GPL-2.0

//! Calls and messages to whoever serves a region (LITE, section 5).
//!
//! A session at the home of a region *serves* it ([`service`]); whoever has it mapped with the right to write
//! may call. Name, rights and life of a service are those of its region. A node that calls has one [`link`]
//! to a service for all its processes: a ring for calls at the home, and one for replies at the caller, each
//! of them a region that the other maps. So the rules of regions see to it that nothing is written to a ring
//! that is gone.
//!
//! A message is one write with an immediate, of which the poller of the receiver hears. Calls wait in their
//! ring until a server takes them, and hold up nobody but who calls the same service from the same node;
//! replies are taken from theirs at once ([`call`]). Data that are too [`long`] for a ring go by relays.

pub(crate) mod channel;
pub(crate) mod client;
pub(crate) mod connect;
pub(crate) mod rendezvous;
pub(crate) mod server;

use self::{channel::RpcChannel, client::call::RpcCalls, server::RpcService};
use crate::{
    fabric::send::write_imm::ImmPayload, region::MemoryService, sys::event_counter::EventCounter,
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

/// The user that kernels act as towards each other.
pub(crate) const ROOT_UID: u32 = 0;

/// Time between looks whether the other end of a link is still there.
pub(crate) const WAIT_SLICE_MS: u32 = 50;

/// Time between attempts at what has to be done.
const RETRY_MS: i64 = 100;

/// A message that has its data and is yet to get its place.
pub(crate) struct RpcMessage {
    pub(crate) header: MsgHeader,
    /// Room for the line, and the data.
    bytes: KVec<u8>,
    /// Somebody of high priority waits for it.
    pub(crate) high_priority: bool,
}

impl RpcMessage {
    /// What is to be written.
    fn content(&self) -> ImmPayload<'_> {
        ImmPayload {
            bytes: &self.bytes,
            high_priority: self.high_priority,
        }
    }

    /// A message without relays, whose data are written by `fill`.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; those of `fill`.
    pub(crate) fn new(header: MsgHeader, fill: impl FnOnce(&mut [u8]) -> Result) -> Result<Self> {
        Self::new_with_bufs(GFP_KERNEL, header, RendezvousBufs::default(), fill)
    }

    /// A message with the relays that its line needs, in memory of that kind. The data that are in the message
    /// itself, if any are, are written by `fill`.
    ///
    /// # Errors
    ///
    /// As for [`Self::new`].
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

/// The calls and services of one RNIC.
#[pin_data]
pub(crate) struct Rpc {
    /// Links by the number of the ring at this node, for immediates.
    #[pin]
    channels: XArray<Arc<RpcChannel>>,
    next_ring_id: Atomic<u32>,
    /// Links to services, by the home and the region.
    #[pin]
    client_channels: Mutex<RBTree<(NodeInstance, u64), Arc<RpcChannel>>>,
    /// What this node serves, by region.
    #[pin]
    services: Mutex<RBTree<u64, Arc<RpcService>>>,
    #[pin]
    calls: RpcCalls,
    /// Hears of rings and relays that end, and nobody listens to it: who uses one looks.
    pub(crate) ignored_events: Arc<EventCounter>,
    pub(crate) memory_service: Arc<MemoryService>,
}

impl Rpc {
    /// Nothing served or called.
    pub(crate) fn new(memory_service: Arc<MemoryService>) -> Result<Arc<Self>> {
        Arc::pin_init(
            try_pin_init!(Self {
                channels <- XArray::new(AllocKind::Alloc),
                next_ring_id: Atomic::new(0u32),
                client_channels <- new_mutex!(RBTree::new()),
                services <- new_mutex!(RBTree::new()),
                calls <- RpcCalls::new(),
                ignored_events: EventCounter::new()?,
                memory_service,
            }),
            GFP_KERNEL,
        )
    }

    /// Numbers a link that `make` makes, so that immediates find it.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, also if there are too many; those of `make`.
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

    /// The link of that number.
    fn channel_by_ring(&self, ring_id: u16) -> Option<Arc<RpcChannel>> {
        self.channels.lock().get(ring_id.into()).map(Into::into)
    }

    /// Makes immediates find the link no more.
    fn unregister_channel(&self, channel: &RpcChannel) {
        let removed = self.channels.lock().remove(channel.ring_id.into());
        drop(removed);
    }

    /// A peer, or this node itself, wrote to a ring of ours.
    pub(crate) fn on_immediate(self: &Arc<Self>, from: NodeInstance, immediate: Immediate) {
        let channel = self.channel_by_ring(immediate.ring_id);
        let Some(channel) = channel.filter(|channel| channel.peer == from) else {
            return self.memory_service.stats.unmatched_completions.add(1);
        };
        if channel.on_immediate(self, immediate.unit).is_err() {
            self.memory_service.stats.malformed_messages.add(1);
        }
    }

    /// The view changed: ends what was between this node and those who left.
    pub(crate) fn disconnect_removed_members(self: &Arc<Self>) {
        let mut next = 0;
        while let Some(service) = self.service_at_or_after(next) {
            next = service.region + 1;
            service.detach_clients(self, |client| {
                !self.memory_service.cluster.is_member(client.instance)
            });
        }
    }

    /// Leaves the cluster: all services end, and what we have of others.
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

/// Lets time pass before something is tried again.
fn backoff() {
    fsleep(Delta::from_millis(RETRY_MS));
}
