// SPDX-License-Identifier: GPL-2.0

//! Setup and teardown of channels.
//!
//! # Operation
//!
//! The caller allocates a ring for replies and requests a ring for calls from the home. A request handler
//! must not wait for another node. So the home maps the caller's ring on a workqueue, and replies
//! `EINPROGRESS` until the ring is mapped. The caller retries. The last handle that detaches closes the
//! caller's end, and sends a detach request in the background.
//!
//! # Recovery
//!
//! - The caller cannot map the ring of the home: it detaches, and the call fails with `ECONNRESET` if the
//!   ring was freed.
//! - A caller gave up during setup: its next attach request, or that of another caller, detaches the leftover
//!   client.
//! - The last handle detaches while a thread attaches: `user_count` of 0 makes that thread open another
//!   channel.
//!
//! # Locking
//!
//! `Rpc::client_channels` and `RpcChannel::user_count` (mutexes) are never held together.

use super::{
    channel::RpcChannel,
    ring::RingInfo,
    server::{clients::RpcClient, RpcService},
    Rpc, ROOT_UID,
};
use crate::{
    control::{client::ControlClient, priority::WorkPriority, retry::CONTROL_TIMEOUT_MS},
    errno,
    region::{
        alloc::AllocRequest,
        map::{open::OpenRequest, MapTerms, Mapping},
    },
    sys::deadline::{retry_until, Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    rights::Rights,
    view::NodeInstance,
    wire::{ControlReply, ControlRequest},
};

/// Size, in bytes, of a ring for replies. The ring is small, since replies are taken at once.
const REPLY_RING_BYTES: u64 = 64 << 10;

fn parse_attach_reply(reply: &ControlReply<'_>) -> Result<RingInfo> {
    match *reply {
        ControlReply::RingAttached {
            ring_region: ring,
            ring_id: number,
        } => Ok(RingInfo {
            region: ring,
            id: number,
        }),
        _ => Err(EIO),
    }
}

impl Rpc {
    /// Returns a channel to the service of a mapped region, for one more handle. The caller must call
    /// [`Self::detach`] later.
    ///
    /// # Errors
    ///
    /// - `ECONNREFUSED`: no session serves the region.
    /// - `ECONNRESET`: the service has just ended.
    /// - `ESTALE`: the region was freed.
    /// - `EHOSTDOWN`: the home died.
    /// - `EACCES`, `EBADF`: the mapping ended (see [`Mapping::access`]), or has no write right.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `ENOMEM`: no memory.
    pub(crate) fn attach(
        self: &Arc<Self>,
        mapping: &Mapping,
        deadline: Deadline,
    ) -> Result<Arc<RpcChannel>> {
        mapping.wait_home(deadline)?;
        let instance = self.memory_service.cluster.instance_of(mapping.home)?;
        let key = (instance, mapping.region);
        if let Some(channel) = self.attach_existing(key) {
            return Ok(channel);
        }
        let channel = self.open_channel(mapping, instance, deadline)?;
        let mut channels = self.client_channels.lock();
        // Another thread may have inserted a channel. Both work. Later handles find this one.
        let inserted = channels.try_create_and_insert(key, channel.clone(), GFP_KERNEL);
        drop(channels);
        inserted
            .map(|_| channel.clone())
            .inspect_err(|_| self.detach(channel.clone()))
    }

    /// Returns an open channel that exists, and counts one more handle.
    fn attach_existing(&self, key: (NodeInstance, u64)) -> Option<Arc<RpcChannel>> {
        let channel = self.client_channels.lock().get(&key).cloned();
        let channel = channel.filter(|channel| channel.check_open().is_ok())?;
        let mut user_count = channel.user_count.lock();
        // A channel without users is closing.
        let is_live = *user_count != 0;
        *user_count += usize::from(is_live);
        drop(user_count);
        is_live.then_some(channel)
    }

    /// Releases a handle's use of a channel. The last release closes the channel.
    pub(crate) fn detach(self: &Arc<Self>, channel: Arc<RpcChannel>) {
        let mut user_count = channel.user_count.lock();
        *user_count -= 1;
        let is_last = *user_count == 0;
        drop(user_count);
        if !is_last {
            return;
        }
        let key = (channel.peer, channel.region);
        let mut channels = self.client_channels.lock();
        let is_registered = channels
            .get(&key)
            .is_some_and(|other| Arc::ptr_eq(other, &channel));
        let removed = is_registered.then(|| channels.remove(&key));
        drop(channels);
        drop(removed);
        self.close_channel(&channel);
        if let Some(peer_ring) = channel.peer_ring() {
            self.send_detach_deferred(channel.peer.node, peer_ring);
        }
    }

    fn open_channel(
        self: &Arc<Self>,
        mapping: &Mapping,
        instance: NodeInstance,
        deadline: Deadline,
    ) -> Result<Arc<RpcChannel>> {
        let channel = self.new_channel(REPLY_RING_BYTES, |ring_id, rx_mapping| {
            RpcChannel::new(ring_id, instance, mapping.region, None, rx_mapping)
        })?;
        let attached = self.request_attach(mapping, &channel, deadline);
        let attached = attached.map_err(|error| {
            if error == ENOENT {
                errno::stale()
            } else {
                error
            }
        });
        let connected = attached.and_then(|peer_ring| {
            let mapped = self.map_peer_ring(mapping.home, peer_ring, &channel, deadline);
            mapped
                .inspect_err(|_| self.send_detach_deferred(mapping.home, peer_ring))
                .map_err(|error| {
                    if error == ENOENT {
                        errno::connreset()
                    } else {
                        error
                    }
                })
        });
        connected
            .map(|()| channel.clone())
            .inspect_err(|_| self.close_channel(&channel))
    }

    /// Creates an end with a new ring of `len` bytes. `make` creates the channel from ring ID and mapping.
    fn new_channel(
        self: &Arc<Self>,
        len: u64,
        make: impl Fn(u16, Arc<Mapping>) -> Result<Arc<RpcChannel>>,
    ) -> Result<Arc<RpcChannel>> {
        let request = AllocRequest {
            len,
            nodes: &[],
            name: None,
            owner: ROOT_UID,
            other_rights: Rights::NONE,
        };
        let rx_mapping = self
            .memory_service
            .alloc(&request, self.ignored_events.clone())?;
        self.register_channel(|ring_id| make(ring_id, rx_mapping.clone()))
            .inspect_err(|_| self.memory_service.release_anonymous(&rx_mapping))
    }

    /// Maps the ring at the other end, which may be at this node too.
    fn map_peer_ring(
        self: &Arc<Self>,
        home: u32,
        peer_ring: RingInfo,
        channel: &RpcChannel,
        deadline: Deadline,
    ) -> Result {
        let (memory_service, events) = (&self.memory_service, self.ignored_events.clone());
        // The poller defers head publications to this queue. Creating it here saves the poller from doing so.
        memory_service.ensure_foreground_queue(channel.peer);
        let request = OpenRequest {
            home,
            region: peer_ring.region,
            terms: MapTerms {
                uid: ROOT_UID,
                rights: Rights::WRITE,
                outlives_fence: false,
            },
            deadline,
        };
        let mapping = request.run(memory_service, events)?;
        channel
            .set_tx_ring(memory_service.fabric(), mapping.clone(), peer_ring.id)
            .inspect_err(|_| memory_service.unmap(&mapping))
    }

    fn request_attach(
        self: &Arc<Self>,
        mapping: &Mapping,
        channel: &RpcChannel,
        deadline: Deadline,
    ) -> Result<RingInfo> {
        let (rx_mapping, _) = channel.ring_mappings();
        let request = ControlRequest::AttachRing {
            region: mapping.region,
            mapping: mapping.id,
            ring_region: rx_mapping.region,
            ring_id: channel.ring_id,
        };
        let (home, memory_service) = (mapping.home, &self.memory_service);
        if memory_service.cluster.local_node() == Ok(home) {
            return retry_until(deadline, || {
                Ok(parse_attach_reply(&self.dispatch(home, &request)?)?)
            });
        }
        let reply = memory_service.request_with_retry(home, &request, deadline)?;
        parse_attach_reply(&reply.decode()?)
    }

    /// Notifies the home, in the background, that this node no longer uses its ring.
    fn send_detach_deferred(self: &Arc<Self>, home: u32, peer_ring: RingInfo) {
        if self.memory_service.cluster.local_node() == Ok(home) {
            return self.serve_detach(home, peer_ring);
        }
        let request = ControlRequest::DetachRing {
            ring_region: peer_ring.region,
            ring_id: peer_ring.id,
        };
        self.memory_service.defer(
            home,
            WorkPriority::Background,
            move |memory_service, instance| {
                memory_service.request_while_reachable(instance, &request);
            },
        );
    }

    /// Handles an attach request. Returns region and ID of the ring for calls from that node.
    ///
    /// # Errors
    ///
    /// - `ENOENT`: the node has no such mapping of the region.
    /// - `EACCES`: the mapping has no write right.
    /// - `ECONNREFUSED`: no session serves the region.
    /// - `EINPROGRESS`: the channel is being created. The caller must retry.
    /// - Errors of the creation of the channel.
    pub(crate) fn serve_attach(
        self: &Arc<Self>,
        instance: NodeInstance,
        (region, mapping): (u64, u64),
        peer_ring: RingInfo,
    ) -> Result<RingInfo> {
        let memory_service = &self.memory_service;
        memory_service.check_mapper_rights(region, instance.node, mapping, Rights::WRITE)?;
        let service = self.services.lock().get(&region).cloned();
        let service = service.ok_or_else(errno::connrefused)?;
        let client = (instance, memory_service.cluster.admission_of(instance)?);
        let channel = service.channel_for(client, peer_ring.region, || {
            // Remove clients whose callers gave up during setup.
            service.detach_clients(self, RpcClient::is_closed);
            let (rpc, service) = (self.clone(), service.clone());
            memory_service.defer(instance.node, WorkPriority::Foreground, move |_, _| {
                let channel = service
                    .memcg
                    .with_active(|| rpc.accept_channel(&service, instance, peer_ring));
                if let Some(surplus) =
                    service.on_channel_opened(instance, peer_ring.region, channel)
                {
                    rpc.close_channel(&surplus);
                }
            });
        })?;
        let (rx_mapping, _) = channel.ring_mappings();
        Ok(RingInfo {
            region: rx_mapping.region,
            id: channel.ring_id,
        })
    }

    /// Creates the home's end of a channel.
    fn accept_channel(
        self: &Arc<Self>,
        service: &Arc<RpcService>,
        instance: NodeInstance,
        peer_ring: RingInfo,
    ) -> Result<Arc<RpcChannel>> {
        let channel = self.new_channel(service.ring_bytes(), |ring_id, rx_mapping| {
            RpcChannel::new(
                ring_id,
                instance,
                service.region,
                Some(service.clone()),
                rx_mapping,
            )
        })?;
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let connected = self.map_peer_ring(instance.node, peer_ring, &channel, deadline);
        connected
            .map(|()| channel.clone())
            .inspect_err(|_| self.close_channel(&channel))
    }

    /// Handles a detach request: a node no longer uses a ring of this node.
    pub(crate) fn serve_detach(self: &Arc<Self>, node: u32, own_ring: RingInfo) {
        let channel = self.channel_by_ring(own_ring.id);
        let channel = channel.filter(|channel| {
            channel.peer.node == node && channel.ring_mappings().0.region == own_ring.region
        });
        let Some(channel) = channel else {
            return;
        };
        if let Some(receiver) = channel.receiver() {
            receiver.detach_channel(self, &channel);
        }
    }

    /// Closes this end. The channel must be out of all tables but the one for immediates.
    fn close_channel(self: &Arc<Self>, channel: &RpcChannel) {
        self.unregister_channel(channel);
        let (rx_mapping, tx_mapping) = channel.ring_mappings();
        self.memory_service.release_anonymous(rx_mapping);
        if let Some(mapping) = tx_mapping {
            self.memory_service.unmap(mapping);
        }
        for mapping in &channel.mapping_cache.close() {
            self.memory_service.unmap(mapping);
        }
    }

    /// Closes this end in the background, after earlier background work for that node. See
    /// [`Self::close_channel`].
    pub(crate) fn close_channel_deferred(self: &Arc<Self>, channel: Arc<RpcChannel>) {
        let node = channel.peer.node;
        let guard = ChannelCloseGuard {
            rpc: self.clone(),
            channel,
        };
        self.defer(node, WorkPriority::Background, move || drop(guard));
    }

    /// Runs `f` on the node's workqueue, after earlier work of that priority. Drops `f` if the node is no
    /// longer a member.
    pub(crate) fn defer(
        &self,
        node: u32,
        priority: WorkPriority,
        f: impl FnOnce() + Send + 'static,
    ) {
        self.memory_service.defer(node, priority, move |_, _| f());
    }
}

/// Closes a channel on drop, also if its work item never runs.
struct ChannelCloseGuard {
    rpc: Arc<Rpc>,
    channel: Arc<RpcChannel>,
}

impl Drop for ChannelCloseGuard {
    fn drop(&mut self) {
        self.rpc.close_channel(&self.channel);
    }
}
