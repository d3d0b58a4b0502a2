// SPDX-License-Identifier: GPL-2.0

//! The directory of DC targets (KRCORE, section 4.2): where nodes say by what they are reached, and others look.
//!
//! The first nodes of the view keep it, each a whole copy in memory that others read with one READ of one
//! bucket (`kite_core::wire::targets`). All nodes of a view know which these are. Each tells its target whenever the view
//! changes, and whoever has looked one up keeps it until somebody leaves, when all take other targets.

use super::{member_instance, Cluster};
use crate::{
    errno,
    fabric::peer::{Peer, PeerAddress},
    mlx5::{dct::DctId, wr::DcAddress},
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

/// Nodes that keep the directory.
pub(crate) const DIRECTORY_REPLICAS: usize = 2;

/// Buckets of the directory: room for as many nodes as a view can have.
const DIRECTORY_BUCKETS: u32 = 512;

/// In place of a target's key: the node takes atomic operations by connections.
const RC_ATOMICS_KEY: u64 = 1;

/// How long one copy is waited for, before another is tried.
const REPLICA_READ_MS: u32 = 300;

/// Times that a bucket is read in which somebody writes.
const MAX_TORN_READS: u32 = 16;

/// Where a copy of the directory is.
#[derive(Clone, Copy)]
struct Replica {
    instance: NodeInstance,
    addr: u64,
    buckets: u32,
}

/// What a node knows of the directory.
#[pin_data]
pub(crate) struct AddressDirectory {
    /// Our copy, if somebody has told us a target.
    #[pin]
    local_replica: Mutex<Option<DmaPages>>,
    /// Those that we were told of.
    #[pin]
    replicas: Mutex<KVec<Replica>>,
    /// Epoch of the view in which somebody had left last.
    min_epoch: Atomic<u64>,
}

impl AddressDirectory {
    /// Nothing is known.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            local_replica <- new_mutex!(None),
            replicas <- new_mutex!(KVec::new()),
            min_epoch: Atomic::new(0u64),
        })
    }

    /// The view of `epoch` has begun: nodes of which `stays` does not hold have left, if there are any, and those of which
    /// `keeps` does not hold keep no copy that anybody tells.
    pub(super) fn on_view_change(
        &self,
        epoch: u64,
        is_member: impl Fn(NodeInstance) -> bool,
        has_replica: impl Fn(NodeInstance) -> bool,
        has_removed: bool,
    ) {
        if has_removed {
            self.min_epoch.store(epoch, Release);
        }
        self.replicas
            .lock()
            .retain(|replica| has_replica(replica.instance));
        let table = self.local_replica.lock();
        let Some(pages) = &*table else { return };
        for bucket_offset in (0..DIRECTORY_BUCKETS as usize).map(|i| i * BUCKET_SIZE) {
            let mut bucket = [0; BUCKET_SIZE];
            let _ = pages.read(bucket_offset, &mut bucket);
            for entry_offset in targets::stale_offsets(&bucket, &is_member) {
                let _ = pages.write(bucket_offset + entry_offset, &[0; ENTRY_SIZE]);
            }
        }
    }

    /// Who had an answer is asked first from now on: the other may be silent.
    fn prefer_replica(&self, instance: NodeInstance) {
        let mut replicas = self.replicas.lock();
        if let Some(index) = replicas
            .iter()
            .position(|replica| replica.instance == instance)
        {
            replicas.swap(0, index);
        }
    }

    /// Nothing is known any more, and nobody is to read our copy.
    pub(super) fn clear(&self) {
        let replicas = core::mem::replace(&mut *self.replicas.lock(), KVec::new());
        let local_replica = self.local_replica.lock().take();
        // The next cluster counts anew.
        self.min_epoch.store(0, Release);
        drop((replicas, local_replica));
    }

    /// Enters a target in our copy. Returns where that is.
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

/// Of nodes that keep the directory, and of those that tell them.
impl Cluster {
    /// Whether a node keeps a copy.
    pub(crate) fn has_directory_replica(&self, instance: NodeInstance) -> bool {
        let state = self.state.lock();
        let mut replicas = state.members.iter().take(DIRECTORY_REPLICAS);
        replicas.any(|member| crate::cluster::directory::member_instance(&member.info) == instance)
    }

