// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Accepting of connection requests by listening identifiers.

use kite::{PeerCred, Vqp};

use super::address;
use super::cm_id::{CmId, CmIdState, CmState};
use super::event::{CmEvent, UndeliveredId};
use super::ffi_id::{destroy_id, into_raw_passive};
use super::message::{CmMessage, MsgKind};
use super::wire::{ChannelEvent, CmChannel, ConnRequest};
use crate::header::*;
use crate::pending::PendingRequestGuard;

impl CmIdState {
    /// Accepts connection requests. Returns `true` if there were any.
    pub(super) fn accept_requests(&mut self, id: &CmId) -> bool {
        let mut any = false;
        while let Some(Ok((vqp, peer))) = self.port.as_ref().map(|port| port.listener.accept(None))
        {
            any = true;
            if let Some(event) = self.connect_request_event(id, vqp, peer) {
                self.push_event(id, event);
            }
        }
        any
    }

    /// Returns the event for a connection request. A request without an event is dropped, which closes its channel.
    fn connect_request_event(&self, id: &CmId, vqp: Vqp, peer: PeerCred) -> Option<CmEvent> {
        let place = PendingRequestGuard::acquire(&id.manager.pending_requests, peer)?;
        let mut channel = CmChannel::new(&id.manager.cluster, vqp).ok()?;
        let CmMessage { param, addrs, .. } = self.receive_request(&mut channel)?;
        let remote = address::remote_addr(&id.manager.cluster, peer.node, addrs[0]).ok()?;
        let request = ConnRequest {
            channel,
            peer,
            param: param.clone(),
            place,
        };
        let raw = into_raw_passive(CmId::new_passive((id, self), request), [remote, addrs[1]]);
        // SAFETY: the identifier is new.
        let new_id = unsafe { UndeliveredId::new(raw, destroy_id) };
        Some(CmEvent {
            param,
            new_id: Some(new_id),
            ..CmEvent::new(RDMA_CM_EVENT_CONNECT_REQUEST, 0)
        })
    }

    /// Receives the connection request of a new channel. Returns `None` if there is none, or the identifier does not
    /// listen.
    fn receive_request(&self, channel: &mut CmChannel) -> Option<CmMessage> {
        match channel.poll() {
            ChannelEvent::Message(request)
                if request.kind == MsgKind::Req && self.cm_state == CmState::Listening =>
            {
                Some(request)
            }
            _ => None,
        }
    }
}
