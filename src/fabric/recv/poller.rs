// SPDX-License-Identifier: GPL-2.0

//! The thread that takes what peers send (LITE, section 5.1: one poller on one receive queue).
//!
//! Under traffic it polls without pause, unless those who wait for messages do (`watch`). When nothing has come
//! for a while it arms the queues and sleeps until an interrupt, so an idle node costs nothing. It also polls
//! the send queue for those who sleep on it.

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

/// How long the poller looks for more after it has driven something, so that who uses queues steadily has no
/// need to wake it.
const CLIENT_SPIN_NS: i64 = 1_000_000;

/// How long what is driven may keep it from other things.
const POLL_BUDGET_NS: i64 = 200_000;

/// How long it sleeps between looks that need not come at once.
const SOON_SLEEP_US: u32 = 100;

/// How long it sleeps while something may take too long.
const WAITING_SLEEP_MS: u32 = 50;

/// How long it sleeps for what was posted: who uses queues steadily has no need to wake it meanwhile.
const POSTED_SLEEP_MS: u32 = 1;

/// Bytes that precede a datagram: the global routing header.
const GRH_BYTES: usize = 40;

/// Takes what came from peers.
pub(crate) trait RecvHandler: Send + Sync + 'static {
    /// A request of a peer; `bytes` is the whole message, whose form has been checked. The peer is to be
    /// told of the end ([`Peer::end_answer`]). Who polls waits for this call, so it must not wait for
    /// anything but memory.
    fn on_request(&self, from: Arc<Peer>, header: ControlHeader, bytes: &[u8]);

    /// A peer acts on the view of `epoch`, and has nothing else to tell of it. Who polls waits for this call as well.
    fn on_view(&self, from: &Peer, epoch: u64);

    /// A node wrote to our memory, and says so with `immediate`. It, or its queue pair, may be gone by now.
    /// Who polls waits for this call as well.
    fn on_immediate(&self, from: NodeInstance, immediate: u32);

    /// A packet came to a target of ours, or by a connection from this node. Who polls waits for this call as well.
    fn on_packet(&self, from: Option<NodeInstance>, bytes: KVec<u8>);
}

/// What the poller has to do for something that it drives, from little to much.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PollHint {
    /// Nothing, until it is woken.
    Idle,
    /// To look again when something was sent or has come, and now and then.
    Waiting,
    /// To look again when what was posted completes, or after a moment.
    Posted,
    /// To look again soon.
    Soon,
    /// To go on.
    Busy,
}

/// What the poller thread drives besides.
pub(crate) trait PollClient: Send + Sync + 'static {
    /// Goes on with what can go on, and waits for nothing but memory. Returns how much that was.
    fn poll_work(&self, fabric: &Fabric) -> usize;

    /// The poller is about to sleep. If it does not look again after a moment by itself, who has something for
    /// it has to wake it from now on.
    fn poll_hint(&self) -> PollHint;

    /// The RNIC goes. Ends what is under way.
    fn on_device_removed(&self);
}

/// All that is driven, by number.
pub(in crate::fabric) struct PollClients {
    clients: KVec<(u64, Arc<dyn PollClient>)>,
    next_id: u64,
    /// Whose turn it is.
    cursor: usize,
}

impl PollClients {
    /// None.
    pub(in crate::fabric) const fn new() -> Self {
        Self {
            clients: KVec::new(),
            next_id: 0,
            cursor: 0,
        }
    }

    /// Drives all, or as many as there is time for: messages do not wait for more. Returns how much was done.
    fn poll_all(&mut self, fabric: &Fabric) -> usize {
        let (mut done, start) = (0, Instant::<Monotonic>::now());
        for _ in 0..self.clients.len() {
            self.cursor = (self.cursor + 1) % self.clients.len();
            if let Some((_, client)) = self.clients.get(self.cursor) {
                done += client.poll_work(fabric);
            }
            // With one there is nobody to wait for.
            if self.clients.len() > 1 && start.elapsed().as_nanos() > POLL_BUDGET_NS {
                break;
            }
        }
        done
    }
}

/// Who polls the receive queue, one at a time.
#[pin_data]
pub(in crate::fabric) struct RecvEngine {
    /// Taken away when the RNIC goes.
    #[pin]
    handler: SleepableRevocable<SetOnce<Arc<dyn RecvHandler>>>,
    /// Held by who polls; what was received is copied there.
    #[pin]
    poll_buffer: Mutex<[u8; RECV_BUFFER_BYTES]>,
    pub(in crate::fabric) busy_pollers: BusyPollers,
}

impl RecvEngine {
    /// Nobody hears yet.
    pub(in crate::fabric) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            handler <- SleepableRevocable::new(SetOnce::new()),
            poll_buffer <- new_mutex!([0; RECV_BUFFER_BYTES]),
            busy_pollers: BusyPollers::new(),
        })
    }
}

impl Fabric {
    /// Has `sink` take what comes, from now on.
    pub(crate) fn set_recv_handler(&self, handler: Arc<dyn RecvHandler>) {
        if let Some(handler_cell) = self.recv_engine.handler.try_access() {
            handler_cell.populate(handler);
        }
    }

    /// Drops the sink: nothing is taken any more.
    pub(crate) fn clear_recv_handler(&self) {
        drop(self.recv_engine.handler.revoke());
    }

