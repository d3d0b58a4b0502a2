// SPDX-License-Identifier: GPL-2.0 OR MIT
//! An open device: a session with kite, the memory that was registered in it, and its queue pairs.

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use kite::{Address, Cluster, Error, Memory, Registered, Rights};

use crate::errno::{Errno, Result};
use crate::header::ibv_ah_attr;
use crate::memory::Area;
use crate::pair::{Pair, MOST_PAIRS};
use crate::watcher::{look_after, Watcher};

pub(crate) struct Session {
    pub(crate) cluster: Cluster,
    /// Another session, which keeps numbers of queue pairs: the first has no room for that.
    pub(crate) numbers: Cluster,
    /// Where this node is reached.
    pub(crate) address: Address,
    areas: RwLock<HashMap<u32, Arc<Area>>>,
    /// Those that the program has not destroyed.
    pairs: Mutex<Vec<Arc<Pair>>>,
    /// Memory for messages without bytes.
    nowhere: OnceLock<Arc<Registered>>,
    watcher: OnceLock<Watcher>,
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
        let view = cluster.nodes()?;
        let own = view.members.iter().find(|member| member.node == view.own);
        Ok(Self {
            address: own.ok_or(Error::NotJoined)?.address,
            numbers: Cluster::open_rnic(cluster.rnic())?,
            cluster,
            areas: RwLock::default(),
            pairs: Mutex::default(),
            nowhere: OnceLock::new(),
            watcher: OnceLock::new(),
        })
    }

    /// The node that an address vector leads to.
    ///
    /// # Errors
    /// `EHOSTUNREACH` if it is none of the cluster.
    pub(crate) fn node_at(&self, way: &ibv_ah_attr) -> Result<u32> {
        // SAFETY: any bytes are bytes.
        let gid = Ipv6Addr::from(unsafe { way.grh.dgid.raw });
        let is_there = |address: &Address| match way.is_global {
            0 => way.dlid != 0 && address.lid == way.dlid,
            _ => address.gid == gid,
        };
        let view = self.cluster.nodes()?;
        let found = view.members.iter().find(|member| is_there(&member.address));
        Ok(found.ok_or(Errno(libc::EHOSTUNREACH))?.node)
    }

    /// Memory by its key.
    pub(crate) fn area(&self, key: u32) -> Option<Arc<Area>> {
        let areas = self.areas.read().unwrap_or_else(PoisonError::into_inner);
        areas.get(&key).cloned()
    }

    pub(crate) fn keep_area(&self, key: u32, area: Arc<Area>) {
        let mut areas = self.areas.write().unwrap_or_else(PoisonError::into_inner);
        areas.insert(key, area);
    }

    pub(crate) fn forget_area(&self, key: u32) {
        let mut areas = self.areas.write().unwrap_or_else(PoisonError::into_inner);
        areas.remove(&key);
    }

    /// Memory of our own that the RNIC may use, and nobody else.
    pub(crate) fn own_memory(&self, len: usize) -> Result<Arc<Registered>> {
        let memory = Memory::new(len)?;
        let registered = self.cluster.register_memory(memory, Rights::empty())?;
        Ok(Arc::new(registered))
    }

    /// Where messages go that have no bytes.
    pub(crate) fn nowhere(&self) -> Result<Arc<Registered>> {
        if let Some(memory) = self.nowhere.get() {
            return Ok(memory.clone());
        }
        let memory = self.own_memory(1)?;
        Ok(self.nowhere.get_or_init(|| memory).clone())
    }

    /// Makes a queue pair, which is looked after from now on.
    ///
    /// # Errors
    /// `ENOMEM` if there are [`MOST_PAIRS`]; those of `make`, and of [`Watcher::start`].
    pub(crate) fn add_pair(
        self: &Arc<Self>,
        make: impl FnOnce() -> Result<Pair>,
    ) -> Result<Arc<Pair>> {
        if self.watcher.get().is_none() {
            // If another thread is faster this one ends when it is dropped.
            let _ = self
                .watcher
                .set(Watcher::start(&self.cluster, look_after(self))?);
        }
        let mut pairs = lock(&self.pairs);
        if pairs.len() >= MOST_PAIRS {
            return Err(Errno(libc::ENOMEM));
        }
        let pair = Arc::new(make()?);
        pairs.push(pair.clone());
        Ok(pair)
    }

    /// Those that there are.
    pub(crate) fn pairs(&self) -> Vec<Arc<Pair>> {
        lock(&self.pairs).clone()
    }

    /// A queue pair is destroyed.
    pub(crate) fn forget_pair(&self, pair: &Arc<Pair>) {
        lock(&self.pairs).retain(|other| !Arc::ptr_eq(other, pair));
    }

    /// Somebody waits for completions, or there may be some that nothing tells of.
    pub(crate) fn wake_watcher(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.wake();
        }
    }
}
