// SPDX-License-Identifier: GPL-2.0

//! Poller thread: processes the messages that peers send (LITE, section 5.1: one poller on one receive
//! queue).
//!
//! # Operation
//!
//! 1. The thread polls the receive CQ and, with DC, the packet CQ. [`RecvHandler`] processes each message.
//! 2. The thread polls the send CQ if a sender sleeps.
//! 3. The thread polls the [`PollClient`]s, which are I/O queues and VQPs.
//! 4. Under traffic the thread polls without pause, except while waiters busy-poll ([`super::busy_poll`]).
//! 5. After an adaptive spin without a message the thread arms the CQs and sleeps until an interrupt.
//!    An idle node therefore uses no processor time.
//!
//! # Recovery
//!
//! A failed receive completion is dropped, since the users of the QP detect the failure themselves.
//! Only a failure of the control QP is reported, to the connector thread.
//! When the thread stops, each registered client receives [`PollClient::on_device_removed`].
//!
//! # Locking
//!
//! - `RecvEngine::poll_buffer` (mutex) serializes receive processing and protects the copy buffer.
//!   The mutex is held while a [`RecvHandler`] runs.
//! - `Fabric::poll_clients` (mutex) protects the client list. The mutex is held while
//!   [`PollClient::poll_work`] and [`PollClient::poll_hint`] run, but not while
//!   [`PollClient::on_device_removed`] runs.
//! - Order: access to `RecvEngine::handler`, then `poll_buffer`, then the locks of peers and connections.
//! - Order: `DcTransport::dct`, then `poll_buffer`, since a DCT is rotated while received messages are
//!   drained.
//! - Order: `poll_clients`, then the locks of a client, then the locks of the send engine.

use super::busy_poll::{AdaptiveInterval, BusyPollers};
use crate::{
    fabric::{
        endpoint::{Endpoint, RECV_BUFFER_BYTES},
        peer::Peer,
        Fabric, CONTROL_ENDPOINT_ID, RECV_CQ_ENTRIES,
    },
    sys::{
        adaptive_spin::AdaptiveSpin,
        bytes,
        revocable::SleepableRevocable,
        thread::{cond_resched, ThreadBody},
    },
    verbs::cq::{WcStatus, WorkCompletion},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, Mutex, SetOnce,
    },
    time::{Instant, Monotonic},
};
use kite_core::{
    view::NodeInstance,
    wire::{
        self,
        packet::is_vqp_packet,
        setup::{SetupDatagram, SetupKind},
        ControlBody, ControlHeader, ControlRequest,
    },
    wrid::WrId,
};

/// Time for which the thread keeps polling after a client made progress, in ns. A process that uses its
/// queues steadily then needs no system call to wake the thread.
const CLIENT_SPIN_NS: i64 = 1_000_000;

/// Longest time that one round over the clients may take before messages are polled again, in ns.
const POLL_BUDGET_NS: i64 = 200_000;

/// Sleep after [`PollHint::Soon`], in µs.
const SOON_SLEEP_US: u32 = 100;

/// Longest sleep after [`PollHint::Waiting`], in ms: a request may be stuck and need recovery.
const WAITING_SLEEP_MS: u32 = 50;

/// Longest sleep after [`PollHint::Posted`], in ms. A process that uses its queues steadily need not wake the
/// thread meanwhile.
const POSTED_SLEEP_MS: u32 = 1;

/// Bytes of the global routing header (GRH), which precedes each datagram in its receive buffer.
const GRH_BYTES: usize = 40;

/// Handler of received messages. The polling thread waits for each call, so no method may wait for anything
/// but memory.
pub(crate) trait RecvHandler: Send + Sync + 'static {
    /// Processes a control request of a peer. `bytes` is the whole message, whose format has been checked.
    ///
    /// The handler must call [`Peer::complete_request`] when the request has been executed.
    fn on_request(&self, from: Arc<Peer>, header: ControlHeader, bytes: &[u8]);

    /// Records that a peer has applied the view of `epoch` and has no further announcement for it.
    fn on_view(&self, from: &Peer, epoch: u64);

    /// Processes the immediate of an RDMA WRITE to memory of this node.
    ///
    /// The sender may have left the view, and its QP may have been destroyed, by the time of the call.
    fn on_immediate(&self, from: NodeInstance, immediate: u32);

    /// Processes a VQP packet. `from` is the sender if the packet came over a connection, and `None` if it
    /// came to the DCT of this node.
    fn on_packet(&self, from: Option<NodeInstance>, bytes: KVec<u8>);
}

