// SPDX-License-Identifier: GPL-2.0

//! Directory of DC addresses (KRCORE, section 4.2): publication and lookup of the DCT of each node.
//!
//! # Operation
//!
//! The first [`DIRECTORY_REPLICAS`] nodes of the view each hold a complete replica. The view determines these
//! nodes, so no election is needed. At each view change, every node publishes its DCT to the replicas. A
//! reader fetches one bucket of one replica by one RDMA READ (`kite_core::wire::targets`). The reader caches
//! the address in the peer until a node is removed from the view, since all nodes then replace their DCTs.
//!
//! # Recovery
//!
//! - A torn bucket is read again, with at most [`MAX_TORN_READS`] READs in all.
//! - If a replica does not reply within [`REPLICA_READ_MS`], the next replica is read. The replica that
//!   replied is preferred from then on.
//! - If no replica has the entry, the lookup is retried until its deadline.
//!
//! # Locking
//!
//! - [`AddressDirectory::local_replica`] (mutex): the replica of this node and all writes to it.
//! - [`AddressDirectory::replicas`] (mutex): locations of the replicas, in order of preference.
//!
//! The two mutexes never nest. Each is taken before the mutex of the cluster state ([`Cluster`]). Holders may
//! sleep. `min_epoch` is stored with release ordering at a view change and loaded with acquire ordering by
//! lookups.

use super::{member_instance, Cluster};
use crate::{
    errno::{self, TryError, TryResult},
    fabric::{peer::PeerAddress, send::one_shot::OneShot},
    sys::{
        deadline::{retry_until, Deadline},
        pages::{ContiguousPages, MemcgCharge},
    },
    verbs::{device::IbDevice, dma::DmaPages},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, Mutex,
    },
};
use kite_core::{
    view::NodeInstance,
    wire::targets::{self, DirectoryEntry, DirectoryLookup, BUCKET_SIZE, ENTRY_SIZE},
};

/// Number of directory replicas.
pub(crate) const DIRECTORY_REPLICAS: usize = 2;

/// Number of buckets: enough for the maximum number of nodes of a view.
const DIRECTORY_BUCKETS: u32 = 512;

/// Value of `dc_key` in an entry without DCT: the RNIC of the node has kernel atomics over RC.
const RC_ATOMICS_KEY: u64 = 1;

/// Maximum wait for one replica before the next replica is read, in milliseconds.
const REPLICA_READ_MS: u32 = 300;

/// Maximum reads of a torn bucket.
const MAX_TORN_READS: u32 = 16;

/// Location of a directory replica.
#[derive(Clone, Copy)]
struct Replica {
    instance: NodeInstance,
    addr: u64,
    buckets: u32,
}

/// State of the directory at this node.
#[pin_data]
pub(crate) struct AddressDirectory {
    /// Replica of this node; `None` until the first entry is published here.
    #[pin]
    local_replica: Mutex<Option<DmaPages>>,
    /// Replicas that accepted the entry of this node. The first is read first.
    #[pin]
    replicas: Mutex<KVec<Replica>>,
    /// Epoch of the last view change that removed a node. Entries of earlier epochs name replaced DCTs.
    min_epoch: Atomic<u64>,
}

