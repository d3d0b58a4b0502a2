// SPDX-License-Identifier: GPL-2.0

//! Moves bytes and messages between nodes, and connects queue pairs for it.
//!
//! Services above name a node and memory; they never see a queue pair. Below are `verbs`. One
//! [`Fabric`] per RNIC holds its protection domain, one send and one receive completion queue, the UD
//! queue pair through which connections are set up, and the peers. Two threads serve it: the poller
//! ([`poller`]) and the connector ([`connector`]).

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
    peer::{suspicion::SuspectListener, LocalIdentity, Peer},
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

/// Queue key of all control queue pairs: "kite". It keeps strangers out by accident only; what proves a
/// peer is the secret in each datagram.
const CONTROL_QKEY: u32 = 0x6b69_7465;

/// Number of the channel of the control queue pair.
const CONTROL_ENDPOINT_ID: u32 = 0;

/// How long a datagram may wait for a slot.
const DATAGRAM_TIMEOUT_MS: u32 = 1000;

/// Entries of the receive completion queue: enough for a thousand peers with the usual two queue pairs.
const RECV_CQ_ENTRIES: u32 = 64 * 1024;

/// Module parameters of the fabric.
#[derive(Clone, Copy)]
pub(crate) struct FabricConfig {
    /// RC queue pairs per peer (LITE's K).
    pub(crate) conns_per_peer: NonZeroU8,
    /// Slots: operations in flight per RNIC.
    pub(crate) max_inflight: u32,
    /// Most peers that virtual queue pairs reach by connections.
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
    /// The hardware, if we reach it.
    hca: Option<Arc<Mlx5Device>>,
    /// Nothing if the RNIC has no DC.
    dc: Option<Arc<DcTransport>>,
    pub(crate) mr_table: Pin<KBox<MrTable>>,
    #[pin]
    registrar: MrRegistrar,
    #[pin]
    atomic_engine: AtomicEngine,
    control_endpoint: Arc<Endpoint>,
    /// The UD queue pair is in ERR, and the connector is to mend it.
    control_qp_failed: AtomicFlag,
    #[pin]
    endpoints: XArray<Arc<Endpoint>>,
    next_endpoint_id: Atomic<u32>,
    recv_cq_budget: Arc<RecvCqBudget>,
    /// The GID that peers know us by, once a view told them.
    #[pin]
    advertised_gid: SpinLock<Option<Gid>>,
    /// Sorted by node.
    #[pin]
    peers: SpinLock<KVec<Arc<Peer>>>,
    /// This node, to which nothing is ever connected: it reaches itself by DC.
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
    /// Sets up the queues of an RNIC. Nothing is connected yet.
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

    /// What the RNIC has of DC, if it has it.
    pub(crate) fn dc(&self) -> Option<&Arc<DcTransport>> {
        self.dc.as_ref()
    }

    /// The RNIC.
    pub(crate) fn device(&self) -> IbDevice {
        self.resources.pd.device()
    }

    /// The key to our memory, for peers' kernels.
    fn global_rkey(&self) -> u32 {
        self.resources.pd.global_rkey()
    }

    fn send_engine(&self) -> &Arc<SendEngine> {
        &self.resources.send_engine
    }

    /// Claims a slot, if there is one.
    ///
    /// # Errors
    ///
    /// `EAGAIN`.
    pub(crate) fn try_acquire_slot(&self, class: SlotClass) -> Result<SlotGuard> {
        self.send_engine().acquire_slot(class, None)
    }

    /// Key by which requests name local memory.
    pub(crate) fn local_key(&self) -> u32 {
        self.resources.pd.local_dma_lkey()
    }

    /// The GID by which peers reach us, and its index.
    fn gid(&self, link: LinkLayer) -> Result<(u8, Gid)> {
        let port = self.resources.port;
        match *self.advertised_gid.lock() {
            Some(gid) => self.device().find_gid(port, link, &gid),
            None => self.device().preferred_gid(port, link),
        }
    }

    /// Takes the address at which peers were told to reach us for ours until [`Self::forget_gid`], whatever
    /// else the port is given meanwhile.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not that of the control queue pair, or the port does not have its GID, on InfiniBand
    /// its LID.
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