/// Next action that a [`PollClient`] needs from the poller thread, in increasing order of urgency.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PollHint {
    /// Nothing: the thread may sleep until it is woken.
    Idle,
    /// Poll after the next send or receive completion, and after at most [`WAITING_SLEEP_MS`].
    Waiting,
    /// Poll when a posted request completes, and after at most [`POSTED_SLEEP_MS`].
    Posted,
    /// Poll again after [`SOON_SLEEP_US`].
    Soon,
    /// Poll again at once.
    Busy,
}

/// Source of work that the poller thread polls in addition to the CQs: an I/O queue or a VQP.
pub(crate) trait PollClient: Send + Sync + 'static {
    /// Makes all progress possible without waiting for anything but memory. Returns the number of steps done.
    fn poll_work(&self, fabric: &Fabric) -> usize;

    /// Returns when the thread must poll the client again. Called before the thread sleeps.
    ///
    /// After a hint below [`PollHint::Posted`], a producer of new work must wake the thread.
    fn poll_hint(&self) -> PollHint;

    /// Ends all requests in flight: the RNIC is being removed.
    fn on_device_removed(&self);
}

/// Registered [`PollClient`]s.
pub(in crate::fabric) struct PollClients {
    /// Each client with the id that [`Fabric::register_poll_client`] returned.
    clients: KVec<(u64, Arc<dyn PollClient>)>,
    next_id: u64,
    /// Index of the client polled last (round robin).
    cursor: usize,
}

impl PollClients {
    /// Creates an empty list.
    pub(in crate::fabric) const fn new() -> Self {
        Self {
            clients: KVec::new(),
            next_id: 0,
            cursor: 0,
        }
    }

    /// Polls the clients in turn, for at most about [`POLL_BUDGET_NS`], so that messages are not delayed.
    /// Returns the number of steps done.
    fn poll_all(&mut self, fabric: &Fabric) -> usize {
        let (mut done, start) = (0, Instant::<Monotonic>::now());
        for _ in 0..self.clients.len() {
            self.cursor = (self.cursor + 1) % self.clients.len();
            if let Some((_, client)) = self.clients.get(self.cursor) {
                done += client.poll_work(fabric);
            }
            // A single client ends the loop anyway, so the clock need not be read.
            if self.clients.len() > 1 && start.elapsed().as_nanos() > POLL_BUDGET_NS {
                break;
            }
        }
        done
    }
}

/// State of receive processing. One thread polls at a time.
#[pin_data]
pub(in crate::fabric) struct RecvEngine {
    /// Handler of received messages, set once. Revoked when the RNIC is removed.
    #[pin]
    handler: SleepableRevocable<SetOnce<Arc<dyn RecvHandler>>>,
    /// Copy of the message being processed. The polling thread holds the mutex.
    #[pin]
    poll_buffer: Mutex<[u8; RECV_BUFFER_BYTES]>,
    /// Waiters that poll in place of the poller thread.
    pub(in crate::fabric) busy_pollers: BusyPollers,
}

impl RecvEngine {
    /// Creates the state without a handler.
    pub(in crate::fabric) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            handler <- SleepableRevocable::new(SetOnce::new()),
            poll_buffer <- new_mutex!([0; RECV_BUFFER_BYTES]),
            busy_pollers: BusyPollers::new(),
        })
    }
}

impl Fabric {
    /// Sets the handler of received messages. Has no effect if a handler was set before or after
    /// [`Self::clear_recv_handler`].
    pub(crate) fn set_recv_handler(&self, handler: Arc<dyn RecvHandler>) {
        if let Some(handler_cell) = self.recv_engine.handler.try_access() {
            handler_cell.populate(handler);
        }
    }

    /// Drops the handler, after waiting for running calls. No message is processed afterwards.
    pub(crate) fn clear_recv_handler(&self) {
        drop(self.recv_engine.handler.revoke());
    }

