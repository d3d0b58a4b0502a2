// SPDX-License-Identifier: GPL-2.0

//! All that is offered on one RNIC, and what comes from peers for it.
//!
//! Services know those that they are made of, and none beside them; here is what concerns all: that the view changes,
//! that this node leaves, and that the RNIC goes.

use crate::{
    errno,
    fabric::{peer::Peer, poller::Sink, Fabric},
    lmr::Lmr,
    rpc::Rpc,
    sys::gate::Inside,
    vqp::exchange::Exchange,
};
use core::ops::Deref;
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    view::Life,
    wire::{ring::Immediate, Header},
};

/// The services of an RNIC.
pub(crate) struct Services {
    rpc: Arc<Rpc>,
    exchange: Arc<Exchange>,
}

impl Services {
    /// Those over a memory service.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(lmr: Arc<Lmr>) -> Result<Arc<Self>> {
        let services = Self {
            exchange: Exchange::new(lmr.clone())?,
            rpc: Rpc::new(lmr)?,
        };
        Ok(Arc::new(services, GFP_KERNEL)?)
    }

    fn lmr(&self) -> &Arc<Lmr> {
        &self.rpc.lmr
    }

    /// The fabric that they use.
    pub(crate) fn fabric(&self) -> &Arc<Fabric> {
        &self.lmr().cluster.fabric
    }

    /// The view changed: ends what was between this node and those who left.
    pub(crate) fn prune(&self) {
        let stays = |life| self.lmr().cluster.has(life);
        self.exchange.prune(stays, errno::hostdown());
        self.exchange.deliver_parked();
        self.rpc.prune();
    }

    /// Leaves the cluster.
    pub(crate) fn leave(&self) {
        self.rpc.leave();
        // After that nobody else makes an end.
        self.exchange.prune(|_| false, errno::hostunreach());
    }

    /// Waits for what was to be done for peers, or was to be told them.
    pub(crate) fn flush(&self) {
        self.exchange.flush();
        self.lmr().flush();
    }

    /// Ends them, when nobody comes to them any more. Returns whether nobody used them.
    pub(crate) fn end(self: Arc<Self>) -> bool {
        let (rpc, exchange) = (self.rpc.clone(), self.exchange.clone());
        let lmr = rpc.lmr.clone();
        let alone = [
            Arc::into_unique_or_drop(self).map(drop),
            Arc::into_unique_or_drop(exchange).map(drop),
            Arc::into_unique_or_drop(rpc).map(drop),
            Arc::into_unique_or_drop(lmr).map(drop),
        ];
        alone.iter().all(Option::is_some)
    }
}

/// Calls, for one request.
pub(crate) struct RpcInside<'a>(pub(crate) Inside<'a, Arc<Services>>);

impl Deref for RpcInside<'_> {
    type Target = Arc<Rpc>;

    fn deref(&self) -> &Arc<Rpc> {
        &self.0.rpc
    }
}

/// The memory service, for one request.
pub(crate) struct LmrInside<'a>(pub(crate) Inside<'a, Arc<Services>>);

impl Deref for LmrInside<'_> {
    type Target = Arc<Lmr>;

    fn deref(&self) -> &Arc<Lmr> {
        self.0.lmr()
    }
}

/// Virtual queue pairs, for one request.
pub(crate) struct ExchangeInside<'a>(pub(crate) Inside<'a, Arc<Services>>);

impl Deref for ExchangeInside<'_> {
    type Target = Arc<Exchange>;

    fn deref(&self) -> &Arc<Exchange> {
        &self.0.exchange
    }
}

/// Takes what the poller thread hears.
pub(crate) struct Reception(pub(crate) Arc<Services>);

impl Sink for Reception {
    fn on_request(&self, from: Arc<Peer>, header: Header, bytes: &[u8]) {
        self.0.rpc.on_request(from, header, bytes);
    }

    fn on_view(&self, from: &Peer, epoch: u64) {
        self.0.lmr().on_view(from, epoch);
    }

    fn on_immediate(&self, from: Life, immediate: u32) {
        let immediate = Immediate::from_u32(immediate);
        self.0.rpc.on_immediate(from, immediate);
    }

    fn on_packet(&self, from: Option<Life>, bytes: KVec<u8>) {
        self.0.exchange.deliver(from, bytes);
    }
}
