// SPDX-License-Identifier: GPL-2.0

//! What the connector thread does with a connection: makes, connects and drops its queue pairs, as
//! `kite_core::conn` decides, and tells the peer.

use super::Conn;
use crate::{
    fabric::{
        channel::{Channel, Place},
        peer::Identity,
    },
    trace,
    verbs::qp::Partner,
};
use kernel::{pr_warn_once, prelude::*, sync::Arc, time::Instant};
use kite_core::{
    conn::{Action, Input, Phase},
    wire::setup::{Setup, SetupKind},
};

/// Repetitions without an answer after which the peer is suspected: about half a second.
const SILENT_TICKS: u32 = 10;

/// What the connector lends a connection to act with.
pub(crate) trait Workshop {
    /// Whether the way to the peer is known; if not it is sought.
    fn is_routed(&self) -> bool;

    /// Has the way to the peer sought anew: the peer may have moved.
    fn forget_route(&self);

    /// Takes a place for channels, of which there is one at a time.
    fn take_place(&self) -> Result<Place>;

    /// Makes an RC channel and makes it findable by its number.
    fn make_channel(&self) -> Result<Arc<Channel>>;

    /// Forgets a channel.
    fn drop_channel(&self, channel: Arc<Channel>);

    /// Connects a channel to the peer's queue pair.
    fn connect(&self, channel: &Channel, partner: Partner, psn: u32) -> Result;

    /// Sends a datagram to the peer.
    fn send(&self, setup: &Setup);

    /// Who we are, and who the peer is.
    fn identity(&self) -> &Identity;
}

/// What a datagram means; `idle` says that nobody here uses the connection.
fn input(message: &Setup, idle: bool) -> Option<Input> {
    let generation = message.generation;
    Some(match message.kind {
        SetupKind::Connect => Input::Connect(generation),
        SetupKind::Accept => Input::Accept(generation),
        SetupKind::Poke => Input::Poke(generation),
        SetupKind::Part => Input::Part {
            generation,
            attempt: message.psn,
            idle,
        },
        SetupKind::Gone => Input::Gone(generation),
        SetupKind::Stay => Input::Stay(message.psn),
        // They are about no connection.
        SetupKind::Acting | SetupKind::Answer => return None,
    })
}

impl Conn {
    /// Does what is to be done, if anything. Returns whether to come again soon.
    pub(crate) fn step(&self, shop: &impl Workshop, tick: bool) -> bool {
        let needed = self.needs_route();
        let routed = needed && shop.is_routed();
        let mut inner = self.inner.lock();
        if inner.closed.is_some() {
            return false;
        }
        let mut actions = [Action::Nothing; 5];
        let mut setup = None;
        if routed && core::mem::take(&mut inner.wanted) {
            actions[0] = inner.logic.on(Input::Wanted);
        }
        if let Some(generation) = inner.failed.take() {
            actions[1] = inner.logic.on(Input::Failed(generation));
        }
        if let Some(message) = inner.inbox.take_if(|_| routed) {
            let idle = inner.idle_ms().is_some();
            if let Some(input) = input(&message, idle) {
                actions[2] = inner.logic.on(input);
            }
            setup = Some(message);
        }
        if core::mem::take(&mut inner.spare) && inner.idle_ms().is_some() {
            actions[4] = inner.logic.on(Input::Spare);
        }
        if tick {
            actions[3] = inner.logic.tick();
            inner.unanswered += u32::from(actions[3] != Action::Nothing);
        }
        let silent = inner.unanswered != 0 && inner.unanswered % SILENT_TICKS == 0 && tick;
        drop(inner);
        if silent {
            self.suspicion.raise();
            shop.forget_route();
        }
        for action in actions {
            self.act(shop, action, setup.as_ref());
        }
        self.settle(shop);
        (needed && !routed) || self.inner.lock().logic.is_unsettled()
    }

    /// Whether there is something to do for which the way to the peer has to be known.
    fn needs_route(&self) -> bool {
        let inner = self.inner.lock();
        inner.closed.is_none()
            && (inner.wanted || inner.inbox.is_some() || inner.logic.is_unsettled())
    }

    /// Lets go of a failed queue pair when its last user has left.
    fn settle(&self, shop: &impl Workshop) {
        let channel = {
            let mut inner = self.inner.lock();
            if inner.logic.phase() != Phase::Draining || inner.inflight != 0 {
                return;
            }
            inner.channel.take()
        };
        if let Some(channel) = channel {
            shop.drop_channel(channel);
        }
        let action = self.inner.lock().logic.on(Input::Drained);
        self.act(shop, action, None);
        self.give_up_place();
    }

    /// Leaves room for others if there is to be no other queue pair soon.
    fn give_up_place(&self) {
        let mut inner = self.inner.lock();
        let settled = inner.logic.phase() == Phase::Idle && !inner.logic.is_unsettled();
        let parted = settled && inner.newest == 0;
        let place = inner.place.take_if(|_| parted);
        drop(inner);
        drop(place);
    }

