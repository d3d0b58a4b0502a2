// SPDX-License-Identifier: GPL-2.0

//! Dispatch of control requests: ring requests (`AttachRing`, `DetachRing`) to the RPC service, all others to
//! the memory service.
//!
//! [`crate::rpc::connect`] serves ring requests, [`crate::region::serve`] the others. `CONTRIBUTING.md` lists
//! the places of a new control message.

use crate::{
    fabric::peer::Peer,
    region::serve::encode_reply,
    rpc::{ring::RingInfo, Rpc},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::wire::{ControlHeader, ControlReply, ControlRequest};

impl Rpc {
    /// Handles a request received from a peer, on a worker of the memory service.
    pub(crate) fn on_request(
        self: &Arc<Self>,
        from: Arc<Peer>,
        header: ControlHeader,
        bytes: &[u8],
    ) {
        let rpc = self.clone();
        self.memory_service.serve_deferred(
            from,
            header,
            bytes,
            move |node, header, request, out| match request {
                ControlRequest::AttachRing { .. } | ControlRequest::DetachRing { .. } => {
                    encode_reply(header, rpc.dispatch(node, request), out)
                }
                _ => rpc.memory_service.serve(node, header, request, out),
            },
        );
    }

    /// Executes a ring request of `node`, which may be this node.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the request is no ring request.
    /// - `EHOSTDOWN`: `node` is not in the view.
    /// - See [`Rpc::serve_attach`].
    pub(crate) fn dispatch(
        self: &Arc<Self>,
        node: u32,
        request: &ControlRequest<'_>,
    ) -> Result<ControlReply<'static>> {
        match *request {
            ControlRequest::AttachRing {
                region,
                mapping,
                ring_region: ring,
                ring_id: number,
            } => {
                let instance = self.memory_service.cluster.instance_of(node)?;
                let peer_ring = RingInfo {
                    region: ring,
                    id: number,
                };
                let own_ring = self.serve_attach(instance, (region, mapping), peer_ring)?;
                Ok(ControlReply::RingAttached {
                    ring_region: own_ring.region,
                    ring_id: own_ring.id,
                })
            }
            ControlRequest::DetachRing {
                ring_region: ring,
                ring_id: number,
            } => {
                let own_ring = RingInfo {
                    region: ring,
                    id: number,
                };
                self.serve_detach(node, own_ring);
                Ok(ControlReply::Done)
            }
            _ => Err(EINVAL),
        }
    }
}
