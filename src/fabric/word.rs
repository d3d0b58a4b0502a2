// SPDX-License-Identifier: GPL-2.0

//! Telling nodes that this one acts on a view, by datagrams: `kite_core::word` says when. So nodes that have nothing
//! else to tell each other need no connection for it.

use super::{conn::Workshop, peer::Peer, Fabric};
use kite_core::{view::Life, wire::setup::SetupKind, word::Due};

impl Fabric {
    /// Has a node told that this one acts on the view of `epoch`, until it does, too, or is to be told of another, or of
    /// none, which is 0. Of a node that is not in the view that is not wanted.
    pub(crate) fn tell_view(&self, to: Life, epoch: u64) {
        if let Ok(peer) = self.peer_in(to) {
            peer.word.lock().give(epoch);
            self.connector.event.signal();
        }
    }

    /// Has a peer that told of the view of `epoch` answered, which was taken note of if this node acted on that of
    /// `acting` before.
    pub(crate) fn answer_view(&self, peer: &Peer, epoch: u64, acting: u64) {
        peer.word.lock().answer(epoch, acting);
        self.connector.event.signal();
    }
}

impl Peer {
    /// The peer answers.
    pub(super) fn on_answer(&self, epoch: u64) {
        self.trust();
        self.word.lock().answered(epoch);
    }

    /// Sends what is to be told. Returns whether to come again soon. Only the connector calls this.
    pub(super) fn speak(&self, shop: &impl Workshop, tick: bool) -> bool {
        if !self.word.lock().is_unsettled() {
            return false;
        }
        if shop.is_routed() {
            let due = self.word.lock().due(tick);
            self.act(shop, &due);
        }
        self.word.lock().is_unsettled()
    }

    fn act(&self, shop: &impl Workshop, due: &Due) {
        let said = [
            (SetupKind::Answer, due.answer),
            (SetupKind::Acting, due.tell),
        ];
        for (kind, epoch) in said {
            if let Some(epoch) = epoch {
                shop.send(&shop.identity().word(kind, epoch));
            }
        }
        if due.suspect {
            self.suspect();
            shop.forget_route();
        }
    }
}
