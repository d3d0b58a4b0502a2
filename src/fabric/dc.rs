// SPDX-License-Identifier: GPL-2.0

//! Requests to peers to which nothing is connected (KRCORE, sections 3 and 4).
//!
//! A few initiators of DC on each processor are shared by all, and reach the target of any node, which serves all
//! of its peers: so what a node keeps for this does not depend on how many there are, and nobody waits for a
//! connection. The target is another whenever somebody leaves the view, who may live on and know the former one.
//!
//! An initiator that failed gets no new users; when the last has left, the connector starts it anew ([`Dynamic::mend`]).

use super::{
    recv::wake::ThreadWaker,
    send::slots::{Recovery, SlotGuard},
};
use crate::{
    mlx5::{
        cq::Mlx5Cq,
        dct::{Dct, DctId},
        qp::Mlx5Qp,
        rmp::Rmp,
        wr::Mlx5SendWr,
        Mlx5Device, PortConfig,
    },
    stats::Stats,
    verbs::cq::WcStatus,
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex, SpinLock,
    },
    time::{Instant, Monotonic},
};
use kite_core::view::NodeInstance;

/// Initiators of each processor: while one waits for a target that does not answer, there is another.
const DCIS_PER_CPU: usize = 2;

/// Most of a node.
const MAX_DCIS: usize = 64;

/// Requests that may be under way by one of them.
const DCI_SEND_DEPTH: u32 = 128;

/// Bytes that may be under way by one of them, besides a single request: what comes late must not come much later.
pub(crate) const MAX_INFLIGHT_DCI_BYTES: u64 = 256 << 20;

/// An initiator by which nothing ended for so long, in ms, may wait for a target that does not answer.
const DCI_STUCK_AFTER_MS: i64 = 5;

/// Buffers for packets that nobody has looked at yet.
const PACKET_BUFFERS: u32 = 256;

/// What becomes of an initiator.
struct DciState {
    /// Requests that users have announced, and their bytes.
    inflight_wrs: u32,
    inflight_bytes: u64,
    /// When somebody's requests ended last.
    last_progress: Instant<Monotonic>,
    /// It is to be started, anew or for the first time, before anybody uses it.
    failed: bool,
    /// The peer whose request made it fail, and how, if that is known.
    failed_by: Option<(NodeInstance, WcStatus)>,
}

impl DciState {
    /// Nobody uses it.
    fn new(failed: bool) -> Self {
        Self {
            inflight_wrs: 0,
            inflight_bytes: 0,
            last_progress: Instant::now(),
            failed,
            failed_by: None,
        }
    }

    /// Nobody waits for anything of it.
    fn is_idle(&self) -> bool {
        self.inflight_wrs == 0
    }

    /// It is idle, or something ended by it not long ago.
    fn is_making_progress(&self) -> bool {
        self.is_idle() || self.last_progress.elapsed().as_millis() < DCI_STUCK_AFTER_MS
    }

    /// It gets no new users. Returns whether it was in order.
    fn mark_failed(&mut self) -> bool {
        !core::mem::replace(&mut self.failed, true)
    }
}

/// An initiator, and who uses it.
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
            pin_init!(Self { qp, state <- new_spinlock!(DciState::new(true)) }),
            GFP_KERNEL,
        )
    }

    /// Announces so many requests and bytes, if it is in order, there is room, and it `suits`.
    fn try_reserve(
        &self,
        (wr_count, bytes): (u32, u64),
        is_eligible: fn(&DciState) -> bool,
    ) -> bool {
        let mut state = self.state.lock();
        let bytes_fit = state.is_idle() || state.inflight_bytes + bytes <= MAX_INFLIGHT_DCI_BYTES;
        let has_credits = state.inflight_wrs + wr_count <= DCI_SEND_DEPTH && bytes_fit;
        let is_available = !state.failed && has_credits && is_eligible(&state);
        if is_available {
            if state.is_idle() {
                state.last_progress = Instant::now();
            }
            state.inflight_wrs += wr_count;
            state.inflight_bytes += bytes;
        }
        is_available
    }
}

/// Where we are.
#[derive(Clone, Copy)]
struct DctPort {
    /// Nothing without a view.
    port: Option<PortConfig>,
    /// How often there was none before.
    open_count: u32,
}

