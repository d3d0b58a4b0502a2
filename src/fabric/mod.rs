// SPDX-License-Identifier: GPL-2.0

//! Data transfer and connections between nodes, over one RNIC.
//!
//! Services above this module address a node and memory and never use a QP. The [`crate::verbs`] module is
//! below.
//!
//! # Operation
//!
//! One [`Fabric`] per RNIC owns the protection domain, one send and one receive CQ, the UD setup QP, and the
//! peers. The setup QP carries the datagrams that set up connections and announce views. With mlx5 hardware,
//! [`DcTransport`] adds DC. Each part has a type that owns its fields, for example [`PeerTable`],
//! [`RecvEngine`] and [`MrTable`]. The functions of the fabric itself combine several parts. Two threads
//! serve a fabric: the poller ([`recv::poller`]) and the connector ([`conn::connector`]).
//!
//! # Recovery
//!
//! The connector replaces a failed RC QP ([`conn`]). It resets and restarts a failed DCI ([`dc`]) and the
//! setup QP. Nodes removed from the view are fenced in two steps: [`Fabric::fence_peers`] revokes their
//! access to local memory, and [`Fabric::drain_peers`] waits for local users and destroys the QPs.
//!
//! # Locking
//!
//! The fabric itself has no locks. Each of its parts owns its fields and their locks. The table of all locks
//! and their order is in `docs/development/architecture.md`.

mod address;
pub(crate) mod conn;
pub(crate) mod control;
pub(crate) mod dc;
pub(crate) mod endpoint;
mod endpoint_table;
pub(crate) mod mr;
pub(crate) mod peer;
pub(crate) mod qos;
pub(crate) mod recv;
pub(crate) mod send;
mod setup_qp;

use self::{
    address::LocalAddress,
    control::ControlRequests,
    dc::DcTransport,
    endpoint::{Endpoint, EndpointResources},
    endpoint_table::EndpointTable,
    mr::{atomics::AtomicEngine, table::MrTable},
    peer::{suspicion::SuspectListener, table::PeerTable, Peer},
    qos::Qos,
    recv::{engine::RecvEngine, poll_client::PollClients, wake::ThreadWaker},
    send::slots::{SendEngine, SlotClass, SlotGuard},
    setup_qp::SetupQp,
};
use crate::{
    errno::TryResult,
    mlx5::{dct::DctId, wr::DcAddress, Mlx5Device},
    params,
    stats::Stats,
    sys::adaptive_spin::{AdaptiveSpin, SpinSample},
    verbs::{cq::Cq, device::IbDevice, log::rnic_err, pd::Pd},
};
use core::num::{NonZeroU32, NonZeroU8};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// Entries of the receive CQ: sufficient for about 1000 peers with two RC connections each.
const RECV_CQ_ENTRIES: u32 = 64 * 1024;

/// Module parameters of the fabric.
#[derive(Clone, Copy)]
pub(crate) struct FabricConfig {
    /// RC connections per peer (K in LITE).
    pub(crate) conns_per_peer: NonZeroU8,
    /// Data slots: maximum transfers in flight per RNIC.
    pub(crate) max_inflight: u32,
    /// Maximum number of peers promoted to RC for virtual queue pairs.
    max_promoted: u8,
}

impl FabricConfig {
    /// Reads the module parameters.
    pub(crate) fn from_parameters() -> Self {
        Self {
            conns_per_peer: params::conns_per_peer(),
            max_inflight: params::max_inflight(),
            max_promoted: params::max_promoted(),
        }
    }
}

/// The fabric of one RNIC.
#[pin_data]
pub(crate) struct Fabric {
    config: FabricConfig,
    resources: EndpointResources,
    /// `None` if the RNIC has no DC.
    dc: Option<Arc<DcTransport>>,
    pub(crate) local_address: Arc<LocalAddress>,
    pub(crate) mr_table: Pin<KBox<MrTable>>,
    #[pin]
    pub(crate) atomic_engine: AtomicEngine,
    setup_qp: SetupQp,
    #[pin]
    endpoints: EndpointTable,
    #[pin]
    pub(crate) peers: PeerTable,
    #[pin]
    control_requests: ControlRequests,
    #[pin]
    pub(crate) recv_engine: RecvEngine,
    #[pin]
    pub(crate) poll_clients: PollClients,
    pub(crate) qos: Arc<Qos>,
    pub(crate) poller_waker: Arc<ThreadWaker>,
    connector_waker: Arc<ThreadWaker>,
    pub(crate) suspect_listener: Arc<SuspectListener>,
    pub(crate) stats: Arc<Stats>,
}

