// SPDX-License-Identifier: GPL-2.0

//! The thread that makes, connects and drops queue pairs, so that nobody else has to sleep for it.
//!
//! It runs when a connection asks for it, or when a peer is to be told something, and every few tens of milliseconds
//! while that is unsettled, to repeat datagrams that may have been lost.

use super::{
    channel::{Channel, Place},
    conn::Workshop,
    peer::{Identity, Peer, Route},
    Fabric,
};
use crate::{
    errno,
    sys::{deadline::Deadline, queue::OwnQueue, thread::Run},
    verbs::qp::Partner,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
};
use kite_core::wire::setup::Setup;

/// Time between repetitions.
const TICK_MS: u32 = 50;

/// Neighbours whose addresses are sought at a time.
const SEEKERS: c_int = 32;

/// The connector thread of one RNIC.
pub(crate) struct Connector {
    fabric: Arc<Fabric>,
    /// Finds the ways to peers: a dead one takes a second each time, which others shall not wait for.
    seekers: OwnQueue,
    stopping: Atomic<u32>,
}

impl Connector {
    /// Makes the body of the thread.
    pub(crate) fn new(fabric: Arc<Fabric>) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                fabric,
                seekers: OwnQueue::new(c"kite_routes", SEEKERS)?,
                stopping: Atomic::new(0),
            },
            GFP_KERNEL,
        )?)
    }

    /// Tells every peer what it is to be told, and steps every connection. Returns whether one is unsettled.
    fn step_all(&self, tick: bool) -> bool {
        self.fabric.mend_ud();
        if tick {
            self.fabric.part_with_idle();
        }
        let mut unsettled = self.fabric.memories.reap();
        if let Some(dynamic) = self.fabric.dynamic() {
            unsettled |= dynamic.mend();
        }
        for i in 0..self.fabric.peer_count() {
            let Some(peer) = self.fabric.nth_peer(i) else {
                break;
            };
            let bench = Bench {
                connector: self,
                peer: &peer,
            };
            unsettled |= peer.speak(&bench, tick);
            for conn in peer.conns() {
                unsettled |= conn.step(&bench, tick);
            }
        }
        unsettled | self.fabric.is_crowded()
    }
}

impl Run for Connector {
    fn run(&self) {
        let mut next = Deadline::after_ms(TICK_MS);
        while self.stopping.load(Acquire) == 0 {
            let tick = next.passed();
            let unsettled = self.step_all(tick);
            if tick {
                next = Deadline::after_ms(TICK_MS);
            }
            if unsettled {
                self.fabric.connector.event.wait_timeout(next.left_ms());
            } else {
                self.fabric.connector.event.wait_idle();
            }
        }
    }

    fn stop(&self) {
        self.stopping.store(1, Release);
        self.fabric.connector.event.signal_all();
    }
}

/// What a connection to `peer` is made with.
struct Bench<'a> {
    connector: &'a Connector,
    peer: &'a Arc<Peer>,
}

impl Bench<'_> {
    fn fabric(&self) -> &Arc<Fabric> {
        &self.connector.fabric
    }
}

/// Finds the way to `peer`. One to which there is none is suspected; it is tried again at the next tick.
fn seek(fabric: &Fabric, peer: &Peer) {
    if peer.has_left() {
        return;
    }
    let found = fabric
        .find_route(peer)
        .and_then(|route| Ok(Arc::new(route, GFP_KERNEL)?));
    match found {
        Ok(route) => {
            peer.set_route(Route::Known(route));
            fabric.connector.event.signal();
        }
        Err(error) => {
            pr_debug!("node {}: no way there: {error:?}\n", peer.node());
            peer.set_route(Route::Unknown);
            peer.suspect();
        }
    }
}

impl Workshop for Bench<'_> {
    fn is_routed(&self) -> bool {
        if self.peer.begin_to_seek() {
            let (fabric, peer) = (self.fabric().clone(), self.peer.clone());
            self.connector.seekers.spawn(move || seek(&fabric, &peer));
        }
        self.peer.route().is_some()
    }

    fn forget_route(&self) {
        self.peer.forget_route();
    }

    fn take_place(&self) -> Result<Place> {
        self.fabric().places.take()
    }

    fn make_channel(&self) -> Result<Arc<Channel>> {
        self.fabric().make_channel(self.peer.life())
    }

    fn drop_channel(&self, channel: Arc<Channel>) {
        self.fabric().forget(channel);
    }

    fn connect(&self, channel: &Channel, partner: Partner, psn: u32) -> Result {
        let route = self.peer.route().ok_or_else(errno::hostunreach)?;
        channel.qp().connect(&route, partner, psn)
    }

    fn send(&self, setup: &Setup) {
        if let Err(error) = self.fabric().send_setup(self.peer, setup) {
            pr_debug!("node {}: datagram not sent: {error:?}\n", self.peer.node());
        }
    }

    fn identity(&self) -> &Identity {
        &self.peer.identity
    }
}