/// What an RNIC has of DC.
#[pin_data]
pub(crate) struct DcTransport {
    dcis: KVec<Arc<Dci>>,
    /// Whose turn it is, of the initiators of a processor.
    next_dci: Atomic<u32>,
    #[pin]
    port_state: SpinLock<DctPort>,
    /// What peers reach us by. Nothing without a view, or if it could not be made yet.
    #[pin]
    dct: Mutex<Option<Dct<ThreadWaker>>>,
    /// Where packets come to, whatever the target.
    packet_pool: Arc<Rmp<ThreadWaker>>,
    /// Wakes the connector.
    connector_waker: Arc<ThreadWaker>,
    stats: Arc<Stats>,
    send_cq: Arc<Mlx5Cq<ThreadWaker>>,
    hca: Arc<Mlx5Device>,
}

impl DcTransport {
    /// What is needed for DC, if the RNIC has it.
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
            .inspect_err(|error| pr_warn!("DC cannot be used: {error:?}\n"))
            .ok()
    }

    /// Makes the initiators; they are started by and by.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the hardware has no room for them; `EIO`, `ENOMEM`.
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
        let packet_pool = Rmp::new(hca.clone(), PACKET_BUFFERS, poller_waker)?;
        let mut dcis = KVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            dcis.push(Dci::new(&hca, &send_cq)?, GFP_KERNEL)?;
        }
        Arc::pin_init(
            pin_init!(Self {
                dcis,
                next_dci: Atomic::new(0u32),
                port_state <- new_spinlock!(DctPort { port: None, open_count: 0 }),
                dct <- new_mutex!(None),
                packet_pool,
                connector_waker,
                stats,
                send_cq,
                hca,
            }),
            GFP_KERNEL,
        )
    }

    /// The hardware.
    pub(crate) fn hca(&self) -> &Arc<Mlx5Device> {
        &self.hca
    }

    /// The completion queue of all initiators.
    pub(crate) fn send_cq(&self) -> &Arc<Mlx5Cq<ThreadWaker>> {
        &self.send_cq
    }

    /// Is to be reached at a port from now on, if it is not yet.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
    pub(crate) fn open_dct(&self, port: PortConfig) -> Result {
        let mut dct = self.dct.lock();
        if self.port().is_none() {
            *dct = Some(self.create_dct(port)?);
            let mut port_state = self.port_state.lock();
            port_state.port = Some(port);
            port_state.open_count += 1;
            drop(port_state);
            drop(dct);
            // They may have been started somewhere else.
            self.dcis.iter().for_each(|dci| self.fail_dci(dci));
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

    /// Is to be reached by another name from now on. When this returns nobody reaches our memory by the former.
    /// `take` takes what has come.
    pub(crate) fn rotate_dct(&self, drain_recv: impl Fn()) {
        let mut dct = self.dct.lock();
        if let Some(old_dct) = dct.take() {
            destroy_dct(old_dct, drain_recv);
        }
        if self.needs_dct_retry(&mut dct) {
            pr_warn!("peers do not reach this node by DC yet\n");
            self.connector_waker.event.complete();
        }
    }

    /// Makes a target if there should be one. Returns whether there still is none.
    fn needs_dct_retry(&self, dct: &mut Option<Dct<ThreadWaker>>) -> bool {
        // Looked at under the lock of the target, which who closes takes after that.
        let Some(port) = self.port().filter(|_| dct.is_none()) else {
            return false;
        };
        *dct = self.create_dct(port).ok();
        dct.is_none()
    }

    /// Is not to be reached any more, when this returns. `take` takes what has come.
    pub(crate) fn close_dct(&self, drain_recv: impl Fn()) {
        self.port_state.lock().port = None;
        let old_dct = self.dct.lock().take();
        if let Some(dct) = old_dct {
            destroy_dct(dct, drain_recv);
        }
    }

    /// Takes packets that have come. Returns how many there were.
    pub(super) fn poll_packets(&self, mut on_packet: impl FnMut(KVec<u8>)) -> usize {
        self.packet_pool.cq().poll(|completion| {
            let bytes = self.packet_pool.receive_packet(&completion);
            if completion.status == WcStatus::Success {
                on_packet(bytes);
            }
        })
    }

    /// Asks for an interrupt when a packet comes, after whoever looks once more and finds none.
    pub(super) fn arm_packet_cq(&self) {
        self.packet_pool.cq().arm();
    }

    /// What peers reach us by, if they do.
    pub(crate) fn dct_address(&self) -> Option<DctId> {
        self.dct.lock().as_ref().map(Dct::id)
    }

    /// Starts initiators anew that failed and that nobody uses any more, and makes a target if there is none. Returns
    /// whether to come again soon.
    pub(super) fn recover(&self) -> bool {
        let DctPort { port, open_count } = *self.port_state.lock();
        let Some(port) = port else {
            return false;
        };
        // Who has the lock may be long about it.
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
            // Nobody else starts what failed; it is to be started once more if the source has changed.
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

    /// An initiator failed, by no peer's fault.
    fn fail_dci(&self, dci: &Dci) {
        let mut state = dci.state.lock();
        state
            .failed_by
            .get_or_insert((NodeInstance::default(), WcStatus::Flushed));
        let was_healthy = state.mark_failed();
        drop(state);
        self.stats.dcis.sub(was_healthy.into());
    }

    /// Announces so many requests and bytes by the initiator of number `on`, or by one of those of this processor if
    /// possible. One that may be stuck, for a node that died, is the last choice.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is no room.
    pub(crate) fn try_acquire(
        self: &Arc<Self>,
        amount: (u32, u64),
        dci_index: Option<usize>,
    ) -> Result<DciCredit> {
        let first_dci = kernel::cpu::CpuId::current().as_u32() as usize * DCIS_PER_CPU;
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
        credit.ok_or(EAGAIN)
    }

    /// Announces that by one of so many initiators from `first` on, if one suits.
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

/// Ends a target. Who sent something to it was told that it has come, so it is taken before.
fn destroy_dct(mut dct: Dct<ThreadWaker>, drain_recv: impl Fn()) {
    // If it does not end, dropping it says so.
    let _ = dct.drain();
    drain_recv();
    drop(dct);
}

/// The right to post a number of requests by an initiator.
pub(crate) struct DciCredit {
    transport: Arc<DcTransport>,
    dci: Arc<Dci>,
    /// The number of the initiator.
    pub(crate) dci_index: usize,
    wr_count: u32,
    bytes: u64,
}

impl DciCredit {
    /// Posts requests that were announced, with one doorbell. Those that are refused make the claim fail.
    ///
    /// # Safety
    ///
    /// The local memory that they name must be mapped for as long as `claim` has requests under way.
    pub(crate) unsafe fn post(&self, slot: &SlotGuard, wrs: &[Mlx5SendWr<'_>]) {
        slot.account_post(wrs.len() as u32);
        // SAFETY: By the safety requirements.
        let posted = unsafe { self.dci.qp.post(wrs) };
        if posted == wrs.len() {
            return;
        }
        // The hardware has failed: there is room, and what is posted is well formed.
        self.transport.fail_dci(&self.dci);
        (posted..wrs.len()).for_each(|_| slot.complete_unposted());
    }

    /// Reports how a request to `peer` failed, and with it the initiator.
    pub(crate) fn report_failure(&self, status: WcStatus, peer: NodeInstance) {
        let mut state = self.dci.state.lock();
        let was_healthy = state.mark_failed();
        if status != WcStatus::Flushed {
            state.failed_by = Some((peer, status));
        }
        drop(state);
        self.transport.stats.dci_errors.add(was_healthy.into());
        self.transport.stats.dcis.sub(was_healthy.into());
    }

    /// The peer whose request made the initiator fail, and how, once that is known.
    pub(crate) fn failed_by(&self) -> Option<(NodeInstance, WcStatus)> {
        self.dci.state.lock().failed_by
    }

    /// Since when nobody's requests have ended, and how many bytes are under way.
    pub(super) fn last_progress(&self) -> (Instant<Monotonic>, u64) {
        let state = self.dci.state.lock();
        (state.last_progress, state.inflight_bytes)
    }

    /// Gives the initiator up, for want of completions.
    pub(crate) fn recover(&self, recovery: Recovery) -> Result {
        self.transport.fail_dci(&self.dci);
        match recovery {
            Recovery::ToError => self.dci.qp.fail(),
            Recovery::ToReset => self.dci.qp.reset(),
        }
    }
}

impl Drop for DciCredit {
    fn drop(&mut self) {
        let mut state = self.dci.state.lock();
        state.inflight_wrs -= self.wr_count;
        state.inflight_bytes -= self.bytes;
        state.last_progress = Instant::now();
        let drained = state.failed && state.is_idle();
        drop(state);
        if drained {
            self.transport.connector_waker.event.complete();
        }
    }
}