    /// Is free to choose another GID, and reached by DC no more.
    pub(crate) fn unpin_address(&self) {
        *self.advertised_gid.lock() = None;
        if let Some(dc) = &self.dc {
            dc.close_dct(|| self.drain_recv_cq());
        }
    }

    /// Is reached by DC, too, from now on, if the RNIC has it.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
    pub(crate) fn open_dct(&self) -> Result {
        match &self.dc {
            Some(dc) => dc.open_dct(self.local_port()?),
            None => Ok(()),
        }
    }

    /// The port by which we send.
    fn local_port(&self) -> Result<PortConfig> {
        let state = self.device().query_port(self.resources.port)?;
        Ok(PortConfig {
            port: self.resources.port,
            gid_index: self.gid(state.link_layer)?.0,
            mtu: state.mtu,
        })
    }

    /// The way from our port to itself.
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

    /// Finds the way to a peer; sleeps for as long as the network takes to resolve the neighbour.
    fn resolve_route(&self, peer: &Peer) -> Result<AddressHandle> {
        let (pd, port) = (self.resources.pd.clone(), self.resources.port);
        let link = self.device().query_port(port)?.link_layer;
        let (gid_index, _) = self.gid(link)?;
        AddressHandle::new(pd, port, link, gid_index, peer.control_address.destination)
    }

    /// The way to a peer; sleeps for as long as it takes to find it.
    ///
    /// # Errors
    ///
    /// As for [`AddressHandle::new`].
    pub(crate) fn route_or_resolve(&self, peer: &Peer) -> Result<Arc<AddressHandle>> {
        match peer.route() {
            Some(route) => Ok(route),
            None => Ok(Arc::new(self.resolve_route(peer)?, GFP_KERNEL)?),
        }
    }

    /// Where peers find our control queue pair, and whether the port is active.
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

    /// Whether the port is active.
    pub(crate) fn is_port_active(&self) -> bool {
        self.device().is_port_active(self.resources.port)
    }

    /// The channel of that number.
    fn endpoint(&self, id: u32) -> Option<Arc<Endpoint>> {
        self.endpoints.lock().get(id as usize).map(Into::into)
    }

