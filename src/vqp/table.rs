// SPDX-License-Identifier: GPL-2.0

//! Endpoints of VQPs by number, and listeners that accept new endpoints (KRCORE, section 4.5).
//!
//! # Operation
//!
//! Connecting to a port sends nothing. The first message creates the peer endpoint, which waits in the
//! listener's backlog until a process accepts it. Messages that arrive before are queued.
//! [`super::recv::deliver`] dispatches packets to endpoints, and [`super::recv::window_update`] sends state
//! updates between endpoints.
//!
//! # Locking
//!
//! - `deferred_packets` protects packets of non-members, and serializes the dispatch of all packets. The
//!   holder may sleep for memory.
//! - `state` protects [`VqpTableState`]. The holder may sleep for memory.
//! - Order: `deferred_packets`, then `state` or `Vqp::state`.
//! - `state` is not nested with `Vqp::state`, nor with the lock of [`VqpRegistry`].
//! - Under `deferred_packets` and under `state`, [`crate::cluster`] is locked for membership checks.

use super::{
    ids::EndpointIds,
    listener::{AcceptedVqp, Listener, PendingAccept},
    registry::VqpRegistry,
    Vqp,
};
use crate::{
    bindings,
    errno::{self, TryError, TryResult},
    fabric::Fabric,
    region::MemoryService,
    sys::{
        event_counter::EventCounter,
        memcg::{self, Memcg},
        thread::pi_mutex::{new_pi_mutex, PiMutex},
        workqueue::OwnedQueue,
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, Relaxed, Release},
        Arc,
    },
};
use kite_core::{
    view::NodeInstance,
    wire::packet::{Packet, VqpMessage},
};

/// Maximum number of endpoints that wait at one listener for `accept`.
const BACKLOG: usize = 32;

/// Number of closed endpoints whose source is remembered.
const MAX_TIME_WAIT: usize = 1024;

/// Maximum number of stored packets of nodes outside the view.
pub(super) const MAX_DEFERRED_PACKETS: usize = 1024;

/// Maximum number of concurrent workers of each workqueue.
const WQ_MAX_ACTIVE: c_int = 64;

/// Sources of the last [`MAX_TIME_WAIT`] closed endpoints that a message had created. A ring buffer: the
/// oldest entry is replaced first.
struct TimeWaitList {
    sources: KVec<(NodeInstance, u64)>,
    next_index: usize,
}

impl TimeWaitList {
    fn add(&mut self, source: (NodeInstance, u64)) {
        if let Some(entry) = self.sources.get_mut(self.next_index) {
            *entry = source;
        }
        self.next_index = (self.next_index + 1) % MAX_TIME_WAIT;
    }
}

pub(super) struct VqpTableState {
    by_vqpn: RBTree<u64, Arc<Vqp>>,
    /// Endpoints created by a message, by node instance and number of the peer endpoint.
    by_peer: RBTree<(NodeInstance, u64), u64>,
    /// Closed endpoints whose first message may be retransmitted.
    time_wait: TimeWaitList,
    listeners: KVec<Arc<Listener>>,
    pending_accepts: KVec<PendingAccept>,
}

/// All endpoints of a node.
#[pin_data]
pub(crate) struct VqpTable {
    #[pin]
    pub(super) state: PiMutex<VqpTableState>,
    /// Packets of nodes that are not in the view, but may be in the next.
    #[pin]
    pub(super) deferred_packets: PiMutex<KVec<KVec<u8>>>,
    /// VQPs of processes.
    #[pin]
    registry: VqpRegistry,
    next_vqpn: Atomic<u64>,
    deferred_wq: OwnedQueue,
    /// Workers that execute atomics in the peer's kernel. Each waits for another node, so other work has
    /// another queue.
    atomics_wq: OwnedQueue,
    /// Workers that send updates to peer endpoints. Each waits for another node. No other work depends on an
    /// update.
    pub(super) updates_wq: OwnedQueue,
    pub(crate) memory_service: Arc<MemoryService>,
}

