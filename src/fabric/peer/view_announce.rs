// SPDX-License-Identifier: GPL-2.0

//! Telling nodes that this one acts on a view, by datagrams: `kite_core::proto::view_announce` says when. So nodes that have nothing
//! else to tell each other need no connection for it.

use super::Peer;
use crate::fabric::{conn::ConnOps, Fabric};
use kite_core::{proto::view_announce::TickActions, view::NodeInstance, wire::setup::SetupKind};

impl Fabric {
    /// Has a node told that this one acts on the view of `epoch`, until it does, too, or is to be told of another, or of
    /// none, which is 0. Of a node that is not in the view that is not wanted.
    pub(crate) fn announce_view(&self, instance: NodeInstance, epoch: u64) {
        if let Ok(peer) = self.peer_by_instance(instance) {
            peer.view_announcer.lock().announce(epoch);
            self.connector_waker.event.complete();
        }
    }

    /// Has a peer that told of the view of `epoch` answered, which was taken note of if this node acted on that of
    /// `acting` before.
    pub(crate) fn ack_view(&self, peer: &Peer, epoch: u64, acting_epoch: u64) {
        peer.view_announcer
            .lock()
            .on_announcement(epoch, acting_epoch);
        self.connector_waker.event.complete();
    }
}

impl Peer {
    /// The peer answers.
    pub(in crate::fabric) fn on_view_ack(&self, epoch: u64) {
        self.clear_suspicion();
        self.view_announcer.lock().on_ack(epoch);
    }

    /// Sends what is to be told. Returns whether to come again soon. Only the connector calls this.
    pub(in crate::fabric) fn flush_announcements(&self, ops: &impl ConnOps, tick: bool) -> bool {
        if !self.view_announcer.lock().has_pending() {
            return false;
        }
        if ops.try_resolve_route() {
            let due = self.view_announcer.lock().take_actions(tick);
            self.send_due(ops, &due);
        }
        self.view_announcer.lock().has_pending()
    }

    fn send_due(&self, ops: &impl ConnOps, due: &TickActions) {
        let messages = [
            (SetupKind::ViewAck, due.acknowledge),
            (SetupKind::ViewAnnounce, due.announce),
        ];
        for (kind, epoch) in messages {
            if let Some(epoch) = epoch {
                ops.send_setup(&ops.identity().view_setup(kind, epoch));
            }
        }
        if due.is_suspect {
            self.suspect();
            ops.invalidate_route();
        }
    }
}