    /// Processes all messages received before the call. May sleep.
    ///
    /// Required before a QP is reset: the sender has received an acknowledgment for these messages, and
    /// drivers discard unpolled completions at the reset.
    pub(in crate::fabric) fn drain_recv_cq(&self) {
        let Some(handler) = self.recv_engine.handler.try_access() else {
            return;
        };
        let Some(handler) = handler.as_ref() else {
            return;
        };
        let mut scratch = self.recv_engine.poll_buffer.lock();
        for _ in 0..RECV_CQ_ENTRIES {
            let recv_cq = &self.resources.recv_cq;
            let messages =
                recv_cq.poll(|completion| self.process_recv(&**handler, completion, &mut scratch));
            if messages + self.poll_packets(&**handler) == 0 {
                return;
            }
        }
    }

    /// Registers a client with the poller thread. Returns the id for [`Self::unregister_poll_client`].
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list.
    pub(crate) fn register_poll_client(&self, client: Arc<dyn PollClient>) -> Result<u64> {
        let mut clients = self.poll_clients.lock();
        let id = clients.next_id;
        clients.clients.push((id, client), GFP_KERNEL)?;
        clients.next_id += 1;
        drop(clients);
        self.poller_waker.event.complete();
        Ok(id)
    }

    /// Wakes the poller thread, which then polls all clients.
    pub(crate) fn wake_poller(&self) {
        self.poller_waker.event.complete();
    }

    /// Removes a client from the poller thread, which does not poll the client after the call.
    pub(crate) fn unregister_poll_client(&self, id: u64) {
        let mut clients = self.poll_clients.lock();
        let index = clients
            .clients
            .iter()
            .position(|(client_id, _)| *client_id == id);
        let removed = index.and_then(|index| clients.clients.remove(index).ok());
        drop(clients);
        // Drop the client without the lock.
        drop(removed);
    }

    /// Removes all clients, and notifies each of the removal of the RNIC.
    fn stop_poll_clients(&self) {
        let clients = core::mem::replace(&mut self.poll_clients.lock().clients, KVec::new());
        for (_, client) in clients {
            client.on_device_removed();
        }
    }

    /// Processes received messages unless another thread does. Returns the number of messages.
    ///
    /// The caller must not hold any lock, since the handler takes locks.
    pub(crate) fn try_poll_recv(&self) -> usize {
        let Some(handler) = self.recv_engine.handler.try_access() else {
            return 0;
        };
        let (Some(handler), Some(mut scratch)) =
            (handler.as_ref(), self.recv_engine.poll_buffer.try_lock())
        else {
            return 0;
        };
        let recv_cq = &self.resources.recv_cq;
        let messages =
            recv_cq.poll(|completion| self.process_recv(&**handler, completion, &mut scratch));
        messages + self.poll_packets(&**handler)
    }

    /// Processes VQP packets received by DC. Returns the number of packets.
    fn poll_packets(&self, handler: &dyn RecvHandler) -> usize {
        let dc = self.dc.as_ref();
        dc.map_or(0, |dc| {
            dc.poll_packets(|bytes| handler.on_packet(None, bytes))
        })
    }

    /// Arms the packet CQ. Returns `true` if packets may have arrived before.
    fn arm_packet_cq(&self) -> bool {
        self.dc.as_ref().is_some_and(|dc| {
            dc.arm_packet_cq();
            // Another thread may have polled the CQ before it was armed, and may not poll it again.
            let is_polled = self.recv_engine.poll_buffer.try_lock().is_none();
            is_polled || self.try_poll_recv() != 0
        })
    }

    /// Processes one receive completion. `scratch` is the copy buffer of the polling thread.
    fn process_recv(
        &self,
        handler: &dyn RecvHandler,
        completion: WorkCompletion,
        scratch: &mut [u8; RECV_BUFFER_BYTES],
    ) {
        let id = WrId::from_u64(completion.wr_id);
        if completion.status != WcStatus::Success {
            // A failed or destroyed QP flushes its receives. The users of an RC QP detect the failure by
            // their own requests, but the control QP may have no request in flight.
            if id.generation == CONTROL_ENDPOINT_ID {
                self.report_control_qp_failure();
            }
            return;
        }
        let Some(endpoint) = self.endpoint(id.generation) else {
            return self.stats.unmatched_completions.add(1);
        };
        if let Some(immediate) = completion.imm_data {
            let _ = endpoint.post_recv(id.slot);
            return handler.on_immediate(endpoint.peer(), immediate);
        }
        let len = (completion.byte_len as usize).min(RECV_BUFFER_BYTES);
        let copied = endpoint.read_recv(id.slot, &mut scratch[..len]);
        // Repost the receive before the message is processed: a peer that receives the reply may send the
        // next request at once.
        let _ = endpoint.post_recv(id.slot);
        if copied.is_ok() {
            self.dispatch_recv(handler, &endpoint, &scratch[..len]);
        }
    }

