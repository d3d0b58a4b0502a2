// SPDX-License-Identifier: GPL-2.0

//! Session with a peer: the RC connections to it, and the records of control requests in both directions.
//!
//! # Operation
//!
//! All users share the K connections of a session (LITE, section 6.1). A control request of the peer is
//! admitted ([`Peer::admit_request`]) unless a copy of it is in progress or it has ended at the peer. A
//! request that must be executed at most once has a sequence number ([`Peer::assign_sequence`]). The receiver
//! executes it through [`Peer::execute_once`], which returns the recorded reply for a copy. Pushes have a
//! sequence space of their own, because their duration depends on a third node.
//!
//! # Recovery
//!
//! The sender retries a request until it receives a reply. The records last as long as the [`Peer`]. A node
//! that joins in another incarnation starts with new sequence spaces. A node that is admitted again in the
//! same incarnation is another [`Peer`], whose numbers start above those of the former one
//! ([`FirstSequences`]).
//!
//! # Locking
//!
//! - `PeerSession::served_requests` and `SequenceSpace::sent` are spin locks, each for the value that the
//!   lock contains.
//! - `SequenceSpace::replies` (mutex) protects the recorded replies of one sequence space.
//!   [`Peer::execute_once`] holds the mutex while it executes the request, so the locks of the request are
//!   taken after it.

use super::{identity::PeerIdentity, suspicion::Suspicion, Peer};
use crate::{
    errno::{self, TryError, TryResult},
    fabric::{conn::Conn, qos::ConnSubset},
    sys::thread::current_cpu_rank,
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Relaxed, Release},
        Arc, Mutex, SpinLock,
    },
};
use kite_core::{
    proto::{
        conn::ConnRole,
        inflight_requests::InflightRequests,
        once::{ReplyCache, RequestState, SequenceWindow},
    },
    wire::{setup::SetupDatagram, ControlHeader, ControlRequest, PUSH_SEQUENCE_FLAG},
};

/// Session of this node with one peer.
#[pin_data]
pub(crate) struct PeerSession {
    conns: KVec<Arc<Conn>>,
    /// Number of connections that the peer accepts. 1 until the first datagram of the peer arrives.
    peer_max_conns: Atomic<u32>,
    /// Requests of the peer that this node executes.
    #[pin]
    served_requests: SpinLock<InflightRequests>,
    /// Sequence space of all requests but pushes.
    #[pin]
    request_sequences: SequenceSpace,
    /// Sequence space of pushes.
    #[pin]
    push_sequences: SequenceSpace,
}

impl PeerSession {
    /// Creates a session with idle connections.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new(
        identity: &PeerIdentity,
        suspicion: &Arc<Suspicion>,
        first_sequences: &FirstSequences,
    ) -> Result<Pin<KBox<Self>>> {
        let [first_request, first_push] = first_sequences.get();
        let conns = Self::create_conns(identity, suspicion)?;
        KBox::pin_init(
            pin_init!(Self {
                conns,
                peer_max_conns: Atomic::new(1u32),
                served_requests <- new_spinlock!(InflightRequests::default(), "PeerSession::served_requests"),
                request_sequences <- SequenceSpace::new(first_request),
                push_sequences <- SequenceSpace::new(first_push),
            }),
            GFP_KERNEL,
        )
    }

    fn create_conns(
        identity: &PeerIdentity,
        suspicion: &Arc<Suspicion>,
    ) -> Result<KVec<Arc<Conn>>> {
        let (local, peer) = (&identity.local, identity.peer);
        let role = if local.instance < peer {
            ConnRole::Active
        } else {
            ConnRole::Passive
        };
        let mut conns = KVec::with_capacity(identity.max_conns().into(), GFP_KERNEL)?;
        for i in 0..identity.max_conns() {
            let conn = Conn::new(identity, i, role, suspicion.clone())?;
            conns.push(conn, GFP_KERNEL)?;
        }
        Ok(conns)
    }

    /// Closes all connections permanently: users receive `error`.
    pub(in crate::fabric) fn close(&self, error: Error) {
        self.conns.iter().for_each(|conn| conn.close(error));
    }

    /// Returns the next numbers of requests and of pushes.
    pub(super) fn next_sequences(&self) -> [u64; 2] {
        [&self.request_sequences, &self.push_sequences].map(|space| space.sent.lock().next_number())
    }

    fn sequence_space(&self, sequence: u64) -> &SequenceSpace {
        if sequence & PUSH_SEQUENCE_FLAG == 0 {
            &self.request_sequences
        } else {
            &self.push_sequences
        }
    }

    /// Passes a datagram of the peer to its connection. Returns `false` if there is no such connection.
    fn on_setup(&self, setup: SetupDatagram) -> bool {
        self.peer_max_conns
            .store(setup.conns_per_peer.into(), Release);
        let conn = self.conns.get(usize::from(setup.conn_index));
        conn.map(|conn| conn.on_setup(setup)).is_some()
    }

    /// Selects one of the connections that both nodes accept. The order of preference is: the connection of
    /// this CPU in `subset`, a ready connection of `subset`, any ready connection. A failed QP therefore
    /// blocks no user. If the connection of this CPU is not ready, requests it for later, within the budget.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the peer is this node, which has no connections.
    fn select_conn(&self, subset: ConnSubset) -> Result<Arc<Conn>> {
        let usable = self
            .conns
            .len()
            .min(self.peer_max_conns.load(Acquire) as usize);
        let (first, count) = subset.range(usable);
        let cpu_offset = current_cpu_rank() as usize % count;
        let subset_conns = || self.conns.iter().skip(first).take(count);
        let rotated = || subset_conns().cycle().skip(cpu_offset).take(count);
        let preferred = rotated().next().ok_or(EINVAL)?;
        if preferred.is_ready() {
            return Ok(preferred.clone());
        }
        preferred.request_connect_if_budget();
        let is_ready = |conn: &&Arc<Conn>| conn.is_ready();
        let any_ready = || self.conns.iter().take(usable).find(is_ready);
        Ok(rotated()
            .find(is_ready)
            .or_else(any_ready)
            .unwrap_or(preferred)
            .clone())
    }
}