impl VqpTableState {
    /// Creates the endpoint for the first message of a source to a port.
    ///
    /// Returns `None` if the port has no listener of the required owner, the backlog is full, the message is not
    /// the first, or memory is short. Called by the poller, so the accounted allocations do not sleep for a
    /// cgroup that has reached its limit.
    pub(super) fn create_passive(
        &mut self,
        (local, admission): (NodeInstance, u64),
        vqpn: u64,
        packet: &Packet,
        message: &VqpMessage,
    ) -> Option<Arc<Vqp>> {
        let port = message.port;
        let listener = self.listeners.iter().find(|entry| entry.port == port)?;
        let is_for_listener = |entry: &&PendingAccept| Arc::ptr_eq(&entry.listener, listener);
        if message.sequence != 0
            || !listener.satisfies(message)
            || self.pending_accepts.iter().filter(is_for_listener).count() >= BACKLOG
        {
            return None;
        }
        let ids = EndpointIds {
            local_node: local,
            local_vqpn: vqpn,
            peer_vqpn: packet.source_vqp,
            port,
            uid: listener.uid,
            required_owner: None,
        };
        let (session_events, listener) = (listener.session_events.clone(), listener.clone());
        let (memcg, gfp) = (listener.memcg.clone(), memcg::gfp_atomic_account());
        let sender = (packet.sender, admission);
        let vqp = Vqp::new(sender, ids, true, session_events, (memcg, gfp)).ok()?;
        let vqpn_entry = RBTreeNode::new(vqpn, vqp.clone(), gfp).ok()?;
        let peer_entry = RBTreeNode::new((packet.sender, packet.source_vqp), vqpn, gfp).ok()?;
        let pending = PendingAccept {
            listener: listener.clone(),
            vqpn,
            peer_uid: message.uid,
        };
        // The poller does not wait for memory: without it the connection is refused.
        self.pending_accepts.push(pending, GFP_ATOMIC).ok()?;
        self.by_vqpn.insert(vqpn_entry);
        self.by_peer.insert(peer_entry);
        listener.pending_event.complete();
        Some(vqp)
    }

    /// Returns `true` if the source of a packet had an endpoint here that is closed.
    pub(super) fn is_in_time_wait(&self, packet: &Packet) -> bool {
        self.time_wait
            .sources
            .contains(&(packet.sender, packet.source_vqp))
    }

    fn has_listener(&self, port: u32) -> bool {
        self.listeners.iter().any(|listener| listener.port == port)
    }

    /// Returns `true` if the listener of a message's port belongs to another user than the message requires.
    pub(super) fn denies(&self, message: &VqpMessage) -> bool {
        let mut listeners = self.listeners.iter();
        let found = listeners.find(|listener| listener.port == message.port);
        found.is_some_and(|listener| !listener.satisfies(message))
    }

    /// Returns the cgroup to charge for messages to `port`, or `None` if the port has no listener.
    pub(super) fn listener_memcg(&self, port: u32) -> Option<Arc<Memcg>> {
        let mut listeners = self.listeners.iter();
        let found = listeners.find(|listener| listener.port == port)?;
        Some(found.memcg.clone())
    }

    /// Returns the endpoint that a packet is addressed to. Without a destination number, the source selects
    /// the endpoint.
    pub(super) fn lookup(&self, packet: &Packet) -> Option<Arc<Vqp>> {
        let vqpn = match packet.destination_vqp {
            0 => *self.by_peer.get(&(packet.sender, packet.source_vqp))?,
            number => number,
        };
        let vqp = self.by_vqpn.get(&vqpn)?;
        (vqp.peer == packet.sender).then(|| vqp.clone())
    }
}

