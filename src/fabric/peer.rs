// SPDX-License-Identifier: GPL-2.0

//! Another node of the view: who it is, and how it is reached. Of a node with which this one has nothing to do no
//! more is there (KRCORE, section 4.1): its [`Contact`] is made when it is first talked to.

use super::{
    contact::Contact,
    suspicion::{Daemon, Suspicion},
    wake::Wake,
};
use crate::{
    bindings,
    dc::work::Way,
    stats::Stats,
    verbs::address::{AddressHandle, Destination},
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{atomic::AtomicFlag, Arc, SetOnce, SpinLock},
};
use kite_core::{
    promotion::Demand,
    view::Life,
    wire::setup::{Setup, SetupKind},
    word::Word,
};

/// What all peers have of this node.
pub(crate) struct Own {
    pub(crate) life: Life,
    /// What the kernels of the cluster know each other by.
    pub(crate) secret: [u8; 16],
    /// Key to our memory; datagrams go to the peer's kernel alone.
    pub(crate) key: u32,
    /// Largest packet of our port, in bytes.
    pub(crate) mtu: u32,
    pub(crate) rd_atomic: u8,
    /// Connections that we are willing to have.
    pub(crate) pairs: u8,
    pub(super) connector: Arc<Wake>,
    pub(super) daemon: Arc<Daemon>,
    pub(super) stats: Arc<Stats>,
}

/// The two ends of a connection, as the datagrams that set it up name them.
pub(crate) struct Identity {
    pub(crate) own: Arc<Own>,
    pub(crate) peer: Life,
}

impl Identity {
    /// Connections that we are willing to have: nothing is ever connected to oneself.
    pub(super) fn pairs(&self) -> u8 {
        if self.peer == self.own.life {
            0
        } else {
            self.own.pairs
        }
    }

    /// A first packet sequence number that cannot be guessed.
    pub(crate) fn random_psn(&self) -> u32 {
        // SAFETY: The function has no preconditions.
        unsafe { bindings::get_random_u32() & 0xff_ffff }
    }

    /// A datagram to the peer.
    pub(crate) fn setup(
        &self,
        kind: SetupKind,
        index: u8,
        generation: u32,
        qpn: u32,
        psn: u32,
    ) -> Setup {
        Setup {
            index,
            generation,
            qpn,
            psn,
            ..self.datagram(kind)
        }
    }

    /// A datagram to the peer that tells it of a view.
    pub(super) fn word(&self, kind: SetupKind, epoch: u64) -> Setup {
        Setup {
            epoch,
            ..self.datagram(kind)
        }
    }

    fn datagram(&self, kind: SetupKind) -> Setup {
        let own = &*self.own;
        Setup {
            kind,
            secret: own.secret,
            from: own.life.node,
            to: self.peer.node,
            from_incarnation: own.life.incarnation,
            to_incarnation: self.peer.incarnation,
            index: 0,
            pairs: own.pairs,
            generation: 0,
            qpn: 0,
            psn: 0,
            rkey: own.key,
            mtu: own.mtu as u16,
            rd_atomic: own.rd_atomic,
            epoch: 0,
        }
    }

    /// Whether a datagram is from the peer, in its present life, to us in ours.
    pub(crate) fn accepts(&self, setup: &Setup) -> bool {
        let from = Life {
            node: setup.from,
            incarnation: setup.from_incarnation,
        };
        let to = Life {
            node: setup.to,
            incarnation: setup.to_incarnation,
        };
        setup.secret == self.own.secret && from == self.peer && to == self.own.life
    }
}

/// Where a node's control queue pair is.
#[derive(Clone, Copy)]
pub(crate) struct ControlAddress {
    pub(crate) destination: Destination,
    pub(crate) qpn: u32,
}

/// What is known of the way to a peer.
pub(super) enum Route {
    Unknown,
    /// Somebody is finding it.
    Sought,
    Known(Arc<AddressHandle>),
}

/// By what a peer is reached.
pub(crate) struct Reach {
    /// By DC, if we both have it.
    pub(crate) way: Option<Way>,
    /// Whether it takes atomic operations, and we have them.
    pub(crate) has_atomics: bool,
    /// Epoch as of which that was told.
    pub(crate) epoch: u64,
    /// Key to its memory.
    pub(crate) rkey: u32,
    /// Address of its table of memory regions.
    pub(crate) regions: u64,
}

/// What is found out about a node.
struct Known {
    route: Route,
    reach: Option<Arc<Reach>>,
    /// It left the view: who is late gets this error.
    closed: Option<Error>,
}

