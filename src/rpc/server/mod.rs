// SPDX-License-Identifier: GPL-2.0

//! A region that is served at its home: who calls, who waits for calls.
//!
//! Any number of sessions may serve one, and each call goes to one of them. Those who call from different
//! nodes take turns. A call that was taken is open until it is answered; when its session ends, the caller
//! is told so.

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

/// Time between looks of a server that waits whether its region is still there.
const RECHECK_MS: u32 = 1000;

/// A node that calls, or is about to.
pub(super) struct RpcClient {
    pub(super) instance: NodeInstance,
    /// The region of its ring for replies.
    ring_region: u64,
    /// Nothing while it is being made.
    channel: Option<Result<Arc<RpcChannel>>>,
    /// It calls no more; messages that it sent before are still to be taken.
    detached: bool,
}

/// The clients, and whose turn it is.
struct RpcClients {
    clients: KVec<RpcClient>,
    next_index: usize,
}

struct RpcServiceState {
    /// Counts the calls that have come, or come back, and other reasons to look for one.
    arrival_seq: u64,
    /// How many there were when there was nothing to take, but for long ones, and with them.
    empty_at: [Option<u64>; 2],
    /// Servers that look for calls, and need not be woken.
    pollers: usize,
    closed: bool,
}

/// A region that is served.
#[pin_data]
pub(crate) struct RpcService {
    pub(crate) region: u64,
    /// Bytes of the ring of each node that calls.
    ring_bytes: u64,
    /// Most bytes of data of a call or message.
    max_data_bytes: u64,
    /// Who pays for them: the first server.
    pub(super) memcg: Memcg,
    #[pin]
    state: SpinLock<RpcServiceState>,
    #[pin]
    arrival_cv: CondVar,
    /// Receives by queues, which the poller thread looks after.
    polled_receivers: Atomic<u32>,
    poller: Arc<ThreadWaker>,
    #[pin]
    clients: Mutex<RpcClients>,
    /// Of the sessions that serve it.
    #[pin]
    servers: Mutex<KVec<Arc<EventCounter>>>,
    receive_spin: AdaptiveSpin,
}

/// A call or message that a server gets.
pub(crate) struct ReceivedCall {
    pub(crate) header: MsgHeader,
    pub(crate) node: u32,
    /// Nothing if no reply is wanted.
    pub(crate) pending_reply: Option<PendingReply>,
}

impl ReceivedCall {
    /// It, with its data.
    pub(super) fn new(channel: &Arc<RpcChannel>, header: MsgHeader, bufs: RendezvousBufs) -> Self {
        Self {
            header,
            node: channel.peer.node,
            pending_reply: PendingReply::new(channel, &header, bufs),
        }
    }
}

/// What a server gets.
pub(crate) enum RpcDelivery {
    Received(ReceivedCall),
    Rendezvous(RendezvousCall),
}

/// Why a server does not get a call.
pub(crate) enum RpcReceiveError {
    Failed(Error),
    /// Its buffer is too short; the call waits.
    BufferTooShort,
    /// That much of its buffer is not present; the call waits.
    FaultNeeded(usize),
}

impl From<Error> for RpcReceiveError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl RpcService {
    /// A service of one server.
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

    /// Bytes of each ring.
    pub(super) fn ring_bytes(&self) -> u64 {
        self.ring_bytes
    }

    /// Takes note of one more server.
    ///
    /// # Errors
    ///
    /// `EBUSY` if there are as many as may be, since all of them are to hear of each call; `ENOMEM`.
    fn add_server(&self, events: Arc<EventCounter>) -> Result {
        let mut servers = self.servers.lock();
        if servers.len() >= bindings::KITE_SERVERS_MAX as usize {
            return Err(EBUSY);
        }
        Ok(servers.push(events, GFP_KERNEL)?)
    }

    /// Takes note that a server is gone. Returns whether it was the last.
    fn remove_server(&self, events: &Arc<EventCounter>) -> bool {
        let mut servers = self.servers.lock();
        if let Some(at) = servers.iter().position(|other| Arc::ptr_eq(other, events)) {
            let removed = servers.remove(at);
            drop(removed);
        }
        servers.is_empty()
    }

    /// Nobody gets calls any more.
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

    /// A call has come.
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

    /// Whether a call waits.
    pub(crate) fn has_ready_call(&self) -> bool {
        self.clients.lock().has_ready_call()
    }

    /// Takes a call; `room` bytes of `memory` get its data. If there is none it waits, with patience, and asks
    /// `wanted` now and then whether to go on.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the service has ended; that of `wanted`; `ETIMEDOUT`, `EINTR`; without patience `EAGAIN`.
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
                // Who was woken for a call and does not take it leaves it to another.
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

    /// A long call, unless it is too long for the service, which its caller is told.
    ///
    /// # Errors
    ///
    /// Its buffer is too short; the call waits.
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

    /// Waits until more calls have come than `seen`, or a while.
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

    /// Wakes a server if there is more to do: who was looking took only one call.
    fn wake_next_server(&self) {
        if self.has_ready_call() {
            self.arrival_cv.notify_one();
        }
    }

    /// Gives a call its server's memory. Returns nothing if nobody wants it.
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
            // Or who did calls no more.
            channel.free_slots(rpc, &header.slot);
            return Ok(None);
        };
        if header.len > buffer_len {
            self.requeue(channel, &header);
            return Err(RpcReceiveError::BufferTooShort);
        }
        // What is in the ring was checked when it came.
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

    /// The link to a node that asks for one, with its ring in that region.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` while it is being made, which `make` is to begin; why it could not be made; `ENOMEM`.
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

    /// The link that was being made is, or cannot be. Returns it if it is wanted no more.
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

    /// Forgets all clients: there will be no more servers. Who waits for an answer is told that there will
    /// be none.
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

    /// Some clients call no more. They are forgotten when what they sent is taken.
    pub(super) fn detach_clients(&self, rpc: &Arc<Rpc>, predicate: impl Fn(&RpcClient) -> bool) {
        for client in &mut self.clients.lock().clients {
            client.detached |= predicate(client);
        }
        self.reap_clients(rpc);
    }

    /// Forgets those who are gone and of whose messages none waits.
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
    /// Whether it cannot call any more: its link was not made, or it closed its end.
    pub(super) fn is_closed(&self) -> bool {
        match &self.channel {
            None => false,
            Some(Ok(channel)) => channel.check_open().is_err(),
            Some(Err(_)) => true,
        }
    }

    /// Its link, if that was made.
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

    /// The call of the node whose turn it is; a long one if `longs`.
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
                        // Nobody waits for the reply.
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
    /// Makes a session, by its watch, a server of a region of this node.
    ///
    /// # Errors
    ///
    /// As for [`Service::add_server`].
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

    /// A session serves no more. If it was the last, all who call are told.
    pub(crate) fn stop_serving(
        self: &Arc<Self>,
        service: &Arc<RpcService>,
        events: &Arc<EventCounter>,
    ) {
        // Who waits by the handle that ends sees that.
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