    fn act(&self, shop: &impl Workshop, action: Action, setup: Option<&Setup>) {
        let result = match (action, setup) {
            (Action::Nothing, _) => Ok(()),
            (Action::Open(_), _) => self.open(shop),
            (Action::Build(_), Some(setup)) => self.build(shop, setup),
            (Action::Finish, Some(setup)) => self.finish(shop, setup),
            (Action::Connect, _) => self.offer(shop, SetupKind::Connect),
            (Action::Accept, _) => self.offer(shop, SetupKind::Accept),
            (Action::Poke(generation), _) => self.say(shop, SetupKind::Poke, generation, 0),
            (Action::Part(attempt), _) => {
                let generation = self.inner.lock().logic.generation();
                self.say(shop, SetupKind::Part, generation, attempt)
            }
            (Action::Gone(generation), _) => self.say(shop, SetupKind::Gone, generation, 0),
            (Action::Stay(attempt), Some(setup)) => {
                self.say(shop, SetupKind::Stay, setup.generation, attempt)
            }
            (Action::Drain, _) => self.drain(shop),
            (Action::Leave, _) => self.part(),
            (Action::Resume, _) => self.resume(),
            _ => Err(EINVAL),
        };
        if let Err(error) = result {
            // It is tried again every few milliseconds.
            pr_warn_once!("node {}: not connected: {error:?}\n", self.node);
            pr_debug!("node {}: not connected: {error:?}\n", self.node);
        }
    }

    /// Stores a new channel, unless the connection was closed meanwhile.
    fn install(&self, shop: &impl Workshop, psn: u32) -> Result<Arc<Channel>> {
        let channel = self.make_channel(shop).inspect_err(|_| self.abandon())?;
        let mut inner = self.inner.lock();
        if let Some(error) = inner.closed {
            drop(inner);
            shop.drop_channel(channel);
            return Err(error);
        }
        inner.channel = Some(channel.clone());
        inner.psn = psn;
        Ok(channel)
    }

    fn make_channel(&self, shop: &impl Workshop) -> Result<Arc<Channel>> {
        if self.inner.lock().place.is_none() {
            let place = shop.take_place()?;
            self.inner.lock().place = Some(place);
        }
        shop.make_channel()
    }

    /// Puts off making a channel. That says nothing of the peer.
    fn abandon(&self) {
        let mut inner = self.inner.lock();
        inner.logic.abandon();
        inner.unanswered = 0;
    }

    fn open(&self, shop: &impl Workshop) -> Result {
        self.install(shop, shop.identity().random_psn())?;
        self.offer(shop, SetupKind::Connect)
    }

    fn build(&self, shop: &impl Workshop, setup: &Setup) -> Result {
        let psn = shop.identity().random_psn();
        let channel = self.install(shop, psn)?;
        self.connect(shop, &channel, setup, psn)?;
        self.offer(shop, SetupKind::Accept)
    }

    fn finish(&self, shop: &impl Workshop, setup: &Setup) -> Result {
        let (channel, psn) = {
            let inner = self.inner.lock();
            (inner.channel.clone().ok_or(EIO)?, inner.psn)
        };
        self.connect(shop, &channel, setup, psn)
    }

    fn connect(&self, shop: &impl Workshop, channel: &Channel, setup: &Setup, psn: u32) -> Result {
        let partner = Partner {
            qpn: setup.qpn,
            psn: setup.psn,
            mtu: u32::from(setup.mtu).min(shop.identity().own.mtu),
            rd_atomic: setup.rd_atomic.min(shop.identity().own.rd_atomic),
        };
        if let Err(error) = shop.connect(channel, partner, psn) {
            self.failed(setup.generation);
            return Err(error);
        }
        let mut inner = self.inner.lock();
        if let Some(error) = inner.closed {
            return Err(error);
        }
        inner.remote_key = setup.rkey;
        inner.packet = partner.mtu;
        inner.connected = true;
        inner.newest = setup.generation;
        inner.unanswered = 0;
        inner.progress = Instant::now();
        self.stats.connections.add(1);
        drop(inner);
        self.suspicion.clear();
        self.stats.connects.add(1);
        trace::pair(self.node, self.index.into(), setup.generation, true);
        self.changed.notify_all();
        Ok(())
    }

    fn drain(&self, shop: &impl Workshop) -> Result {
        shop.forget_route();
        self.stats.disconnects.add(1);
        self.stop()
    }

    /// Gives up a queue pair that nobody uses.
    fn part(&self) -> Result {
        self.inner.lock().newest = 0;
        self.stats.partings.add(1);
        self.hear();
        self.stop()
    }

    /// The peer uses the queue pair, so both keep it.
    fn resume(&self) -> Result {
        self.hear();
        self.changed.notify_all();
        Ok(())
    }

    /// The peer has answered.
    fn hear(&self) {
        self.inner.lock().unanswered = 0;
        self.suspicion.clear();
    }

    /// Nothing new is posted to the queue pair, and what is posted ends.
    fn stop(&self) -> Result {
        let mut inner = self.inner.lock();
        if core::mem::take(&mut inner.connected) {
            self.stats.connections.sub(1);
        }
        let (channel, generation) = (inner.channel.clone(), inner.logic.generation());
        drop(inner);
        trace::pair(self.node, self.index.into(), generation, false);
        self.changed.notify_all();
        channel.map_or(Ok(()), |channel| channel.qp().fail())
    }

    /// Tells the peer of our queue pair.
    fn offer(&self, shop: &impl Workshop, kind: SetupKind) -> Result {
        let (generation, qpn, psn) = {
            let inner = self.inner.lock();
            let channel = inner.channel.as_ref().ok_or(EIO)?;
            (inner.logic.generation(), channel.qp().number(), inner.psn)
        };
        shop.send(&self.message(shop, kind, generation, qpn, psn));
        Ok(())
    }

    /// Tells the peer something for which no queue pair is needed.
    fn say(&self, shop: &impl Workshop, kind: SetupKind, generation: u32, attempt: u32) -> Result {
        shop.send(&self.message(shop, kind, generation, 0, attempt));
        Ok(())
    }

    fn message(
        &self,
        shop: &impl Workshop,
        kind: SetupKind,
        generation: u32,
        qpn: u32,
        psn: u32,
    ) -> Setup {
        shop.identity()
            .setup(kind, self.index, generation, qpn, psn)
    }
}
