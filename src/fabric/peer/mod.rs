// SPDX-License-Identifier: GPL-2.0

//! Another node of the view: who it is, and how it is reached. Of a node with which this one has nothing to do no
//! more is there (KRCORE, section 4.1): its [`Contact`] is made when it is first talked to.

pub(crate) mod identity;
pub(crate) mod session;
pub(crate) mod suspicion;
mod table;
pub(crate) mod view_announce;

use self::{identity::PeerIdentity, session::PeerSession, suspicion::Suspicion};
use crate::{
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

/// Where a node's control queue pair is.
#[derive(Clone, Copy)]
pub(crate) struct ControlAddress {
    pub(crate) destination: PortAddress,
    pub(crate) qpn: u32,
}

/// What is known of the way to a peer.
pub(super) enum RouteState {
    Unresolved,
    /// Somebody is finding it.
    Resolving,
    Resolved(Arc<AddressHandle>),
}

/// By what a peer is reached.
pub(crate) struct PeerAddress {
    /// By DC, if we both have it.
    pub(crate) dc_address: Option<DcAddress>,
    /// Whether it takes atomic operations, and we have them.
    pub(crate) has_atomics: bool,
    /// Epoch as of which that was told.
    pub(crate) epoch: u64,
    /// Key to its memory.
    pub(crate) rkey: u32,
    /// Address of its table of memory regions.
    pub(crate) mr_table_addr: u64,
}

/// What is found out about a node.
struct PeerState {
    route: RouteState,
    address: Option<Arc<PeerAddress>>,
    /// It left the view: who is late gets this error.
    close_error: Option<Error>,
}

/// A node of the view.
#[pin_data]
pub(crate) struct Peer {
    pub(crate) identity: PeerIdentity,
    pub(crate) control_address: ControlAddress,
    #[pin]
    state: SpinLock<PeerState>,
    /// Of virtual queue pairs.
    #[pin]
    pub(super) request_rate: SpinLock<DecayingCounter>,
    /// They are to go by a connection.
    pub(super) promoted: AtomicFlag,
    #[pin]
    pub(super) view_announcer: SpinLock<ViewAnnouncer>,
    suspicion: SetOnce<Arc<Suspicion>>,
    session: SetOnce<Pin<KBox<PeerSession>>>,
}

impl Peer {
    /// Makes a peer with which there is no contact.
    pub(crate) fn new(
        identity: PeerIdentity,
        control_address: ControlAddress,
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
                state <- new_spinlock!(state),
                request_rate <- new_spinlock!(DecayingCounter::default()),
                promoted: AtomicFlag::new(false),
                view_announcer <- new_spinlock!(ViewAnnouncer::default()),
                suspicion: SetOnce::new(),
                session: SetOnce::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Its number.
    pub(crate) fn node(&self) -> u32 {
        self.identity.peer.node
    }

    /// Its number, and which life of it this is.
    pub(crate) fn instance(&self) -> NodeInstance {
        self.identity.peer
    }

    /// The way there, if it is known.
    pub(super) fn route(&self) -> Option<Arc<AddressHandle>> {
        match &self.state.lock().route {
            RouteState::Resolved(route) => Some(route.clone()),
            _ => None,
        }
    }

    /// The way there, or that it was not found.
    pub(super) fn set_route(&self, route: RouteState) {
        let old = core::mem::replace(&mut self.state.lock().route, route);
        drop(old);
    }

    /// The way there may be another by now.
    pub(super) fn invalidate_route(&self) {
        let mut state = self.state.lock();
        let old = match state.route {
            RouteState::Resolved(_) => core::mem::replace(&mut state.route, RouteState::Unresolved),
            _ => return,
        };
        drop(state);
        drop(old);
    }

    /// Whether the way there is to be sought by the caller.
    pub(super) fn try_claim_resolution(&self) -> bool {
        let mut state = self.state.lock();
        let is_unresolved = matches!(state.route, RouteState::Unresolved);
        if is_unresolved {
            state.route = RouteState::Resolving;
        }
        is_unresolved
    }

    /// Whether it left the view.
    pub(super) fn has_left(&self) -> bool {
        self.state.lock().close_error.is_some()
    }

    /// By what it is reached, if that is known as of `since` or later.
    pub(crate) fn cached_address(&self, min_epoch: u64) -> Option<Arc<PeerAddress>> {
        let state = self.state.lock();
        let address = state.address.as_ref();
        address
            .filter(|address| address.epoch >= min_epoch)
            .cloned()
    }

    /// It is reached by this.
    pub(crate) fn cache_address(&self, address: Arc<PeerAddress>) -> Arc<PeerAddress> {
        let old = self.state.lock().address.replace(address.clone());
        drop(old);
        address
    }

    /// What there is between us, if we have talked.
    pub(super) fn session(&self) -> Option<&PeerSession> {
        self.session.as_ref().map(|session| &**session)
    }

    /// What there is between us from now on.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn ensure_session(&self) -> Result<&PeerSession> {
        if self.session().is_none() {
            let session = PeerSession::new(&self.identity, self.ensure_suspicion()?)?;
            // Held so that no connection is made after all were shut.
            let state = self.state.lock();
            if let Some(error) = state.close_error {
                session.close(error);
            }
            // Somebody else may have been first.
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

    /// It does not answer.
    pub(super) fn suspect(&self) {
        // Without memory it is suspected the next time.
        if let Ok(suspicion) = self.ensure_suspicion() {
            suspicion.raise();
        }
    }

    /// It answers.
    pub(super) fn clear_suspicion(&self) {
        if let Some(suspicion) = self.suspicion.as_ref() {
            suspicion.clear();
        }
    }

    /// Takes the suspicion, if there is one to report.
    pub(super) fn consume_suspicion(&self) -> bool {
        let suspicion = self.suspicion.as_ref();
        suspicion.is_some_and(|suspicion| suspicion.consume())
    }

    /// Nothing more is said of it.
    fn close_suspicion(&self) {
        if let Some(suspicion) = self.suspicion.as_ref() {
            suspicion.close();
        }
    }

    /// It left: nobody can use a connection to it any more, and gets `error`.
    pub(super) fn close(&self, error: Error) {
        self.state.lock().close_error = Some(error);
        if let Some(session) = self.session() {
            session.close(error);
        }
        self.close_suspicion();
    }
}
