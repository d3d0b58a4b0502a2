// SPDX-License-Identifier: GPL-2.0

//! Data transfer and connections between nodes, over one RNIC.
//!
//! Services above this module address a node and memory and never use a QP. The [`crate::verbs`] module is
//! below.
//!
//! # Operation
//!
//! One [`Fabric`] per RNIC owns the protection domain, one send and one receive CQ, the UD control QP, and
//! the peers. The control QP carries the datagrams that set up connections and announce views. With mlx5
//! hardware, [`DcTransport`] adds DC. Two threads serve a fabric: the poller ([`recv::poller`]) and the
//! connector ([`conn::connector`]).
//!
//! # Recovery
//!
//! A failed RC QP is replaced by the connector ([`conn`]), a failed DCI too ([`dc`]). The connector restarts
//! the control QP. Nodes removed from the view are fenced in two steps: [`Fabric::fence_peers`] revokes their
//! access to local memory, and [`Fabric::drain_peers`] waits for local users and destroys the QPs.
//!
//! # Locking
//!
//! - `advertised_gid`, `peers`, `self_peer`: spin locks, each for the field that the lock contains.
//! - `promoted_peers`: spin lock for the set. Holders take `peers`, and [`Peer::request_rate`] of other
//!   peers.
//! - `endpoints`: spin lock of the XArray. [`Endpoint`]s are dropped after the lock is released, because
//!   destroying a QP sleeps.
//! - `poll_clients`: mutex. A holder may sleep for memory.
//! - `control_qp_failed`: set with release order by the poller or the connector. Only the connector clears
//!   the flag, with full order.
//!
//! Lock order: `promoted_peers` → `peers`; `promoted_peers` → [`Peer::request_rate`]; `peers` → the locks of
//! [`peer::suspicion`].

pub(crate) mod conn;
pub(crate) mod control;
pub(crate) mod dc;
pub(crate) mod endpoint;
pub(crate) mod mr;
pub(crate) mod peer;
pub(crate) mod qos;
pub(crate) mod recv;
pub(crate) mod send;

use self::{
    conn::credit::StaleQp,
    control::ControlRequests,
    dc::DcTransport,
    endpoint::{Endpoint, EndpointResources, RecvCqBudget},
    mr::{atomics::AtomicEngine, registrar::MrRegistrar, table::MrTable},
    peer::{identity::LocalIdentity, suspicion::SuspectListener, Peer},
    qos::Qos,
    recv::{
        poller::{PollClients, RecvEngine},
        wake::ThreadWaker,
    },
    send::slots::{Recovery, SendEngine, SlotClass, SlotGuard},
};
use crate::{
    bindings, errno,
    mlx5::{Mlx5Device, PortConfig},
    params,
    stats::Stats,
    sys::deadline::Deadline,
    verbs::{
        address::{AddressHandle, PortAddress},
        cq::{Cq, WcStatus},
        device::{Gid, IbDevice, LinkLayer},
        pd::Pd,
        work::UdSendWr,
    },
};
use core::num::{NonZeroU32, NonZeroU8};
use kernel::{
    new_mutex, new_spinlock, pr_info_once, pr_warn_once,
    prelude::*,
    sync::{
        atomic::{Atomic, AtomicFlag, Full, Relaxed, Release},
        Arc, Mutex, SpinLock,
    },
    xarray::{AllocKind, XArray},
};
use kite_core::{policy::promotion::PromotedPeers, view::NodeInstance, wire::setup::SetupDatagram};

/// Queue key of all control QPs ("kite" in ASCII). The key prevents accidental deliveries only. Peers are
/// authenticated by the secret in each datagram.
const CONTROL_QKEY: u32 = 0x6b69_7465;

/// ID of the control endpoint. IDs of RC endpoints are higher.
const CONTROL_ENDPOINT_ID: u32 = 0;

