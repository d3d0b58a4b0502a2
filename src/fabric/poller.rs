// SPDX-License-Identifier: GPL-2.0

//! The thread that takes what peers send (LITE, section 5.1: one poller on one receive queue).
//!
//! Under traffic it polls without pause. When nothing has come for a while it arms the queues and
//! sleeps until an interrupt, so an idle node costs nothing. It also polls the send queue for those
//! who sleep on it.

use super::{
    channel::{Channel, RECV_SIZE},
    peer::Peer,
    Fabric, CONTROL,
};
use crate::{
    sys::thread::{give_way, Run},
    verbs::cq::{Completion, Status},
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
    time::{Instant, Monotonic},
};
use kite_core::{
    view::Life,
    wire::{self, setup::Setup, Body, Header, Request},
    wrid::WrId,
};

/// How long the poller looks for more before it sleeps.
const SPIN_NS: i64 = 50_000;

/// Bytes that precede a datagram: the global routing header.
const GRH: usize = 40;

/// Takes what came from peers.
pub(crate) trait Sink: Send + Sync + 'static {
    /// A request of a peer; `bytes` is the whole message, whose form has been checked. The peer is to be
    /// told of the end ([`Peer::end_answer`]). The poller waits for this call, so it must not wait for
    /// anything but memory.
    fn on_request(&self, from: Arc<Peer>, header: Header, bytes: &[u8]);

    /// A node wrote to our memory, and says so with `immediate`. It, or its queue pair, may be gone by now.
    /// The poller waits for this call as well.
    fn on_immediate(&self, from: Life, immediate: u32);
}

/// The poller thread of one RNIC.
pub(crate) struct Poller<S: Sink> {
    fabric: Arc<Fabric>,
    sink: Arc<S>,
    stopping: Atomic<u32>,
}

impl<S: Sink> Poller<S> {
    /// Makes the body of the thread.
    pub(crate) fn new(fabric: Arc<Fabric>, sink: Arc<S>) -> Result<Arc<Self>> {
        Ok(Arc::new(
            Self {
                fabric,
                sink,
                stopping: Atomic::new(0),
            },
            GFP_KERNEL,
        )?)
    }

    fn poll(&self, scratch: &mut [u8; RECV_SIZE]) -> usize {
        let recv = &self.fabric.parts.recv;
        let received = recv.poll(|completion| self.receive(completion, scratch));
        if self.fabric.sender().has_sleepers() {
            return received + self.fabric.sender().poll();
        }
        received
    }

    fn receive(&self, completion: Completion, scratch: &mut [u8; RECV_SIZE]) {
        let id = WrId::from_u64(completion.wr_id);
        if completion.status != Status::Success {
            // A queue pair that failed or is gone gives its receives back. Its users find out by
            // themselves, but the control queue pair may have none.
            if id.generation == CONTROL {
                self.fabric.ud_failed();
            }
            return;
        }
        let Some(channel) = self.fabric.channel(id.generation) else {
            return self.fabric.stats.stray_completions.add(1);
        };
        if let Some(immediate) = completion.immediate {
            let _ = channel.post_recv(id.slot);
            return self.sink.on_immediate(channel.peer(), immediate);
        }
        let len = (completion.len as usize).min(RECV_SIZE);
        let read = channel.read_recv(id.slot, &mut scratch[..len]);
        // Posted again before it is acted on: whoever gets an answer finds room for the next.
        let _ = channel.post_recv(id.slot);
        if read.is_ok() {
            self.dispatch(&channel, &scratch[..len]);
        }
    }

    fn dispatch(&self, channel: &Channel, bytes: &[u8]) {
        let understood = match channel.peer() {
            Life { node: 0, .. } => bytes
                .get(GRH..)
                .is_some_and(|bytes| self.on_datagram(bytes)),
            peer => self.on_message(peer, channel.number(), bytes),
        };
        if !understood {
            self.fabric.stats.bad_messages.add(1);
        }
    }

    /// A datagram sets up a connection. Who does not know the secret is not heard.
    fn on_datagram(&self, bytes: &[u8]) -> bool {
        let Ok(setup) = Setup::decode(bytes) else {
            return false;
        };
        let Ok(peer) = self.fabric.peer(setup.from) else {
            return false;
        };
        peer.identity.accepts(&setup) && peer.deliver(setup)
    }

    fn on_message(&self, peer: Life, by: u32, bytes: &[u8]) -> bool {
        match wire::decode(bytes) {
            Ok((header, Body::Request(request))) => {
                self.on_request(peer, by, header, &request, bytes);
            }
            Ok((header, Body::Reply(_))) => self.fabric.calls.reply(header.call, peer.node, bytes),
            Err(_) => return false,
        }
        true
    }

    /// Of a peer that is gone, or whose call is, nothing is wanted any more.
    fn on_request(&self, from: Life, by: u32, header: Header, request: &Request<'_>, bytes: &[u8]) {
        let Ok(peer) = self.fabric.peer_in(from) else {
            return;
        };
        if peer.begin_answer(&header, request, by) {
            self.sink.on_request(peer, header, bytes);
        } else {
            self.fabric.stats.late_calls.add(1);
        }
    }

    /// Arms the queues and sleeps, unless something came meanwhile. (Who goes to sleep on the send queue
    /// arms it; the notification that woke us was the last, so whoever still sleeps needs another.)
    fn sleep(&self) {
        let mut missed = self.fabric.parts.recv.arm();
        if self.fabric.sender().has_sleepers() {
            missed |= self.fabric.sender().arm();
        }
        if missed || self.stopping.load(Acquire) != 0 {
            return;
        }
        self.fabric.poller.event.wait_idle();
        self.fabric.stats.wakeups.add(1);
    }
}

impl<S: Sink> Run for Poller<S> {
    fn run(&self) {
        let Ok(mut scratch) = KBox::new([0; RECV_SIZE], GFP_KERNEL) else {
            return pr_err!("no memory for the poller\n");
        };
        let mut busy = Instant::<Monotonic>::now();
        while self.stopping.load(Acquire) == 0 {
            if self.poll(&mut scratch) != 0 {
                busy = Instant::now();
            } else if busy.elapsed().as_nanos() < SPIN_NS {
                core::hint::spin_loop();
            } else {
                self.sleep();
                busy = Instant::now();
            }
            give_way();
        }
    }

    fn stop(&self) {
        self.stopping.store(1, Release);
        self.fabric.poller.event.signal_all();
    }
}
