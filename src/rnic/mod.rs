// SPDX-License-Identifier: GPL-2.0

//! RNICs of this host, each with its own fabric and services.
//!
//! # Operation
//!
//! The RDMA core calls [`RnicClient`] when an RNIC is added, renamed or removed. A bound session holds a
//! reference to an [`Rnic`] and accesses the services through a guard for the duration of one request.
//!
//! # Recovery
//!
//! Removal of an RNIC revokes the services: new requests fail with `ENODEV`, and requests in progress fail
//! soon. The removal then waits for all guards and destroys all objects of the device before it returns to
//! the RDMA core. Sessions keep the [`Rnic`] itself, which no longer uses the device.
//!
//! # Locking
//!
//! - `RNICS` (mutex): list of RNICs in order of arrival. Holders may sleep. Nests outside `Rnic::name`.
//! - `Rnic::name` (spinlock): current device name.
//! - `Rnic::blocking_wq` (mutex): held while work is queued, which may sleep in an allocation; not held while
//!   the workqueue is destroyed.
//! - `Rnic::threads` (mutex): taken only at removal, and held while the threads are joined.
//!
//! `Rnic::removed` is stored with release ordering after the services have left the cluster. A reader that
//! sees the flag (acquire) finds all events of the removal.

pub(crate) mod control_dispatch;
pub(crate) mod services;

use self::services::{RecvDispatcher, RnicServices, RpcGuard};
use crate::{
    bindings, errno,
    fabric::{conn::connector::Connector, recv::poller::Poller, Fabric, FabricConfig},
    params,
    region::{lend::loan::LendLimits, MemoryService},
    stats::Stats,
    sys::{
        compat::forbid_unload,
        pages::total_ram_bytes,
        revocable::{RevocableGuard, SleepableRevocable},
        thread::Thread,
        workqueue::OwnedQueue,
    },
    verbs::{
        client::IbClient,
        device::IbDevice,
        log::{rnic_err, rnic_info, rnic_warn},
    },
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
    // SAFETY: `init` initializes the list before the client is registered and the misc device exists, so
    // before any other access.
    unsafe(uninit) static RNICS: Mutex<KVec<Arc<Rnic>>> = KVec::new();
}

/// Initializes the list of RNICs.
///
/// # Safety
///
/// The caller must call this function exactly once, before any other function of this module.
pub(crate) unsafe fn init() {
    // SAFETY: By the safety requirements of this function, this is the only call and precedes all accesses.
    unsafe { RNICS.init() };
}

/// Name of an RNIC, zero padded.
pub(crate) type RnicName = [u8; bindings::KITE_RNIC_NAME_SIZE as usize];

/// Returns a name as a string for output; empty if the name is not UTF-8.
pub(crate) fn name_str(name: &RnicName) -> &str {
    core::str::from_utf8(name)
        .unwrap_or("")
        .trim_end_matches('\0')
}

/// Maximum blocking requests of I/O queues that execute concurrently.
const BLOCKING_WQ_MAX_ACTIVE: c_int = 256;

/// Threads of an RNIC. Dropping stops and joins the threads.
struct RnicThreads {
    _poller: Thread<Poller>,
    _connector: Thread<Connector>,
}

/// RNIC with its services.
#[pin_data]
pub(crate) struct Rnic {
    device: IbDevice,
    /// Current device name. udev can rename an RNIC after it was added.
    #[pin]
    name: SpinLock<RnicName>,
    #[pin]
    services: SleepableRevocable<Arc<RnicServices>>,
    removed: AtomicFlag,
    #[pin]
    threads: Mutex<Option<RnicThreads>>,
    /// Workqueue for blocking requests of I/O queues; `None` after removal.
    #[pin]
    blocking_wq: Mutex<Option<OwnedQueue>>,
    /// Notified when the RNIC is removed.
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
        let rnic = Self::start(device, name, fabric, services.clone(), stats);
        if rnic.is_err() {
            Self::dismantle(device, services);
        }
        rnic
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
                name <- new_spinlock!(name, "Rnic::name"),
                services <- SleepableRevocable::new(services),
                removed: AtomicFlag::new(false),
                threads <- new_mutex!(Some(threads), "Rnic::threads"),
                blocking_wq <- new_mutex!(
                    Some(OwnedQueue::new(c"kite_queues", BLOCKING_WQ_MAX_ACTIVE)?),
                    "Rnic::blocking_wq"
                ),
                removal_cv <- new_poll_condvar!(),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    /// Installs the receive handler and starts the threads. Thread names do not follow later renames of the
    /// RNIC.
    fn start_threads(
        name: &RnicName,
        fabric: Arc<Fabric>,
        services: Arc<RnicServices>,
    ) -> Result<RnicThreads> {
        let name = name_str(name);
        fabric
            .recv_engine
            .set_handler(Arc::new(RecvDispatcher(services), GFP_KERNEL)?);
        let poller = Poller::new(fabric.clone())?;
        let connector = Connector::new(fabric)?;
        let poller_name = CString::try_from_fmt(fmt!("kite/{name}"))?;
        let connector_name = CString::try_from_fmt(fmt!("kite-conn/{name}"))?;
        Ok(RnicThreads {
            _poller: Thread::spawn(&poller_name, poller)?,
            _connector: Thread::spawn(&connector_name, connector)?,
        })
    }