/// A node of the view.
#[pin_data]
pub(crate) struct Peer {
    pub(crate) identity: Identity,
    pub(crate) address: ControlAddress,
    #[pin]
    known: SpinLock<Known>,
    /// Of virtual queue pairs.
    #[pin]
    pub(super) demand: SpinLock<Demand>,
    /// They are to go by a connection.
    pub(super) promoted: AtomicFlag,
    #[pin]
    pub(super) word: SpinLock<Word>,
    suspicion: SetOnce<Arc<Suspicion>>,
    contact: SetOnce<Pin<KBox<Contact>>>,
}

impl Peer {
    /// Makes a peer with which there is no contact.
    pub(crate) fn new(identity: Identity, address: ControlAddress) -> Result<Arc<Self>> {
        let known = Known {
            route: Route::Unknown,
            reach: None,
            closed: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                identity,
                address,
                known <- new_spinlock!(known),
                demand <- new_spinlock!(Demand::default()),
                promoted: AtomicFlag::new(false),
                word <- new_spinlock!(Word::default()),
                suspicion: SetOnce::new(),
                contact: SetOnce::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Its number.
    pub(crate) fn node(&self) -> u32 {
        self.identity.peer.node
    }

    /// Its number, and which life of it this is.
    pub(crate) fn life(&self) -> Life {
        self.identity.peer
    }

    /// The way there, if it is known.
    pub(super) fn route(&self) -> Option<Arc<AddressHandle>> {
        match &self.known.lock().route {
            Route::Known(route) => Some(route.clone()),
            _ => None,
        }
    }

    /// The way there, or that it was not found.
    pub(super) fn set_route(&self, route: Route) {
        let before = core::mem::replace(&mut self.known.lock().route, route);
        drop(before);
    }

    /// The way there may be another by now.
    pub(super) fn forget_route(&self) {
        let mut known = self.known.lock();
        let before = match known.route {
            Route::Known(_) => core::mem::replace(&mut known.route, Route::Unknown),
            _ => return,
        };
        drop(known);
        drop(before);
    }

    /// Whether the way there is to be sought by the caller.
    pub(super) fn begin_to_seek(&self) -> bool {
        let mut known = self.known.lock();
        let unknown = matches!(known.route, Route::Unknown);
        if unknown {
            known.route = Route::Sought;
        }
        unknown
    }

    /// Whether it left the view.
    pub(super) fn has_left(&self) -> bool {
        self.known.lock().closed.is_some()
    }

    /// By what it is reached, if that is known as of `since` or later.
    pub(crate) fn reach(&self, since: u64) -> Option<Arc<Reach>> {
        let known = self.known.lock();
        let reach = known.reach.as_ref();
        reach.filter(|reach| reach.epoch >= since).cloned()
    }

    /// It is reached by this.
    pub(crate) fn set_reach(&self, reach: Arc<Reach>) -> Arc<Reach> {
        let before = self.known.lock().reach.replace(reach.clone());
        drop(before);
        reach
    }

    /// What there is between us, if we have talked.
    pub(super) fn contact(&self) -> Option<&Contact> {
        self.contact.as_ref().map(|contact| &**contact)
    }

    /// What there is between us from now on.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn make_contact(&self) -> Result<&Contact> {
        if self.contact().is_none() {
            let contact = Contact::new(&self.identity, self.suspicion()?)?;
            // Held so that no connection is made after all were shut.
            let known = self.known.lock();
            if let Some(error) = known.closed {
                contact.shut(error);
            }
            // Somebody else may have been first.
            self.contact.populate(contact);
        }
        self.contact().ok_or(ENOMEM)
    }

    fn suspicion(&self) -> Result<&Arc<Suspicion>> {
        if self.suspicion.as_ref().is_none() {
            let suspicion = Suspicion::new(self.identity.own.daemon.clone())?;
            let known = self.known.lock();
            self.suspicion.populate(suspicion);
            let closed = known.closed.is_some();
            drop(known);
            if closed {
                self.settle();
            }
        }
        self.suspicion.as_ref().ok_or(ENOMEM)
    }

    /// It does not answer.
    pub(super) fn suspect(&self) {
        // Without memory it is suspected the next time.
        if let Ok(suspicion) = self.suspicion() {
            suspicion.raise();
        }
    }

    /// It answers.
    pub(super) fn trust(&self) {
        if let Some(suspicion) = self.suspicion.as_ref() {
            suspicion.clear();
        }
    }

    /// Takes the suspicion, if there is one to report.
    pub(super) fn report(&self) -> bool {
        let suspicion = self.suspicion.as_ref();
        suspicion.is_some_and(|suspicion| suspicion.report())
    }

    /// Nothing more is said of it.
    fn settle(&self) {
        if let Some(suspicion) = self.suspicion.as_ref() {
            suspicion.close();
        }
    }

    /// It left: nobody can use a connection to it any more, and gets `error`.
    pub(super) fn shut(&self, error: Error) {
        self.known.lock().closed = Some(error);
        if let Some(contact) = self.contact() {
            contact.shut(error);
        }
        self.settle();
    }
}
