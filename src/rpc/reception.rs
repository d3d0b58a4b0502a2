// SPDX-License-Identifier: GPL-2.0

//! Requests that come from peers, of which most are for the memory service.

use super::{attach::Ring, Rpc};
use crate::fabric::peer::Peer;
use kernel::{prelude::*, sync::Arc};
use kite_core::wire::{Header, Reply, Request};

impl Rpc {
    /// A request of a peer has come.
    pub(crate) fn on_request(self: &Arc<Self>, from: Arc<Peer>, header: Header, bytes: &[u8]) {
        let rpc = self.clone();
        self.lmr.answer_later(
            from,
            header,
            bytes,
            move |node, header, request, out| match request {
                Request::Attach { .. } | Request::Detach { .. } => {
                    rpc.lmr.encode(header, rpc.decide(node, request), out)
                }
                _ => rpc.lmr.serve(node, header, request, out),
            },
        );
    }

    /// Answers a request of `node`, which may be this one.
    pub(super) fn decide(
        self: &Arc<Self>,
        node: u32,
        request: &Request<'_>,
    ) -> Result<Reply<'static>> {
        match *request {
            Request::Attach {
                region,
                mapping,
                ring,
                number,
            } => {
                let life = self.lmr.cluster.life_of(node)?;
                let theirs = Ring {
                    region: ring,
                    number,
                };
                let ours = self.serve_attach(life, (region, mapping), theirs)?;
                Ok(Reply::Attached {
                    ring: ours.region,
                    number: ours.number,
                })
            }
            Request::Detach { ring, number } => {
                let ours = Ring {
                    region: ring,
                    number,
                };
                self.serve_detach(node, ours);
                Ok(Reply::Done)
            }
            _ => Err(EINVAL),
        }
    }
}