impl AddressDirectory {
    /// Creates a directory without replicas.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            local_replica <- new_mutex!(None, "AddressDirectory::local_replica"),
            replicas <- new_mutex!(KVec::new(), "AddressDirectory::replicas"),
            min_epoch: Atomic::new(0u64),
        })
    }

    /// Handles the change to the view of `epoch`.
    ///
    /// Removes the entries of nodes for which `is_reachable` is false from the local replica. Drops replicas
    /// for which `has_replica` is false. `has_closed` is set if a peer was closed, so DCTs were replaced.
    pub(super) fn on_view_change(
        &self,
        epoch: u64,
        is_reachable: impl Fn(NodeInstance) -> bool,
        has_replica: impl Fn(NodeInstance) -> bool,
        has_closed: bool,
    ) {
        if has_closed {
            self.min_epoch.store(epoch, Release);
        }
        self.replicas
            .lock()
            .retain(|replica| has_replica(replica.instance));
        let table = self.local_replica.lock();
        let Some(pages) = &*table else { return };
        for bucket_offset in (0..DIRECTORY_BUCKETS as usize).map(|i| i * BUCKET_SIZE) {
            let mut bucket = [0; BUCKET_SIZE];
            // Neither access can fail: all buckets are within the pages.
            let _ = pages.read(bucket_offset, &mut bucket);
            for entry_offset in targets::stale_offsets(&bucket, &is_reachable) {
                let _ = pages.write(bucket_offset + entry_offset, &[0; ENTRY_SIZE]);
            }
        }
    }

    /// Moves a replica to the front of the list, since other replicas may be unresponsive.
    fn prefer_replica(&self, instance: NodeInstance) {
        let mut replicas = self.replicas.lock();
        if let Some(index) = replicas
            .iter()
            .position(|replica| replica.instance == instance)
        {
            replicas.swap(0, index);
        }
    }

    /// Frees the local replica and drops all others. No peer may be connected any longer, since peers read
    /// the replica.
    pub(super) fn clear(&self) {
        let replicas = core::mem::replace(&mut *self.replicas.lock(), KVec::new());
        let local_replica = self.local_replica.lock().take();
        // The epochs of the next cluster can be lower.
        self.min_epoch.store(0, Release);
        drop((replicas, local_replica));
    }

    /// Stores an entry in the local replica, which is allocated on first use. Returns its address and bucket
    /// count.
    fn insert(&self, device: IbDevice, entry: &DirectoryEntry) -> Result<(u64, u32)> {
        let mut local_replica = self.local_replica.lock();
        if local_replica.is_none() {
            let pages = ContiguousPages::new(
                DIRECTORY_BUCKETS as usize * BUCKET_SIZE,
                MemcgCharge::Kernel,
            )?;
            *local_replica = Some(DmaPages::new_coherent(device, pages)?);
        }
        let pages = local_replica.as_ref().ok_or(ENOMEM)?;
        let bucket_offset =
            targets::bucket_index(entry.instance.node, DIRECTORY_BUCKETS) as usize * BUCKET_SIZE;
        let mut bucket = [0; BUCKET_SIZE];
        pages.read(bucket_offset, &mut bucket)?;
        let entry_offset = targets::entry_offset(&bucket, entry.instance.node).ok_or(ENOMEM)?;
        pages.write(bucket_offset + entry_offset, &entry.encode())?;
        Ok((pages.dma_addr(), DIRECTORY_BUCKETS))
    }
}

/// Publication of addresses.
impl Cluster {
    /// Returns `true` if a node holds a replica.
    pub(crate) fn has_directory_replica(&self, instance: NodeInstance) -> bool {
        let state = self.state.lock();
        let mut replicas = state.reachable().take(DIRECTORY_REPLICAS);
        replicas.any(|member| member_instance(&member.info) == instance)
    }

    /// Returns the entry of this node for the view of `epoch`. Without DC, the entry has the address of the
    /// MR table only.
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the DCT could not be created.
    /// - `EHOSTUNREACH`: there is no view.
    /// - `EHOSTDOWN`: this node is not in the view.
    pub(crate) fn local_directory_entry(&self, epoch: u64) -> Result<DirectoryEntry> {
        let instance = self.instance_of(self.local_node()?)?;
        let mut entry = DirectoryEntry {
            instance,
            epoch,
            dctn: 0,
            dc_key: 0,
            rkey: 0,
            mr_table_addr: self.fabric.mr_table.table_addr(),
        };
        if let Some(dc) = self.fabric.dc() {
            let dct = dc.dct_address().ok_or(ENODEV)?;
            (entry.dctn, entry.dc_key) = (dct.dctn, dct.dc_key);
            entry.rkey = dc.hca().global_mkey();
        } else if self.fabric.device().has_kernel_atomics() {
            entry.dc_key = RC_ATOMICS_KEY;
        }
        Ok(entry)
    }

    /// Stores the entry that `node` publishes in the local replica. Returns its address and bucket count.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the entry names another node.
    /// - `EHOSTDOWN`: the node is not in the view with this incarnation.
    /// - `ENOMEM`: the bucket is full, or out of memory.
    pub(crate) fn publish_entry(&self, node: u32, entry: &DirectoryEntry) -> Result<(u64, u32)> {
        if entry.instance.node != node {
            return Err(EACCES);
        }
        if !self.is_reachable(entry.instance) {
            return Err(errno::hostdown());
        }
        self.directory.insert(self.fabric.device(), entry)
    }

