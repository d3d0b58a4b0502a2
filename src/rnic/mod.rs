// SPDX-License-Identifier: GPL-2.0

//! The RNICs of this host, each with its own fabric and services.
//!
//! Sessions hold an [`Rnic`] for as long as they are open, and enter its gate for each request. When
//! the RNIC goes, the gate is closed: requests under way fail soon, later ones find `ENODEV`, and all
//! that was made from the device is gone before the RDMA core hears that we are done.

pub(crate) mod dispatch;
pub(crate) mod services;

use self::services::{RecvDispatcher, RnicServices, RpcGuard};
use crate::{
    bindings,
    fabric::{conn::connector::Connector, recv::poller::Poller, Fabric, FabricConfig},
    params,
    region::{lend::loan::LendLimits, MemoryService},
    stats::Stats,
    sys::{
        pages::total_ram_bytes,
        revocable::{RevocableGuard, SleepableRevocable},
        thread::Thread,
        workqueue::OwnedQueue,
    },
    verbs::{client::IbClient, device::IbDevice},
};
use kernel::{
    new_mutex, new_poll_condvar, new_spinlock,
    prelude::*,
    str::CString,
    sync::{
        atomic::{Acquire, AtomicFlag, Release},
        global_lock,
        poll::PollCondVar,
        Arc, Mutex, SpinLock,
    },
};

global_lock! {
    // SAFETY: Initialised by `init`, before the client is registered and the device exists.
    unsafe(uninit) static RNICS: Mutex<KVec<Arc<Rnic>>> = KVec::new();
}

/// Makes the list of RNICs ready for use.
///
/// # Safety
///
/// Must be called once, before anything else of this file.
pub(crate) unsafe fn init() {
    // SAFETY: By the safety requirements.
    unsafe { RNICS.init() };
}

/// A name of an RNIC, zero padded.
pub(crate) type RnicName = [u8; bindings::KITE_RNIC_NAME_SIZE as usize];

/// The name as a text, for people.
pub(crate) fn name_str(name: &RnicName) -> &str {
    core::str::from_utf8(name)
        .unwrap_or("")
        .trim_end_matches('\0')
}

/// Requests of queues that are done at a time, besides those that wait for nothing.
const BLOCKING_WQ_MAX_ACTIVE: c_int = 256;

/// The threads that serve an RNIC. Dropping them stops them.
struct RnicThreads {
    _poller: Thread<Poller>,
    _connector: Thread<Connector>,
}

/// An RNIC.
#[pin_data]
pub(crate) struct Rnic {
    device: IbDevice,
    /// Its present name: udev may rename an RNIC when we have it already.
    #[pin]
    name: SpinLock<RnicName>,
    #[pin]
    services: SleepableRevocable<Arc<RnicServices>>,
    removed: AtomicFlag,
    #[pin]
    threads: Mutex<Option<RnicThreads>>,
    /// What is done for queues of processes, and may have to wait.
    #[pin]
    blocking_wq: Mutex<Option<OwnedQueue>>,
    /// Woken when the RNIC goes.
    #[pin]
    pub(crate) removal_cv: PollCondVar,
    pub(crate) stats: Arc<Stats>,
}

impl Rnic {
    fn new(device: IbDevice) -> Result<Arc<Self>> {
        let stats = Arc::new(Stats::new(), GFP_KERNEL)?;
        let fabric = Fabric::new(device, FabricConfig::from_parameters(), stats.clone())?;
        let services = RnicServices::new(MemoryService::new(fabric.clone(), lend_limits())?)?;
        let name = device.name();
        Self::start(device, name, fabric.clone(), services, stats)
            // What it hears with holds the fabric, which holds that.
            .inspect_err(|_| fabric.clear_recv_handler())
    }

    fn start(
        device: IbDevice,
        name: RnicName,
        fabric: Arc<Fabric>,
        services: Arc<RnicServices>,
        stats: Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let threads = Self::start_threads(&name, fabric, services.clone())?;
        Arc::pin_init(
            try_pin_init!(Self {
                device,
                name <- new_spinlock!(name),
                services <- SleepableRevocable::new(services),
                removed: AtomicFlag::new(false),
                threads <- new_mutex!(Some(threads)),
                blocking_wq <- new_mutex!(Some(OwnedQueue::new(c"kite_queues", BLOCKING_WQ_MAX_ACTIVE)?)),
                removal_cv <- new_poll_condvar!(),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Starts the threads. They keep the name that the RNIC has now.
    fn start_threads(
        name: &RnicName,
        fabric: Arc<Fabric>,
        services: Arc<RnicServices>,
    ) -> Result<RnicThreads> {
        let name = name_str(name);
        fabric.set_recv_handler(Arc::new(RecvDispatcher(services), GFP_KERNEL)?);
        let poller = Poller::new(fabric.clone())?;
        let connector = Connector::new(fabric)?;
        let poller_name = CString::try_from_fmt(fmt!("kite/{name}"))?;
        let connector_name = CString::try_from_fmt(fmt!("kite-conn/{name}"))?;
        Ok(RnicThreads {
            _poller: Thread::spawn(&poller_name, poller)?,
            _connector: Thread::spawn(&connector_name, connector)?,
        })
    }

    /// Enters for one request.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the RNIC is gone.
    pub(crate) fn enter_services(&self) -> Result<RevocableGuard<'_, Arc<RnicServices>>> {
        self.services.try_access().ok_or(ENODEV)
    }

    /// Enters for one request that has to do with calls.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the RNIC is gone.
    pub(crate) fn enter_rpc(&self) -> Result<RpcGuard<'_>> {
        self.enter_services().map(RpcGuard)
    }

    /// Has a worker do `f`, which finds out itself if the RNIC goes.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the RNIC is gone.
    pub(crate) fn spawn(&self, f: impl FnOnce() + Send + 'static) -> Result {
        let blocking_wq = self.blocking_wq.lock();
        blocking_wq.as_ref().ok_or(ENODEV)?.spawn(f);
        Ok(())
    }

    /// Whether it is gone, and sessions have been told of all that ended with it.
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Acquire)
    }

