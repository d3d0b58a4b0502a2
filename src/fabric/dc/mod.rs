// SPDX-License-Identifier: GPL-2.0

//! DC transport: requests to peers without an RC connection (KRCORE, sections 3 and 4).
//!
//! # Operation
//!
//! A few DC initiators (DCIs) per CPU are shared by all users. A DCI reaches the DC target (DCT) of any node,
//! and one DCT serves all peers of a node. The resources of a node therefore do not depend on the number of
//! peers, and no request waits for a connection setup. A user acquires a [`DciCredit`]
//! ([`DcTransport::try_acquire`]), posts, and drops the credit when its requests have completed.
//!
//! # Recovery
//!
//! A failed DCI accepts no new users. When its last user is gone, the connector resets and restarts the DCI
//! ([`DcTransport::recover`]). The DCT is replaced when nodes are removed from the view
//! ([`DcTransport::rotate_dct`]): a removed node may still run and have the old DCT number. If no DCT can be
//! created, the connector retries.
//!
//! # Locking
//!
//! - `dct`: mutex for the DCT. [`DcTransport::rotate_dct`] holds the mutex while it drains the DCT, which
//!   takes up to 30 s, and while it processes received messages.
//! - `port_state`: spin lock for the port and the count of opens.
//! - `Dci::state`: spin lock for the counters and the failure of one DCI.
//!
//! Lock order: `dct` → the receive buffer of the poller → the locks of the message handlers; `dct` →
//! `port_state`; `Dci::state` → `port_state`. The connector only tries to lock `dct`.

mod credit;

pub(crate) use self::credit::DciCredit;

use super::{recv::wake::ThreadWaker, send::usage::SendQueueUsage};
use crate::{
    errno::{TryError, TryResult},
    mlx5::{
        cq::Mlx5Cq,
        dct::{Dct, DctId},
        qp::Mlx5Qp,
        rmp::Rmp,
        Mlx5Device, PortConfig,
    },
    stats::Stats,
    sys::thread::current_cpu_rank,
    verbs::{cq::WcStatus, log::rnic_warn},
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex, SpinLock,
    },
};
use kite_core::{view::NodeInstance, wire::packet::MAX_PACKET_BYTES};

/// DCIs per CPU. While one waits for an unresponsive DCT, another is available.
const DCIS_PER_CPU: usize = 2;

/// Maximum number of DCIs of an RNIC.
const MAX_DCIS: usize = 64;

/// Maximum number of work requests in flight on one DCI.
const DCI_SEND_DEPTH: u32 = 128;

/// Maximum bytes in flight on one DCI. A larger request is accepted while no bytes are in flight. The
/// limit bounds how late a delayed packet can arrive.
pub(crate) const MAX_INFLIGHT_DCI_BYTES: u64 = 256 << 20;

/// Time in ms without progress after which a DCI may be waiting for an unresponsive DCT.
const DCI_STUCK_AFTER_MS: i64 = 5;

/// Receive buffers for packets that the poller has not processed yet.
const PACKET_BUFFERS: u32 = 256;

/// State of a DCI, protected by [`Dci::state`].
struct DciState {
    /// Work requests of all credits, at most `DCI_SEND_DEPTH`, and their bytes.
    usage: SendQueueUsage,
    /// The DCI must be started, or restarted, before use.
    failed: bool,
    /// Peer of the request that moved the DCI to the error state, and the status. `None` if unknown. The
    /// default instance and `Flushed` if no peer caused the failure.
    failed_by: Option<(NodeInstance, WcStatus)>,
}

impl DciState {
    /// Creates the state of a DCI without users.
    fn new(failed: bool) -> Self {
        Self {
            usage: SendQueueUsage::new(),
            failed,
            failed_by: None,
        }
    }

    /// Returns `true` if the DCI has no users.
    fn is_idle(&self) -> bool {
        self.usage.is_idle()
    }

    /// Returns `true` if the DCI is idle or made progress within `DCI_STUCK_AFTER_MS`.
    fn is_making_progress(&self) -> bool {
        let (last_progress, _) = self.usage.last_progress();
        self.is_idle() || last_progress.elapsed().as_millis() < DCI_STUCK_AFTER_MS
    }

