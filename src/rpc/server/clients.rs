// SPDX-License-Identifier: GPL-2.0

//! Clients of a service: one per calling node and ring.
//!
//! # Operation
//!
//! The first attach request of a node adds a client. Its channel is created on a workqueue. The clients are
//! served round-robin.
//!
//! # Recovery
//!
//! - A client detaches, or its node leaves or is fenced: the client is removed once its queued messages are
//!   taken. Its queued calls are delivered to no server.
//! - The last server ends: all clients are removed. Queued messages that expect a reply fail with
//!   `ECONNRESET`.
//!
//! # Locking
//!
//! `RpcService::clients` (mutex) protects [`RpcClients`].

use super::{dequeue::DequeuedCall, reply::send_status_deferred, RpcService};
use crate::{
    errno::{self, TryError, TryResult},
    rpc::{channel::RpcChannel, Rpc},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{view::NodeInstance, wire::ring::MsgType};

/// Node that calls, or is attaching.
pub(in crate::rpc) struct RpcClient {
    pub(in crate::rpc) instance: NodeInstance,
    /// Admission of the node when it attached.
    pub(in crate::rpc) admission: u64,
    /// Region of the client's ring for replies.
    ring_region: u64,
    /// `None` while the channel is being created.
    channel: Option<Result<Arc<RpcChannel>>>,
    /// Set once the client has detached. Messages sent before are still delivered.
    detached: bool,
}

/// Clients of a service, and the index of the next one to serve.
pub(super) struct RpcClients {
    clients: KVec<RpcClient>,
    next_index: usize,
}

impl RpcService {
    /// Returns the channel of a client, whose ring for replies is `ring_region`. Adds the client if it is
    /// new, and then calls `start_opening` without the lock.
    ///
    /// # Errors
    ///
    /// - [`TryError::InTransition`]: the channel is being created.
    /// - `ENOMEM`: no memory.
    /// - The error with which the creation failed.
    pub(in crate::rpc) fn channel_for(
        &self,
        (instance, admission): (NodeInstance, u64),
        ring_region: u64,
        start_opening: impl FnOnce(),
    ) -> TryResult<Arc<RpcChannel>> {
        let mut clients = self.clients.lock();
        let Some(index) = clients.index_of(instance, ring_region) else {
            let client = RpcClient {
                instance,
                admission,
                ring_region,
                channel: None,
                detached: false,
            };
            clients.clients.push(client, GFP_KERNEL)?;
            drop(clients);
            start_opening();
            return Err(TryError::InTransition);
        };
        match &clients.clients[index].channel {
            None => Err(TryError::InTransition),
            Some(channel) => Ok(channel.clone()?),
        }
    }

    /// Stores the result of a channel's creation. Returns the channel if its client is gone or the service is
    /// closed. The caller must then close the channel.
    pub(in crate::rpc) fn on_channel_opened(
        &self,
        instance: NodeInstance,
        ring_region: u64,
        channel: Result<Arc<RpcChannel>>,
    ) -> Option<Arc<RpcChannel>> {
        let mut clients = self.clients.lock();
        let is_closed = self.state.lock().closed;
        match clients.index_of(instance, ring_region) {
            Some(at) if !is_closed => {
                clients.clients[at].channel = Some(channel);
                None
            }
            _ => channel.ok(),
        }
    }

    /// Removes all clients, after the last server has ended. Queued messages that expect a reply fail with
    /// `ECONNRESET`.
    pub(in crate::rpc) fn disconnect_clients(&self, rpc: &Arc<Rpc>) {
        while let Some(client) = self.remove_client(|_| true) {
            let Some(channel) = client.connected_channel() else {
                continue;
            };
            while let Some(header) = channel.discard_next() {
                if header.expects_answer() {
                    send_status_deferred(rpc, channel, header.call_id, Err(errno::connreset()));
                }
            }
            rpc.close_channel_deferred(channel.clone());
        }
    }

    /// Detaches the clients that match `predicate`. A client is removed once its queued messages are taken.
    pub(in crate::rpc) fn detach_clients(
        &self,
        rpc: &Arc<Rpc>,
        predicate: impl Fn(&RpcClient) -> bool,
    ) {
        for client in &mut self.clients.lock().clients {
            client.detached |= predicate(client);
        }
        self.reap_clients(rpc);
    }

    /// Removes detached clients without queued messages.
    pub(super) fn reap_clients(&self, rpc: &Arc<Rpc>) {
        while let Some(client) = self.remove_client(RpcClient::is_drained) {
            client.close_channel(rpc);
        }
    }

    /// Like [`Self::reap_clients`], for the poller thread: does nothing while another thread holds the lock.
    /// The holder may sleep for memory.
    pub(super) fn try_reap_clients(&self, rpc: &Arc<Rpc>) {
        let try_remove = || {
            self.clients
                .try_lock()?
                .remove_client(RpcClient::is_drained)
        };
        while let Some(client) = try_remove() {
            client.close_channel(rpc);
        }
    }

    fn remove_client(&self, predicate: impl Fn(&RpcClient) -> bool) -> Option<RpcClient> {
        self.clients.lock().remove_client(predicate)
    }
}

impl RpcClient {
    /// Returns `true` if the client can no longer call: its channel could not be created, or it closed its
    /// end.
    pub(in crate::rpc) fn is_closed(&self) -> bool {
        match &self.channel {
            None => false,
            Some(Ok(channel)) => channel.check_open().is_err(),
            Some(Err(_)) => true,
        }
    }

    /// Returns `true` if the client is detached and no message of it is queued.
    fn is_drained(&self) -> bool {
        let channel = self.connected_channel();
        self.detached && channel.is_none_or(|channel| !channel.has_pending_call())
    }

    fn close_channel(&self, rpc: &Arc<Rpc>) {
        if let Some(channel) = self.connected_channel() {
            rpc.close_channel_deferred(channel.clone());
        }
    }

    /// Returns the client's channel, if it was created.
    pub(super) fn connected_channel(&self) -> Option<&Arc<RpcChannel>> {
        self.channel.as_ref()?.as_ref().ok()
    }
}

impl RpcClients {
    /// Creates an empty list.
    pub(super) const fn new() -> Self {
        Self {
            clients: KVec::new(),
            next_index: 0,
        }
    }

    fn remove_client(&mut self, predicate: impl Fn(&RpcClient) -> bool) -> Option<RpcClient> {
        let index = self.clients.iter().position(predicate)?;
        self.clients.remove(index).ok()
    }

    /// Returns `true` if a call can be taken now.
    pub(super) fn has_ready_call(&self) -> bool {
        let mut channels = self
            .clients
            .iter()
            .filter_map(|client| client.connected_channel());
        channels.any(|channel| channel.has_ready_call())
    }

    /// Takes a call from the next client in order that has one. Takes rendezvous calls only if
    /// `allow_rendezvous`.
    pub(super) fn dequeue_next(
        &mut self,
        rpc: &Arc<Rpc>,
        allow_rendezvous: bool,
    ) -> Option<(Arc<RpcChannel>, DequeuedCall)> {
        let count = self.clients.len();
        for i in 0..count {
            let index = (self.next_index + i) % count;
            let client = &self.clients[index];
            let Some(channel) = client.connected_channel() else {
                continue;
            };
            if let Some(mut call) = channel.dequeue(rpc, allow_rendezvous) {
                if let DequeuedCall::Inline(header) = &mut call {
                    if client.detached && header.msg_type == MsgType::Call {
                        // No thread waits for the reply.
                        header.msg_type = MsgType::Void;
                    }
                }
                let channel = channel.clone();
                self.next_index = index + 1;
                return Some((channel, call));
            }
        }
        None
    }

    fn index_of(&self, instance: NodeInstance, ring_region: u64) -> Option<usize> {
        let is_same_client =
            |client: &RpcClient| client.instance == instance && client.ring_region == ring_region;
        self.clients.iter().position(is_same_client)
    }
}
