// SPDX-License-Identifier: GPL-2.0

//! Moves bytes and messages between nodes, and connects queue pairs for it.
//!
//! Services above name a node and memory; they never see a queue pair. Below are `verbs`. One
//! [`Fabric`] per RNIC holds its protection domain, one send and one receive completion queue, the UD
//! queue pair through which connections are set up, and the peers. Two threads serve it: the poller
//! ([`poller`]) and the connector ([`connector`]).

mod atomics;
pub(crate) mod batch;
pub(crate) mod call;
pub(crate) mod carrier;
pub(crate) mod channel;
pub(crate) mod conn;
pub(crate) mod connector;
pub(crate) mod contact;
mod cut;
pub(crate) mod dynamic;
mod fetch;
pub(crate) mod flight;
pub(crate) mod memory;
pub(crate) mod notice;
mod parting;
pub(crate) mod peer;
pub(crate) mod poller;
mod promotion;
pub(crate) mod qos;
mod registrar;
pub(crate) mod sender;
pub(crate) mod suspicion;
pub(crate) mod transfer;
pub(crate) mod usage;
pub(crate) mod wake;
mod watch;
mod word;

use crate::{
    bindings,
    dc::{Hca, Source},
    errno, params,
    stats::Stats,
    sys::deadline::Deadline,
    verbs::{
        address::{AddressHandle, Destination},
        cq::{Cq, Status},
        device::{Device, Gid, LinkLayer},
        pd::Pd,
        work::Datagram,
    },
};
use atomics::Atomics;
use call::Calls;
use channel::{Channel, Parts, Places};
use core::num::{NonZeroU32, NonZeroU8};
use dynamic::Dynamic;
use kernel::{
    new_mutex, new_spinlock, pr_info_once, pr_warn_once,
    prelude::*,
    sync::{
        atomic::{Atomic, AtomicFlag, Full, Relaxed, Release},
        Arc, Mutex, SpinLock,
    },
    xarray::{AllocKind, XArray},
};
use kite_core::{promotion::Promoted, view::Life, wire::setup::Setup};
use memory::Memories;
use peer::{Own, Peer};
use poller::{Drivers, Receiver};
use qos::Qos;
use registrar::Registrar;
use sender::{Claim, Class, Rescue, Sender};
use suspicion::Daemon;
use usage::Failure;
use wake::Wake;

/// Queue key of all control queue pairs: "kite". It keeps strangers out by accident only; what proves a
/// peer is the secret in each datagram.
const QKEY: u32 = 0x6b69_7465;

/// Number of the channel of the control queue pair.
const CONTROL: u32 = 0;

/// How long a datagram may wait for a slot.
const DATAGRAM_MS: u32 = 1000;

/// Entries of the receive completion queue: enough for a thousand peers with the usual two queue pairs.
const RECV_CQ_ENTRIES: u32 = 64 * 1024;

/// Module parameters of the fabric.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    /// RC queue pairs per peer (LITE's K).
    pub(crate) pairs: NonZeroU8,
    /// Slots: operations in flight per RNIC.
    pub(crate) slots: u32,
    /// Most peers that virtual queue pairs reach by connections.
    promote: u8,
}

impl Config {
    /// Reads the module parameters.
    pub(crate) fn from_parameters() -> Self {
        Self {
            pairs: params::pairs(),
            slots: params::slots(),
            promote: params::promote(),
        }
    }
}

/// The fabric of one RNIC.
#[pin_data]
pub(crate) struct Fabric {
    config: Config,
    parts: Parts,
    /// The hardware, if we reach it.
    hca: Option<Arc<Hca>>,
    /// Nothing if the RNIC has no DC.
    dynamic: Option<Arc<Dynamic>>,
    pub(crate) memories: Pin<KBox<Memories>>,
    #[pin]
    registrar: Registrar,
    #[pin]
    atomics: Atomics,
    ud: Arc<Channel>,
    /// The UD queue pair is in ERR, and the connector is to mend it.
    ud_failed: AtomicFlag,
    #[pin]
    channels: XArray<Arc<Channel>>,
    next_channel: Atomic<u32>,
    places: Arc<Places>,
    /// The GID that peers know us by, once a view told them.
    #[pin]
    told_gid: SpinLock<Option<Gid>>,
    /// Sorted by node.
    #[pin]
    peers: SpinLock<KVec<Arc<Peer>>>,
    /// This node, to which nothing is ever connected: it reaches itself by DC.
    #[pin]
    own: SpinLock<Option<Arc<Peer>>>,
    #[pin]
    promoted: SpinLock<Promoted>,
    #[pin]
    pub(crate) calls: Calls,
    #[pin]
    receiver: Receiver,
    #[pin]
    drivers: Mutex<Drivers>,
    pub(crate) qos: Arc<Qos>,
    pub(crate) poller: Arc<Wake>,
    pub(crate) connector: Arc<Wake>,
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) stats: Arc<Stats>,
}