    /// Passes a message to its handler. Node 0 is the peer of the control QP, which receives datagrams.
    fn dispatch_recv(&self, handler: &dyn RecvHandler, endpoint: &Endpoint, bytes: &[u8]) {
        let is_valid = match endpoint.peer() {
            NodeInstance { node: 0, .. } => bytes
                .get(GRH_BYTES..)
                .is_some_and(|bytes| self.on_datagram(handler, bytes)),
            peer => self.on_message(handler, peer, endpoint.id(), bytes),
        };
        if !is_valid {
            self.stats.malformed_messages.add(1);
        }
    }

    /// Processes a datagram of connection setup or of a view announcement. Returns `false` if the datagram is
    /// malformed or rejected.
    ///
    /// Datagrams without the shared secret, or for another incarnation of either node, are rejected.
    fn on_datagram(&self, handler: &dyn RecvHandler, bytes: &[u8]) -> bool {
        let Ok(setup) = SetupDatagram::decode(bytes) else {
            return false;
        };
        let Ok(peer) = self.peer(setup.from_node) else {
            return false;
        };
        if !peer.identity.accepts(&setup) {
            return false;
        }
        match setup.kind {
            SetupKind::ViewAnnounce => handler.on_view(&peer, setup.epoch),
            SetupKind::ViewAck => peer.on_view_ack(setup.epoch),
            _ => return peer.on_setup(setup),
        }
        true
    }

    /// Processes a message received over a connection. Returns `false` if the message is malformed.
    fn on_message(
        &self,
        handler: &dyn RecvHandler,
        peer: NodeInstance,
        endpoint_id: u32,
        bytes: &[u8],
    ) -> bool {
        if is_vqp_packet(bytes) {
            let mut packet = bytes::alloc_zeroed_nofail(bytes.len());
            packet.copy_from_slice(bytes);
            handler.on_packet(Some(peer), packet);
            return true;
        }
        match wire::decode_control(bytes) {
            Ok((header, ControlBody::Request(request))) => {
                self.on_request(handler, (peer, endpoint_id), header, &request, bytes);
            }
            Ok((header, ControlBody::Reply(_))) => {
                self.control_requests
                    .on_reply(header.request_id, peer.node, bytes)
            }
            Err(_) => return false,
        }
        true
    }

    /// Processes a control request, unless the peer left the view or the request is a duplicate or has ended.
    fn on_request(
        &self,
        handler: &dyn RecvHandler,
        (from, endpoint_id): (NodeInstance, u32),
        header: ControlHeader,
        request: &ControlRequest<'_>,
        bytes: &[u8],
    ) {
        let Ok(peer) = self.peer_by_instance(from) else {
            return;
        };
        if peer.admit_request(&header, request, endpoint_id) {
            handler.on_request(peer, header, bytes);
        } else {
            self.stats.duplicate_messages.add(1);
        }
    }
}

/// The poller thread of one RNIC.
pub(crate) struct Poller {
    fabric: Arc<Fabric>,
    /// Time for which the thread polls without a message before it sleeps.
    adaptive_spin: AdaptiveSpin,
    /// 1 once the thread must end. Stored with `Release`, loaded with `Acquire`.
    stopping: Atomic<u32>,
}

impl Poller {
    /// Creates the body of the thread.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
    pub(crate) fn new(fabric: Arc<Fabric>) -> Result<Arc<Self>> {
        let poller = Self {
            fabric,
            adaptive_spin: AdaptiveSpin::new(),
            stopping: Atomic::new(0u32),
        };
        Ok(Arc::new(poller, GFP_KERNEL)?)
    }

    /// Polls once. Returns the number of completions and messages, and the number of steps done for clients.
    fn poll(&self) -> (usize, usize) {
        let mut done = self.fabric.try_poll_recv();
        if self.fabric.send_engine().has_sleepers() {
            done += self.fabric.send_engine().poll();
        }
        (done, self.fabric.poll_clients.lock().poll_all(&self.fabric))
    }