impl Fabric {
    /// Creates the queues of an RNIC, without any peer or connection.
    pub(crate) fn new(
        device: IbDevice,
        config: FabricConfig,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let poller_waker = ThreadWaker::new()?;
        let connector_waker = ThreadWaker::new()?;
        let pd = Pd::new(device)?;
        let recv_cqe_count = RECV_CQ_ENTRIES.min(device.limits().max_cqe);
        let recv_cq = Arc::new(
            Cq::new(device, recv_cqe_count, 1, poller_waker.clone())?,
            GFP_KERNEL,
        )?;
        // `None` if another driver drives the RNIC or the hardware lacks a required feature.
        let hca = Mlx5Device::probe(&pd);
        let dc = hca
            .as_ref()
            .and_then(|hca| DcTransport::probe(hca, [&poller_waker, &connector_waker], &stats));
        let dc_cq = dc.as_ref().map(|dc| dc.send_cq().clone());
        let send_engine = SendEngine::new(
            device,
            config.max_inflight,
            poller_waker.clone(),
            dc_cq,
            stats.clone(),
        )?;
        let resources = EndpointResources {
            pd,
            send_engine,
            recv_cq,
            port: device.first_port(),
        };
        let setup_qp = SetupQp::new(&resources, connector_waker.clone())?;
        let setup_endpoint = setup_qp.endpoint().clone();
        let local_address = LocalAddress::new(
            resources.pd.clone(),
            resources.port,
            setup_endpoint.qp().qpn(),
        )?;
        let recv_engine =
            RecvEngine::new(resources.recv_cq.clone(), dc.clone(), poller_waker.clone());
        let mr_table = MrTable::new(local_address.clone(), hca.clone(), connector_waker.clone())?;
        let atomic_engine = AtomicEngine::new(local_address.clone(), hca);
        let this = Arc::pin_init(
            try_pin_init!(Self {
                config,
                resources,
                dc,
                local_address,
                mr_table,
                atomic_engine <- atomic_engine,
                setup_qp,
                endpoints <- EndpointTable::new(recv_cqe_count),
                peers <- PeerTable::new(config.max_promoted, connector_waker.clone(), stats.clone()),
                control_requests <- ControlRequests::new(),
                recv_engine <- recv_engine,
                poll_clients <- PollClients::new(poller_waker.clone()),
                qos: Qos::new(stats.clone())?,
                poller_waker,
                connector_waker,
                suspect_listener: SuspectListener::new()?,
                stats,
            }),
            GFP_KERNEL,
        )?;
        this.endpoints.insert(setup_endpoint)?;
        Ok(this)
    }

    /// Returns the DC transport if the RNIC has DC.
    pub(crate) fn dc(&self) -> Option<&Arc<DcTransport>> {
        self.dc.as_ref()
    }

    /// Returns the DC address of a peer whose DCT has the number `dctn`. Returns `None` if the RNIC has no
    /// DC.
    ///
    /// # Errors
    ///
    /// - See [`LocalAddress::route_or_resolve`] and [`DcAddress::new`].
    pub(crate) fn dc_address(
        &self,
        peer: &Peer,
        dctn: u32,
        dc_key: u64,
    ) -> Result<Option<DcAddress>> {
        let Some(dc) = &self.dc else {
            return Ok(None);
        };
        let route = self.local_address.route_or_resolve(peer)?;
        DcAddress::new(dc.hca(), &route, DctId { dctn, dc_key }).map(Some)
    }

    /// Returns the peer with this node number. See [`PeerTable::get`].
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    pub(crate) fn peer(&self, node: u32) -> Result<Arc<Peer>> {
        self.peers.get(node)
    }

    /// Returns the peer with this node number and incarnation. See [`PeerTable::get_instance`].
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view, or has another incarnation.
    pub(crate) fn peer_by_instance(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        self.peers.get_instance(instance)
    }

    /// Opens the DCT at the local port. Does nothing if the RNIC has no DC.
    ///
    /// # Errors
    ///
    /// - `EIO`: the hardware rejected the DCT.
    /// - `ENOMEM`: out of memory.
    /// - Any error of the port and GID queries.
    pub(crate) fn open_dct(&self) -> Result {
        match &self.dc {
            Some(dc) => dc.open_dct(self.local_address.port_config()?),
            None => Ok(()),
        }
    }

