// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The connection manager: the functions of librdmacm for reliable connections, over virtual queue pairs.
//!
//! Programs have communication identifiers ([`identifier`], whose states [`id`] has), and event channels ([`event`]).
//! [`place`] has them listen at ports, or find the other end, to which they [`connect`] a queue pair ([`qp`]). A
//! port of theirs is a port of kite. Who connects there does so by a virtual queue pair of its own ([`wire`]), by which
//! the two ends tell each other the numbers of their queue pairs, and what the programs add ([`message`]). Those are then
//! connected as by any program of verbs. Which node has an IP address is for [`address`] to find out.
//!
//! A process has one manager, with a session of kite and a thread. All that is connected is so on one open device.

mod address;
mod addrinfo;
mod connect;
mod endpoint;
mod event;
mod id;
mod identifier;
mod message;
mod place;
mod qp;
mod wire;

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock};

use kite::Cluster;

use crate::errno::{ptr_or_null, Result};
use crate::header::*;
use crate::memory::{ibv_alloc_pd, ibv_dealloc_pd};
use crate::object::SendPtr;
use crate::session::lock;
use crate::watcher::{BackgroundPoller, PollOutcome};
use crate::{context, device};
use id::CmId;

/// What all identifiers of a process share.
pub(crate) struct CmManager {
    cluster: Cluster,
    /// The device, and a domain for who has none.
    verbs: SendPtr<ibv_context>,
    pd: SendPtr<ibv_pd>,
    ids: Mutex<Vec<Arc<CmId>>>,
    poller: OnceLock<BackgroundPoller>,
}

impl CmManager {
    /// That of this process. A child that was forked has one of its own.
    fn get() -> Result<Arc<Self>> {
        static INSTANCE: Mutex<Option<(u32, Arc<CmManager>)>> = Mutex::new(None);
        let mut instance = lock(&INSTANCE);
        let pid = std::process::id();
        if let Some((_, manager)) = instance.as_ref().filter(|(owner, _)| *owner == pid) {
            return Ok(manager.clone());
        }
        let manager = Self::new()?;
        *instance = Some((pid, manager.clone()));
        Ok(manager)
    }

    fn new() -> Result<Arc<Self>> {
        let (device, session) = device::open()?;
        let cluster = Cluster::open()?;
        let verbs = context::into_raw(device, session)?;
        // SAFETY: the context is open, and stays so.
        let pd = unsafe { ibv_alloc_pd(verbs) };
        let manager = Arc::new(Self {
            cluster,
            verbs: SendPtr(verbs),
            pd: SendPtr(pd),
            ids: Mutex::default(),
            poller: OnceLock::new(),
        });
        let started = BackgroundPoller::start(&manager.cluster, poll_work_for_manager(&manager));
        let watcher = started.inspect_err(|_| {
            // SAFETY: the program has got neither.
            unsafe {
                ibv_dealloc_pd(pd);
                context::ibv_close_device(verbs);
            }
        })?;
        // Nobody else has it yet.
        let _ = manager.poller.set(watcher);
        Ok(manager)
    }

    /// An identifier is looked after from now on.
    fn add_id(&self, id: &Arc<CmId>) {
        lock(&self.ids).push(id.clone());
    }

    /// There is something to look after that nothing else tells of.
    fn wake_poller(&self) {
        if let Some(watcher) = self.poller.get() {
            watcher.wake();
        }
    }

    /// It is destroyed.
    fn remove_id(&self, id: &Arc<CmId>) {
        lock(&self.ids).retain(|other| !Arc::ptr_eq(other, id));
    }
}

/// The work of its thread.
fn poll_work_for_manager(
    manager: &Arc<CmManager>,
) -> impl FnMut() -> Option<PollOutcome> + Send + 'static {
    let manager = Arc::downgrade(manager);
    move || {
        let ids = lock(&manager.upgrade()?.ids).clone();
        let found = ids.iter().map(|id| id.poll());
        Some(found.fold(PollOutcome::IDLE, PollOutcome::merge))
    }
}

/// # Safety
/// `count` is NULL or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let manager = CmManager::get();
    if !count.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe { count.write(manager.is_ok().into()) };
    }
    let list = |manager: Arc<CmManager>| [manager.verbs.0, ptr::null_mut()];
    ptr_or_null(manager.map(|manager| Box::into_raw(Box::new(list(manager))).cast()))
}

/// # Safety
/// Its argument came from [`rdma_get_devices`].
#[no_mangle]
unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: a box gave it away, as the caller vouches.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_context; 2]>()) });
}
