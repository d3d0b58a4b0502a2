// SPDX-License-Identifier: GPL-2.0 OR MIT
//! An open device: a session with kite, the memory that was registered in it, and its queue pairs.

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use kite::{Buffer, Cluster, Error, FabricAddress, Mr, Rights};

use crate::errno::{Errno, Result};
use crate::header::ibv_ah_attr;
use crate::memory::EmulatedMr;
use crate::pair::{EmulatedQp, MAX_QPS};
use crate::watcher::{poll_work_for_session, BackgroundPoller};

pub(crate) struct Session {
    pub(crate) cluster: Cluster,
    /// Another session, which keeps numbers of queue pairs: the first has no room for that.
    pub(crate) qpn_cluster: Cluster,
    /// Where this node is reached.
    pub(crate) address: FabricAddress,
    mrs: RwLock<HashMap<u32, Arc<EmulatedMr>>>,
    /// Those that the program has not destroyed.
    qps: Mutex<Vec<Arc<EmulatedQp>>>,
    /// Memory for messages without bytes.
    zero_len_mr: OnceLock<Arc<Mr>>,
    poller: OnceLock<BackgroundPoller>,
}

/// No code panics under a lock, so what it guards is whole in any case.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// Opens one, on the first RNIC.
    ///
    /// # Errors
    /// Those of [`Cluster::open`]; [`Error::NotJoined`].
    pub(crate) fn open() -> kite::Result<Self> {
        let cluster = Cluster::open()?;
        let view = cluster.view()?;
        let self_member = view
            .members
            .iter()
            .find(|member| member.node == view.local_node);
        Ok(Self {
            address: self_member.ok_or(Error::NotJoined)?.address,
            qpn_cluster: Cluster::open_rnic(cluster.rnic_name())?,
            cluster,
            mrs: RwLock::default(),
            qps: Mutex::default(),
            zero_len_mr: OnceLock::new(),
            poller: OnceLock::new(),
        })
    }

    /// The node that an address vector leads to.
    ///
    /// # Errors
    /// `EHOSTUNREACH` if it is none of the cluster.
    pub(crate) fn node_at(&self, ah_attr: &ibv_ah_attr) -> Result<u32> {
        // SAFETY: any bytes are bytes.
        let gid = Ipv6Addr::from(unsafe { ah_attr.grh.dgid.raw });
        let has_address = |address: &FabricAddress| match ah_attr.is_global {
            0 => ah_attr.dlid != 0 && address.lid == ah_attr.dlid,
            _ => address.gid == gid,
        };
        let view = self.cluster.view()?;
        let found = view
            .members
            .iter()
            .find(|member| has_address(&member.address));
        Ok(found.ok_or(Errno(libc::EHOSTUNREACH))?.node)
    }

    /// Memory by its key.
    pub(crate) fn find_mr(&self, key: u32) -> Option<Arc<EmulatedMr>> {
        let mrs = self.mrs.read().unwrap_or_else(PoisonError::into_inner);
        mrs.get(&key).cloned()
    }

    pub(crate) fn insert_mr(&self, key: u32, mr: Arc<EmulatedMr>) {
        let mut mrs = self.mrs.write().unwrap_or_else(PoisonError::into_inner);
        mrs.insert(key, mr);
    }

    pub(crate) fn remove_mr(&self, key: u32) {
        let mut mrs = self.mrs.write().unwrap_or_else(PoisonError::into_inner);
        mrs.remove(&key);
    }

    /// Memory of our own that the RNIC may use, and nobody else.
    pub(crate) fn alloc_mr(&self, len: usize) -> Result<Arc<Mr>> {
        let buffer = Buffer::new(len)?;
        let mr = self.cluster.reg_mr(buffer, Rights::empty())?;
        Ok(Arc::new(mr))
    }

    /// Where messages go that have no bytes.
    pub(crate) fn zero_len_mr(&self) -> Result<Arc<Mr>> {
        if let Some(mr) = self.zero_len_mr.get() {
            return Ok(mr.clone());
        }
        let mr = self.alloc_mr(1)?;
        Ok(self.zero_len_mr.get_or_init(|| mr).clone())
    }

    /// Makes a queue pair, which is looked after from now on.
    ///
    /// # Errors
    /// `ENOMEM` if there are [`MOST_PAIRS`]; those of `make`, and of [`Watcher::start`].
    pub(crate) fn add_qp(
        self: &Arc<Self>,
        make: impl FnOnce() -> Result<EmulatedQp>,
    ) -> Result<Arc<EmulatedQp>> {
        if self.poller.get().is_none() {
            // If another thread is faster this one ends when it is dropped.
            let _ = self.poller.set(BackgroundPoller::start(
                &self.cluster,
                poll_work_for_session(self),
            )?);
        }
        let mut qps = lock(&self.qps);
        if qps.len() >= MAX_QPS {
            return Err(Errno(libc::ENOMEM));
        }
        let qp = Arc::new(make()?);
        qps.push(qp.clone());
        Ok(qp)
    }

    /// Those that there are.
    pub(crate) fn qps(&self) -> Vec<Arc<EmulatedQp>> {
        lock(&self.qps).clone()
    }

    /// A queue pair is destroyed.
    pub(crate) fn remove_qp(&self, qp: &Arc<EmulatedQp>) {
        lock(&self.qps).retain(|other| !Arc::ptr_eq(other, qp));
    }

    /// Somebody waits for completions, or there may be some that nothing tells of.
    pub(crate) fn wake_poller(&self) {
        if let Some(watcher) = self.poller.get() {
            watcher.wake();
        }
    }
}
