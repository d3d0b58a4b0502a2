// SPDX-License-Identifier: GPL-2.0

//! Ends of virtual queue pairs by number, and those who listen for new ones (KRCORE, section 4.5).
//!
//! Who connects to a port tells nobody. Its first message makes the other end, which waits at the port until a process
//! accepts it; messages that have come are kept meanwhile. How packets find their ends is in [`super::recv::deliver`], and what
//! ends say to each other in [`super::recv::window_update`].

use super::{registry::RegisteredVqp, send::EndpointIds, Vqp};
use crate::{
    errno,
    region::MemoryService,
    sys::{
        completion::CountingCompletion,
        deadline::Deadline,
        event_counter::EventCounter,
        memcg::{self, Memcg},
        workqueue::OwnedQueue,
    },
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Relaxed, Release},
        Arc, Mutex,
    },
};
use kite_core::{
    view::NodeInstance,
    wire::packet::{Packet, VqpMessage},
};

/// New ends that may wait at a port.
const BACKLOG: usize = 32;

/// Ends that are over, and remembered.
const MAX_TIME_WAIT: usize = 1024;

/// Packets that are kept of nodes that are not in the view.
pub(super) const MAX_DEFERRED_PACKETS: usize = 1024;

/// Workers at a time that tell other nodes something, and that find something out.
const WQ_MAX_ACTIVE: c_int = 64;

/// How long somebody sleeps who waits, should nobody wake him.
const WAIT_SLICE_MS: u32 = 50;

/// Somebody who listens at a port.
#[pin_data]
pub(crate) struct Listener {
    port: u32,
    uid: u32,
    #[pin]
    pending_event: CountingCompletion,
    /// It listens no more.
    is_closed: AtomicFlag,
    session_events: Arc<EventCounter>,
    /// Pays for ends that are yet to be accepted.
    memcg: Arc<Memcg>,
}

impl Listener {
    /// Does what says `EAGAIN` while nobody waits to be accepted, whenever somebody has come.
    ///
    /// # Errors
    ///
    /// Those of `f`; `ETIMEDOUT`, `EINTR`.
    pub(crate) fn wait<T>(
        &self,
        deadline: Deadline,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            match f() {
                Err(error) if error == EAGAIN => deadline.check()?,
                done => return done,
            }
            let woken = self
                .pending_event
                .wait_interruptible_timeout_ms(deadline.remaining_ms().min(WAIT_SLICE_MS));
            woken.map(drop).or_else(|_| deadline.handle_signal())?;
        }
    }
}

/// A new end that nobody has accepted yet.
struct PendingAccept {
    listener: Arc<Listener>,
    vqpn: u64,
    peer_uid: u32,
}

/// A new end that somebody has accepted.
pub(crate) struct AcceptedVqp {
    pub(crate) vqp: Arc<Vqp>,
    /// The user at the other end.
    pub(crate) peer_uid: u32,
}

/// The last ends that messages to a port had made, by who sent them, of those that are over.
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
    /// Those that messages to a port have made, by who sent them.
    by_peer: RBTree<(NodeInstance, u64), u64>,
    /// Of those that are over: their first message may come again.
    time_wait: TimeWaitList,
    listeners: KVec<Arc<Listener>>,
    pending_accepts: KVec<PendingAccept>,
}

/// All ends of a node.
#[pin_data]
pub(crate) struct VqpTable {
    #[pin]
    pub(super) state: Mutex<VqpTableState>,
    /// Packets of nodes that are not in the view, perhaps not yet.
    #[pin]
    pub(super) deferred_packets: Mutex<KVec<KVec<u8>>>,
    /// Those that processes have.
    #[pin]
    pub(super) registry: Mutex<KVec<RegisteredVqp>>,
    next_vqpn: Atomic<u64>,
    deferred_wq: OwnedQueue,
    /// Those who ask other nodes for what RNICs do not do, which may take as long.
    atomics_wq: OwnedQueue,
    /// Those who tell other ends, for as long as that takes: nothing else waits for them.
    pub(super) updates_wq: OwnedQueue,
    pub(crate) lmr: Arc<MemoryService>,
}