impl Fabric {
    /// Sets up the queues of an RNIC. Nothing is connected yet.
    pub(crate) fn new(device: Device, config: Config, stats: Arc<Stats>) -> Result<Arc<Self>> {
        let poller = Wake::new()?;
        let connector = Wake::new()?;
        let pd = Pd::new(device)?;
        let entries = RECV_CQ_ENTRIES.min(device.limits().cqe);
        let recv = Arc::new(Cq::new(device, entries, 1, poller.clone())?, GFP_KERNEL)?;
        let hca = Hca::find(&pd);
        let dynamic = hca
            .as_ref()
            .and_then(|hca| Dynamic::of(hca, [&poller, &connector], &stats));
        let cq = dynamic.as_ref().map(|dynamic| dynamic.cq().clone());
        let sender = Sender::new(device, config.slots, poller.clone(), cq, stats.clone())?;
        let parts = Parts {
            pd,
            sender,
            recv,
            port: device.first_port(),
        };
        let ud = Arc::new(Channel::new_ud(&parts, CONTROL, QKEY)?, GFP_KERNEL)?;
        let first = ud.clone();
        let this = Arc::pin_init(
            try_pin_init!(Self {
                config,
                parts,
                hca,
                dynamic,
                memories: Memories::new(device)?,
                registrar <- Registrar::new(),
                atomics <- Atomics::new(),
                ud,
                ud_failed: AtomicFlag::new(false),
                channels <- XArray::new(AllocKind::Alloc),
                next_channel: Atomic::new(CONTROL + 1),
                places: Places::new(entries)?,
                told_gid <- new_spinlock!(None),
                peers <- new_spinlock!(KVec::new()),
                own <- new_spinlock!(None),
                promoted <- new_spinlock!(Promoted::new(config.promote.into())),
                calls <- Calls::new(),
                receiver <- Receiver::new(),
                drivers <- new_mutex!(Drivers::new()),
                qos: Qos::new(stats.clone())?,
                poller,
                connector,
                daemon: Daemon::new()?,
                stats,
            }),
            GFP_KERNEL,
        )?;
        this.channels
            .lock()
            .store(CONTROL as usize, first, GFP_ATOMIC)
            .map_err(|error| error.error)?;
        Ok(this)
    }

    /// What the RNIC has of DC, if it has it.
    pub(crate) fn dynamic(&self) -> Option<&Arc<Dynamic>> {
        self.dynamic.as_ref()
    }

    /// The RNIC.
    pub(crate) fn device(&self) -> Device {
        self.parts.pd.device()
    }

    /// The key to our memory, for peers' kernels.
    fn key(&self) -> u32 {
        self.parts.pd.global_key()
    }

    fn sender(&self) -> &Arc<Sender> {
        &self.parts.sender
    }

    /// Claims a slot, if there is one.
    ///
    /// # Errors
    ///
    /// `EAGAIN`.
    pub(crate) fn claim(&self, class: Class) -> Result<Claim> {
        self.sender().claim(class, None)
    }

    /// Key by which requests name local memory.
    pub(crate) fn local_key(&self) -> u32 {
        self.parts.pd.local_key()
    }

    /// The GID by which peers reach us, and its index.
    fn gid(&self, link: LinkLayer) -> Result<(u8, Gid)> {
        let port = self.parts.port;
        match *self.told_gid.lock() {
            Some(told) => self.device().find_gid(port, link, &told),
            None => self.device().gid(port, link),
        }
    }

    /// Takes the address at which peers were told to reach us for ours until [`Self::forget_gid`], whatever
    /// else the port is given meanwhile.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not that of the control queue pair, or the port does not have its GID, on InfiniBand
    /// its LID.
    pub(crate) fn settle_address(&self, address: &bindings::kite_address) -> Result {
        if address.qpn != self.ud.qp().number() {
            return Err(EINVAL);
        }
        let state = self.device().port_state(self.parts.port)?;
        if state.link == LinkLayer::InfiniBand {
            return (address.lid == state.lid).then_some(()).ok_or(EINVAL);
        }
        if self.told_gid.lock().is_some() {
            return Ok(());
        }
        let found = self
            .device()
            .find_gid(self.parts.port, state.link, &address.gid);
        found.map_err(|_| EINVAL)?;
        *self.told_gid.lock() = Some(address.gid);
        Ok(())
    }

    /// Is free to choose another GID, and reached by DC no more.
    pub(crate) fn forget_gid(&self) {
        *self.told_gid.lock() = None;
        if let Some(dynamic) = &self.dynamic {
            dynamic.close(|| self.take_all());
        }
    }

