// SPDX-License-Identifier: GPL-2.0

//! Announcement of views to peers, by datagrams.
//!
//! # Operation
//!
//! `kite_core::proto::view_announce` decides when an announcement is sent, and the connector thread sends it.
//! Datagrams need no connection, so nodes without other communication need none either.
//!
//! # Recovery
//!
//! An announcement is repeated until the peer acknowledges it. A peer without acknowledgments is suspected,
//! and its route is resolved again.
//!
//! # Locking
//!
//! `Peer::view_announcer` (spin lock) is held for single calls of the state machine, and not during a send.

use super::Peer;
use crate::fabric::conn::ConnOps;
use kite_core::{proto::view_announce::TickActions, wire::setup::SetupKind};

impl Peer {
    /// Announces to the peer that this node acts on the view of `epoch`. The announcement is repeated until
    /// the peer acknowledges the same or a later epoch, or until another call replaces it. An `epoch` of 0
    /// stops the announcements.
    pub(super) fn announce_view(&self, epoch: u64) {
        self.view_announcer.lock().announce(epoch);
        self.identity.local.connector_waker.event.complete();
    }

    /// Acknowledges the announcement of `epoch` by the peer. `acting_epoch` is the epoch on which this node
    /// acts.
    pub(crate) fn ack_view(&self, epoch: u64, acting_epoch: u64) {
        self.view_announcer
            .lock()
            .on_announcement(epoch, acting_epoch);
        self.identity.local.connector_waker.event.complete();
    }

    /// Processes an acknowledgment of `epoch` by the peer.
    pub(in crate::fabric) fn on_view_ack(&self, epoch: u64) {
        self.clear_suspicion();
        self.view_announcer.lock().on_ack(epoch);
    }

    /// Sends the announcements and acknowledgments that are due. `tick` is `true` in a round for
    /// retransmissions. Returns `true` if another tick is needed. Called by the connector only.
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
