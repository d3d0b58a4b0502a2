// SPDX-License-Identifier: GPL-2.0

//! Service of a region at its home: clients, servers and delivery of calls.
//!
//! # Operation
//!
//! Several sessions may serve one region. Each call is delivered to one of them ([`receive`],
//! [`try_receive`]). Clients, one per calling node and ring, are served round-robin ([`clients`]). A
//! delivered call is open until its server replies. If the session of the server ends first, the caller
//! receives `ECONNRESET` ([`reply`]).
//!
//! # Recovery
//!
//! The last server ends: queued messages that expect a reply fail with `ECONNRESET`, and all channels
//! close.
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

pub(super) mod clients;
mod dequeue;
mod receive;
pub(crate) mod received;
pub(crate) mod reply;
pub(crate) mod try_receive;

pub(crate) use self::{
    receive::{RpcDelivery, RpcReceiveError},
    received::ReceivedCall,
    try_receive::{PolledReceiver, RpcTryReceive},
};

use self::clients::RpcClients;
use super::{
    channel::{CallReceiver, RpcChannel},
    Rpc,
};
use crate::{
    bindings,
    fabric::recv::wake::ThreadWaker,
    sys::{
        adaptive_spin::AdaptiveSpin,
        event_counter::EventCounter,
        memcg::Memcg,
        thread::pi_mutex::{new_pi_mutex, PiMutex},
    },
};
use kernel::{
    new_condvar, new_mutex, new_spinlock,
    prelude::*,
    sync::{atomic::Atomic, Arc, CondVar, Mutex, SpinLock},
};

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
    servers: PiMutex<KVec<Arc<EventCounter>>>,
    receive_spin: AdaptiveSpin,
}

impl RpcService {
    /// Creates a service without servers, charged to the current memory cgroup.
    pub(super) fn new(
        region: u64,
        ring_bytes: u64,
        max_data_bytes: u64,
        poller: Arc<ThreadWaker>,
    ) -> Result<Arc<Self>> {
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
                state <- new_spinlock!(state, "RpcService::state"),
                arrival_cv <- new_condvar!("RpcService::arrival_cv"),
                polled_receivers: Atomic::new(0u32),
                poller,
                clients <- new_mutex!(RpcClients::new(), "RpcService::clients"),
                servers <- new_pi_mutex!(KVec::new(), "RpcService::servers"),
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
}

impl CallReceiver for RpcService {
    fn notify_arrival(&self) {
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

    fn detach_channel(&self, rpc: &Arc<Rpc>, channel: &Arc<RpcChannel>) {
        self.detach_clients(rpc, |client| {
            client
                .connected_channel()
                .is_some_and(|other| Arc::ptr_eq(other, channel))
        });
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
        let poller = self.fabric().poller_waker.clone();
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
        // All receives wake up: one that waits through the closing handle rechecks `check_open`.
        service.state.lock().arrival_seq += 1;
        service.wake_servers();
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
