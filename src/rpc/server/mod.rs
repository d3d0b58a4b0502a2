// SPDX-License-Identifier: GPL-2.0

//! Service of a region at its home: clients, servers and delivery of calls.
//!
//! # Operation
//!
//! Several sessions may serve one region. Each call is delivered to one of them. Clients, one per calling
//! node and ring, are served round-robin. A delivered call is open until its server replies. If the session
//! of the server ends first, the caller receives `ECONNRESET` ([`reply`]). A server waits by busy polling,
//! then on `arrival_cv`. A receive on an I/O queue is polled by the poller thread instead ([`try_receive`]).
//!
//! # Recovery
//!
//! - The buffer of a server is too short or not present: the call returns to the front of its queue.
//! - A client detaches, or its node leaves: it is removed once its queued messages are taken. Its queued
//!   calls are delivered to no server.
//! - The last server ends: queued messages that expect an answer fail with `ECONNRESET`, and all channels
//!   close.
//!
//! # Locking
//!
//! - `clients` (mutex): clients, their channels, and the next client to serve.
//! - `servers` (mutex): event counters of the serving sessions. Nests inside `Rpc::services`.
//! - `state` (spinlock): arrival counters, poller count, closed flag. `arrival_cv` waits with this lock.
//!   Nests inside `Rpc::services` and inside `clients`.
//!
//! Inside `clients` nest also `RpcChannel::rx_ring`, `RpcChannel::rendezvous_queue` and the mutex of the peer
//! workqueues. `servers` and `clients` are never held together.
//!
//! `polled_receivers` is incremented before a receive reads `arrival_seq`, and read after an arrival has
//! incremented `arrival_seq`. So either the receive observes the arrival, or the arrival wakes the poller
//! thread.

pub(crate) mod reply;
pub(crate) mod try_receive;

pub(crate) use self::try_receive::{PolledReceiver, RpcTryReceive};

use self::reply::{send_status_deferred, PendingReply};
use super::{
    channel::{DequeuedCall, RpcChannel},
    rendezvous::queue::RendezvousCall,
    Rpc,
};
use crate::{
    bindings, errno,
    fabric::recv::wake::ThreadWaker,
    sys::{
        adaptive_spin::AdaptiveSpin, buffer::Buffer, deadline::Deadline,
        event_counter::EventCounter, memcg::Memcg,
    },
};
use kernel::{
    new_condvar, new_mutex, new_spinlock,
    prelude::*,
    sync::{atomic::Atomic, Arc, CondVar, CondVarTimeoutResult, Mutex, SpinLock},
    time::msecs_to_jiffies,
};
use kite_core::{
    view::NodeInstance,
    wire::ring::{MsgHeader, MsgType, RendezvousBufs},
};

/// Interval, in ms, at which a waiting server rechecks that its region and handle exist.
const RECHECK_MS: u32 = 1000;

/// Node that calls, or is attaching.
pub(super) struct RpcClient {
    pub(super) instance: NodeInstance,
    /// Region of the client's ring for replies.
    ring_region: u64,
    /// `None` while the channel is being created.
    channel: Option<Result<Arc<RpcChannel>>>,
    /// Set once the client has detached. Messages sent before are still delivered.
    detached: bool,
}

/// Clients of a service, and the index of the next one to serve.
struct RpcClients {
    clients: KVec<RpcClient>,
    next_index: usize,
}

struct RpcServiceState {
    /// Counts new and requeued calls, and other reasons to poll.
    arrival_seq: u64,
    /// Value of `arrival_seq` at the last poll that found nothing: without rendezvous calls (index 0), and
    /// with them (1).
    empty_at: [Option<u64>; 2],
    /// Servers that busy-poll, so that no server must be woken.
    pollers: usize,
    closed: bool,
}