    /// Its name.
    pub(crate) fn name(&self) -> RnicName {
        *self.name.lock()
    }

    /// Its address, and whether its port is active.
    pub(crate) fn address(&self) -> Result<(bindings::kite_address, bool)> {
        self.enter_rpc()?
            .memory_service
            .cluster
            .fabric
            .control_address()
    }

    /// Takes everything down that was made from the device. Waits for the requests under way, which wait
    /// for no process.
    fn close(&self) {
        if let Some(services) = self.services.try_access() {
            self.services.revoke_nosync();
            services.fabric().qos.on_device_removed();
            // Who waits for a peer is told that it is gone, and every session what it loses.
            services.leave();
            self.removed.store(true, Release);
            self.removal_cv.notify_all();
        }
        let Some(services) = self.services.revoke() else {
            return;
        };
        let blocking_wq = self.blocking_wq.lock().take();
        drop(blocking_wq);
        services.leave();
        services.flush();
        drop(self.threads.lock().take());
        services.fabric().clear_recv_handler();
        services.flush();
        if !services.close() {
            pr_err!("services still referenced at removal of the RNIC\n");
        }
    }
}

/// Maximum memory of this node in regions of other nodes and in its own, from the module parameters.
fn lend_limits() -> LendLimits {
    LendLimits {
        lent_bytes: params::lend_bytes().unwrap_or(total_ram_bytes() / 2),
        own_bytes: params::own_bytes().unwrap_or(u64::MAX),
    }
}

/// The RNIC of that name; with no name the first with an active port, or the first at all.
///
/// # Errors
///
/// `ENODEV` if there is none.
pub(crate) fn find(name: &[u8]) -> Result<Arc<Rnic>> {
    let all = all_rnics()?;
    let has_name = |rnic: &&Arc<Rnic>| {
        rnic.name()
            .into_iter()
            .take_while(|&b| b != 0)
            .eq(name.iter().copied())
    };
    if !name.is_empty() {
        return all.iter().find(has_name).cloned().ok_or(ENODEV);
    }
    // Whoever opens a session comes by here: the RNIC's firmware is slow to answer.
    let is_active = |rnic: &&Arc<Rnic>| {
        rnic.enter_rpc()
            .is_ok_and(|rpc| rpc.memory_service.cluster.fabric.is_port_active())
    };
    all.iter()
        .find(is_active)
        .or(all.first())
        .cloned()
        .ok_or(ENODEV)
}

/// The `i`th RNIC in order of arrival.
pub(crate) fn nth(i: usize) -> Option<Arc<Rnic>> {
    RNICS.lock().get(i).cloned()
}

fn all_rnics() -> Result<KVec<Arc<Rnic>>> {
    let rnics = RNICS.lock();
    let mut all = KVec::with_capacity(rnics.len(), GFP_KERNEL)?;
    for rnic in rnics.iter() {
        all.push(rnic.clone(), GFP_KERNEL)?;
    }
    Ok(all)
}

/// Our registration with the RDMA core.
pub(crate) struct RnicClient;

impl IbClient for RnicClient {
    const NAME: &'static CStr = c"kite";

    fn add(device: IbDevice) -> Result {
        let rnic = Rnic::new(device).inspect_err(|error| {
            pr_warn!("RNIC cannot be used: {error:?}\n");
        })?;
        pr_info!(
            "{}: ready; its global key reaches all memory mapped for DMA, so trust every kernel of the cluster\n",
            name_str(&rnic.name())
        );
        RNICS.lock().push(rnic.clone(), GFP_KERNEL)?;
        Ok(())
    }

    fn rename(device: IbDevice) {
        let rnics = RNICS.lock();
        if let Some(rnic) = rnics.iter().find(|rnic| rnic.device == device) {
            let new_name = device.name();
            let old_name = core::mem::replace(&mut *rnic.name.lock(), new_name);
            pr_info!(
                "{}: renamed to {}\n",
                name_str(&old_name),
                name_str(&new_name)
            );
        }
    }

    fn remove(device: IbDevice) {
        let found = {
            let mut rnics = RNICS.lock();
            let at = rnics.iter().position(|rnic| rnic.device == device);
            let found = at.and_then(|at| rnics.remove(at).ok());
            if rnics.is_empty() {
                // A static is never dropped, and when we are unloaded this list is empty.
                *rnics = KVec::new();
            }
            found
        };
        if let Some(rnic) = found {
            rnic.close();
        }
    }
}