    /// Closes the DCT. Does nothing if the RNIC has no DC.
    pub(crate) fn close_dct(&self) {
        if let Some(dc) = &self.dc {
            dc.close_dct(|| self.drain_recv_cq());
        }
    }

    /// Returns the RNIC.
    pub(crate) fn device(&self) -> IbDevice {
        self.resources.pd.device()
    }

    /// Returns the rkey of all local memory, which only the kernels of peers receive.
    fn global_rkey(&self) -> u32 {
        self.resources.pd.global_rkey()
    }

    fn send_engine(&self) -> &Arc<SendEngine> {
        &self.resources.send_engine
    }

    /// Acquires a slot without sleeping.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: no slot of the class is free.
    pub(crate) fn try_acquire_slot(&self, class: SlotClass) -> TryResult<SlotGuard> {
        self.send_engine().acquire_slot(class, None)
    }

    /// Returns the lkey by which work requests address local memory.
    pub(crate) fn local_key(&self) -> u32 {
        self.resources.pd.local_dma_lkey()
    }

    /// Returns the maximum number of segments that one connection may have in flight now: the free data slots
    /// divided by K, at least 1. The quota reserves slots for other peers if some peers do not respond: after
    /// `n` stuck connections, (1 - 1/(K + 1))^n of all slots remain.
    pub(crate) fn inflight_quota(&self) -> u32 {
        (self.send_engine().free_slots() / NonZeroU32::from(self.config.conns_per_peer)).max(1)
    }

    /// Processes all messages received before the call. May sleep.
    ///
    /// Required before a QP is reset: the sender has received an acknowledgment for these messages, and
    /// drivers discard unpolled completions at the reset.
    fn drain_recv_cq(&self) {
        self.recv_engine.drain(self);
    }

    /// Processes received messages unless another thread does. Returns the number of messages.
    ///
    /// The caller must not hold any lock, since the handler takes locks.
    pub(crate) fn try_poll_recv(&self) -> usize {
        self.recv_engine.try_poll(self).unwrap_or(0)
    }

    /// Polls the receive queues and processes messages until `done` returns `true` or the spin time ends.
    ///
    /// Returns `None` if `done` returned `true`. Otherwise the poller thread was woken, and the caller must
    /// sleep. The caller drops the returned sample when the wait ends, which adapts `spin`.
    ///
    /// The caller must not hold any lock, since message handlers take locks.
    pub(crate) fn busy_poll<'a>(
        &self,
        spin: &'a AdaptiveSpin,
        done: impl FnMut() -> bool,
    ) -> Option<SpinSample<'a>> {
        self.recv_engine.busy_poll(self, spin, done)
    }

    fn destroy_endpoint(&self, endpoint: Arc<Endpoint>) {
        // The QP is in ERR. Process its received messages before the reset: some drivers discard them in the
        // reset, others complete them after it.
        self.drain_recv_cq();
        // The endpoint may have other references for a short time. RESET takes the QP out of use now.
        if let Err(error) = endpoint.qp().modify_to_reset() {
            rnic_err!(self.device(), "QP cannot be moved to RESET: {error:?}\n");
        }
        self.drain_recv_cq();
        self.endpoints.remove(endpoint.id());
    }

    /// Closes all connections to `peers`: users receive `error`. On return, none of `peers` can access local
    /// memory. The DCT is rotated too, because a removed node may still run and have the old DCT number.
    pub(crate) fn fence_peers(&self, peers: &[Arc<Peer>], error: Error) {
        peers.iter().for_each(|peer| peer.close(error));
        if let Some(dc) = self.dc.as_ref().filter(|_| !peers.is_empty()) {
            dc.rotate_dct(|| self.drain_recv_cq());
        }
    }

    /// Waits until the connections to `peers` have no users, and destroys their QPs. The connections must be
    /// closed.
    pub(crate) fn drain_peers(&self, peers: &[Arc<Peer>]) {
        self.peers.demote(peers);
        for conn in peers.iter().flat_map(|peer| peer.conns()) {
            let (endpoint, reservation) = conn.drain();
            if let Some(endpoint) = endpoint {
                self.destroy_endpoint(endpoint);
            }
            drop(reservation);
        }
    }
}