impl VqpTableState {
    /// Makes the end for the first message of a source to a port, if somebody listens there and has room. The poller does
    /// so, which waits for no cgroup that is full.
    pub(super) fn create_passive(
        &mut self,
        local: NodeInstance,
        vqpn: u64,
        packet: &Packet,
        message: &VqpMessage,
    ) -> Option<Arc<Vqp>> {
        let port = message.port;
        let listener = self.listeners.iter().find(|entry| entry.port == port)?;
        let is_for_listener = |entry: &&PendingAccept| Arc::ptr_eq(&entry.listener, listener);
        if message.sequence != 0
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
        };
        let (session_events, listener) = (listener.session_events.clone(), listener.clone());
        let (memcg, gfp) = (listener.memcg.clone(), memcg::gfp_atomic_account());
        let vqp = Vqp::new(packet.sender, ids, true, session_events, (memcg, gfp)).ok()?;
        let vqpn_entry = RBTreeNode::new(vqpn, vqp.clone(), gfp).ok()?;
        let peer_entry = RBTreeNode::new((packet.sender, packet.source_vqp), vqpn, gfp).ok()?;
        let pending = PendingAccept {
            listener: listener.clone(),
            vqpn,
            peer_uid: message.uid,
        };
        self.pending_accepts.push(pending, GFP_KERNEL).ok()?;
        self.by_vqpn.insert(vqpn_entry);
        self.by_peer.insert(peer_entry);
        listener.pending_event.complete();
        Some(vqp)
    }

    /// Whether the end that messages of a source had made is over.
    pub(super) fn is_in_time_wait(&self, packet: &Packet) -> bool {
        self.time_wait
            .sources
            .contains(&(packet.sender, packet.source_vqp))
    }

    fn has_listener(&self, port: u32) -> bool {
        self.listeners.iter().any(|listener| listener.port == port)
    }

    /// Who pays for what comes to a port, if somebody listens there.
    pub(super) fn listener_memcg(&self, port: u32) -> Option<Arc<Memcg>> {
        let mut listeners = self.listeners.iter();
        let found = listeners.find(|listener| listener.port == port)?;
        Some(found.memcg.clone())
    }

    /// The end that a packet is for.
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
    /// None.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(lmr: Arc<MemoryService>) -> Result<Arc<Self>> {
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
        let deferred_wq = OwnedQueue::new(c"kite_list_vqps", WQ_MAX_ACTIVE)?;
        let atomics_wq = OwnedQueue::new(c"kite_vqp_asks", WQ_MAX_ACTIVE)?;
        let updates_wq = OwnedQueue::new(c"kite_vqp_tells", WQ_MAX_ACTIVE)?;
        Arc::pin_init(
            try_pin_init!(Self {
                state <- new_mutex!(state),
                deferred_packets <- new_mutex!(KVec::with_capacity(MAX_DEFERRED_PACKETS, GFP_KERNEL)?),
                registry <- new_mutex!(KVec::new()),
                next_vqpn: Atomic::new(1u64),
                deferred_wq,
                atomics_wq,
                updates_wq,
                lmr,
            }),
            GFP_KERNEL,
        )
    }

    /// A number for an end.
    pub(super) fn alloc_vqpn(&self) -> u64 {
        self.next_vqpn.fetch_add(1u64, Relaxed)
    }

    /// Enters an end, for packets to find, unless its node has left.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN`, `ENOMEM`.
    pub(super) fn insert(&self, vqpn: u64, vqp: Arc<Vqp>) -> Result {
        let peer = vqp.peer;
        let node = RBTreeNode::new(vqpn, vqp, GFP_KERNEL_ACCOUNT)?;
        let mut table = self.state.lock();
        if !self.lmr.cluster.is_member(peer) {
            return Err(errno::hostdown());
        }
        table.by_vqpn.insert(node);
        Ok(())
    }

    /// Has a worker do something.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn defer(&self, f: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.deferred_wq.try_spawn(GFP_KERNEL, f)?)
    }

    /// Has a worker ask another node for something.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn defer_atomics(&self, f: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.atomics_wq.try_spawn(GFP_KERNEL, f)?)
    }

    /// Waits until the workers have done all that they were given.
    pub(crate) fn flush(&self) {
        self.deferred_wq.flush();
        self.atomics_wq.flush();
        self.updates_wq.flush();
        // Who was at it may have left it for later, when there is nobody to tell any more.
        self.updates_wq.flush();
    }

    /// Ends a queue pair, and tells the other end if there is one.
    pub(crate) fn close(self: &Arc<Self>, vqp: &Arc<Vqp>) {
        self.unregister(vqp);
        self.remove(vqp);
        if vqp.close() {
            self.send_update_deferred(vqp);
        }
    }

    /// Packets find it no more.
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

    /// Listens at a port.
    ///
    /// # Errors
    ///
    /// `EADDRINUSE` if somebody does; `ENOMEM`.
    pub(crate) fn listen(
        &self,
        port: u32,
        uid: u32,
        session_events: Arc<EventCounter>,
    ) -> Result<Arc<Listener>> {
        let memcg = Arc::new(Memcg::current(), GFP_KERNEL_ACCOUNT)?;
        let listener = Arc::pin_init(
            pin_init!(Listener { port, uid, pending_event <- CountingCompletion::new(), is_closed: AtomicFlag::new(false), session_events, memcg }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let mut table = self.state.lock();
        if table.has_listener(port) {
            return Err(errno::addrinuse());
        }
        table.listeners.push(listener.clone(), GFP_KERNEL)?;
        Ok(listener)
    }

    /// Listens no more. Those that nobody has accepted end.
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

    fn pop_pending_accept(&self, listener: &Arc<Listener>) -> Result<AcceptedVqp> {
        let mut table = self.state.lock();
        let mut pending = table.pending_accepts.iter();
        let index = pending.position(|entry| Arc::ptr_eq(&entry.listener, listener));
        let entry = table
            .pending_accepts
            .remove(index.ok_or(EAGAIN)?)
            .map_err(|_| EAGAIN)?;
        let vqp = table.by_vqpn.get(&entry.vqpn).cloned().ok_or(EAGAIN)?;
        Ok(AcceptedVqp {
            vqp,
            peer_uid: entry.peer_uid,
        })
    }

    /// Accepts a new end, and tells the other.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if none waits, `EBADF` if nobody listens any more.
    pub(crate) fn accept(self: &Arc<Self>, listener: &Arc<Listener>) -> Result<AcceptedVqp> {
        if listener.is_closed.load(Acquire) {
            return Err(EBADF);
        }
        let accepted = self.pop_pending_accept(listener)?;
        accepted.vqp.state.lock().accepted = true;
        self.send_update_deferred(&accepted.vqp);
        Ok(accepted)
    }

    /// Whether somebody waits to be accepted.
    pub(crate) fn has_pending_accept(&self, listener: &Arc<Listener>) -> bool {
        let table = self.state.lock();
        let mut pending = table.pending_accepts.iter();
        pending.any(|entry| Arc::ptr_eq(&entry.listener, listener))
    }

    /// Ends of nodes that left are over.
    pub(crate) fn shutdown_removed(&self, is_member: impl Fn(NodeInstance) -> bool, error: Error) {
        let mut next_vqpn = 0;
        while let Some((vqpn, vqp)) = self.next_vqp(next_vqpn) {
            next_vqpn = vqpn + 1;
            if !is_member(vqp.peer) {
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

impl Vqp {
    /// Of this end, and of the other.
    pub(super) fn vqp_numbers(&self) -> (u64, u64) {
        let ids = &self.state.lock().ids;
        (ids.local_vqpn, ids.peer_vqpn)
    }
}