impl VqpTable {
    /// Creates an empty table.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn new(memory_service: Arc<MemoryService>) -> Result<Arc<Self>> {
        let state = VqpTableState {
            by_vqpn: RBTree::new(),
            by_peer: RBTree::new(),
            time_wait: TimeWaitList {
                sources: KVec::from_elem(Default::default(), MAX_TIME_WAIT, GFP_KERNEL)?,
                next_index: 0,
            },
            listeners: KVec::new(),
            pending_accepts: KVec::new(),
        };
        let deferred_wq = OwnedQueue::new(c"kite_vqps", WQ_MAX_ACTIVE)?;
        let atomics_wq = OwnedQueue::new(c"kite_vqp_atomics", WQ_MAX_ACTIVE)?;
        let updates_wq = OwnedQueue::new(c"kite_vqp_updates", WQ_MAX_ACTIVE)?;
        Arc::pin_init(
            try_pin_init!(Self {
                state <- new_pi_mutex!(state, "VqpTable::state"),
                deferred_packets <- new_pi_mutex!(KVec::with_capacity(MAX_DEFERRED_PACKETS, GFP_KERNEL)?, "VqpTable::deferred_packets"),
                registry <- VqpRegistry::new(),
                next_vqpn: Atomic::new(1u64),
                deferred_wq,
                atomics_wq,
                updates_wq,
                memory_service,
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the fabric of the RNIC.
    pub(crate) fn fabric(&self) -> &Arc<Fabric> {
        self.memory_service.fabric()
    }

    /// Adds a VQP of the current process to the registry.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn register(&self, vqp: Arc<Vqp>) -> Result {
        self.registry.add(vqp)
    }

    /// Returns the statistics of the VQPs of one user, or of all VQPs.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn list_vqps(
        &self,
        owner_uid: Option<u32>,
    ) -> Result<KVec<bindings::kite_vqp_info>> {
        let rc_only = self.fabric().dc().is_none();
        self.registry.list(owner_uid, rc_only)
    }

    /// Returns an unused endpoint number.
    pub(super) fn alloc_vqpn(&self) -> u64 {
        self.next_vqpn.fetch_add(1u64, Relaxed)
    }

    /// Adds an endpoint, so packets find it, unless its node was removed or fenced since.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node was removed or fenced.
    /// - `ENOMEM`: out of memory.
    pub(super) fn insert(&self, vqpn: u64, vqp: Arc<Vqp>) -> Result {
        let (peer, admission) = (vqp.peer, vqp.admission);
        let node = RBTreeNode::new(vqpn, vqp, GFP_KERNEL_ACCOUNT)?;
        let mut table = self.state.lock();
        if !self.memory_service.cluster.is_connected(peer, admission) {
            return Err(errno::hostdown());
        }
        table.by_vqpn.insert(node);
        Ok(())
    }

    /// Runs `f` on a worker.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn defer(&self, f: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.deferred_wq.try_spawn(GFP_KERNEL, f)?)
    }

