// SPDX-License-Identifier: GPL-2.0

//! The thread that makes, connects and drops queue pairs, so that nobody else has to sleep for it.
//!
//! It runs when a connection asks for it, and every few tens of milliseconds while one is unsettled, to
//! repeat datagrams that may have been lost.

use super::{
    channel::Channel,
    conn::Workshop,
    peer::{Identity, Peer},
    Fabric,
};
use crate::{
    sys::{deadline::Deadline, thread::Run},
    verbs::{address::AddressHandle, qp::Partner},
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

/// The connector thread of one RNIC.
pub(crate) struct Connector {
    fabric: Arc<Fabric>,
    stopping: Atomic<u32>,
}

impl Connector {
    /// Makes the body of the thread.
    pub(crate) fn new(fabric: Arc<Fabric>) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                fabric,
                stopping: Atomic::new(0),
            },
            GFP_KERNEL,
        )?)
    }

    /// Steps every connection. Returns whether one is unsettled.
    fn step_all(&self, tick: bool) -> bool {
        let mut unsettled = false;
        for i in 0..self.fabric.peer_count() {
            let Some(peer) = self.fabric.nth_peer(i) else {
                break;
            };
            let bench = Bench {
                fabric: &self.fabric,
                peer: &peer,
            };
            for conn in &peer.conns {
                unsettled |= conn.step(&bench, tick);
            }
        }
        unsettled
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
    fabric: &'a Fabric,
    peer: &'a Peer,
}

impl Bench<'_> {
    /// The way to the peer; found when first needed.
    fn route(&self) -> Result<Arc<AddressHandle>> {
        let mut route = self.peer.route.lock();
        if let Some(route) = &*route {
            return Ok(route.clone());
        }
        let local = self.fabric.local()?;
        let parts = &self.fabric.parts;
        let to = self.peer.address.destination;
        let handle = AddressHandle::new(
            parts.pd.clone(),
            parts.port,
            local.link,
            local.gid_index,
            to,
        )?;
        Ok(route.insert(Arc::new(handle, GFP_KERNEL)?).clone())
    }
}

impl Workshop for Bench<'_> {
    fn make_channel(&self) -> Result<Arc<Channel>> {
        self.fabric.make_channel(self.peer.life())
    }

    fn drop_channel(&self, channel: Arc<Channel>) {
        self.fabric.forget(channel);
    }

    fn connect(&self, channel: &Channel, partner: Partner, psn: u32) -> Result {
        channel.qp().connect(&*self.route()?, partner, psn)
    }

    fn send(&self, setup: &Setup) {
        let sent = self
            .route()
            .and_then(|_| self.fabric.send_setup(self.peer, setup));
        if let Err(error) = sent {
            pr_debug!("node {}: datagram not sent: {error:?}\n", self.peer.node());
        }
    }

    fn identity(&self) -> &Identity {
        &self.peer.identity
    }
}