/// Served region.
#[pin_data]
pub(crate) struct RpcService {
    pub(crate) region: u64,
    /// Size, in bytes, of the ring for each client.
    ring_bytes: u64,
    /// Maximum data, in bytes, of a call or message.
    max_data_bytes: u64,
    /// Memory cgroup charged for the rings: that of the first server.
    pub(super) memcg: Memcg,
    #[pin]
    state: SpinLock<RpcServiceState>,
    #[pin]
    arrival_cv: CondVar,
    /// Receives on I/O queues that the poller thread polls.
    polled_receivers: Atomic<u32>,
    poller: Arc<ThreadWaker>,
    #[pin]
    clients: Mutex<RpcClients>,
    /// Event counters of the serving sessions.
    #[pin]
    servers: Mutex<KVec<Arc<EventCounter>>>,
    receive_spin: AdaptiveSpin,
}

/// Call or message delivered to a server.
pub(crate) struct ReceivedCall {
    pub(crate) header: MsgHeader,
    pub(crate) node: u32,
    /// `None` if the message has no reply.
    pub(crate) pending_reply: Option<PendingReply>,
}

impl ReceivedCall {
    /// Creates a delivered call. Its data have been copied.
    pub(super) fn new(channel: &Arc<RpcChannel>, header: MsgHeader, bufs: RendezvousBufs) -> Self {
        Self {
            header,
            node: channel.peer.node,
            pending_reply: PendingReply::new(channel, &header, bufs),
        }
    }
}

/// Message handed to a server.
pub(crate) enum RpcDelivery {
    Received(ReceivedCall),
    Rendezvous(RendezvousCall),
}

/// Reason why a server received no call.
pub(crate) enum RpcReceiveError {
    Failed(Error),
    /// The server's buffer is too short. The call remains queued.
    BufferTooShort,
    /// Pages are not present in the first `n` bytes of the server's buffer, where `n` is the value. The call
    /// remains queued.
    FaultNeeded(usize),
}