    /// What this node tells as of a view. Without DC that is where its table of memory regions is.
    ///
    /// # Errors
    ///
    /// `ENODEV` if its target could not be made; `EHOSTUNREACH` without a view.
    pub(crate) fn local_directory_entry(&self, epoch: u64) -> Result<DirectoryEntry> {
        let instance = self.instance_of(self.local_node()?)?;
        let (
            DctId {
                dctn: number,
                dc_key: key,
            },
            rkey,
        ) = match self.fabric.dc() {
            Some(dynamic) => (
                dynamic.dct_address().ok_or(ENODEV)?,
                dynamic.hca().global_mkey(),
            ),
            None => (self.placeholder_address(), 0),
        };
        Ok(DirectoryEntry {
            instance,
            epoch,
            dctn: number,
            dc_key: key,
            rkey,
            mr_table_addr: self.fabric.mr_table.table_addr(),
        })
    }

    /// What a node without DC tells in place of a target.
    fn placeholder_address(&self) -> DctId {
        let has_atomics = self.fabric.device().has_kernel_atomics();
        DctId {
            dctn: 0,
            dc_key: if has_atomics { RC_ATOMICS_KEY } else { 0 },
        }
    }

    /// Enters the target of `node` in our copy, for who reads that. Says where that is.
    ///
    /// # Errors
    ///
    /// `EACCES` if it is another's; `EHOSTDOWN` if the node is not in the view in that life; `ENOMEM`.
    pub(crate) fn publish_entry(&self, node: u32, entry: &DirectoryEntry) -> Result<(u64, u32)> {
        if entry.instance.node != node {
            return Err(EACCES);
        }
        if !self.is_member(entry.instance) {
            return Err(errno::hostdown());
        }
        self.directory.insert(self.fabric.device(), entry)
    }

    /// A copy of the directory is there, if that is not the answer of who keeps it no more.
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
        // Without memory there is a copy less to look at.
        let _ = replicas.push(replica, GFP_KERNEL);
    }
}

/// Of those who look.
impl Cluster {
    /// By what a peer is reached. Who knows it already waits for nothing; who does not, for one READ.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN` if it is not in the view.
    /// - `ETIMEDOUT`, `EINTR`, `ENOMEM`.
    pub(crate) fn resolve_address(
        &self,
        instance: NodeInstance,
        deadline: Deadline,
    ) -> Result<Arc<PeerAddress>> {
        if let Some(address) = self.cached_address(instance)? {
            return Ok(address);
        }
        let peer = self.fabric.peer_or_self(instance)?;
        let min_epoch = self.directory.min_epoch.load(Acquire);
        let entry = retry_until(deadline, || {
            self.query_replicas(instance, min_epoch, deadline)
        })?;
        let dc_address = self.dc_address(&peer, &entry)?;
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

    /// As [`Self::reach`], but waits for nothing: what is not known is not found out.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn cached_address(
        &self,
        instance: NodeInstance,
    ) -> Result<Option<Arc<PeerAddress>>> {
        let peer = self.fabric.peer_or_self(instance)?;
        let cached = peer.cached_address(self.directory.min_epoch.load(Acquire));
        if cached.is_some() {
            self.fabric.stats.directory_hits.add(1);
        }
        Ok(cached)
    }

    /// The way to a target, if we both have DC.
    fn dc_address(&self, peer: &Peer, entry: &DirectoryEntry) -> Result<Option<DcAddress>> {
        let Some(dynamic) = self.fabric.dc().filter(|_| entry.dctn != 0) else {
            return Ok(None);
        };
        let route = self.fabric.route_or_resolve(peer)?;
        let dct = DctId {
            dctn: entry.dctn,
            dc_key: entry.dc_key,
        };
        DcAddress::new(dynamic.hca(), &route, dct).map(Some)
    }

    /// `EAGAIN` if no copy has it, or none can be read now.
    fn query_replicas(
        &self,
        instance: NodeInstance,
        min_epoch: u64,
        deadline: Deadline,
    ) -> Result<DirectoryEntry> {
        drop(self.fabric.peer_or_self(instance)?);
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
        Err(EAGAIN)
    }

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
                let result =
                    self.fabric
                        .read_remote_rc(replica.instance, addr, &mut bucket, deadline);
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
