// SPDX-License-Identifier: GPL-2.0

//! Peers: the other nodes of the view, each in one incarnation.
//!
//! # Operation
//!
//! A new peer holds its identity and the address of its setup QP only. The [`PeerSession`] and the
//! [`Suspicion`] are created at first use, because a node of a large cluster communicates with few of the
//! others (KRCORE, section 4.1). The connector thread resolves the route. The address of a peer, with its DCT
//! and its keys, is cached after the first read of the directory.
//!
//! # Recovery
//!
//! The route is discarded when the peer does not respond, and resolved again. When the peer is fenced because
//! it left the view or is unreachable, [`Peer::close`] closes its connections, and users receive the error of
//! the close. A node that is admitted again is another peer. In the same incarnation, this peer continues the
//! sequence numbers of the former one ([`Peer::continue_sequences`]).
//!
//! # Locking
//!
//! - `Peer::state` (spin lock) protects the route, the address and the error of the close. The lock is held
//!   while a session or a suspicion is stored. Either [`Peer::close`] then finds the stored object, or the
//!   storing thread finds the error.
//! - `Peer::request_rate` and `Peer::view_announcer` are spin locks, each for the value that the lock
//!   contains.
//! - Order: `Peer::state`, then `Conn::state`.

pub(crate) mod identity;
pub(crate) mod session;
pub(crate) mod suspicion;
pub(super) mod table;
pub(crate) mod view_announce;

use self::{
    identity::PeerIdentity,
    session::{FirstSequences, PeerSession},
    suspicion::Suspicion,
};
use crate::{
    errno,
    mlx5::wr::DcAddress,
    verbs::address::{AddressHandle, PortAddress},
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{atomic::AtomicFlag, Arc, SetOnce, SpinLock},
};
use kite_core::{
    policy::promotion::DecayingCounter, proto::view_announce::ViewAnnouncer, view::NodeInstance,
};

/// Address of the setup QP of a node.
#[derive(Clone, Copy)]
pub(crate) struct ControlAddress {
    pub(crate) destination: PortAddress,
    pub(crate) qpn: u32,
}

/// Resolution of the route to a peer.
pub(super) enum RouteState {
    Unresolved,
    /// A worker resolves the route.
    Resolving,
    Resolved(Arc<AddressHandle>),
}

/// Address of a peer for RDMA, from its directory entry.
pub(crate) struct PeerAddress {
    /// DC address. `None` unless both nodes have DC.
    pub(crate) dc_address: Option<DcAddress>,
    /// `true` if RDMA atomics to the peer are possible: by DC, or because both RNICs have kernel atomics.
    pub(crate) has_atomics: bool,
    /// Epoch of the view for which the peer published the entry.
    pub(crate) epoch: u64,
    /// Key to the memory of the peer.
    pub(crate) rkey: u32,
    /// Address of the MR table of the peer.
    pub(crate) mr_table_addr: u64,
}

/// State of a peer, protected by `Peer::state`.
struct PeerState {
    route: RouteState,
    address: Option<Arc<PeerAddress>>,
    /// Error that users receive after the peer was fenced.
    close_error: Option<Error>,
}

/// Reachable node of the view, in one incarnation and of one admission.
#[pin_data]
pub(crate) struct Peer {
    pub(crate) identity: PeerIdentity,
    pub(crate) control_address: ControlAddress,
    /// Optional features of the module of the node, `KITE_FEATURE_*`.
    features: u64,
    first_sequences: FirstSequences,
    #[pin]
    state: SpinLock<PeerState>,
    /// Rate of virtual queue pair requests to the peer.
    #[pin]
    request_rate: SpinLock<DecayingCounter>,
    /// `true` if requests of virtual queue pairs use RC connections.
    promoted: AtomicFlag,
    #[pin]
    view_announcer: SpinLock<ViewAnnouncer>,
    suspicion: SetOnce<Arc<Suspicion>>,
    session: SetOnce<Pin<KBox<PeerSession>>>,
}