    /// Is reached by DC, too, from now on, if the RNIC has it.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
    pub(crate) fn open_target(&self) -> Result {
        match &self.dynamic {
            Some(dynamic) => dynamic.open(self.source()?),
            None => Ok(()),
        }
    }

    /// The port by which we send.
    fn source(&self) -> Result<Source> {
        let state = self.device().port_state(self.parts.port)?;
        Ok(Source {
            port: self.parts.port,
            gid_index: self.gid(state.link)?.0,
            mtu: state.mtu,
        })
    }

    /// The way from our port to itself.
    fn route_to_itself(&self) -> Result<AddressHandle> {
        let (pd, port) = (self.parts.pd.clone(), self.parts.port);
        let state = self.device().port_state(port)?;
        let (from, gid) = self.gid(state.link)?;
        let own = Destination {
            gid,
            lid: state.lid,
        };
        AddressHandle::new(pd, port, state.link, from, own)
    }

    /// Finds the way to a peer; sleeps for as long as the network takes to resolve the neighbour.
    fn find_route(&self, peer: &Peer) -> Result<AddressHandle> {
        let (pd, port) = (self.parts.pd.clone(), self.parts.port);
        let link = self.device().port_state(port)?.link;
        let (from, _) = self.gid(link)?;
        AddressHandle::new(pd, port, link, from, peer.address.destination)
    }

    /// The way to a peer; sleeps for as long as it takes to find it.
    ///
    /// # Errors
    ///
    /// As for [`AddressHandle::new`].
    pub(crate) fn route(&self, peer: &Peer) -> Result<Arc<AddressHandle>> {
        match peer.route() {
            Some(route) => Ok(route),
            None => Ok(Arc::new(self.find_route(peer)?, GFP_KERNEL)?),
        }
    }

