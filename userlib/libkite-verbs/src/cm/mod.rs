// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connection manager: the functions of librdmacm for reliable connections, over virtual queue pairs.
//!
//! # Operation
//!
//! Programs have communication identifiers ([`ffi_id`], with the state machine [`cm_id`]) and event channels
//! ([`event`]). An identifier listens on a port ([`bind`]) or resolves the remote end ([`resolve`]), and then connects
//! ([`connect`]) its QP ([`qp`]). A port of librdmacm is a port of kite. A connection has a separate virtual queue pair
//! ([`wire`]), through which the ends exchange their QP numbers and private data ([`message`]). The QPs are then
//! connected as with any verbs program. [`address`] finds the node with an IP address.
//!
//! A process has one manager, with a session of kite and a thread. All connections use the same open device.

mod accept;
mod address;
mod addrinfo;
mod bind;
mod cm_id;
mod connect;
mod endpoint;
mod event;
mod ffi_id;
mod get_event;
mod message;
mod qp;
mod resolve;
mod wire;

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock};

use kite::Cluster;

use crate::device::{self, context};
use crate::errno::{ptr_or_null, Result};
use crate::header::*;
use crate::memory::verbs::{ibv_alloc_pd, ibv_dealloc_pd};
use crate::object::SendPtr;
use crate::pending::PendingRequests;
use crate::poller::{BackgroundPoller, PollOutcome};
use crate::sync::lock;
use cm_id::CmId;

/// State shared by all identifiers of a process.
pub(crate) struct CmManager {
    cluster: Cluster,
    /// Open device, and the domain for identifiers without one.
    verbs: SendPtr<ibv_context>,
    pd: SendPtr<ibv_pd>,
    ids: Mutex<Vec<Arc<CmId>>>,
    pending_requests: Arc<PendingRequests>,
    poller: OnceLock<BackgroundPoller>,
}

impl CmManager {
    /// Returns the manager of this process. A forked child gets a manager of its own.
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
        let verbs = device::open_context(device, session)?;
        // SAFETY: the context is open, and is not closed afterwards.
        let pd = unsafe { ibv_alloc_pd(verbs) };
        let manager = Arc::new(Self {
            cluster,
            verbs: SendPtr(verbs),
            pd: SendPtr(pd),
            ids: Mutex::default(),
            pending_requests: Arc::default(),
            poller: OnceLock::new(),
        });
        let started = BackgroundPoller::start(&manager.cluster, poll_work_for_manager(&manager));
        let poller = started.inspect_err(|_| {
            // SAFETY: the program has got neither.
            unsafe {
                ibv_dealloc_pd(pd);
                context::ibv_close_device(verbs);
            }
        })?;
        // Cannot fail, since no other thread has the manager.
        let _ = manager.poller.set(poller);
        Ok(manager)
    }

    /// Adds an identifier, which the background poller serves from now on.
    fn add_id(&self, id: &Arc<CmId>) {
        lock(&self.ids).push(id.clone());
    }

    /// Wakes the background poller for work without an event.
    fn wake_poller(&self) {
        if let Some(poller) = self.poller.get() {
            poller.wake();
        }
    }

    /// Removes an identifier, which is destroyed.
    fn remove_id(&self, id: &Arc<CmId>) {
        lock(&self.ids).retain(|other| !Arc::ptr_eq(other, id));
    }
}

/// Returns the work of the background poller.
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
        // SAFETY: guaranteed by the caller.
        unsafe { count.write(manager.is_ok().into()) };
    }
    let list = |manager: Arc<CmManager>| [manager.verbs.0, ptr::null_mut()];
    ptr_or_null(manager.map(|manager| Box::into_raw(Box::new(list(manager))).cast()))
}

/// # Safety
/// The argument comes from [`rdma_get_devices`].
#[no_mangle]
unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: `rdma_get_devices` leaked the box, as the caller guarantees.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_context; 2]>()) });
}
