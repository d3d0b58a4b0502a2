// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Open device: a session with kite, its memory regions, and its QPs.

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use kite::{Buffer, Cluster, Error, FabricAddress, Mr, Rights};

use crate::errno::{Errno, Result};
use crate::header::ibv_ah_attr;
use crate::limits::MAX_QPS;
use crate::memory::EmulatedMr;
use crate::poller::{poll_unattended_qps, BackgroundPoller, PollOutcome, PolledQp};
use crate::sync::lock;

pub(crate) struct Session {
    pub(crate) cluster: Cluster,
    /// Second session, which reserves QP numbers: the first one has no listeners left for that.
    pub(crate) qpn_cluster: Cluster,
    /// Address of this node.
    pub(crate) address: FabricAddress,
    mrs: RwLock<HashMap<u32, Arc<EmulatedMr>>>,
    /// QPs that the program has not destroyed.
    qps: Mutex<Vec<Arc<dyn PolledQp>>>,
    /// Memory for messages of length 0.
    zero_len_mr: OnceLock<Arc<Mr>>,
    poller: OnceLock<BackgroundPoller>,
}

impl Session {
    /// Opens a session on the first RNIC.
    ///
    /// # Errors
    /// [`Error::NotJoined`] if this node is in no cluster. See also [`Cluster::open`].
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

    /// Returns the node with the address of an address vector.
    ///
    /// # Errors
    /// `EHOSTUNREACH` if no member has the address.
    pub(crate) fn node_at(&self, ah_attr: &ibv_ah_attr) -> Result<u32> {
        // SAFETY: any bytes are a valid GID.
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

    /// Returns the memory region with a key.
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

    /// Registers memory that the RNIC may access, and no other user.
    pub(crate) fn alloc_mr(&self, len: usize) -> Result<Arc<Mr>> {
        let buffer = Buffer::new(len)?;
        let mr = self.cluster.reg_mr(buffer, Rights::empty())?;
        Ok(Arc::new(mr))
    }

    /// Returns the memory for messages of length 0.
    pub(crate) fn zero_len_mr(&self) -> Result<Arc<Mr>> {
        if let Some(mr) = self.zero_len_mr.get() {
            return Ok(mr.clone());
        }
        let mr = self.alloc_mr(1)?;
        Ok(self.zero_len_mr.get_or_init(|| mr).clone())
    }

    /// Creates a QP, which the background poller serves from now on.
    ///
    /// # Errors
    /// `ENOMEM` if there are [`MAX_QPS`] QPs. See also `make` and [`BackgroundPoller::start`].
    pub(crate) fn add_qp<Q: PolledQp + 'static>(
        self: &Arc<Self>,
        make: impl FnOnce() -> Result<Q>,
    ) -> Result<Arc<Q>> {
        if self.poller.get().is_none() {
            // If another thread was faster, this poller ends when it is dropped.
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

    /// Returns all QPs that are not destroyed.
    fn qps(&self) -> Vec<Arc<dyn PolledQp>> {
        lock(&self.qps).clone()
    }

    /// Removes a QP, which the program destroys.
    pub(crate) fn remove_qp(&self, qp: &Arc<dyn PolledQp>) {
        lock(&self.qps).retain(|other| !Arc::ptr_eq(other, qp));
    }

    /// Wakes the background poller, since the program waits for completions or there may be some without an event.
    pub(crate) fn wake_poller(&self) {
        if let Some(poller) = self.poller.get() {
            poller.wake();
        }
    }
}

/// Returns the work for the QPs of a session.
fn poll_work_for_session(
    session: &Arc<Session>,
) -> impl FnMut() -> Option<PollOutcome> + Send + 'static {
    let session = Arc::downgrade(session);
    let mut last_poll_counts = Vec::new();
    move || {
        let qps = session.upgrade()?.qps();
        let busy;
        (last_poll_counts, busy) = poll_unattended_qps(&qps, &last_poll_counts);
        Some(PollOutcome {
            had_work: busy,
            recheck_ms: -1,
        })
    }
}