impl Peer {
    /// Creates a peer without a session.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn new(
        identity: PeerIdentity,
        control_address: ControlAddress,
        features: u64,
    ) -> Result<Arc<Self>> {
        let state = PeerState {
            route: RouteState::Unresolved,
            address: None,
            close_error: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                identity,
                control_address,
                features,
                first_sequences: FirstSequences::new(),
                state <- new_spinlock!(state, "Peer::state"),
                request_rate <- new_spinlock!(DecayingCounter::default(), "Peer::request_rate"),
                promoted: AtomicFlag::new(false),
                view_announcer <- new_spinlock!(ViewAnnouncer::default(), "Peer::view_announcer"),
                suspicion: SetOnce::new(),
                session: SetOnce::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the node number.
    pub(crate) fn node(&self) -> u32 {
        self.identity.peer.node
    }

    /// Returns the node number and the incarnation.
    pub(crate) fn instance(&self) -> NodeInstance {
        self.identity.peer
    }

    /// Checks that the module of the node has these optional features.
    ///
    /// # Errors
    ///
    /// - `EOPNOTSUPP`: the module lacks one of them.
    pub(super) fn check_features(&self, required: u64) -> Result {
        match required & !self.features {
            0 => Ok(()),
            _ => Err(errno::opnotsupp()),
        }
    }

    /// Returns the route if it is resolved.
    pub(super) fn route(&self) -> Option<Arc<AddressHandle>> {
        match &self.state.lock().route {
            RouteState::Resolved(route) => Some(route.clone()),
            _ => None,
        }
    }

    /// Stores the result of a resolution.
    pub(super) fn set_route(&self, route: RouteState) {
        let old = core::mem::replace(&mut self.state.lock().route, route);
        drop(old);
    }

    /// Discards a resolved route, which may have changed.
    pub(super) fn invalidate_route(&self) {
        let mut state = self.state.lock();
        let old = match state.route {
            RouteState::Resolved(_) => core::mem::replace(&mut state.route, RouteState::Unresolved),
            _ => return,
        };
        drop(state);
        drop(old);
    }

    /// Returns `true` if the caller must resolve the route, and marks the resolution as started.
    pub(super) fn try_claim_resolution(&self) -> bool {
        let mut state = self.state.lock();
        let is_unresolved = matches!(state.route, RouteState::Unresolved);
        if is_unresolved {
            state.route = RouteState::Resolving;
        }
        is_unresolved
    }

    /// Returns `true` if the peer was fenced.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().close_error.is_some()
    }

    /// Returns the cached address if it is of `min_epoch` or later.
    pub(crate) fn cached_address(&self, min_epoch: u64) -> Option<Arc<PeerAddress>> {
        let state = self.state.lock();
        let address = state.address.as_ref();
        address
            .filter(|address| address.epoch >= min_epoch)
            .cloned()
    }

    /// Caches the address, and returns it.
    pub(crate) fn cache_address(&self, address: Arc<PeerAddress>) -> Arc<PeerAddress> {
        let old = self.state.lock().address.replace(address.clone());
        drop(old);
        address
    }

    /// Returns the session if one was created.
    pub(super) fn session(&self) -> Option<&PeerSession> {
        self.session.as_ref().map(|session| &**session)
    }

    /// Returns the session. Creates it at the first call.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn ensure_session(&self) -> Result<&PeerSession> {
        if self.session().is_none() {
            let first_sequences = &self.first_sequences;
            let session =
                PeerSession::new(&self.identity, self.ensure_suspicion()?, first_sequences)?;
            // Hold the lock until the session is stored. Otherwise a concurrent `close` could miss the
            // session, and its connections would stay open.
            let state = self.state.lock();
            if let Some(error) = state.close_error {
                session.close(error);
            }
            // Has no effect if another thread stored a session first.
            self.session.populate(session);
        }
        self.session().ok_or(ENOMEM)
    }

    fn ensure_suspicion(&self) -> Result<&Arc<Suspicion>> {
        if self.suspicion.as_ref().is_none() {
            let suspicion = Suspicion::new(self.identity.local.suspect_listener.clone())?;
            let state = self.state.lock();
            self.suspicion.populate(suspicion);
            let is_closed = state.close_error.is_some();
            drop(state);
            if is_closed {
                self.close_suspicion();
            }
        }
        self.suspicion.as_ref().ok_or(ENOMEM)
    }

    /// Suspects the peer, because it does not respond.
    pub(super) fn suspect(&self) {
        // Without memory, the next failure suspects the peer.
        if let Ok(suspicion) = self.ensure_suspicion() {
            suspicion.raise();
        }
    }

    /// Clears an unreported suspicion, because the peer responded.
    pub(super) fn clear_suspicion(&self) {
        if let Some(suspicion) = self.suspicion.as_ref() {
            suspicion.clear();
        }
    }

    /// Returns `true` if a suspicion of the peer must be reported, and marks it as reported.
    pub(super) fn consume_suspicion(&self) -> bool {
        let suspicion = self.suspicion.as_ref();
        suspicion.is_some_and(|suspicion| suspicion.consume())
    }

    /// Clears the suspicion permanently.
    fn close_suspicion(&self) {
        if let Some(suspicion) = self.suspicion.as_ref() {
            suspicion.close();
        }
    }

    /// Continues the sequence numbers of `former`, a closed peer in the same incarnation: the two nodes still
    /// identify tickets and grants by numbers of `former`. Must be called before the peer is used.
    pub(crate) fn continue_sequences(&self, former: &Self) {
        let first_unused = former.session().map(PeerSession::next_sequences);
        let first_unused = first_unused.unwrap_or_else(|| former.first_sequences.get());
        self.first_sequences.set(first_unused);
    }

    /// Closes all connections to the peer, because it was fenced: users receive `error`.
    pub(super) fn close(&self, error: Error) {
        self.state.lock().close_error = Some(error);
        if let Some(session) = self.session() {
            session.close(error);
        }
        self.close_suspicion();
    }
}