    /// Adds a replica, unless the replying node holds none in the current view.
    pub(crate) fn add_replica(&self, instance: NodeInstance, addr: u64, buckets: u32) {
        let replica = Replica {
            instance,
            addr,
            buckets,
        };
        let mut replicas = self.directory.replicas.lock();
        replicas.retain(|other| other.instance != instance);
        if !self.has_directory_replica(instance) {
            return;
        }
        // On allocation failure, lookups have one replica fewer.
        let _ = replicas.push(replica, GFP_KERNEL);
    }
}

/// Lookup of addresses.
impl Cluster {
    /// Returns the address of a peer: from the cache without sleeping, else by an RDMA READ of a replica.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the peer is not in the view.
    /// - `ETIMEDOUT`: no replica returned the entry before the deadline.
    /// - `EINTR`: a signal is pending.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn resolve_address(
        &self,
        instance: NodeInstance,
        deadline: Deadline,
    ) -> Result<Arc<PeerAddress>> {
        if let Some(address) = self.cached_address(instance)? {
            return Ok(address);
        }
        let peer = self.fabric.peers.get_or_self(instance)?;
        let min_epoch = self.directory.min_epoch.load(Acquire);
        let entry = retry_until(deadline, || {
            self.query_replicas(instance, min_epoch, deadline)
        })?;
        let dc_address = match entry.dctn {
            0 => None,
            dctn => self.fabric.dc_address(&peer, dctn, entry.dc_key)?,
        };
        let both_have_atomics =
            self.fabric.device().has_kernel_atomics() && entry.dc_key == RC_ATOMICS_KEY;
        let address = PeerAddress {
            has_atomics: dc_address.is_some() || both_have_atomics,
            dc_address,
            epoch: entry.epoch,
            rkey: entry.rkey,
            mr_table_addr: entry.mr_table_addr,
        };
        Ok(peer.cache_address(Arc::new(address, GFP_KERNEL)?))
    }

    /// Returns the cached address of a peer, or `None`. Does not sleep on the network, unlike
    /// [`Self::resolve_address`].
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN`: the peer is not in the view.
    pub(crate) fn cached_address(
        &self,
        instance: NodeInstance,
    ) -> Result<Option<Arc<PeerAddress>>> {
        let peer = self.fabric.peers.get_or_self(instance)?;
        let cached = peer.cached_address(self.directory.min_epoch.load(Acquire));
        if cached.is_some() {
            self.fabric.stats.directory_hits.add(1);
        }
        Ok(cached)
    }

    /// Reads the entry from the replicas, in order of preference.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: no replica has the entry, or none is readable.
    /// - `EHOSTDOWN`: the peer is not in the view.
    fn query_replicas(
        &self,
        instance: NodeInstance,
        min_epoch: u64,
        deadline: Deadline,
    ) -> TryResult<DirectoryEntry> {
        drop(self.fabric.peers.get_or_self(instance)?);
        for i in 0..DIRECTORY_REPLICAS {
            let replica = self.directory.replicas.lock().get(i).copied();
            let deadline = deadline.capped_at_ms(REPLICA_READ_MS);
            let found = replica.and_then(|replica| {
                Some((
                    replica,
                    self.read_replica(replica, instance, min_epoch, deadline)?,
                ))
            });
            if let Some((replica, entry)) = found {
                self.directory.prefer_replica(replica.instance);
                return Ok(entry);
            }
        }
        self.fabric.stats.directory_misses.add(1);
        Err(TryError::WouldBlock)
    }

    /// Reads the entry from one replica: from local memory, or by RDMA READ. Returns `None` on any failure.
    fn read_replica(
        &self,
        replica: Replica,
        instance: NodeInstance,
        min_epoch: u64,
        deadline: Deadline,
    ) -> Option<DirectoryEntry> {
        let offset = targets::bucket_index(instance.node, replica.buckets) as usize * BUCKET_SIZE;
        for _ in 0..MAX_TORN_READS {
            let mut bucket = [0; BUCKET_SIZE];
            if self.local_node() == Ok(replica.instance.node) {
                let local_replica = self.directory.local_replica.lock();
                local_replica.as_ref()?.read(offset, &mut bucket).ok()?;
            } else {
                let addr = replica.addr + offset as u64;
                let read = OneShot::new_rc(&self.fabric, replica.instance, deadline);
                let result = read.read(addr, &mut bucket);
                self.fabric.stats.directory_reads.add(1);
                result.ok()?;
            }
            match targets::lookup(&bucket, instance, min_epoch) {
                DirectoryLookup::Found(entry) => return Some(entry),
                DirectoryLookup::Absent => return None,
                DirectoryLookup::Torn => {}
            }
        }
        None
    }
}