impl From<Error> for RpcReceiveError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl RpcService {
    /// Creates a service without servers, charged to the current memory cgroup.
    pub(super) fn new(
        region: u64,
        ring_bytes: u64,
        max_data_bytes: u64,
        poller: Arc<ThreadWaker>,
    ) -> Result<Arc<Self>> {
        let clients = RpcClients {
            clients: KVec::new(),
            next_index: 0,
        };
        let state = RpcServiceState {
            arrival_seq: 0,
            empty_at: [None; 2],
            pollers: 0,
            closed: false,
        };
        Arc::pin_init(
            pin_init!(Self {
                region,
                ring_bytes,
                max_data_bytes,
                memcg: Memcg::current(),
                state <- new_spinlock!(state),
                arrival_cv <- new_condvar!(),
                polled_receivers: Atomic::new(0u32),
                poller,
                clients <- new_mutex!(clients),
                servers <- new_mutex!(KVec::new()),
                receive_spin: AdaptiveSpin::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the size of each ring in bytes.
    pub(super) fn ring_bytes(&self) -> u64 {
        self.ring_bytes
    }

    /// Adds a server.
    ///
    /// # Errors
    ///
    /// - `EBUSY`: the service has `KITE_SERVERS_MAX` servers. The number is limited, since each arrival
    ///   notifies all of them.
    /// - `ENOMEM`: no memory.
    fn add_server(&self, events: Arc<EventCounter>) -> Result {
        let mut servers = self.servers.lock();
        if servers.len() >= bindings::KITE_SERVERS_MAX as usize {
            return Err(EBUSY);
        }
        Ok(servers.push(events, GFP_KERNEL)?)
    }

    /// Removes a server. Returns `true` if none is left.
    fn remove_server(&self, events: &Arc<EventCounter>) -> bool {
        let mut servers = self.servers.lock();
        if let Some(at) = servers.iter().position(|other| Arc::ptr_eq(other, events)) {
            let removed = servers.remove(at);
            drop(removed);
        }
        servers.is_empty()
    }

    /// Closes the service: no server receives further calls.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.arrival_seq += 1;
        drop(state);
        self.wake_servers();
    }

    fn wake_servers(&self) {
        self.arrival_cv.notify_all();
        self.wake_poller();
        for events in self.servers.lock().iter() {
            events.poll_condvar.notify_all();
        }
    }

    /// Notifies the servers that a call has arrived.
    pub(super) fn notify_arrival(&self) {
        let mut state = self.state.lock();
        state.arrival_seq += 1;
        let has_no_poller = state.pollers == 0;
        drop(state);
        if has_no_poller {
            self.arrival_cv.notify_one();
        }
        self.wake_poller();
        for events in self.servers.lock().iter() {
            events.poll_condvar.notify_all();
        }
    }

    /// Returns `true` if a call can be taken now.
    pub(crate) fn has_ready_call(&self) -> bool {
        self.clients.lock().has_ready_call()
    }

    /// Takes a call and copies its data to the first `buffer_len` bytes of `memory`. Waits until `wait_until`
    /// if no call is queued, and rechecks `check_open` at least every [`RECHECK_MS`]. Does not wait if
    /// `wait_until` is `None`.
    ///
    /// # Errors
    ///
    /// - `ESTALE`: the service has ended.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `EINTR`: a signal arrived, and the deadline is interruptible.
    /// - `EAGAIN`: no call was received, and `wait_until` is `None`.
    /// - Errors of `check_open`.
    /// - [`RpcReceiveError::BufferTooShort`], [`RpcReceiveError::FaultNeeded`]: the call remains queued.
    pub(crate) fn receive(
        &self,
        rpc: &Arc<Rpc>,
        memory: &Buffer,
        buffer_len: u64,
        wait_until: Option<Deadline>,
        check_open: impl Fn() -> Result,
    ) -> Result<RpcDelivery, RpcReceiveError> {
        loop {
            check_open()?;
            let seen_seq = self.state.lock().arrival_seq;
            let dequeued = self.clients.lock().dequeue_next(rpc, true);
            let Some((channel, call)) = dequeued else {
                self.reap_clients(rpc);
                let deadline = wait_until.ok_or(EAGAIN)?;
                let waited = self.wait_for_arrival(rpc, seen_seq, deadline, &check_open);
                // The failed waiter may have consumed the wakeup of a call. Pass it on.
                waited.inspect_err(|_| self.wake_next_server())?;
                continue;
            };
            self.wake_next_server();
            let delivery = match call {
                DequeuedCall::Rendezvous(rendezvous) => self
                    .check_size(rpc, rendezvous, buffer_len)?
                    .map(RpcDelivery::Rendezvous),
                DequeuedCall::Inline(header) => {
                    self.deliver(rpc, &channel, header, memory, buffer_len)?
                }
            };
            if let Some(delivery) = delivery {
                return Ok(delivery);
            }
            wait_until.ok_or(EAGAIN)?.check()?;
        }
    }

    /// Checks the length of a rendezvous call. Rejects the call with `EMSGSIZE` if its data exceed the limit
    /// of the service, and returns `None`.
    ///
    /// # Errors
    ///
    /// - [`RpcReceiveError::BufferTooShort`]: the call remains queued.
    pub(crate) fn check_size(
        &self,
        rpc: &Arc<Rpc>,
        call: RendezvousCall,
        buffer_len: u64,
    ) -> Result<Option<RendezvousCall>, RpcReceiveError> {
        if call.len() > self.max_data_bytes {
            call.reject(rpc, errno::msgsize());
            Ok(None)
        } else if call.len() > buffer_len {
            Err(RpcReceiveError::BufferTooShort)
        } else {
            Ok(Some(call))
        }
    }

    /// Waits until `arrival_seq` differs from `seen_seq`, for at most [`RECHECK_MS`].
    fn wait_for_arrival(
        &self,
        rpc: &Rpc,
        seen_seq: u64,
        deadline: Deadline,
        check_open: impl Fn() -> Result,
    ) -> Result {
        self.state.lock().pollers += 1;
        let _spin_sample = rpc
            .memory_service
            .cluster
            .fabric
            .busy_poll(&self.receive_spin, || {
                self.state.lock().arrival_seq != seen_seq
            });
        self.state.lock().pollers -= 1;
        check_open()?;
        let mut state = self.state.lock();
        if state.closed {
            return Err(errno::stale());
        }
        if state.arrival_seq != seen_seq {
            return Ok(());
        }
        deadline.check()?;
        let slice_jiffies = msecs_to_jiffies(deadline.remaining_ms().min(RECHECK_MS));
        let woken = self
            .arrival_cv
            .wait_interruptible_timeout(&mut state, slice_jiffies);
        drop(state);
        match woken {
            CondVarTimeoutResult::Signal { .. } => deadline.handle_signal(),
            _ => Ok(()),
        }
    }

    /// Wakes another server if calls remain: each server takes only one.
    fn wake_next_server(&self) {
        if self.has_ready_call() {
            self.arrival_cv.notify_one();
        }
    }

    /// Copies the data of an inline call to the server's buffer, and frees its slot. Returns `None` if the
    /// message is void or this end is closed.
    fn deliver(
        &self,
        rpc: &Arc<Rpc>,
        channel: &Arc<RpcChannel>,
        header: MsgHeader,
        memory: &Buffer,
        buffer_len: u64,
    ) -> Result<Option<RpcDelivery>, RpcReceiveError> {
        let ring = channel
            .rx_memory()
            .ok()
            .filter(|_| header.msg_type != MsgType::Void);
        let Some(ring) = ring else {
            // Also a call of a detached client, which was made void.
            channel.free_slots(rpc, &header.slot);
            return Ok(None);
        };
        if header.len > buffer_len {
            self.requeue(channel, &header);
            return Err(RpcReceiveError::BufferTooShort);
        }
        // Cannot fail: the message was checked on arrival.
        let bufs = channel
            .read_rendezvous_bufs(&ring, &header)
            .unwrap_or_default();
        let len = header.inline_len();
        let copied = memory.try_copy_from_pages(&ring, channel.data_offset(&header.slot), 0, len);
        if let Err(error) = copied {
            self.requeue(channel, &header);
            let needs_fault = error == EAGAIN;
            return Err(if needs_fault {
                RpcReceiveError::FaultNeeded(len)
            } else {
                error.into()
            });
        }
        channel.free_slots(rpc, &header.slot);
        Ok(Some(RpcDelivery::Received(ReceivedCall::new(
            channel, header, bufs,
        ))))
    }

    fn requeue(&self, channel: &RpcChannel, header: &MsgHeader) {
        channel.requeue(header);
        self.notify_arrival();
    }

    /// Returns the channel of a client, whose ring for replies is `ring_region`. Adds the client if it is
    /// new, and then calls `start_opening` without the lock.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the channel is being created.
    /// - `ENOMEM`: no memory.
    /// - The error with which the creation failed.
    pub(super) fn channel_for(
        &self,
        instance: NodeInstance,
        ring_region: u64,
        start_opening: impl FnOnce(),
    ) -> Result<Arc<RpcChannel>> {
        let mut clients = self.clients.lock();
        let Some(index) = clients.index_of(instance, ring_region) else {
            let client = RpcClient {
                instance,
                ring_region,
                channel: None,
                detached: false,
            };
            clients.clients.push(client, GFP_KERNEL)?;
            drop(clients);
            start_opening();
            return Err(errno::inprogress());
        };
        match &clients.clients[index].channel {
            None => Err(errno::inprogress()),
            Some(channel) => channel.clone(),
        }
    }

    /// Stores the result of a channel's creation. Returns the channel if its client is gone or the service is
    /// closed. The caller must then close the channel.
    pub(super) fn on_channel_opened(
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

    /// Removes all clients, after the last server has ended. Queued messages that expect an answer fail with
    /// `ECONNRESET`.
    pub(super) fn disconnect_clients(&self, rpc: &Arc<Rpc>) {
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
    pub(super) fn detach_clients(&self, rpc: &Arc<Rpc>, predicate: impl Fn(&RpcClient) -> bool) {
        for client in &mut self.clients.lock().clients {
            client.detached |= predicate(client);
        }
        self.reap_clients(rpc);
    }

    /// Removes detached clients without queued messages.
    fn reap_clients(&self, rpc: &Arc<Rpc>) {
        let is_drained = |client: &RpcClient| {
            client.detached
                && client
                    .connected_channel()
                    .is_none_or(|channel| !channel.has_pending_call())
        };
        while let Some(client) = self.remove_client(is_drained) {
            if let Some(channel) = client.connected_channel() {
                rpc.close_channel_deferred(channel.clone());
            }
        }
    }

    fn remove_client(&self, predicate: impl Fn(&RpcClient) -> bool) -> Option<RpcClient> {
        let mut clients = self.clients.lock();
        let at = clients.clients.iter().position(predicate)?;
        clients.clients.remove(at).ok()
    }
}

impl RpcClient {
    /// Returns `true` if the client can no longer call: its channel could not be created, or it closed its
    /// end.
    pub(super) fn is_closed(&self) -> bool {
        match &self.channel {
            None => false,
            Some(Ok(channel)) => channel.check_open().is_err(),
            Some(Err(_)) => true,
        }
    }

    /// Returns the client's channel, if it was created.
    pub(super) fn connected_channel(&self) -> Option<&Arc<RpcChannel>> {
        self.channel.as_ref()?.as_ref().ok()
    }
}

impl RpcClients {
    fn has_ready_call(&self) -> bool {
        let mut channels = self
            .clients
            .iter()
            .filter_map(|client| client.connected_channel());
        channels.any(|channel| channel.has_ready_call())
    }

    /// Takes a call from the next client in order that has one. Takes rendezvous calls only if
    /// `allow_rendezvous`.
    fn dequeue_next(
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

impl Rpc {
    /// Makes a session, identified by its event counter, a server of a region of this node. Creates the
    /// service if the session is the first.
    ///
    /// # Errors
    ///
    /// - See [`RpcService::add_server`].
    pub(crate) fn serve_region(
        &self,
        region: u64,
        ring_bytes: u64,
        max_data_bytes: u64,
        events: &Arc<EventCounter>,
    ) -> Result<Arc<RpcService>> {
        let mut services = self.services.lock();
        if let Some(service) = services.get(&region) {
            service.add_server(events.clone())?;
            return Ok(service.clone());
        }
        let poller = self.memory_service.cluster.fabric.poller_waker.clone();
        let service = RpcService::new(region, ring_bytes, max_data_bytes, poller)?;
        service.add_server(events.clone())?;
        services.try_create_and_insert(region, service.clone(), GFP_KERNEL)?;
        Ok(service)
    }

    /// Removes a session from the servers. If it was the last one, closes the service and fails all queued
    /// calls.
    pub(crate) fn stop_serving(
        self: &Arc<Self>,
        service: &Arc<RpcService>,
        events: &Arc<EventCounter>,
    ) {
        // A receive that waits through the closing handle rechecks `check_open`.
        service.notify_arrival();
        let mut services = self.services.lock();
        if !service.remove_server(events) {
            return;
        }
        let found = services.get(&service.region);
        let is_registered = found.is_some_and(|found| Arc::ptr_eq(found, service));
        let removed = is_registered.then(|| services.remove(&service.region));
        service.close();
        drop(services);
        drop(removed);
        service.disconnect_clients(self);
    }
}
