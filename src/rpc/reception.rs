// SPDX-License-Identifier: GPL-2.0

//! What comes from peers: requests, of which some are for the memory service, immediates,
//! and packets for virtual queue pairs.

use super::{attach::Ring, Rpc};
use crate::{
    fabric::{peer::Peer, poller::Sink},
    vqp::exchange,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    view::Life,
    wire::{ring::Immediate, Header, Reply, Request},
};

/// Takes what the poller thread hears.
pub(crate) struct Reception(pub(crate) Arc<Rpc>);

impl Sink for Reception {
    fn on_request(&self, from: Arc<Peer>, header: Header, bytes: &[u8]) {
        let rpc = self.0.clone();
        self.0.lmr.answer_later(
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

    fn on_immediate(&self, from: Life, immediate: u32) {
        self.0.on_immediate(from, Immediate::from_u32(immediate));
    }

    fn on_packet(&self, bytes: KVec<u8>) {
        exchange::deliver(&self.0, bytes);
    }
}

impl Rpc {
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