    /// The peer of that number.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn peer(&self, node: u32) -> Result<Arc<Peer>> {
        let peers = self.peers.lock();
        let index = peers
            .binary_search_by_key(&node, |peer| peer.node())
            .map_err(|_| errno::hostdown())?;
        Ok(peers[index].clone())
    }

    /// The peer of that number, in that life.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view, or lives again.
    pub(crate) fn peer_by_instance(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let peer = self.peer(instance.node)?;
        if peer.instance() == instance {
            Ok(peer)
        } else {
            Err(errno::hostdown())
        }
    }

    /// As [`Self::peer_in`], or this node itself.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view, or lives again.
    pub(crate) fn peer_or_self(&self, instance: NodeInstance) -> Result<Arc<Peer>> {
        let self_peer = self.self_peer.lock().clone();
        let self_peer = self_peer.filter(|self_peer| self_peer.instance() == instance);
        self_peer.map_or_else(|| self.peer_by_instance(instance), Ok)
    }

    /// This node is that from now on, or in no view.
    pub(crate) fn set_self_peer(&self, self_peer: Option<Arc<Peer>>) {
        let old = core::mem::replace(&mut *self.self_peer.lock(), self_peer);
        drop(old);
    }

    /// The queue pairs to a peer that failed and were not replaced yet.
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

    /// Parts of reads and writes that one connection may have under way now: what is free of the slots, shared by
    /// as many connections as a peer has, or one. So peers that do not answer leave some to others: those of `n`
    /// connections leave (1 - 1/(K + 1))^n of all.
    pub(crate) fn inflight_quota(&self) -> u32 {
        (self.send_engine().free_slots() / NonZeroU32::from(self.config.conns_per_peer)).max(1)
    }

    /// All peers, in order of their numbers.
    pub(crate) fn all_peers(&self) -> Result<KVec<Arc<Peer>>> {
        let mut all = KVec::new();
        while let Some(peer) = self.nth_peer(all.len()) {
            all.push(peer, GFP_KERNEL)?;
        }
        Ok(all)
    }

    /// What peers have of this node, in this life of it.
    ///
    /// # Errors
    ///
    /// `EIO` if the port does not say what it can; `ENOMEM`.
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

    /// The `i`th peer, in order of their numbers.
    fn nth_peer(&self, i: usize) -> Option<Arc<Peer>> {
        self.peers.lock().get(i).cloned()
    }

    /// The number of peers.
    fn peer_count(&self) -> usize {
        self.peers.lock().len()
    }

    /// A peer that does not answer and was not reported yet.
    pub(crate) fn next_suspect(&self) -> Option<u32> {
        let peers = self.peers.lock();
        let suspect = peers.iter().find(|peer| peer.consume_suspicion());
        suspect.map(|peer| peer.node())
    }

    /// Puts `peers`, sorted, in place of the present ones, and returns those.
    pub(crate) fn replace_peers(&self, peers: KVec<Arc<Peer>>) -> KVec<Arc<Peer>> {
        let old = core::mem::replace(&mut *self.peers.lock(), peers);
        // The connector may have been looking through the list.
        self.connector_waker.event.complete();
        old
    }

    /// Shuts all connections to `peers`: users get `error`. When this returns none of them can reach our
    /// memory any more.
    pub(crate) fn fence_peers(&self, peers: &[Arc<Peer>], error: Error) {
        peers.iter().for_each(|peer| peer.close(error));
        if let Some(dc) = self.dc.as_ref().filter(|_| !peers.is_empty()) {
            dc.rotate_dct(|| self.drain_recv_cq());
        }
    }

    /// Waits until nobody uses the connections to `peers`, which are shut, and drops their queue pairs.
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
        // It is in ERR. What came by it is to be heard: in some drivers the reset forgets it, in others it
        // still completes what was coming.
        self.drain_recv_cq();
        // Somebody may hold the channel a little longer; its queue pair is out of use now.
        if let Err(error) = endpoint.qp().modify_to_reset() {
            pr_err!("a queue pair does not stop: {error:?}\n");
        }
        self.drain_recv_cq();
        // Let go of what the lock's section returns only after it, since the last reference sleeps.
        let removed = self.endpoints.lock().remove(endpoint.id() as usize);
        drop(removed);
    }

    /// Makes a channel for a connection that has a place.
    fn create_endpoint(&self, peer: NodeInstance) -> Result<Arc<Endpoint>> {
        let id = self.next_endpoint_id.fetch_add(1u32, Relaxed);
        let endpoint = Arc::new(Endpoint::new_rc(&self.resources, id, peer)?, GFP_KERNEL)?;
        self.endpoints
            .lock()
            .store(id as usize, endpoint.clone(), GFP_ATOMIC)
            .map_err(|error| error.error)?;
        Ok(endpoint)
    }

    /// Reports that the control queue pair failed: a neighbour or an address went while it sent.
    fn report_control_qp_failure(&self) {
        self.control_qp_failed.store(true, Release);
        self.connector_waker.event.complete();
    }

    /// Starts the control queue pair anew if it failed. Only the connector calls this, which alone sends
    /// by it.
    fn restart_control_qp(&self) {
        if !self.control_qp_failed.xchg(false, Full) {
            return;
        }
        pr_info_once!("the control queue pair failed, and is started anew\n");
        if let Err(error) = self.control_endpoint.restart_ud(CONTROL_QKEY) {
            pr_warn_once!("the control queue pair does not start: {error:?}\n");
            self.control_qp_failed.store(true, Release);
        }
    }

    fn recover_control_qp(&self, recovery: Recovery) -> Result {
        match recovery {
            Recovery::ToError => self.control_endpoint.qp().modify_to_err(),
            Recovery::ToReset => self.control_endpoint.qp().modify_to_reset(),
        }
    }

    /// Sends a datagram to the peer's control queue pair, and waits until it has left.
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
        // SAFETY: The request names the claim's buffer, and we wait below for its end, before which
        // `route` is not dropped.
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