/// First sequence numbers of a session: of requests, and of pushes. Relaxed: set before the peer is shared.
pub(super) struct FirstSequences([Atomic<u64>; 2]);

impl FirstSequences {
    /// Returns the numbers of a peer without a predecessor.
    pub(super) fn new() -> Self {
        Self([Atomic::new(1u64), Atomic::new(1u64)])
    }

    /// Returns the numbers.
    pub(super) fn get(&self) -> [u64; 2] {
        [&self.0[0], &self.0[1]].map(|first| first.load(Relaxed))
    }

    /// Sets the numbers.
    pub(super) fn set(&self, first: [u64; 2]) {
        for (stored, first) in self.0.iter().zip(first) {
            stored.store(first, Relaxed);
        }
    }
}

/// Sequence numbers of at-most-once requests, in both directions.
#[pin_data]
struct SequenceSpace {
    /// Numbers of the requests of this node.
    #[pin]
    sent: SpinLock<SequenceWindow>,
    /// Replies of this node to the requests of the peer.
    #[pin]
    replies: Mutex<ReplyCache>,
}

impl SequenceSpace {
    /// Creates a space in which the numbers of this node start at `first`.
    fn new(first: u64) -> impl PinInit<Self> {
        pin_init!(Self {
            sent <- new_spinlock!(SequenceWindow::starting_at(first), "SequenceSpace::sent"),
            replies <- new_mutex!(ReplyCache::default(), "SequenceSpace::replies"),
        })
    }
}

/// Sequence number of an at-most-once request. Dropping the guard frees the number: no thread waits for the
/// reply any longer.
pub(crate) struct SequenceGuard {
    pub(crate) peer: Arc<Peer>,
    pub(crate) sequence: u64,
}

impl Drop for SequenceGuard {
    fn drop(&mut self) {
        if let Some(session) = self.peer.session() {
            let space = session.sequence_space(self.sequence);
            space
                .sent
                .lock()
                .complete(self.sequence & !PUSH_SEQUENCE_FLAG);
        }
    }
}

/// Returns the recorded result of a request that was admitted before.
///
/// # Errors
///
/// - [`TryError::InTransition`]: the request is being executed.
/// - `ETIMEDOUT`: the outcome is unknown.
fn recorded_result(state: RequestState) -> TryResult<u64> {
    match state {
        RequestState::Done(reply) => Ok(reply),
        RequestState::Indeterminate => Err(ETIMEDOUT.into()),
        RequestState::New | RequestState::InProgress => Err(TryError::InTransition),
    }
}

/// Control requests.
impl Peer {
    /// Returns `true` if a request that arrived on endpoint `endpoint_id` must be executed. The caller must
    /// then call [`Self::complete_request`]. Copies of a request in progress, and requests that have ended at
    /// the peer, are rejected.
    pub(crate) fn admit_request(
        &self,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
        endpoint_id: u32,
    ) -> bool {
        // Without memory the request is dropped, and the peer retries it.
        self.ensure_session().is_ok_and(|session| {
            let mut served = session.served_requests.lock();
            served.admit(
                header.request_id,
                header.low_watermark,
                request.is_undo(),
                endpoint_id,
            )
        })
    }

    /// Returns `true` while the peer waits for the reply to its request `id`.
    pub(crate) fn is_request_live(&self, id: u64) -> bool {
        self.session()
            .is_some_and(|session| session.served_requests.lock().is_live(id))
    }

    /// Records that a request has been executed. Must be called before the reply is sent. Returns the ID of
    /// the endpoint on which the reply must be sent.
    pub(crate) fn complete_request(&self, header: &ControlHeader) -> Option<u32> {
        self.session()?
            .served_requests
            .lock()
            .complete(header.request_id)
    }