    /// Excludes the DCI from use. Returns `true` if the DCI was healthy.
    fn mark_failed(&mut self) -> bool {
        !core::mem::replace(&mut self.failed, true)
    }
}

/// A DC initiator and its users.
#[pin_data]
struct Dci {
    qp: Mlx5Qp<ThreadWaker>,
    #[pin]
    state: SpinLock<DciState>,
}

impl Dci {
    fn new(hca: &Arc<Mlx5Device>, send_cq: &Arc<Mlx5Cq<ThreadWaker>>) -> Result<Arc<Self>> {
        let qp = Mlx5Qp::new_dci(hca.clone(), send_cq.clone(), DCI_SEND_DEPTH)?;
        Arc::pin_init(
            pin_init!(Self { qp, state <- new_spinlock!(DciState::new(true), "Dci::state") }),
            GFP_KERNEL,
        )
    }

    /// Reserves work requests and bytes. Returns `false` if the DCI has failed, lacks capacity, or is not
    /// eligible.
    fn try_reserve(
        &self,
        (wr_count, bytes): (u32, u64),
        is_eligible: fn(&DciState) -> bool,
    ) -> bool {
        let mut state = self.state.lock();
        let has_credits = state.usage.wr_count() + wr_count <= DCI_SEND_DEPTH
            && state.usage.has_room_for(bytes, MAX_INFLIGHT_DCI_BYTES);
        let is_available = !state.failed && has_credits && is_eligible(&state);
        if is_available {
            state.usage.add(wr_count, bytes);
        }
        is_available
    }
}

/// Port of the DCT.
#[derive(Clone, Copy)]
struct DctPort {
    /// `None` without a view.
    port: Option<PortConfig>,
    /// Number of times that the port was set. A change of the count invalidates DCIs that are being started.
    open_count: u32,
}

/// DC objects of one RNIC.
#[pin_data]
pub(crate) struct DcTransport {
    dcis: KVec<Arc<Dci>>,
    /// Round-robin counter for the DCIs of a CPU. Relaxed: only a hint.
    next_dci: Atomic<u32>,
    #[pin]
    port_state: SpinLock<DctPort>,
    /// Target of all requests of peers. `None` without a view, or if no DCT could be created yet.
    #[pin]
    dct: Mutex<Option<Dct<ThreadWaker>>>,
    /// Receive buffers of packets. Shared by successive DCTs.
    packet_pool: Arc<Rmp<ThreadWaker>>,
    /// Wakes the connector.
    connector_waker: Arc<ThreadWaker>,
    stats: Arc<Stats>,
    send_cq: Arc<Mlx5Cq<ThreadWaker>>,
    hca: Arc<Mlx5Device>,
}

impl DcTransport {
    /// Creates the DC transport if the RNIC has DC. Logs errors, after which only RC is used.
    pub(super) fn probe(
        hca: &Arc<Mlx5Device>,
        [poller_waker, connector_waker]: [&Arc<ThreadWaker>; 2],
        stats: &Arc<Stats>,
    ) -> Option<Arc<Self>> {
        if !hca.has_dc() {
            return None;
        }
        let (poller_waker, connector_waker) = (poller_waker.clone(), connector_waker.clone());
        Self::new(hca.clone(), poller_waker, connector_waker, stats.clone())
            .inspect_err(|error| {
                rnic_warn!(
                    hca.device(),
                    "DC transport unavailable, using RC: {error:?}\n"
                );
            })
            .ok()
    }

