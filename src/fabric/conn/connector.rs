// SPDX-License-Identifier: GPL-2.0

//! Connector thread: creates, connects and destroys QPs, so that no other thread sleeps for a QP transition.
//!
//! # Operation
//!
//! `Fabric::connector_waker` wakes the thread: a connection was requested, a QP failed or lost its last user,
//! a datagram arrived, or an announcement is due. In each round the thread sends the announcements to each
//! peer and executes one step of each connection ([`super::handshake`]). While work remains, a round follows
//! every [`TICK_MS`], in which datagrams are retransmitted that may have been lost. Each such tick also
//! selects idle connections for eviction ([`super::evict`]).
//!
//! Routes are resolved on a workqueue. The resolution for an unreachable neighbor takes about 1 s, which
//! would delay the connections to other peers.
//!
//! # Recovery
//!
//! The thread restarts the setup QP and failed DCIs, replaces failed RC QPs, and deregisters retired MRs. A
//! step that fails is repeated at the next tick. A peer without a route is suspected.
//!
//! # Locking
//!
//! The thread calls peers and connections without a lock held. They take their own locks, and no spin lock is
//! held during a QP transition.

use super::{
    evict::{evict_idle_conns, ConnBudget},
    ConnOps,
};
use crate::{
    errno,
    fabric::{
        endpoint::{Endpoint, RecvCqReservation},
        peer::{identity::PeerIdentity, Peer, RouteState},
        Fabric,
    },
    sys::{deadline::Deadline, thread::ThreadBody, workqueue::OwnedQueue},
    verbs::{device::IbDevice, log::rnic_debug, qp::RemoteQp},
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
};
use kite_core::wire::setup::SetupDatagram;

/// Interval in ms between retransmissions.
const TICK_MS: u32 = 50;

/// Maximum number of routes that are resolved at a time.
const MAX_ROUTE_RESOLVERS: c_int = 32;

/// The connector thread of one RNIC.
pub(crate) struct Connector {
    fabric: Arc<Fabric>,
    /// Workqueue that resolves routes.
    route_wq: OwnedQueue,
    /// 1 once the thread must end. Stored with `Release`, loaded with `Acquire`.
    stopping: Atomic<u32>,
}

impl Connector {
    /// Creates the body of the thread.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the workqueue.
    pub(crate) fn new(fabric: Arc<Fabric>) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                fabric,
                route_wq: OwnedQueue::new(c"kite_routes", MAX_ROUTE_RESOLVERS)?,
                stopping: Atomic::new(0),
            },
            GFP_KERNEL,
        )?)
    }

    /// Executes one round. `tick` is `true` in a round for retransmissions. Returns `true` if another tick is
    /// needed.
    fn step_all(&self, tick: bool) -> bool {
        self.fabric.setup_qp.restart();
        if tick {
            evict_idle_conns(&self.fabric);
        }
        let mut needs_tick = self.fabric.mr_table.reap();
        if let Some(dc) = self.fabric.dc() {
            needs_tick |= dc.recover();
        }
        for i in 0..self.fabric.peers.len() {
            let Some(peer) = self.fabric.peers.nth(i) else {
                break;
            };
            let ops = PeerConnOps {
                connector: self,
                peer: &peer,
            };
            needs_tick |= peer.flush_announcements(&ops, tick);
            for conn in peer.conns() {
                needs_tick |= conn.step(&ops, tick);
            }
        }
        needs_tick | ConnBudget(&self.fabric.stats).is_exceeded()
    }
}

impl ThreadBody for Connector {
    fn run(&self) {
        let mut next_tick = Deadline::after_ms(TICK_MS);
        while self.stopping.load(Acquire) == 0 {
            let tick = next_tick.has_expired();
            let needs_tick = self.step_all(tick);
            if tick {
                next_tick = Deadline::after_ms(TICK_MS);
            }
            if needs_tick {
                self.fabric
                    .connector_waker
                    .event
                    .wait_timeout_ms(next_tick.remaining_ms());
            } else {
                self.fabric.connector_waker.event.wait_idle();
            }
        }
    }

    fn request_stop(&self) {
        self.stopping.store(1, Release);
        self.fabric.connector_waker.event.complete_all();
    }
}

/// [`ConnOps`] for the connections to `peer`.
struct PeerConnOps<'a> {
    connector: &'a Connector,
    peer: &'a Arc<Peer>,
}

impl PeerConnOps<'_> {
    fn fabric(&self) -> &Arc<Fabric> {
        &self.connector.fabric
    }
}

/// Resolves the route to `peer`. If the resolution fails, the peer is suspected, and the next tick resolves
/// the route again.
fn resolve_route(fabric: &Fabric, peer: &Peer) {
    if peer.is_closed() {
        return;
    }
    let resolved = fabric
        .local_address
        .resolve_route(peer)
        .and_then(|route| Ok(Arc::new(route, GFP_KERNEL)?));
    match resolved {
        Ok(route) => {
            peer.set_route(RouteState::Resolved(route));
            fabric.connector_waker.event.complete();
        }
        Err(error) => {
            rnic_debug!(
                fabric.device(),
                "node {}: route cannot be resolved: {error:?}\n",
                peer.node()
            );
            peer.set_route(RouteState::Unresolved);
            peer.suspect();
        }
    }
}

impl ConnOps for PeerConnOps<'_> {
    fn device(&self) -> IbDevice {
        self.fabric().device()
    }

    fn try_resolve_route(&self) -> bool {
        if self.peer.try_claim_resolution() {
            let (fabric, peer) = (self.fabric().clone(), self.peer.clone());
            self.connector
                .route_wq
                .spawn(move || resolve_route(&fabric, &peer));
        }
        self.peer.route().is_some()
    }

    fn invalidate_route(&self) {
        self.peer.invalidate_route();
    }

    fn reserve_recv_cq(&self) -> Result<RecvCqReservation> {
        self.fabric().endpoints.reserve()
    }

    fn create_endpoint(&self) -> Result<Arc<Endpoint>> {
        let fabric = self.fabric();
        fabric
            .endpoints
            .create(&fabric.resources, self.peer.instance())
    }

    fn destroy_endpoint(&self, endpoint: Arc<Endpoint>) {
        self.fabric().destroy_endpoint(endpoint);
    }

    fn connect_endpoint(&self, endpoint: &Endpoint, remote: RemoteQp, psn: u32) -> Result {
        let route = self.peer.route().ok_or_else(errno::hostunreach)?;
        endpoint.qp().connect(&route, remote, psn)
    }

    fn send_setup(&self, setup: &SetupDatagram) {
        if let Err(error) = self.fabric().setup_qp.send_setup(self.peer, setup) {
            rnic_debug!(
                self.device(),
                "node {}: datagram not sent: {error:?}\n",
                self.peer.node()
            );
        }
    }

    fn identity(&self) -> &PeerIdentity {
        &self.peer.identity
    }
}
