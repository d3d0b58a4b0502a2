// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Accepting of connection requests by listening identifiers.

use kite::Vqp;

use super::cm_id::{CmId, CmIdState, CmState};
use super::event::{CmEvent, UndeliveredId};
use super::ffi_id::{destroy_id, into_raw_passive};
use super::message::MsgKind;
use super::wire::{ChannelEvent, CmChannel};
use crate::header::*;

impl CmIdState {
    /// Accepts connection requests. Returns `true` if there were any.
    pub(super) fn accept_requests(&mut self, id: &CmId) -> bool {
        let mut any = false;
        while let Some(Ok((vqp, peer))) = self.port.as_ref().map(|port| port.listener.accept(None))
        {
            any = true;
            if let Some(event) = self.connect_request_event(id, vqp, peer.node) {
                self.push_event(id, event);
            }
        }
        any
    }

    /// Returns the event for a connection request. A request without an event is dropped, which closes its channel.
    fn connect_request_event(&self, id: &CmId, vqp: Vqp, node: u32) -> Option<CmEvent> {
        let mut channel = CmChannel::new(&id.manager.cluster, vqp).ok()?;
        match channel.poll() {
            ChannelEvent::Message(request)
                if request.kind == MsgKind::Req && self.cm_state == CmState::Listening =>
            {
                let param = request.param.clone();
                let passive_id = CmId::new_passive((id, self), channel, node, param.clone());
                let raw = into_raw_passive(passive_id, request.addrs);
                // SAFETY: the identifier is new.
                let new_id = unsafe { UndeliveredId::new(raw, destroy_id) };
                Some(CmEvent {
                    param,
                    new_id: Some(new_id),
                    ..CmEvent::new(RDMA_CM_EVENT_CONNECT_REQUEST, 0)
                })
            }
            _ => None,
        }
    }
}