    /// Creates the DCIs, all marked as failed: the connector starts the DCIs later.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the hardware has no room for the queues.
    /// - `EIO`: the hardware rejected an object.
    /// - `ENOMEM`: out of memory.
    fn new(
        hca: Arc<Mlx5Device>,
        poller_waker: Arc<ThreadWaker>,
        connector_waker: Arc<ThreadWaker>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let count = (kernel::cpu::nr_cpu_ids() as usize * DCIS_PER_CPU).min(MAX_DCIS);
        let send_cq = Mlx5Cq::new(
            hca.clone(),
            count as u32 * DCI_SEND_DEPTH,
            0,
            poller_waker.clone(),
        )?;
        let packet_pool = Rmp::new(hca.clone(), PACKET_BUFFERS, MAX_PACKET_BYTES, poller_waker)?;
        let mut dcis = KVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            dcis.push(Dci::new(&hca, &send_cq)?, GFP_KERNEL)?;
        }
        Arc::pin_init(
            pin_init!(Self {
                dcis,
                next_dci: Atomic::new(0u32),
                port_state <- new_spinlock!(DctPort { port: None, open_count: 0 }, "DcTransport::port_state"),
                dct <- new_mutex!(None, "DcTransport::dct"),
                packet_pool,
                connector_waker,
                stats,
                send_cq,
                hca,
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the mlx5 device.
    pub(crate) fn hca(&self) -> &Arc<Mlx5Device> {
        &self.hca
    }

    /// Returns the send CQ shared by all DCIs.
    pub(crate) fn send_cq(&self) -> &Arc<Mlx5Cq<ThreadWaker>> {
        &self.send_cq
    }

    /// Creates the DCT at `port`, unless a port is already set. All DCIs are then restarted.
    ///
    /// # Errors
    ///
    /// - `EIO`: the hardware rejected the DCT.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn open_dct(&self, port: PortConfig) -> Result {
        let mut dct = self.dct.lock();
        if self.port().is_none() {
            *dct = Some(self.create_dct(port)?);
            let mut port_state = self.port_state.lock();
            port_state.port = Some(port);
            port_state.open_count += 1;
            drop(port_state);
            drop(dct);
            // The DCIs may have been started with another port or GID.
            for dci in &self.dcis {
                self.fail_dci(dci);
            }
            self.connector_waker.event.complete();
        }
        Ok(())
    }

    fn port(&self) -> Option<PortConfig> {
        self.port_state.lock().port
    }

    fn create_dct(&self, port: PortConfig) -> Result<Dct<ThreadWaker>> {
        Dct::new(self.hca.clone(), port, self.packet_pool.clone())
    }

    /// Replaces the DCT by one with a new number and key. On return, the old DCT gives no access to local
    /// memory. `drain_recv` processes received messages.
    pub(crate) fn rotate_dct(&self, drain_recv: impl Fn()) {
        let mut dct = self.dct.lock();
        if let Some(old_dct) = dct.take() {
            self.destroy_dct(old_dct, drain_recv);
        }
        if self.needs_dct_retry(&mut dct) {
            rnic_warn!(
                self.hca.device(),
                "no DCT: peers cannot reach this node by DC, retrying\n"
            );
            self.connector_waker.event.complete();
        }
    }

    /// Creates the DCT if a port is set and no DCT exists. Returns `true` if the DCT is still missing.
    fn needs_dct_retry(&self, dct: &mut Option<Dct<ThreadWaker>>) -> bool {
        // The caller holds the lock of `dct`. `close_dct` first clears the port and then locks `dct`, so it
        // removes a DCT created here.
        let Some(port) = self.port().filter(|_| dct.is_none()) else {
            return false;
        };
        *dct = self.create_dct(port).ok();
        dct.is_none()
    }

    /// Destroys the DCT. On return, peers cannot reach this node by DC. `drain_recv` processes received
    /// messages.
    pub(crate) fn close_dct(&self, drain_recv: impl Fn()) {
        self.port_state.lock().port = None;
        let old_dct = self.dct.lock().take();
        if let Some(dct) = old_dct {
            self.destroy_dct(dct, drain_recv);
        }
    }

    /// Destroys a DCT. The sender of a message has already received the acknowledgment, so received messages
    /// are processed before the DCT is destroyed. A DCT that does not drain still executes the requests of
    /// other nodes, so the key to the memory of this node is replaced.
    fn destroy_dct(&self, mut dct: Dct<ThreadWaker>, drain_recv: impl Fn()) {
        let drained = dct.drain();
        drain_recv();
        drop(dct);
        if drained.is_err() {
            self.hca.replace_global_mkey();
        }
    }

    /// Passes received packets to `on_packet`. Returns the number of completions.
    pub(super) fn poll_packets(&self, mut on_packet: impl FnMut(KVec<u8>)) -> usize {
        self.packet_pool.cq().poll(|completion| {
            let bytes = self.packet_pool.receive_packet(&completion);
            if completion.status == WcStatus::Success {
                on_packet(bytes);
            }
        })
    }

    /// Arms the CQ of packets. The caller must poll once more afterwards, because packets that arrived before
    /// raise no interrupt.
    pub(super) fn arm_packet_cq(&self) {
        self.packet_pool.cq().arm();
    }

    /// Returns the number and key of the DCT. `None` if there is no DCT.
    pub(crate) fn dct_address(&self) -> Option<DctId> {
        self.dct.lock().as_ref().map(Dct::id)
    }

    /// Restarts failed DCIs without users, and creates the DCT if it is missing. Returns `true` if the
    /// connector must call again at its next tick. Called by the connector only.
    pub(super) fn recover(&self) -> bool {
        let DctPort { port, open_count } = *self.port_state.lock();
        let Some(port) = port else {
            return false;
        };
        // Do not block: the holder may drain the old DCT for up to 30 s.
        let mut needs_tick = match self.dct.try_lock() {
            Some(mut dct) => self.needs_dct_retry(&mut dct),
            None => true,
        };
        for dci in &self.dcis {
            let drained = {
                let state = dci.state.lock();
                needs_tick |= state.failed && !state.is_idle();
                state.failed && state.is_idle()
            };
            // Only this function restarts failed DCIs, so the spin lock need not be held meanwhile. If
            // `open_count` changed, the DCI has the old port and must be restarted again.
            if drained {
                let started = dci.qp.reset().and_then(|()| dci.qp.start_dci(port));
                let mut state = dci.state.lock();
                let failed = started.is_err() || self.port_state.lock().open_count != open_count;
                self.stats.dcis.add((!failed).into());
                *state = DciState::new(failed);
                needs_tick |= failed;
            }
        }
        needs_tick
    }

    /// Marks a DCI as failed without blaming a peer, unless a cause is already recorded. Returns `true` if
    /// the DCI was healthy.
    fn fail_dci(&self, dci: &Dci) -> bool {
        let mut state = dci.state.lock();
        state
            .failed_by
            .get_or_insert((NodeInstance::default(), WcStatus::Flushed));
        let was_healthy = state.mark_failed();
        drop(state);
        self.stats.dcis.sub(was_healthy.into());
        was_healthy
    }

    /// Reserves work requests and bytes on the DCI with index `dci_index`, or on any DCI. The order of
    /// preference is: an idle DCI of this CPU, a DCI with recent progress, any healthy DCI. The last may be
    /// stuck on a dead node.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: no DCI has capacity.
    pub(crate) fn try_acquire(
        self: &Arc<Self>,
        amount: (u32, u64),
        dci_index: Option<usize>,
    ) -> TryResult<DciCredit> {
        let first_dci = current_cpu_rank() as usize * DCIS_PER_CPU;
        let next_dci = first_dci + self.next_dci.fetch_add(1u32, Relaxed) as usize % DCIS_PER_CPU;
        let any = |_: &DciState| true;
        let credit = match dci_index {
            Some(dci_index) => self.try_acquire_from((dci_index, 1), amount, any),
            None => self
                .try_acquire_from((first_dci, DCIS_PER_CPU), amount, DciState::is_idle)
                .or_else(|| {
                    self.try_acquire_from(
                        (next_dci, self.dcis.len()),
                        amount,
                        DciState::is_making_progress,
                    )
                })
                .or_else(|| self.try_acquire_from((next_dci, self.dcis.len()), amount, any)),
        };
        credit.ok_or(TryError::WouldBlock)
    }

    /// Reserves on the first eligible one of `dci_count` DCIs, beginning at `first`.
    fn try_acquire_from(
        self: &Arc<Self>,
        (first, dci_count): (usize, usize),
        (wr_count, bytes): (u32, u64),
        is_eligible: fn(&DciState) -> bool,
    ) -> Option<DciCredit> {
        let all = self.dcis.iter().enumerate().cycle();
        let mut dcis = all.skip(first % self.dcis.len()).take(dci_count);
        let (dci_index, dci) =
            dcis.find(|(_, dci)| dci.try_reserve((wr_count, bytes), is_eligible))?;
        Some(DciCredit {
            transport: self.clone(),
            dci: dci.clone(),
            dci_index,
            wr_count,
            bytes,
        })
    }
}
