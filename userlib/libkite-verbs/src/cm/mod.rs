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

use crate::errno::{pointer, Result};
use crate::header::*;
use crate::memory::{ibv_alloc_pd, ibv_dealloc_pd};
use crate::object::Handle;
use crate::session::lock;
use crate::watcher::{Found, Watcher};
use crate::{context, device};
use id::Id;

/// What all identifiers of a process share.
pub(crate) struct Manager {
    cluster: Cluster,
    /// The device, and a domain for who has none.
    verbs: Handle<ibv_context>,
    domain: Handle<ibv_pd>,
    ids: Mutex<Vec<Arc<Id>>>,
    watcher: OnceLock<Watcher>,
}

impl Manager {
    /// That of this process. A child that was forked has one of its own.
    fn get() -> Result<Arc<Self>> {
        static KEPT: Mutex<Option<(u32, Arc<Manager>)>> = Mutex::new(None);
        let mut kept = lock(&KEPT);
        let own = std::process::id();
        if let Some((_, manager)) = kept.as_ref().filter(|(of, _)| *of == own) {
            return Ok(manager.clone());
        }
        let manager = Self::new()?;
        *kept = Some((own, manager.clone()));
        Ok(manager)
    }

    fn new() -> Result<Arc<Self>> {
        let (device, session) = device::open()?;
        let cluster = Cluster::open()?;
        let verbs = context::give(device, session)?;
        // SAFETY: the context is open, and stays so.
        let domain = unsafe { ibv_alloc_pd(verbs) };
        let manager = Arc::new(Self {
            cluster,
            verbs: Handle(verbs),
            domain: Handle(domain),
            ids: Mutex::default(),
            watcher: OnceLock::new(),
        });
        let started = Watcher::start(&manager.cluster, look_after(&manager));
        let watcher = started.inspect_err(|_| {
            // SAFETY: the program has got neither.
            unsafe {
                ibv_dealloc_pd(domain);
                context::ibv_close_device(verbs);
            }
        })?;
        // Nobody else has it yet.
        let _ = manager.watcher.set(watcher);
        Ok(manager)
    }

    /// An identifier is looked after from now on.
    fn enter(&self, id: &Arc<Id>) {
        lock(&self.ids).push(id.clone());
    }

    /// There is something to look after that nothing else tells of.
    fn wake_watcher(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.wake();
        }
    }

    /// It is destroyed.
    fn forget(&self, id: &Arc<Id>) {
        lock(&self.ids).retain(|other| !Arc::ptr_eq(other, id));
    }
}

/// The work of its thread.
fn look_after(manager: &Arc<Manager>) -> impl FnMut() -> Option<Found> + Send + 'static {
    let manager = Arc::downgrade(manager);
    move || {
        let ids = lock(&manager.upgrade()?.ids).clone();
        let found = ids.iter().map(|id| id.proceed());
        Some(found.fold(Found::NOTHING, Found::and))
    }
}

/// # Safety
/// `count` is NULL or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let manager = Manager::get();
    if !count.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe { count.write(manager.is_ok().into()) };
    }
    let list = |manager: Arc<Manager>| [manager.verbs.0, ptr::null_mut()];
    pointer(manager.map(|manager| Box::into_raw(Box::new(list(manager))).cast()))
}

/// # Safety
/// Its argument came from [`rdma_get_devices`].
#[no_mangle]
unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: a box gave it away, as the caller vouches.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_context; 2]>()) });
}
