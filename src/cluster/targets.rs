// SPDX-License-Identifier: GPL-2.0

//! The directory of DC targets (KRCORE, section 4.2): where nodes say by what they are reached, and others look.
//!
//! The first nodes of the view keep it, each a whole copy in memory that others read with one READ of one
//! bucket (`kite_core::wire::targets`). All nodes of a view know which these are. Each tells its target whenever the view
//! changes, and whoever has looked one up keeps it until somebody leaves, when all take other targets.

use super::{life, Cluster};
use crate::{
    dc::{target::Name, work::Way},
    errno,
    fabric::peer::{Peer, Reach},
    sys::{
        deadline::{settle, Deadline},
        pages::{Charge, Pages},
    },
    verbs::{device::Device, dma::DmaPages},
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
    view::Life,
    wire::targets::{self, Found, Target, BUCKET_SIZE, ENTRY_SIZE},
};

/// Nodes that keep the directory.
pub(crate) const KEEPERS: usize = 2;

/// Buckets of the directory: room for as many nodes as a view can have.
const BUCKETS: u32 = 512;

/// In place of a target's key: the node takes atomic operations by connections.
const ATOMICS: u64 = 1;

/// How long one copy is waited for, before another is tried.
const READ_MS: u32 = 300;

/// Times that a bucket is read in which somebody writes.
const READS_MAX: u32 = 16;

/// Where a copy of the directory is.
#[derive(Clone, Copy)]
struct Copy {
    keeper: Life,
    addr: u64,
    buckets: u32,
}

/// What a node knows of the directory.
#[pin_data]
pub(crate) struct Targets {
    /// Our copy, if somebody has told us a target.
    #[pin]
    table: Mutex<Option<DmaPages>>,
    /// Those that we were told of.
    #[pin]
    copies: Mutex<KVec<Copy>>,
    /// Epoch of the view in which somebody had left last.
    since: Atomic<u64>,
}

impl Targets {
    /// Nothing is known.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            table <- new_mutex!(None),
            copies <- new_mutex!(KVec::new()),
            since: Atomic::new(0u64),
        })
    }

    /// The view of `epoch` has begun: nodes of which `stays` does not hold have left, if there are any, and those of which
    /// `keeps` does not hold keep no copy that anybody tells.
    pub(super) fn change(
        &self,
        epoch: u64,
        stays: impl Fn(Life) -> bool,
        keeps: impl Fn(Life) -> bool,
        left: bool,
    ) {
        if left {
            self.since.store(epoch, Release);
        }
        self.copies.lock().retain(|copy| keeps(copy.keeper));
        let table = self.table.lock();
        let Some(pages) = &*table else { return };
        for at in (0..BUCKETS as usize).map(|i| i * BUCKET_SIZE) {
            let mut bucket = [0; BUCKET_SIZE];
            let _ = pages.read(at, &mut bucket);
            for place in targets::stale(&bucket, &stays) {
                let _ = pages.write(at + place, &[0; ENTRY_SIZE]);
            }
        }
    }

    /// Who had an answer is asked first from now on: the other may be silent.
    fn prefer(&self, keeper: Life) {
        let mut copies = self.copies.lock();
        if let Some(at) = copies.iter().position(|copy| copy.keeper == keeper) {
            copies.swap(0, at);
        }
    }

    /// Nothing is known any more, and nobody is to read our copy.
    pub(super) fn forget(&self) {
        let copies = core::mem::replace(&mut *self.copies.lock(), KVec::new());
        let table = self.table.lock().take();
        // The next cluster counts anew.
        self.since.store(0, Release);
        drop((copies, table));
    }

    /// Enters a target in our copy. Returns where that is.
    fn enter(&self, device: Device, target: &Target) -> Result<(u64, u32)> {
        let mut table = self.table.lock();
        if table.is_none() {
            let pages = Pages::new(BUCKETS as usize * BUCKET_SIZE, Charge::Kernel)?;
            *table = Some(DmaPages::shared(device, pages)?);
        }
        let pages = table.as_ref().ok_or(ENOMEM)?;
        let at = targets::bucket(target.life.node, BUCKETS) as usize * BUCKET_SIZE;
        let mut bucket = [0; BUCKET_SIZE];
        pages.read(at, &mut bucket)?;
        let place = targets::place(&bucket, target.life.node).ok_or(ENOMEM)?;
        pages.write(at + place, &target.encode())?;
        Ok((pages.addr(), BUCKETS))
    }
}

/// Of nodes that keep the directory, and of those that tell them.
impl Cluster {
    /// Whether a node keeps a copy.
    pub(crate) fn keeps_targets(&self, life: Life) -> bool {
        let state = self.state.lock();
        let mut keepers = state.members.iter().take(KEEPERS);
        keepers.any(|member| self::life(&member.raw) == life)
    }

