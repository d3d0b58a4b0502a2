// SPDX-License-Identifier: GPL-2.0

//! What there is between this node and another that talk: the K connections shared by all who do (LITE, section 6.1),
//! and what is remembered of requests, each way, so that none is done twice.

use super::{identity::PeerIdentity, suspicion::Suspicion, Peer};
use crate::{
    errno,
    fabric::{conn::Conn, qos::ConnSubset},
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
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

/// Two nodes that talk.
#[pin_data]
pub(crate) struct PeerSession {
    conns: KVec<Arc<Conn>>,
    /// How many of them the peer is willing to have; 1 until a datagram of its has told.
    peer_max_conns: Atomic<u32>,
    /// Its calls that we answer.
    #[pin]
    served_requests: SpinLock<InflightRequests>,
    /// Numbers of our requests that it must not do twice.
    #[pin]
    request_sequences: SequenceSpace,
    /// Of pushes.
    #[pin]
    push_sequences: SequenceSpace,
}

impl PeerSession {
    /// Nothing is connected, and nobody has asked for anything.
    pub(in crate::fabric) fn new(
        identity: &PeerIdentity,
        suspicion: &Arc<Suspicion>,
    ) -> Result<Pin<KBox<Self>>> {
        let conns = Self::create_conns(identity, suspicion)?;
        KBox::pin_init(
            pin_init!(Self {
                conns,
                peer_max_conns: Atomic::new(1u32),
                served_requests <- new_spinlock!(InflightRequests::default()),
                request_sequences <- SequenceSpace::new(),
                push_sequences <- SequenceSpace::new(),
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
            let (waker, stats) = (local.connector_waker.clone(), local.stats.clone());
            let conn = Conn::new(peer.node, i, role, waker, suspicion.clone(), stats)?;
            conns.push(conn, GFP_KERNEL)?;
        }
        Ok(conns)
    }

    /// Nobody can use a connection any more, and gets `error`.
    pub(in crate::fabric) fn close(&self, error: Error) {
        self.conns.iter().for_each(|conn| conn.close(error));
    }

    fn sequence_space(&self, sequence: u64) -> &SequenceSpace {
        if sequence & PUSH_SEQUENCE_FLAG == 0 {
            &self.request_sequences
        } else {
            &self.push_sequences
        }
    }

    /// Takes a datagram from the peer to the connection that it is about. Returns whether there is one.
    fn on_setup(&self, setup: SetupDatagram) -> bool {
        self.peer_max_conns
            .store(setup.conns_per_peer.into(), Release);
        let conn = self.conns.get(usize::from(setup.conn_index));
        conn.map(|conn| conn.on_setup(setup)).is_some()
    }

    /// Chooses a connection, of the share of those that both nodes have: that of this processor if it is
    /// ready, else any that is, of the share if possible, so that one failed queue pair stops nobody. That of this
    /// processor is then made ready for later.
    fn select_conn(&self, subset: ConnSubset) -> Result<Arc<Conn>> {
        let usable = self
            .conns
            .len()
            .min(self.peer_max_conns.load(Acquire) as usize);
        let (first, count) = subset.range(usable);
        let cpu_offset = kernel::cpu::CpuId::current().as_u32() as usize % count;
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

/// Requests that must not be done twice, each way.
#[pin_data]
struct SequenceSpace {
    /// Numbers of ours.
    #[pin]
    sent: SpinLock<SequenceWindow>,
    /// Our answers to those of the peer.
    #[pin]
    replies: Mutex<ReplyCache>,
}

impl SequenceSpace {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            sent <- new_spinlock!(SequenceWindow::default()),
            replies <- new_mutex!(ReplyCache::default()),
        })
    }
}

/// The number of a request that the peer must not do twice, for as long as its answer is waited for.
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

/// The answer to a request that was begun before.
fn recorded_result(state: RequestState) -> Result<u64> {
    match state {
        RequestState::Done(reply) => Ok(reply),
        RequestState::Indeterminate => Err(ETIMEDOUT),
        RequestState::New | RequestState::InProgress => Err(errno::inprogress()),
    }
}

/// Of requests.
impl Peer {
    /// Whether to answer a request that came by the channel of number `by`; if so, [`Self::end_answer`] is
    /// to follow.
    pub(crate) fn admit_request(
        &self,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
        endpoint_id: u32,
    ) -> bool {
        // Without memory the request is asked for again.
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

    /// Whether the peer still wants an answer to its call of that number.
    pub(crate) fn is_request_live(&self, id: u64) -> bool {
        self.session()
            .is_some_and(|session| session.served_requests.lock().is_live(id))
    }

    /// What the call asked for is done. To be told before the peer can know. Returns the number of the
    /// channel by which to answer.
    pub(crate) fn complete_request(&self, header: &ControlHeader) -> Option<u32> {
        self.session()?
            .served_requests
            .lock()
            .complete(header.request_id)
    }

    /// Numbers a request that must not be done twice; `kind` is 0, or [`PUSH`].
    ///
    /// # Errors
    ///
    /// `EAGAIN` while too many are under way; `ENOMEM`.
    pub(crate) fn assign_sequence(self: &Arc<Self>, kind: u64) -> Result<SequenceGuard> {
        let space = self.ensure_session()?.sequence_space(kind);
        let sequence = space.sent.lock().allocate().ok_or(EAGAIN)?;
        Ok(SequenceGuard {
            peer: self.clone(),
            sequence: sequence | kind,
        })
    }

    /// Does what the peer's request of this number asks for, unless it was done; other such requests of its
    /// wait for `act`.
    ///
    /// # Errors
    ///
    /// Those of `act`; `EINPROGRESS` if it is being done; `ETIMEDOUT` if nobody waits for the answer any more; `ENOMEM`.
    pub(crate) fn execute_once(
        &self,
        sequence: u64,
        execute: impl FnOnce() -> Result<u64>,
    ) -> Result<u64> {
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
                result
            }
            state => recorded_result(state),
        }
    }

    /// As [`Self::once`], but others do not wait for `act`, and `ETIMEDOUT` of it says that nobody knows whether it was
    /// done: then it never is again.
    pub(crate) fn execute_once_unordered(
        &self,
        sequence: u64,
        execute: impl FnOnce() -> Result<u64>,
    ) -> Result<u64> {
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
        result
    }

    /// As [`Self::once`], but what is begun is done by and by: [`Self::finish`] is to be told what came of it.
    pub(crate) fn admit_once(&self, sequence: u64) -> Result<RequestState> {
        let mut cache = self
            .ensure_session()?
            .sequence_space(sequence)
            .replies
            .lock();
        cache.admit(sequence & !PUSH_SEQUENCE_FLAG).ok_or(ETIMEDOUT)
    }

    /// What the peer's request of this number has as its answer; without one nothing was done.
    pub(crate) fn complete_once(&self, sequence: u64, reply: Option<u64>) {
        if let Some(session) = self.session() {
            let mut cache = session.sequence_space(sequence).replies.lock();
            cache.complete(sequence & !PUSH_SEQUENCE_FLAG, reply);
        }
    }
}

/// Of connections.
impl Peer {
    /// All there are, ready or not.
    pub(in crate::fabric) fn conns(&self) -> &[Arc<Conn>] {
        self.session().map_or(&[], |session| &session.conns)
    }

    /// Takes a datagram from the peer to the connection that it is about. Returns whether there is one.
    pub(in crate::fabric) fn on_setup(&self, setup: SetupDatagram) -> bool {
        // Without memory it is as if it were lost.
        self.ensure_session()
            .map_or(true, |session| session.on_setup(setup))
    }

    /// The connection that has the channel of number `by`.
    pub(in crate::fabric) fn conn_of_endpoint(&self, endpoint_id: u32) -> Option<&Arc<Conn>> {
        self.conns()
            .iter()
            .find(|conn| conn.has_endpoint(endpoint_id))
    }

    /// Chooses a connection of that share, which there may have to be made.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EINVAL` if it is this node.
    pub(crate) fn select_conn(&self, subset: ConnSubset) -> Result<Arc<Conn>> {
        self.ensure_session()?.select_conn(subset)
    }
}
