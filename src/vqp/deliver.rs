// SPDX-License-Identifier: GPL-2.0

//! How packets find the ends of virtual queue pairs that they are for.
//!
//! What nobody wants is answered, so that its sender learns. What comes from a node that is not in our view is kept
//! until the next: views do not come to all at the same time.

use super::exchange::{Exchange, PARKED};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    view::Life,
    wire::packet::{Body, Message, Packet, Phase, State},
};

impl Exchange {
    /// The view has changed: what has come from nodes that were not in it before is taken now. Others may be in the next.
    pub(crate) fn deliver_parked(self: &Arc<Self>) {
        self.take_known(&mut self.parked.lock());
    }

    /// Takes what has come from nodes that are in the view by now, in its order.
    fn take_known(self: &Arc<Self>, parked: &mut KVec<KVec<u8>>) {
        let known = |bytes: &KVec<u8>| {
            let packet = Packet::decode(bytes);
            packet.is_ok_and(|packet| self.lmr.cluster.has(packet.from))
        };
        while let Some(at) = parked.iter().position(known) {
            let bytes = parked.remove(at).unwrap_or_default();
            if let Ok(packet) = Packet::decode(&bytes) {
                self.take_packet(&packet, &bytes);
            }
        }
    }

    /// A packet has come, by a connection only from who is at its other end.
    pub(crate) fn deliver(self: &Arc<Self>, from: Option<Life>, bytes: KVec<u8>) {
        let packet = Packet::decode(&bytes).ok();
        let honest = packet.filter(|packet| from.is_none_or(|from| packet.from == from));
        let Some(packet) = honest else {
            return self.lmr.stats.bad_messages.add(1);
        };
        // Held meanwhile, so that packets are taken in their order.
        let mut parked = self.parked.lock();
        if self.lmr.cluster.has(packet.from) {
            self.take_known(&mut parked);
            self.take_packet(&packet, &bytes);
        } else {
            if parked.len() == PARKED {
                // Most likely of one that has left.
                drop(parked.remove(0));
            }
            let _ = parked.push_within_capacity(bytes);
            self.take_known(&mut parked);
        }
    }

    fn take_packet(self: &Arc<Self>, packet: &Packet, bytes: &[u8]) {
        let found = self.ends.lock().find(packet);
        match (packet.body, found) {
            (Body::State(state), Some(vqp)) => vqp.hear(packet.source, &state, self),
            (Body::State(_), None) => {}
            (Body::Message(message), Some(vqp)) => {
                if vqp.arrive(message, bytes) {
                    self.tell_later(&vqp);
                }
            }
            (Body::Message(message), None) => self.first_message(packet, message, bytes),
        }
    }

    /// A message has come that is for nobody yet.
    fn first_message(self: &Arc<Self>, packet: &Packet, message: Message, bytes: &[u8]) {
        let cluster = &self.lmr.cluster;
        let Ok(me) = cluster.node().and_then(|me| cluster.life_of(me)) else {
            return;
        };
        let number = self.number();
        let over = packet.destination != 0 || self.ends.lock().was_over(packet);
        let made = match over {
            false => {
                let mut ends = self.ends.lock();
                // Nobody prunes what is made for who has left.
                let stays = cluster.has(packet.from);
                let payer = ends.payer_at(message.port).filter(|_| stays);
                payer.and_then(|payer| payer.pays(|| ends.make(me, number, packet, &message)))
            }
            true => None,
        };
        if let Some(vqp) = made {
            vqp.arrive(message, bytes);
            return;
        }
        // Answers to several may come in any order, so it is the same for all.
        let phase = match over {
            false => Phase::Refused,
            true => Phase::Closed,
        };
        let state = State {
            phase,
            limit: 0,
            taken: 0,
        };
        let answer = Packet {
            from: me,
            source: packet.destination,
            destination: packet.source,
            body: Body::State(state),
        };
        self.send_later(packet.from, answer);
    }
}