    /// What this node tells as of a view. Without DC that is where its table of memory regions is.
    ///
    /// # Errors
    ///
    /// `ENODEV` if its target could not be made; `EHOSTUNREACH` without a view.
    pub(crate) fn own_target(&self, epoch: u64) -> Result<Target> {
        let life = self.life_of(self.node()?)?;
        let (Name { number, key }, rkey) = match self.fabric.dynamic() {
            Some(dynamic) => (dynamic.name().ok_or(ENODEV)?, dynamic.hca().key()),
            None => (self.without_target(), 0),
        };
        Ok(Target {
            life,
            epoch,
            number,
            key,
            rkey,
            regions: self.fabric.memories.table(),
        })
    }

    /// What a node without DC tells in place of a target.
    fn without_target(&self) -> Name {
        let atomics = self.fabric.device().has_atomics();
        Name {
            number: 0,
            key: if atomics { ATOMICS } else { 0 },
        }
    }

    /// Enters the target of `node` in our copy, for who reads that. Says where that is.
    ///
    /// # Errors
    ///
    /// `EACCES` if it is another's; `EHOSTDOWN` if the node is not in the view in that life; `ENOMEM`.
    pub(crate) fn enter_target(&self, node: u32, target: &Target) -> Result<(u64, u32)> {
        if target.life.node != node {
            return Err(EACCES);
        }
        if !self.has(target.life) {
            return Err(errno::hostdown());
        }
        self.targets.enter(self.fabric.device(), target)
    }

    /// A copy of the directory is there, if that is not the answer of who keeps it no more.
    pub(crate) fn note_copy(&self, keeper: Life, addr: u64, buckets: u32) {
        let copy = Copy {
            keeper,
            addr,
            buckets,
        };
        let mut copies = self.targets.copies.lock();
        copies.retain(|other| other.keeper != keeper);
        if !self.keeps_targets(keeper) {
            return;
        }
        // Without memory there is a copy less to look at.
        let _ = copies.push(copy, GFP_KERNEL);
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
    pub(crate) fn reach(&self, life: Life, deadline: Deadline) -> Result<Arc<Reach>> {
        if let Some(reach) = self.known_reach(life)? {
            return Ok(reach);
        }
        let peer = self.fabric.node_in(life)?;
        let since = self.targets.since.load(Acquire);
        let target = settle(deadline, || self.look_up(life, since, deadline))?;
        let way = self.way(&peer, &target)?;
        let both = self.fabric.device().has_atomics() && target.key == ATOMICS;
        let reach = Reach {
            has_atomics: way.is_some() || both,
            way,
            epoch: target.epoch,
            rkey: target.rkey,
            regions: target.regions,
        };
        Ok(peer.set_reach(Arc::new(reach, GFP_KERNEL)?))
    }

    /// As [`Self::reach`], but waits for nothing: what is not known is not found out.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn known_reach(&self, life: Life) -> Result<Option<Arc<Reach>>> {
        let peer = self.fabric.node_in(life)?;
        let known = peer.reach(self.targets.since.load(Acquire));
        if known.is_some() {
            self.fabric.stats.directory_hits.add(1);
        }
        Ok(known)
    }

    /// The way to a target, if we both have DC.
    fn way(&self, peer: &Peer, target: &Target) -> Result<Option<Way>> {
        let Some(dynamic) = self.fabric.dynamic().filter(|_| target.number != 0) else {
            return Ok(None);
        };
        let route = self.fabric.route(peer)?;
        let name = Name {
            number: target.number,
            key: target.key,
        };
        Way::new(dynamic.hca(), &route, name).map(Some)
    }

    /// `EAGAIN` if no copy has it, or none can be read now.
    fn look_up(&self, life: Life, since: u64, deadline: Deadline) -> Result<Target> {
        drop(self.fabric.node_in(life)?);
        for i in 0..KEEPERS {
            let copy = self.targets.copies.lock().get(i).copied();
            let deadline = deadline.within_ms(READ_MS);
            let found = copy.and_then(|copy| Some((copy, self.read(copy, life, since, deadline)?)));
            if let Some((copy, target)) = found {
                self.targets.prefer(copy.keeper);
                return Ok(target);
            }
        }
        self.fabric.stats.directory_misses.add(1);
        Err(EAGAIN)
    }

    fn read(&self, copy: Copy, life: Life, since: u64, deadline: Deadline) -> Option<Target> {
        let offset = targets::bucket(life.node, copy.buckets) as usize * BUCKET_SIZE;
        for _ in 0..READS_MAX {
            let mut bucket = [0; BUCKET_SIZE];
            if self.node() == Ok(copy.keeper.node) {
                let table = self.targets.table.lock();
                table.as_ref()?.read(offset, &mut bucket).ok()?;
            } else {
                let addr = copy.addr + offset as u64;
                let read = self.fabric.fetch(copy.keeper, addr, &mut bucket, deadline);
                self.fabric.stats.directory_reads.add(1);
                read.ok()?;
            }
            match targets::find(&bucket, life, since) {
                Found::Target(target) => return Some(target),
                Found::Absent => return None,
                Found::Torn => {}
            }
        }
        None
    }
}