    /// Runs `f` on a worker for requests to other nodes.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn defer_atomics(&self, f: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.atomics_wq.try_spawn(GFP_KERNEL, f)?)
    }

    /// Waits until all workers have finished.
    pub(crate) fn flush(&self) {
        self.deferred_wq.flush();
        self.atomics_wq.flush();
        self.updates_wq.flush();
        // A worker that failed to send an update may have requeued it once. The second flush waits for that
        // item, which does not requeue again, because the peer is no longer a member.
        self.updates_wq.flush();
    }

    /// Closes a VQP, and sends a last update to the peer endpoint if there is one.
    pub(crate) fn close(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        self.registry.remove(vqp);
        self.remove(vqp);
        if vqp.close() {
            self.send_update_deferred(vqp);
        }
    }

    /// Removes an endpoint from the table. Later packets do not find it. A passive endpoint enters the
    /// time-wait list.
    fn remove(&self, vqp: &Vqp) {
        let (vqpn, peer_vqpn) = vqp.vqp_numbers();
        let mut table = self.state.lock();
        table.pending_accepts.retain(|waiting| waiting.vqpn != vqpn);
        let removed = table.by_vqpn.remove_node(&vqpn);
        let has_peer_entry = table.by_peer.get(&(vqp.peer, peer_vqpn)) == Some(&vqpn);
        let peer_entry = has_peer_entry.then(|| table.by_peer.remove_node(&(vqp.peer, peer_vqpn)));
        if peer_entry.is_some() {
            table.time_wait.add((vqp.peer, peer_vqpn));
        }
        drop(table);
        drop((removed, peer_entry));
    }

    /// Creates a listener at a port.
    ///
    /// # Errors
    ///
    /// - `EADDRINUSE`: the port already has a listener.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn listen(
        &self,
        port: u32,
        uid: u32,
        session_events: Arc<EventCounter>,
    ) -> Result<Arc<Listener>> {
        let listener = Listener::new(port, uid, session_events)?;
        let mut table = self.state.lock();
        if table.has_listener(port) {
            return Err(errno::addrinuse());
        }
        table.listeners.push(listener.clone(), GFP_KERNEL)?;
        Ok(listener)
    }

    /// Closes a listener, and all endpoints that wait to be accepted there.
    pub(crate) fn unlisten(self: &Arc<Self>, listener: &Arc<Listener>) {
        listener.is_closed.store(true, Release);
        listener.pending_event.complete_all();
        let mut table = self.state.lock();
        table
            .listeners
            .retain(|other| !Arc::ptr_eq(other, listener));
        drop(table);
        while let Ok(accepted) = self.pop_pending_accept(listener) {
            self.close(&accepted.vqp);
        }
    }

    fn pop_pending_accept(&self, listener: &Arc<Listener>) -> TryResult<AcceptedVqp> {
        let mut table = self.state.lock();
        let mut pending = table.pending_accepts.iter();
        let index = pending.position(|entry| Arc::ptr_eq(&entry.listener, listener));
        let entry = table
            .pending_accepts
            .remove(index.ok_or(TryError::WouldBlock)?)
            .map_err(|_| TryError::WouldBlock)?;
        let vqp = table
            .by_vqpn
            .get(&entry.vqpn)
            .cloned()
            .ok_or(TryError::WouldBlock)?;
        Ok(AcceptedVqp {
            vqp,
            peer_uid: entry.peer_uid,
        })
    }

    /// Accepts a new endpoint, and sends an update to its peer.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: no endpoint waits.
    /// - `EBADF`: the listener is closed.
    pub(crate) fn accept(self: &Arc<Self>, listener: &Arc<Listener>) -> TryResult<AcceptedVqp> {
        if listener.is_closed.load(Acquire) {
            return Err(EBADF.into());
        }
        let accepted = self.pop_pending_accept(listener)?;
        accepted.vqp.state.lock().accepted = true;
        self.send_update_deferred(&accepted.vqp);
        Ok(accepted)
    }

    /// Returns `true` if an endpoint waits to be accepted.
    pub(crate) fn has_pending_accept(&self, listener: &Arc<Listener>) -> bool {
        let table = self.state.lock();
        let mut pending = table.pending_accepts.iter();
        pending.any(|entry| Arc::ptr_eq(&entry.listener, listener))
    }

    /// Closes the endpoints for which `is_connected` returns `false`, with `error`.
    pub(crate) fn shutdown_unless(&self, is_connected: impl Fn(&Vqp) -> bool, error: Error) {
        let mut next_vqpn = 0;
        while let Some((vqpn, vqp)) = self.next_vqp(next_vqpn) {
            next_vqpn = vqpn + 1;
            if !is_connected(&vqp) {
                vqp.shutdown(error);
            }
        }
    }

    fn next_vqp(&self, min_vqpn: u64) -> Option<(u64, Arc<Vqp>)> {
        let table = self.state.lock();
        let cursor = table.by_vqpn.cursor_lower_bound(&min_vqpn)?;
        let (vqpn, vqp) = cursor.current();
        Some((*vqpn, vqp.clone()))
    }
}