    /// Returns a guard of the services, to be held for one request.
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the RNIC was removed.
    pub(crate) fn enter_services(&self) -> Result<RevocableGuard<'_, Arc<RnicServices>>> {
        self.services.try_access().ok_or(ENODEV)
    }

    /// Returns `ENODEV` if the RNIC was removed, else `error`. The node leaves the cluster before its RNIC
    /// goes, so a request in flight fails with a secondary error.
    pub(crate) fn or_device_gone(&self, error: Error) -> Error {
        self.enter_services().err().unwrap_or(error)
    }

    /// Returns `ENODEV` in place of an `EHOSTDOWN` or `EHOSTUNREACH` that the removal of the RNIC caused.
    pub(crate) fn refine_unreachable(&self, error: Error) -> Error {
        if error == errno::hostdown() || error == errno::hostunreach() {
            self.or_device_gone(error)
        } else {
            error
        }
    }

    /// Returns a guard of the RPC service, to be held for one request.
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the RNIC was removed.
    pub(crate) fn enter_rpc(&self) -> Result<RpcGuard<'_>> {
        self.enter_services().map(RpcGuard)
    }

    /// Runs `f` on a worker. `f` holds no guard of the services and must obtain one itself.
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the RNIC was removed.
    pub(crate) fn spawn(&self, f: impl FnOnce() + Send + 'static) -> Result {
        let blocking_wq = self.blocking_wq.lock();
        blocking_wq.as_ref().ok_or(ENODEV)?.spawn(f);
        Ok(())
    }

    /// Returns `true` if the RNIC was removed, and sessions have received all events caused by the removal.
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Acquire)
    }

    /// Returns the current name.
    pub(crate) fn name(&self) -> RnicName {
        *self.name.lock()
    }

    /// Returns the address of the setup QP, and whether the port is active.
    pub(crate) fn address(&self) -> Result<(bindings::kite_address, bool)> {
        self.enter_rpc()?
            .memory_service
            .cluster
            .fabric
            .local_address
            .control_address()
    }

    /// Destroys all objects of the device. Waits for requests in progress; none of them waits for a process.
    ///
    /// Order of the teardown:
    ///
    /// 1. Revoke the services without waiting, and leave the cluster. Waiters receive an error; sessions
    ///    receive their events. Then set `removed` and notify pollers.
    /// 2. Wait for all guards, and destroy the workqueue.
    /// 3. Leave again, for state created by requests that were in progress. Flush deferred work.
    /// 4. Join the threads and drop the receive handler, which breaks the reference cycle with the fabric.
    /// 5. Flush work deferred by the threads, and drop the services.
    fn close(&self) {
        if let Some(services) = self.services.try_access() {
            self.services.revoke_nosync();
            services.fabric().qos.on_device_removed();
            // Waiters for a peer fail, and each session receives an event for every object that it loses.
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
        Self::dismantle(self.device, services);
    }

    /// Drops the receive handler, flushes the work that the threads have deferred, and drops the services.
    /// The threads must have ended. Until then the receive handler and the fabric reference each other.
    ///
    /// If a service is still referenced, its objects of the device outlive the removal, and its code may run
    /// later. The module then stays loaded.
    fn dismantle(device: IbDevice, services: Arc<RnicServices>) {
        services.fabric().recv_engine.clear_handler();
        services.flush();
        if !services.close() {
            forbid_unload();
            rnic_err!(device, "services still referenced at removal of the RNIC\n");
        }
    }
}