    /// Takes all that was received before. Who sent it by a queue pair that goes has been told that it came,
    /// and drivers forget what was not polled when they reset one.
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

    /// Has the poller thread drive something. Returns a number for it.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn register_poll_client(&self, client: Arc<dyn PollClient>) -> Result<u64> {
        let mut clients = self.poll_clients.lock();
        let id = clients.next_id;
        clients.clients.push((id, client), GFP_KERNEL)?;
        clients.next_id += 1;
        drop(clients);
        self.poller_waker.event.complete();
        Ok(id)
    }

    /// Has the poller thread look at once at what it drives.
    pub(crate) fn wake_poller(&self) {
        self.poller_waker.event.complete();
    }

    /// Has the poller thread drive it no more.
    pub(crate) fn unregister_poll_client(&self, id: u64) {
        let mut clients = self.poll_clients.lock();
        let index = clients
            .clients
            .iter()
            .position(|(client_id, _)| *client_id == id);
        let removed = index.and_then(|index| clients.clients.remove(index).ok());
        drop(clients);
        drop(removed);
    }

    /// Ends all that is driven.
    fn stop_poll_clients(&self) {
        let clients = core::mem::replace(&mut self.poll_clients.lock().clients, KVec::new());
        for (_, client) in clients {
            client.on_device_removed();
        }
    }

    /// Takes what was received. Returns how many messages there were. No lock may be held.
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

    fn poll_packets(&self, handler: &dyn RecvHandler) -> usize {
        let dc = self.dc.as_ref();
        dc.map_or(0, |dc| {
            dc.poll_packets(|bytes| handler.on_packet(None, bytes))
        })
    }

    /// Asks for an interrupt when a packet comes. Returns whether some have.
    fn arm_packet_cq(&self) -> bool {
        self.dc.as_ref().is_some_and(|dc| {
            dc.arm_packet_cq();
            // Who polls may have looked before that, and goes.
            let is_polled = self.recv_engine.poll_buffer.try_lock().is_none();
            is_polled || self.try_poll_recv() != 0
        })
    }

    fn process_recv(
        &self,
        handler: &dyn RecvHandler,
        completion: WorkCompletion,
        scratch: &mut [u8; RECV_BUFFER_BYTES],
    ) {
        let id = WrId::from_u64(completion.wr_id);
        if completion.status != WcStatus::Success {
            // A queue pair that failed or is gone gives its receives back. Its users find out by
            // themselves, but the control queue pair may have none.
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
        // Posted again before it is acted on: whoever gets an answer finds room for the next.
        let _ = endpoint.post_recv(id.slot);
        if copied.is_ok() {
            self.dispatch_recv(handler, &endpoint, &scratch[..len]);
        }
    }

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

    /// A datagram sets up a connection, or tells of a view. Who does not know the secret is not heard.
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

    /// Of a peer that is gone, or whose call is, nothing is wanted any more.
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
    /// How long it looks for more before it sleeps.
    adaptive_spin: AdaptiveSpin,
    stopping: Atomic<u32>,
}

impl Poller {
    /// Makes the body of the thread.
    pub(crate) fn new(fabric: Arc<Fabric>) -> Result<Arc<Self>> {
        let poller = Self {
            fabric,
            adaptive_spin: AdaptiveSpin::new(),
            stopping: Atomic::new(0u32),
        };
        Ok(Arc::new(poller, GFP_KERNEL)?)
    }

    /// Returns how much there was to do, and how much to drive.
    fn poll(&self) -> (usize, usize) {
        let mut done = self.fabric.try_poll_recv();
        if self.fabric.send_engine().has_sleepers() {
            done += self.fabric.send_engine().poll();
        }
        (done, self.fabric.poll_clients.lock().poll_all(&self.fabric))
    }

    /// The most that is left to do for what it drives.
    fn max_poll_hint(&self) -> PollHint {
        let clients = self.fabric.poll_clients.lock();
        let hints = clients.clients.iter().map(|(_, client)| client.poll_hint());
        hints.max().unwrap_or(PollHint::Idle)
    }

    /// Sleeps for a moment, or until it is woken.
    fn sleep_us(&self, us: u32) {
        self.fabric.poller_waker.event.wait_timeout_us(us);
        self.fabric.poller_waker.event.reinit();
    }

    /// For how many microseconds to leave messages to those who wait for some.
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

    /// Arms the queues and sleeps, unless something came meanwhile. (Who goes to sleep on the send queue
    /// arms it; the notification that woke us was the last, so whoever still sleeps needs another.)
    /// Returns whether there may be more than a little to do.
    fn arm_and_sleep(&self) -> bool {
        let mut missed = self.fabric.resources.recv_cq.arm() | self.fabric.arm_packet_cq();
        let has_clients = !self.fabric.poll_clients.lock().clients.is_empty();
        let old_hint = self.max_poll_hint();
        // To look again soon anyway takes no interrupt.
        if self.fabric.send_engine().has_sleepers() || has_clients && old_hint != PollHint::Soon {
            missed |= self.fabric.send_engine().arm();
        }
        // After that: what completes from now on wakes us.
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
        // Many may have woken us since we last slept.
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