/// Maximum time in ms that a datagram waits for a slot.
const DATAGRAM_TIMEOUT_MS: u32 = 1000;

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
    /// mlx5 hardware access. `None` if another driver drives the RNIC or the hardware lacks a required
    /// feature.
    hca: Option<Arc<Mlx5Device>>,
    /// `None` if the RNIC has no DC.
    dc: Option<Arc<DcTransport>>,
    pub(crate) mr_table: Pin<KBox<MrTable>>,
    #[pin]
    registrar: MrRegistrar,
    #[pin]
    atomic_engine: AtomicEngine,
    control_endpoint: Arc<Endpoint>,
    /// The control QP is in ERR. The connector must restart the QP.
    control_qp_failed: AtomicFlag,
    #[pin]
    endpoints: XArray<Arc<Endpoint>>,
    next_endpoint_id: Atomic<u32>,
    recv_cq_budget: Arc<RecvCqBudget>,
    /// GID in the address that the view advertises for this node. Set by `pin_address`, cleared by
    /// `unpin_address`.
    #[pin]
    advertised_gid: SpinLock<Option<Gid>>,
    /// Other nodes of the view, sorted by node number.
    #[pin]
    peers: SpinLock<KVec<Arc<Peer>>>,
    /// This node as a peer. Has no RC connections: a node reaches itself by DC.
    #[pin]
    self_peer: SpinLock<Option<Arc<Peer>>>,
    #[pin]
    promoted_peers: SpinLock<PromotedPeers>,
    #[pin]
    pub(crate) control_requests: ControlRequests,
    #[pin]
    recv_engine: RecvEngine,
    #[pin]
    poll_clients: Mutex<PollClients>,
    pub(crate) qos: Arc<Qos>,
    pub(crate) poller_waker: Arc<ThreadWaker>,
    pub(crate) connector_waker: Arc<ThreadWaker>,
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
        let control_endpoint = Arc::new(
            Endpoint::new_ud(&resources, CONTROL_ENDPOINT_ID, CONTROL_QKEY)?,
            GFP_KERNEL,
        )?;
        let control_ref = control_endpoint.clone();
        let this = Arc::pin_init(
            try_pin_init!(Self {
                config,
                resources,
                hca,
                dc,
                mr_table: MrTable::new(device)?,
                registrar <- MrRegistrar::new(),
                atomic_engine <- AtomicEngine::new(),
                control_endpoint,
                control_qp_failed: AtomicFlag::new(false),
                endpoints <- XArray::new(AllocKind::Alloc),
                next_endpoint_id: Atomic::new(CONTROL_ENDPOINT_ID + 1),
                recv_cq_budget: RecvCqBudget::new(recv_cqe_count)?,
                advertised_gid <- new_spinlock!(None),
                peers <- new_spinlock!(KVec::new()),
                self_peer <- new_spinlock!(None),
                promoted_peers <- new_spinlock!(PromotedPeers::new(config.max_promoted.into())),
                control_requests <- ControlRequests::new(),
                recv_engine <- RecvEngine::new(),
                poll_clients <- new_mutex!(PollClients::new()),
                qos: Qos::new(stats.clone())?,
                poller_waker,
                connector_waker,
                suspect_listener: SuspectListener::new()?,
                stats,
            }),
            GFP_KERNEL,
        )?;
        this.endpoints
            .lock()
            .store(CONTROL_ENDPOINT_ID as usize, control_ref, GFP_ATOMIC)
            .map_err(|error| error.error)?;
        Ok(this)
    }

    /// Returns the DC transport if the RNIC has DC.
    pub(crate) fn dc(&self) -> Option<&Arc<DcTransport>> {
        self.dc.as_ref()
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
    /// - `EAGAIN`: no slot of the class is free.
    pub(crate) fn try_acquire_slot(&self, class: SlotClass) -> Result<SlotGuard> {
        self.send_engine().acquire_slot(class, None)
    }

    /// Returns the lkey by which work requests address local memory.
    pub(crate) fn local_key(&self) -> u32 {
        self.resources.pd.local_dma_lkey()
    }

    /// Returns the index and the value of the GID at which peers reach this node: the pinned GID, else the
    /// preferred one.
    fn gid(&self, link: LinkLayer) -> Result<(u8, Gid)> {
        let port = self.resources.port;
        match *self.advertised_gid.lock() {
            Some(gid) => self.device().find_gid(port, link, &gid),
            None => self.device().preferred_gid(port, link),
        }
    }

    /// Pins the advertised address: this node uses its GID until [`Self::unpin_address`], even if the port
    /// gets other GIDs meanwhile.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `address` does not name the control QP, or the port lacks the GID (on InfiniBand: the
    ///   LID).
    /// - Any error of the port query.
    pub(crate) fn pin_address(&self, address: &bindings::kite_address) -> Result {
        if address.qpn != self.control_endpoint.qp().qpn() {
            return Err(EINVAL);
        }
        let state = self.device().query_port(self.resources.port)?;
        if state.link_layer == LinkLayer::InfiniBand {
            return (address.lid == state.lid).then_some(()).ok_or(EINVAL);
        }
        if self.advertised_gid.lock().is_some() {
            return Ok(());
        }
        let result = self
            .device()
            .find_gid(self.resources.port, state.link_layer, &address.gid);
        result.map_err(|_| EINVAL)?;
        *self.advertised_gid.lock() = Some(address.gid);
        Ok(())
    }

    /// Allows another GID to be chosen, and closes the DCT.
    pub(crate) fn unpin_address(&self) {
        *self.advertised_gid.lock() = None;
        if let Some(dc) = &self.dc {
            dc.close_dct(|| self.drain_recv_cq());
        }
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
            Some(dc) => dc.open_dct(self.local_port()?),
            None => Ok(()),
        }
    }

    /// Returns the port, GID index and MTU of this node.
    fn local_port(&self) -> Result<PortConfig> {
        let state = self.device().query_port(self.resources.port)?;
        Ok(PortConfig {
            port: self.resources.port,
            gid_index: self.gid(state.link_layer)?.0,
            mtu: state.mtu,
        })
    }

    /// Returns a route from the local port to itself.
    fn loopback_route(&self) -> Result<AddressHandle> {
        let (pd, port) = (self.resources.pd.clone(), self.resources.port);
        let state = self.device().query_port(port)?;
        let (gid_index, gid) = self.gid(state.link_layer)?;
        let destination = PortAddress {
            gid,
            lid: state.lid,
        };
        AddressHandle::new(pd, port, state.link_layer, gid_index, destination)
    }

    /// Resolves the route to a peer. Sleeps while the network resolves the neighbor.
    fn resolve_route(&self, peer: &Peer) -> Result<AddressHandle> {
        let (pd, port) = (self.resources.pd.clone(), self.resources.port);
        let link = self.device().query_port(port)?.link_layer;
        let (gid_index, _) = self.gid(link)?;
        AddressHandle::new(pd, port, link, gid_index, peer.control_address.destination)
    }

    /// Returns the cached route to a peer, or resolves one. Sleeps while the network resolves the neighbor.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - Any error of the port query, or of [`AddressHandle::new`].
    pub(crate) fn route_or_resolve(&self, peer: &Peer) -> Result<Arc<AddressHandle>> {
        match peer.route() {
            Some(route) => Ok(route),
            None => Ok(Arc::new(self.resolve_route(peer)?, GFP_KERNEL)?),
        }
    }

    /// Returns the address of the control QP for the view, and `true` if the port is active.
    pub(crate) fn control_address(&self) -> Result<(bindings::kite_address, bool)> {
        let state = self.device().query_port(self.resources.port)?;
        let gid = self.gid(state.link_layer).map_or([0; 16], |(_, gid)| gid);
        let address = bindings::kite_address {
            gid,
            qpn: self.control_endpoint.qp().qpn(),
            lid: state.lid,
            link_layer: if state.link_layer == LinkLayer::InfiniBand {
                1
            } else {
                2
            },
            mtu: state.mtu,
            ..Default::default()
        };
        Ok((address, state.active))
    }

    /// Returns `true` if the port is active.
    pub(crate) fn is_port_active(&self) -> bool {
        self.device().is_port_active(self.resources.port)
    }

    /// Returns the endpoint with this ID.
    fn endpoint(&self, id: u32) -> Option<Arc<Endpoint>> {
        self.endpoints.lock().get(id as usize).map(Into::into)
    }

    /// Returns the peer with this node number.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view.
    pub(crate) fn peer(&self, node: u32) -> Result<Arc<Peer>> {
        let peers = self.peers.lock();
        let index = peers
            .binary_search_by_key(&node, |peer| peer.node())
            .map_err(|_| errno::hostdown())?;
        Ok(peers[index].clone())
    }

    /// Returns the peer with this node number and incarnation.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view, or has another incarnation.
    pub(crate) fn peer_by_instance(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let peer = self.peer(instance.node)?;
        if peer.instance() == instance {
            Ok(peer)
        } else {
            Err(errno::hostdown())
        }
    }

    /// Like [`Self::peer_by_instance`], but also finds this node.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the node is not in the view, or has another incarnation.
    pub(crate) fn peer_or_self(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let self_peer = self.self_peer.lock().clone();
        let self_peer = self_peer.filter(|self_peer| self_peer.instance() == instance);
        self_peer.map_or_else(|| self.peer_by_instance(instance), Ok)
    }

    /// Sets the peer that stands for this node. `None` if this node is in no view.
    pub(crate) fn set_self_peer(&self, self_peer: Option<Arc<Peer>>) {
        let old = core::mem::replace(&mut *self.self_peer.lock(), self_peer);
        drop(old);
    }

    /// Returns the QPs to a peer that failed and have no successor yet. Returns an empty list if the peer is
    /// not in the view.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn stale_qps(&self, instance: NodeInstance) -> Result<KVec<StaleQp>> {
        let mut stale_qps = KVec::new();
        if let Ok(peer) = self.peer_by_instance(instance) {
            for conn in peer.conns() {
                if let Some(generation) = conn.stale_generation() {
                    let conn = conn.clone();
                    stale_qps.push(
                        StaleQp {
                            conn,
                            generation,
                            instance,
                        },
                        GFP_KERNEL,
                    )?;
                }
            }
        }
        Ok(stale_qps)
    }

    /// Returns the maximum number of segments that one connection may have in flight now: the free data slots
    /// divided by K, at least 1. The quota reserves slots for other peers if some peers do not respond: after
    /// `n` stuck connections, (1 - 1/(K + 1))^n of all slots remain.
    pub(crate) fn inflight_quota(&self) -> u32 {
        (self.send_engine().free_slots() / NonZeroU32::from(self.config.conns_per_peer)).max(1)
    }

    /// Returns all peers, sorted by node number.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn all_peers(&self) -> Result<KVec<Arc<Peer>>> {
        let mut all = KVec::new();
        while let Some(peer) = self.nth_peer(all.len()) {
            all.push(peer, GFP_KERNEL)?;
        }
        Ok(all)
    }

    /// Returns the identity that this node presents to its peers, for one incarnation.
    ///
    /// # Errors
    ///
    /// - `EIO`: the port query failed.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn local_identity(
        &self,
        instance: NodeInstance,
        secret: [u8; 16],
    ) -> Result<Arc<LocalIdentity>> {
        let identity = LocalIdentity {
            instance,
            secret,
            rkey: self.global_rkey(),
            mtu: self.device().query_port(self.resources.port)?.mtu,
            rd_atomic: self.device().limits().max_rd_atomic,
            max_conns: self.config.conns_per_peer.get(),
            connector_waker: self.connector_waker.clone(),
            suspect_listener: self.suspect_listener.clone(),
            stats: self.stats.clone(),
        };
        Ok(Arc::new(identity, GFP_KERNEL)?)
    }

    /// Returns the `i`th peer in order of node numbers.
    fn nth_peer(&self, i: usize) -> Option<Arc<Peer>> {
        self.peers.lock().get(i).cloned()
    }

    /// Returns the number of peers.
    fn peer_count(&self) -> usize {
        self.peers.lock().len()
    }

    /// Returns a suspected peer that was not reported yet, and marks the suspicion as reported.
    pub(crate) fn next_suspect(&self) -> Option<u32> {
        let peers = self.peers.lock();
        let suspect = peers.iter().find(|peer| peer.consume_suspicion());
        suspect.map(|peer| peer.node())
    }

    /// Replaces the peers by `peers`, which must be sorted by node number. Returns the old ones.
    pub(crate) fn replace_peers(&self, peers: KVec<Arc<Peer>>) -> KVec<Arc<Peer>> {
        let old = core::mem::replace(&mut *self.peers.lock(), peers);
        // The connector may have skipped a peer while it iterated by index.
        self.connector_waker.event.complete();
        old
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
        self.demote_peers(peers);
        for conn in peers.iter().flat_map(|peer| peer.conns()) {
            let (endpoint, reservation) = conn.drain();
            if let Some(endpoint) = endpoint {
                self.destroy_endpoint(endpoint);
            }
            drop(reservation);
        }
    }

    fn destroy_endpoint(&self, endpoint: Arc<Endpoint>) {
        // The QP is in ERR. Process its received messages before the reset: some drivers discard them in the
        // reset, others complete them after it.
        self.drain_recv_cq();
        // The endpoint may have other references for a short time. RESET takes the QP out of use now.
        if let Err(error) = endpoint.qp().modify_to_reset() {
            pr_err!("QP cannot be moved to RESET: {error:?}\n");
        }
        self.drain_recv_cq();
        // Drop the endpoint after the spin lock is released: dropping the last reference sleeps.
        let removed = self.endpoints.lock().remove(endpoint.id() as usize);
        drop(removed);
    }

    /// Creates and registers an endpoint. The connection must hold an [`endpoint::RecvCqReservation`].
    fn create_endpoint(&self, peer: NodeInstance) -> Result<Arc<Endpoint>> {
        let id = self.next_endpoint_id.fetch_add(1u32, Relaxed);
        let endpoint = Arc::new(Endpoint::new_rc(&self.resources, id, peer)?, GFP_KERNEL)?;
        self.endpoints
            .lock()
            .store(id as usize, endpoint.clone(), GFP_ATOMIC)
            .map_err(|error| error.error)?;
        Ok(endpoint)
    }

    /// Reports that the control QP failed, for example because a neighbor or an address disappeared during a
    /// send. The connector restarts the QP.
    fn report_control_qp_failure(&self) {
        self.control_qp_failed.store(true, Release);
        self.connector_waker.event.complete();
    }

    /// Restarts the control QP if it failed. Called by the connector only, which is also the only sender on
    /// the control QP.
    fn restart_control_qp(&self) {
        if !self.control_qp_failed.xchg(false, Full) {
            return;
        }
        pr_info_once!("control QP failed, restarting\n");
        if let Err(error) = self.control_endpoint.restart_ud(CONTROL_QKEY) {
            pr_warn_once!("control QP cannot be restarted: {error:?}\n");
            self.control_qp_failed.store(true, Release);
        }
    }

    fn recover_control_qp(&self, recovery: Recovery) -> Result {
        match recovery {
            Recovery::ToError => self.control_endpoint.qp().modify_to_err(),
            Recovery::ToReset => self.control_endpoint.qp().modify_to_reset(),
        }
    }

    /// Sends a datagram to the control QP of a peer, and waits for the send completion.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: the route is not resolved.
    /// - `EIO`: the send failed. The connector restarts the control QP.
    /// - Any error of acquiring a slot or of posting.
    fn send_setup(&self, peer: &Peer, setup: &SetupDatagram) -> Result {
        let route = peer.route().ok_or_else(errno::hostunreach)?;
        let mut bytes = [0; 128];
        let len = setup.encode(&mut bytes).ok_or(EINVAL)?;
        let slot = self.send_engine().acquire_slot(
            SlotClass::Control,
            Some(Deadline::after_ms(DATAGRAM_TIMEOUT_MS)),
        )?;
        slot.buffer().write(0, &bytes[..len])?;
        slot.buffer().sync_for_device(len);
        let sges = [slot.buffer().sge(self.local_key(), 0, len).ok_or(EINVAL)?];
        let wr = UdSendWr::new(
            slot.wr_id(),
            &sges,
            &route,
            peer.control_address.qpn,
            CONTROL_QKEY,
        );
        slot.account_post(1);
        // SAFETY: The request addresses the buffer of `slot` only. `slot.wait` below waits for its
        // completion, and `route` is dropped after that.
        unsafe { self.control_endpoint.qp().post_datagram(&wr) }
            .inspect_err(|_| slot.unaccount_post())?;
        match slot.wait(|recovery| self.recover_control_qp(recovery)) {
            WcStatus::Success => Ok(()),
            _ => {
                self.report_control_qp_failure();
                Err(EIO)
            }
        }
    }
}