/// Returns the limits for memory in regions of other nodes and of this node, from the module parameters.
fn lend_limits() -> LendLimits {
    LendLimits {
        lent_bytes: params::lend_bytes().unwrap_or(total_ram_bytes() / 2),
        own_bytes: params::own_bytes().unwrap_or(u64::MAX),
    }
}

/// Caller that uses an RNIC.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// Current process, with the RNICs of its network namespace.
    Process,
    /// Kernel module, with all RNICs.
    Module,
}

/// Returns the RNIC with this name. If the name is empty, returns the first RNIC with an active port, or the
/// first RNIC if no port is active.
///
/// # Errors
///
/// - `ENODEV`: no such RNIC, or the caller may not use it.
/// - `ENOMEM`: out of memory.
pub(crate) fn find(name: &[u8], caller: Caller) -> Result<Arc<Rnic>> {
    let all = usable_rnics(caller)?;
    let has_name = |rnic: &&Arc<Rnic>| {
        rnic.name()
            .into_iter()
            .take_while(|&b| b != 0)
            .eq(name.iter().copied())
    };
    if !name.is_empty() {
        return all.iter().find(has_name).cloned().ok_or(ENODEV);
    }
    // Every bind of a session takes this path, so use the cached port state: a query of the firmware is slow.
    let is_active = |rnic: &&Arc<Rnic>| {
        rnic.enter_rpc()
            .is_ok_and(|rpc| rpc.fabric().local_address.is_port_active())
    };
    all.iter()
        .find(is_active)
        .or(all.first())
        .cloned()
        .ok_or(ENODEV)
}

/// Returns the `i`th RNIC that the current process may use, in order of arrival.
pub(crate) fn nth(i: usize) -> Option<Arc<Rnic>> {
    // The lock delays the removal of the devices.
    let rnics = RNICS.lock();
    let mut usable = rnics.iter().filter(|rnic| rnic.device.is_accessible());
    usable.nth(i).cloned()
}

/// Returns the RNICs that the caller may use, in order of arrival.
fn usable_rnics(caller: Caller) -> Result<KVec<Arc<Rnic>>> {
    // The lock delays the removal of the devices.
    let rnics = RNICS.lock();
    let mut usable = KVec::with_capacity(rnics.len(), GFP_KERNEL)?;
    for rnic in rnics.iter() {
        if caller == Caller::Module || rnic.device.is_accessible() {
            usable.push(rnic.clone(), GFP_KERNEL)?;
        }
    }
    Ok(usable)
}

/// Client of the RDMA core, which manages the list of RNICs.
pub(crate) struct RnicClient;

impl IbClient for RnicClient {
    const NAME: &'static CStr = c"kite";

    fn add(device: IbDevice) -> Result {
        let rnic = Rnic::new(device).inspect_err(|error| {
            rnic_warn!(device, "cannot be used: {error:?}\n");
        })?;
        let listed = RNICS.lock().push(rnic.clone(), GFP_KERNEL);
        // `remove` closes listed RNICs only.
        listed.inspect_err(|_| rnic.close())?;
        rnic_info!(
            device,
            "ready; its global key reaches all memory mapped for DMA, so trust every kernel of the cluster\n"
        );
        Ok(())
    }

    fn rename(device: IbDevice) {
        let rnics = RNICS.lock();
        if let Some(rnic) = rnics.iter().find(|rnic| rnic.device == device) {
            let new_name = device.name();
            let old_name = core::mem::replace(&mut *rnic.name.lock(), new_name);
            rnic_info!(device, "renamed from {}\n", name_str(&old_name));
        }
    }

    fn remove(device: IbDevice) {
        let found = {
            let mut rnics = RNICS.lock();
            let at = rnics.iter().position(|rnic| rnic.device == device);
            let found = at.and_then(|at| rnics.remove(at).ok());
            if rnics.is_empty() {
                // A static is never dropped: free the memory of the list, which is empty when the module is
                // unloaded.
                *rnics = KVec::new();
            }
            found
        };
        if let Some(rnic) = found {
            rnic.close();
        }
    }
}