    /// Where peers find our control queue pair, and whether the port is active.
    pub(crate) fn address(&self) -> Result<(bindings::kite_address, bool)> {
        let state = self.device().port_state(self.parts.port)?;
        let gid = self.gid(state.link).map_or([0; 16], |(_, gid)| gid);
        let address = bindings::kite_address {
            gid,
            qpn: self.ud.qp().number(),
            lid: state.lid,
            link_layer: if state.link == LinkLayer::InfiniBand {
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
    pub(crate) fn is_active(&self) -> bool {
        self.device().is_active(self.parts.port)
    }

    /// The channel of that number.
    fn channel(&self, number: u32) -> Option<Arc<Channel>> {
        self.channels.lock().get(number as usize).map(Into::into)
    }

    /// The peer of that number.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn peer(&self, node: u32) -> Result<Arc<Peer>> {
        let peers = self.peers.lock();
        let at = peers
            .binary_search_by_key(&node, |peer| peer.node())
            .map_err(|_| errno::hostdown())?;
        Ok(peers[at].clone())
    }

    /// The peer of that number, in that life.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view, or lives again.
    pub(crate) fn peer_in(&self, life: Life) -> Result<Arc<Peer>> {
        let peer = self.peer(life.node)?;
        if peer.life() == life {
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
    pub(crate) fn node_in(&self, life: Life) -> Result<Arc<Peer>> {
        let own = self.own.lock().clone();
        let own = own.filter(|own| own.life() == life);
        own.map_or_else(|| self.peer_in(life), Ok)
    }

    /// This node is that from now on, or in no view.
    pub(crate) fn set_own(&self, own: Option<Arc<Peer>>) {
        let before = core::mem::replace(&mut *self.own.lock(), own);
        drop(before);
    }

    /// The queue pairs to a peer that failed and were not replaced yet.
    pub(crate) fn failures(&self, life: Life) -> Result<KVec<Failure>> {
        let mut failures = KVec::new();
        if let Ok(peer) = self.peer_in(life) {
            for conn in peer.conns() {
                if let Some(generation) = conn.failure() {
                    let conn = conn.clone();
                    failures.push(
                        Failure {
                            conn,
                            generation,
                            life,
                        },
                        GFP_KERNEL,
                    )?;
                }
            }
        }
        Ok(failures)
    }

    /// Parts of reads and writes that one connection may have under way now: what is free of the slots, shared by
    /// as many connections as a peer has, or one. So peers that do not answer leave some to others: those of `n`
    /// connections leave (1 - 1/(K + 1))^n of all.
    pub(crate) fn share(&self) -> u32 {
        (self.sender().free_slots() / NonZeroU32::from(self.config.pairs)).max(1)
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
    pub(crate) fn own(&self, life: Life, secret: [u8; 16]) -> Result<Arc<Own>> {
        let own = Own {
            life,
            secret,
            key: self.key(),
            mtu: self.device().port_state(self.parts.port)?.mtu,
            rd_atomic: self.device().limits().rd_atomic,
            pairs: self.config.pairs.get(),
            connector: self.connector.clone(),
            daemon: self.daemon.clone(),
            stats: self.stats.clone(),
        };
        Ok(Arc::new(own, GFP_KERNEL)?)
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
        let suspect = peers.iter().find(|peer| peer.report());
        suspect.map(|peer| peer.node())
    }

    /// Puts `peers`, sorted, in place of the present ones, and returns those.
    pub(crate) fn replace_peers(&self, peers: KVec<Arc<Peer>>) -> KVec<Arc<Peer>> {
        let before = core::mem::replace(&mut *self.peers.lock(), peers);
        // The connector may have been looking through the list.
        self.connector.event.signal();
        before
    }

    /// Shuts all connections to `peers`: users get `error`. When this returns none of them can reach our
    /// memory any more.
    pub(crate) fn shut_out(&self, peers: &[Arc<Peer>], error: Error) {
        peers.iter().for_each(|peer| peer.shut(error));
        if let Some(dynamic) = self.dynamic.as_ref().filter(|_| !peers.is_empty()) {
            dynamic.renew(|| self.take_all());
        }
    }

    /// Waits until nobody uses the connections to `peers`, which are shut, and drops their queue pairs.
    pub(crate) fn see_off(&self, peers: &[Arc<Peer>]) {
        self.demote(peers);
        for conn in peers.iter().flat_map(|peer| peer.conns()) {
            let (channel, place) = conn.leave();
            if let Some(channel) = channel {
                self.forget(channel);
            }
            drop(place);
        }
    }

    fn forget(&self, channel: Arc<Channel>) {
        // It is in ERR. What came by it is to be heard: in some drivers the reset forgets it, in others it
        // still completes what was coming.
        self.take_all();
        // Somebody may hold the channel a little longer; its queue pair is out of use now.
        if let Err(error) = channel.qp().reset() {
            pr_err!("a queue pair does not stop: {error:?}\n");
        }
        self.take_all();
        // Let go of what the lock's section returns only after it, since the last reference sleeps.
        let removed = self.channels.lock().remove(channel.number() as usize);
        drop(removed);
    }

    /// Makes a channel for a connection that has a place.
    fn make_channel(&self, peer: Life) -> Result<Arc<Channel>> {
        let number = self.next_channel.fetch_add(1u32, Relaxed);
        let channel = Arc::new(Channel::new_rc(&self.parts, number, peer)?, GFP_KERNEL)?;
        self.channels
            .lock()
            .store(number as usize, channel.clone(), GFP_ATOMIC)
            .map_err(|error| error.error)?;
        Ok(channel)
    }

    /// Reports that the control queue pair failed: a neighbour or an address went while it sent.
    fn ud_failed(&self) {
        self.ud_failed.store(true, Release);
        self.connector.event.signal();
    }

    /// Starts the control queue pair anew if it failed. Only the connector calls this, which alone sends
    /// by it.
    fn mend_ud(&self) {
        if !self.ud_failed.xchg(false, Full) {
            return;
        }
        pr_info_once!("the control queue pair failed, and is started anew\n");
        if let Err(error) = self.ud.revive_ud(QKEY) {
            pr_warn_once!("the control queue pair does not start: {error:?}\n");
            self.ud_failed.store(true, Release);
        }
    }

    fn rescue_ud(&self, how: Rescue) -> Result {
        match how {
            Rescue::Fail => self.ud.qp().fail(),
            Rescue::Reset => self.ud.qp().reset(),
        }
    }

    /// Sends a datagram to the peer's control queue pair, and waits until it has left.
    fn send_setup(&self, peer: &Peer, setup: &Setup) -> Result {
        let route = peer.route().ok_or_else(errno::hostunreach)?;
        let mut bytes = [0; 128];
        let len = setup.encode(&mut bytes).ok_or(EINVAL)?;
        let claim = self
            .sender()
            .claim(Class::Control, Some(Deadline::after_ms(DATAGRAM_MS)))?;
        claim.buffer().write(0, &bytes[..len])?;
        claim.buffer().for_device(len);
        let sges = [claim.buffer().sge(self.local_key(), 0, len).ok_or(EINVAL)?];
        let work = Datagram::new(claim.wr_id(), &sges, &route, peer.address.qpn, QKEY);
        claim.before_post(1);
        // SAFETY: The request names the claim's buffer, and we wait below for its end, before which
        // `route` is not dropped.
        unsafe { self.ud.qp().post_datagram(&work) }.inspect_err(|_| claim.not_posted())?;
        match claim.wait(|how| self.rescue_ud(how)) {
            Status::Success => Ok(()),
            _ => {
                self.ud_failed();
                Err(EIO)
            }
        }
    }
}