    /// Assigns a sequence number to an at-most-once request. `kind` is 0, or [`PUSH_SEQUENCE_FLAG`].
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the window of numbers is full.
    /// - `EHOSTDOWN`: the peer was fenced.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn assign_sequence(self: &Arc<Self>, kind: u64) -> TryResult<SequenceGuard> {
        let space = self.ensure_session()?.sequence_space(kind);
        let sequence = space.sent.lock().allocate().ok_or(TryError::WouldBlock)?;
        let seq_guard = SequenceGuard {
            peer: self.clone(),
            sequence: sequence | kind,
        };
        // Check after the allocation: a peer that continues the numbers has read them after the close, so the
        // number of an open peer is not used again.
        if self.is_closed() {
            return Err(errno::hostdown().into());
        }
        Ok(seq_guard)
    }

    /// Executes the request of the peer with this number, or returns the recorded reply. Other at-most-once
    /// requests of the peer in the same sequence space wait for `execute`. If `execute` fails, a copy of the
    /// request may execute it again.
    ///
    /// # Errors
    ///
    /// - The error of `execute`.
    /// - [`TryError::InTransition`]: the request is being executed.
    /// - `ETIMEDOUT`: the number is too old, so the peer waits for no reply, or the outcome is unknown.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn execute_once(
        &self,
        sequence: u64,
        execute: impl FnOnce() -> Result<u64>,
    ) -> TryResult<u64> {
        let mut cache = self
            .ensure_session()?
            .sequence_space(sequence)
            .replies
            .lock();
        let sequence = sequence & !PUSH_SEQUENCE_FLAG;
        match cache.admit(sequence).ok_or(ETIMEDOUT)? {
            RequestState::New => {
                let result = execute();
                cache.complete(sequence, result.ok());
                Ok(result?)
            }
            state => recorded_result(state),
        }
    }

    /// Like [`Self::execute_once`], but other requests do not wait for `execute`. If `execute` returns
    /// `ETIMEDOUT`, the outcome is unknown, and the request is never executed again.
    ///
    /// # Errors
    ///
    /// See [`Self::execute_once`].
    pub(crate) fn execute_once_unordered(
        &self,
        sequence: u64,
        execute: impl FnOnce() -> Result<u64>,
    ) -> TryResult<u64> {
        let state = self.admit_once(sequence)?;
        if state != RequestState::New {
            return recorded_result(state);
        }
        let result = execute();
        let mut cache = self
            .ensure_session()?
            .sequence_space(sequence)
            .replies
            .lock();
        let sequence = sequence & !PUSH_SEQUENCE_FLAG;
        match result {
            Err(error) if error == ETIMEDOUT => cache.mark_indeterminate(sequence),
            _ => cache.complete(sequence, result.ok()),
        }
        Ok(result?)
    }

    /// Admits the request of the peer with this number for asynchronous execution. After
    /// [`RequestState::New`], the caller must call [`Self::complete_once`].
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT`: the number is too old, so the peer waits for no reply.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn admit_once(&self, sequence: u64) -> Result<RequestState> {
        let mut cache = self
            .ensure_session()?
            .sequence_space(sequence)
            .replies
            .lock();
        cache.admit(sequence & !PUSH_SEQUENCE_FLAG).ok_or(ETIMEDOUT)
    }

    /// Records the reply to the request of the peer with this number. `None` if the request was not executed:
    /// a copy may then be executed.
    pub(crate) fn complete_once(&self, sequence: u64, reply: Option<u64>) {
        if let Some(session) = self.session() {
            let mut cache = session.sequence_space(sequence).replies.lock();
            cache.complete(sequence & !PUSH_SEQUENCE_FLAG, reply);
        }
    }
}

/// Connections.
impl Peer {
    /// Returns all connections, ready or not. Empty without a session.
    pub(in crate::fabric) fn conns(&self) -> &[Arc<Conn>] {
        self.session().map_or(&[], |session| &session.conns)
    }

    /// Passes a datagram of the peer to its connection. Returns `false` if there is no such connection.
    pub(in crate::fabric) fn on_setup(&self, setup: SetupDatagram) -> bool {
        // Without memory, drop the datagram as if it was lost.
        self.ensure_session()
            .map_or(true, |session| session.on_setup(setup))
    }

    /// Returns the connection that currently uses the endpoint with this ID.
    pub(in crate::fabric) fn conn_of_endpoint(&self, endpoint_id: u32) -> Option<&Arc<Conn>> {
        self.conns()
            .iter()
            .find(|conn| conn.has_endpoint(endpoint_id))
    }

    /// Selects a connection of `subset`, which may have no QP yet. See [`PeerSession::select_conn`].
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - `EINVAL`: the peer is this node, which has no connections.
    pub(crate) fn select_conn(&self, subset: ConnSubset) -> Result<Arc<Conn>> {
        self.ensure_session()?.select_conn(subset)
    }

    /// Returns a connection of `subset` if one is ready. Otherwise requests one.
    pub(crate) fn ready_conn(&self, subset: ConnSubset) -> Option<Arc<Conn>> {
        let conn = self.select_conn(subset).ok()?;
        if conn.is_ready() {
            return Some(conn);
        }
        conn.request_connect();
        None
    }
}