    /// Returns the most urgent hint of all clients.
    fn max_poll_hint(&self) -> PollHint {
        let clients = self.fabric.poll_clients.lock();
        let hints = clients.clients.iter().map(|(_, client)| client.poll_hint());
        hints.max().unwrap_or(PollHint::Idle)
    }

    /// Sleeps for at most about `us` microseconds, or until woken.
    fn sleep_us(&self, us: u32) {
        self.fabric.poller_waker.event.wait_timeout_us(us);
        self.fabric.poller_waker.event.reinit();
    }

    /// Returns how long the thread may sleep, in µs, because waiters busy-poll; `None` if none does.
    fn covered_by_busy_pollers(
        &self,
        interval: &mut AdaptiveInterval,
        now: Instant<Monotonic>,
    ) -> Option<u32> {
        let fabric = &self.fabric;
        let has_other_work =
            fabric.send_engine().has_sleepers() || !fabric.poll_clients.lock().clients.is_empty();
        interval.next_interval_us(&fabric.recv_engine.busy_pollers, now, has_other_work)
    }

    /// Arms the CQs and sleeps, unless a completion arrived meanwhile.
    ///
    /// A sender that goes to sleep arms the send CQ itself. An armed CQ raises only one notification, so the
    /// thread arms the CQ again for senders that still sleep.
    ///
    /// Returns `false` after the short sleep for [`PollHint::Soon`], which must not restart the spin.
    fn arm_and_sleep(&self) -> bool {
        let mut missed = self.fabric.resources.recv_cq.arm() | self.fabric.arm_packet_cq();
        let has_clients = !self.fabric.poll_clients.lock().clients.is_empty();
        let old_hint = self.max_poll_hint();
        // A client that is polled again soon needs no interrupt.
        if self.fabric.send_engine().has_sleepers() || has_clients && old_hint != PollHint::Soon {
            missed |= self.fabric.send_engine().arm();
        }
        // Read the hints again: only completions after the CQ was armed wake the thread.
        let hint = self.max_poll_hint();
        missed |= hint != old_hint;
        if missed || hint == PollHint::Busy || self.stopping.load(Acquire) != 0 {
            return true;
        }
        match hint {
            PollHint::Soon => {
                self.sleep_us(SOON_SLEEP_US);
                return false;
            }
            PollHint::Idle => self.fabric.poller_waker.event.wait_idle(),
            PollHint::Posted => drop(
                self.fabric
                    .poller_waker
                    .event
                    .wait_timeout_ms(POSTED_SLEEP_MS),
            ),
            _ => drop(
                self.fabric
                    .poller_waker
                    .event
                    .wait_timeout_ms(WAITING_SLEEP_MS),
            ),
        }
        // Discard all pending wake-ups: the next round handles all of their causes.
        self.fabric.poller_waker.event.reinit();
        self.fabric.stats.wakeups.add(1);
        true
    }
}

impl ThreadBody for Poller {
    fn run(&self) {
        let mut last_work = Instant::<Monotonic>::now();
        let mut interval = AdaptiveInterval::new();
        let mut last_client_work: Option<Instant<Monotonic>> = None;
        while self.stopping.load(Acquire) == 0 {
            let (done, client_work) = self.poll();
            let now = Instant::now();
            if client_work != 0 {
                last_client_work = Some(now);
            }
            let clients_active =
                last_client_work.is_some_and(|last| (now - last).as_nanos() < CLIENT_SPIN_NS);
            if done != 0 {
                last_work = now;
            } else if clients_active {
                core::hint::spin_loop();
            } else if let Some(us) = self.covered_by_busy_pollers(&mut interval, now) {
                self.sleep_us(us);
                last_work = Instant::now();
            } else if self.adaptive_spin.should_spin(last_work, now) {
                core::hint::spin_loop();
            } else if self.arm_and_sleep() {
                self.adaptive_spin.record_wait(last_work);
                last_work = Instant::now();
            }
            cond_resched();
        }
        self.fabric.stop_poll_clients();
    }

    fn request_stop(&self) {
        self.stopping.store(1, Release);
        self.fabric.poller_waker.event.complete_all();
    }
}
