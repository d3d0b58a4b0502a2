// SPDX-License-Identifier: GPL-2.0

//! What one open file, or one kernel user, owns: handles, events, and perhaps the cluster membership.
//!
//! Dropping a session gives everything back. [`device`] is the file, [`ioctl`] its requests, [`call`] those
//! that are about calls, of which long ones go by a [`relay`], [`lock`] those about locks and barriers, [`qos`]
//! those about priorities and limits; [`queue`] is another way to make them.

mod abi;
pub(crate) mod call;
mod caller;
pub(crate) mod device;
mod export;
mod ioctl;
mod lock;
mod qos;
mod queue;
mod relay;
mod request;
mod segments;
mod serve;
mod spares;
mod vqp;

use crate::{
    bindings, errno,
    fabric::{
        flight::Direction,
        qos::{limits::Who, tenant::Tenant},
    },
    lmr::{
        alloc::Order,
        atomic::Update,
        copy::{Copy, End, Fill},
        grant::Grant,
        io::{Access, Begun, Looker, Moving},
        mapping::Mapping,
        Lmr,
    },
    rnic::Rnic,
    rpc::{link::Link, open::Open, service::Service, Rpc},
    services::{ExchangeInside, LmrInside, RpcInside, Services},
    sys::{deadline::Deadline, gate::Inside, memory::Memory, pin::Pinned, watch::Watch},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed},
        Arc, Mutex, SetOnce,
    },
};
use kite_core::{atomic::WORD, name::Name, rights::Rights};
use lock::Locked;
use segments::Segments;

/// A handle of a session. There may be as many as the memory allows that is granted to the user's cgroup.
#[pin_data]
struct Handle {
    number: u64,
    mapping: Arc<Mapping>,
    rights: Rights,
    /// The region ends with the handle.
    anonymous: bool,
    #[pin]
    uses: Mutex<Uses>,
}

/// What a handle is used for besides its region's memory.
#[derive(Default)]
struct Uses {
    /// The way to whoever serves the region.
    link: Option<Arc<Link>>,
    /// The region as served by this session.
    service: Option<Arc<Service>>,
    /// The handle was given back.
    over: bool,
}

/// A call that was taken.
struct Taken {
    open: Arc<Open>,
    /// The handle by which it was.
    by: u64,
    /// Somebody is bringing its answer on the way.
    answering: bool,
}

impl Handle {
    /// The mapping, to read or write.
    ///
    /// # Errors
    ///
    /// `EACCES` if the handle was mapped without that right.
    fn open_to(&self, direction: Direction) -> Result<Arc<Mapping>> {
        let needed = match direction {
            Direction::Read => Rights::READ,
            Direction::Write => Rights::WRITE,
        };
        let allowed = self.rights.contains(needed);
        allowed.then(|| self.mapping.clone()).ok_or(EACCES)
    }
}

/// To who has no handle yet, a region that is freed the moment it was found is one that is not there.
fn not_found(error: Error) -> Error {
    if error == errno::stale() {
        ENOENT
    } else {
        error
    }
}

/// A session.
#[pin_data]
pub(crate) struct Session {
    rnic: SetOnce<Arc<Rnic>>,
    /// Who it is to others on the RNIC.
    tenant: SetOnce<Pin<KBox<Tenant>>>,
    /// A mutex, as there may be very many to look through for [`Self::next_stale`] or a count.
    #[pin]
    handles: Mutex<RBTree<u64, Arc<Handle>>>,
    /// The handle reported last: the search for the next one goes on there.
    reported: Atomic<u64>,
    next: Atomic<u64>,
    /// Calls that it has taken and not answered, by their numbers.
    #[pin]
    open: Mutex<RBTree<u64, Taken>>,
    #[pin]
    spares: spares::Spares,
    /// What it serves, by handle.
    #[pin]
    served: Mutex<KVec<(u64, Arc<Service>)>>,
    /// Locks that it has, by their numbers.
    #[pin]
    locks: Mutex<RBTree<u64, Locked>>,
    #[pin]
    queues: Mutex<KVec<queue::table::Entered>>,
    #[pin]
    vqps: Mutex<vqp::Vqps>,
    pub(crate) watch: Arc<Watch>,
    /// Whether closing the session leaves the cluster.
    daemon: Atomic<u32>,
}

impl Session {
    /// Makes a session that is bound to nothing.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let watch = Watch::new()?;
        Arc::pin_init(
            pin_init!(Self {
                rnic: SetOnce::new(),
                tenant: SetOnce::new(),
                handles <- new_mutex!(RBTree::new()),
                reported: Atomic::new(0u64),
                next: Atomic::new(1u64),
                open <- new_mutex!(RBTree::new()),
                spares <- spares::Spares::new(),
                served <- new_mutex!(KVec::new()),
                locks <- new_mutex!(RBTree::new()),
                queues <- new_mutex!(KVec::new()),
                vqps <- new_mutex!(vqp::Vqps::default()),
                watch,
                daemon: Atomic::new(0u32),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Ties the session to an RNIC, for somebody who may have limits, or for the kernel.
    ///
    /// # Errors
    ///
    /// `EBUSY` if it is tied already, `ENODEV` if the RNIC is gone, `ENOMEM`.
    pub(crate) fn bind(&self, rnic: Arc<Rnic>, who: Option<Who>) -> Result {
        let tenant = Tenant::new(rnic.enter()?.lmr.cluster.fabric.qos.clone(), who);
        let tenant = KBox::pin_init(tenant, GFP_KERNEL_ACCOUNT)?;
        if !self.tenant.populate(tenant) {
            return Err(EBUSY);
        }
        self.rnic.populate(rnic.clone());
        rnic.stats.sessions.add(1);
        Ok(())
    }

    /// The RNIC.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` if the session is not bound.
    pub(crate) fn rnic(&self) -> Result<&Arc<Rnic>> {
        self.rnic.as_ref().ok_or_else(errno::notconn)
    }

    /// Who it is to others on the RNIC.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` if the session is not bound.
    fn tenant(&self) -> Result<&Tenant> {
        let tenant = self.tenant.as_ref();
        tenant.map(|tenant| &**tenant).ok_or_else(errno::notconn)
    }

    fn services(&self) -> Result<Inside<'_, Arc<Services>>> {
        self.rnic()?.services()
    }

    fn rpc(&self) -> Result<RpcInside<'_>> {
        self.services().map(RpcInside)
    }

    fn lmr(&self) -> Result<LmrInside<'_>> {
        self.services().map(LmrInside)
    }

    fn exchange(&self) -> Result<ExchangeInside<'_>> {
        self.services().map(ExchangeInside)
    }

    /// A number for a handle, a call, a lock or a queue pair.
    fn next_number(&self) -> u64 {
        self.next.fetch_add(1u64, Relaxed)
    }

    fn add(&self, mapping: Arc<Mapping>, rights: Rights, anonymous: bool) -> Result<u64> {
        let number = self.next_number();
        let handle = Arc::pin_init(
            pin_init!(Handle {
                number,
                mapping,
                rights,
                anonymous,
                uses <- new_mutex!(Uses::default()),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let node = RBTreeNode::new(number, handle, GFP_KERNEL_ACCOUNT)?;
        self.handles.lock().insert(node);
        Ok(number)
    }

    fn get(&self, number: u64) -> Result<Arc<Handle>> {
        self.rnic()?;
        self.handles.lock().get(&number).cloned().ok_or(EBADF)
    }

    /// As [`Self::get`], but does not wait for who looks through many handles: `EAGAIN`.
    fn try_get(&self, number: u64) -> Result<Arc<Handle>> {
        let handles = self.handles.try_lock().ok_or(EAGAIN)?;
        handles.get(&number).cloned().ok_or(EBADF)
    }

    fn take(&self, number: u64) -> Result<Arc<Handle>> {
        let node = self.handles.lock().remove_node(&number).ok_or(EBADF)?;
        let (_, handle) = node.to_key_value();
        Ok(handle)
    }

    /// Allocates a region, and returns a handle with all rights.
    pub(crate) fn alloc(&self, order: &Order<'_>) -> Result<u64> {
        let lmr = self.lmr()?;
        let mapping = lmr.alloc(order, self.watch.clone())?;
        self.keep(&lmr, &mapping, order)
    }

    /// Makes a region of memory that is there, and returns a handle with all rights.
    pub(crate) fn register(&self, pinned: Pinned, order: &Order<'_>) -> Result<u64> {
        let pinned = Arc::new(pinned, GFP_KERNEL_ACCOUNT)?;
        let lmr = self.lmr()?;
        let mapping = lmr.register(&pinned, order, self.watch.clone())?;
        self.keep(&lmr, &mapping, order)
    }

    /// A handle for a region that was just made.
    fn keep(&self, lmr: &Arc<Lmr>, mapping: &Arc<Mapping>, order: &Order<'_>) -> Result<u64> {
        let anonymous = order.name.is_none();
        self.add(mapping.clone(), Rights::ALL, anonymous)
            .inspect_err(|_| {
                // Without a handle nobody could ever free it.
                lmr.abandon(mapping);
            })
    }

    /// Maps a region, and returns a handle and the region's length.
    pub(crate) fn map(&self, name: Name, uid: u32, rights: Rights) -> Result<(u64, u64)> {
        let lmr = self.lmr()?;
        let mapping = lmr.map(name, uid, rights, self.watch.clone());
        let mapping = mapping.map_err(not_found)?;
        let len = mapping.layout().map(|layout| layout.len());
        match len.and_then(|len| Ok((self.add(mapping.clone(), rights, false)?, len))) {
            Ok(done) => Ok(done),
            Err(error) => {
                lmr.unmap(&mapping);
                Err(not_found(error))
            }
        }
    }

    /// Gives a handle back.
    pub(crate) fn unmap(&self, number: u64) -> Result {
        let rpc = self.rpc()?;
        self.take(number)
            .map(|handle| self.give_back(&rpc, &handle))
    }

    /// Gives a handle back that is in the table no more. Nothing reaches the region by it when this
    /// returns, but for what its lenders were asked for; others are told in the background, after that.
    fn give_back(&self, rpc: &Arc<Rpc>, handle: &Handle) {
        self.stop_uses(rpc, handle);
        self.forget_locks(handle.number);
        let lmr = &rpc.lmr;
        if handle.anonymous {
            lmr.abandon(&handle.mapping);
        } else {
            lmr.unmap(&handle.mapping);
        }
    }

    /// Frees a region, and gives the handle back.
    pub(crate) fn free(&self, number: u64) -> Result {
        let rpc = self.rpc()?;
        let handle = self.get(number)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        rpc.lmr.free(&handle.mapping)?;
        self.stop_uses(&rpc, &handle);
        let _ = self.take(number);
        self.forget_locks(number);
        Ok(())
    }

    /// Changes the rights to a region.
    pub(crate) fn grant(&self, number: u64, grant: &Grant) -> Result {
        let handle = self.get(number)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        self.lmr()?.grant(&handle.mapping, grant)
    }

    /// Moves a region to other nodes; none is this one.
    pub(crate) fn move_region(&self, number: u64, nodes: &[u32], deadline: Deadline) -> Result {
        let handle = self.get(number)?;
        if !handle.rights.contains(Rights::MASTER) {
            return Err(EACCES);
        }
        let nodes = if nodes.is_empty() { &[0] } else { nodes };
        self.lmr()?.move_region(&handle.mapping, nodes, deadline)
    }

    /// Reads or writes.
    pub(crate) fn access(&self, number: u64, access: &Access, memory: &Memory) -> Result {
        let stats = &self.rnic()?.stats;
        let mapping = self.get(number)?.open_to(access.direction)?;
        access.run(|| self.lmr(), &mapping, memory, self.tenant()?, stats)
    }

    /// Reads or writes several parts of a region.
    fn access_segments(
        &self,
        number: u64,
        direction: Direction,
        segments: &Segments,
        deadline: Deadline,
    ) -> Result {
        let stats = &self.rnic()?.stats;
        let mapping = self.get(number)?.open_to(direction)?;
        let moving = Moving {
            direction,
            spans: segments.spans(),
            deadline,
            tenant: self.tenant()?,
        };
        let result = moving.run(|| self.lmr(), &mapping, segments.memory());
        let whole = Access {
            direction,
            offset: segments.spans().first().map_or(0, |span| span.offset),
            len: segments.len(),
            deadline,
        };
        whole.ended(&mapping, stats, result.err());
        result
    }

    /// Begins to read or write, without waiting.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it would have to wait; else as for [`Self::access`].
    fn begin(
        &self,
        number: u64,
        access: &Access,
        memory: &Memory,
        looker: &mut Looker<'_>,
    ) -> Result<Begun> {
        let lmr = self.lmr()?;
        let mapping = self.try_get(number)?.open_to(access.direction)?;
        access.begin(&lmr, &mapping, memory, looker)
    }

    /// Sets bytes.
    pub(crate) fn set(&self, number: u64, fill: &Fill) -> Result {
        let handle = self.get(number)?;
        if !handle.rights.contains(Rights::WRITE) {
            return Err(EACCES);
        }
        let stats = &self.rnic()?.stats;
        fill.run(|| self.lmr(), &handle.mapping, self.tenant()?, stats)
    }

    /// Copies from an offset of one region to that of another.
    pub(crate) fn copy(
        &self,
        from: (u64, u64),
        to: (u64, u64),
        len: u64,
        deadline: Deadline,
    ) -> Result {
        let stats = &self.rnic()?.stats;
        let (source, target) = (self.get(from.0)?, self.get(to.0)?);
        if !source.rights.contains(Rights::READ) || !target.rights.contains(Rights::WRITE) {
            return Err(EACCES);
        }
        let copy = Copy {
            from: End {
                mapping: &source.mapping,
                offset: from.1,
            },
            to: End {
                mapping: &target.mapping,
                offset: to.1,
            },
            len,
            deadline,
            tenant: self.tenant()?,
        };
        copy.run(|| self.lmr(), stats)
    }

    /// Changes a word. Returns what it was.
    pub(crate) fn update(&self, number: u64, update: &Update) -> Result<u64> {
        let handle = self.get(number)?;
        if !handle.rights.contains(Rights::READ | Rights::WRITE) {
            return Err(EACCES);
        }
        self.wait_to_go(WORD, update.deadline)?;
        self.lmr()?.update(&handle.mapping, update)
    }

    /// Waits until a request of so many bytes may go by the session's priority and limits.
    fn wait_to_go(&self, bytes: u64, deadline: Deadline) -> Result {
        let stats = &self.rnic()?.stats;
        let waited = self.tenant()?.wait(bytes, deadline);
        waited.inspect_err(|_| stats.errors.add(1))
    }

    /// Changes its priority.
    pub(crate) fn set_low(&self, low: bool) -> Result {
        self.tenant().map(|tenant| tenant.set_low(low))
    }

    /// Bytes of the region behind a handle, without waiting.
    fn region_len(&self, number: u64) -> Result<u64> {
        let mapping = self.try_get(number)?.mapping.clone();
        mapping.layout().map(|layout| layout.len())
    }

    /// The mapping behind a handle, and its rights.
    fn describe(&self, number: u64) -> Result<(Arc<Mapping>, Rights)> {
        self.get(number)
            .map(|handle| (handle.mapping.clone(), handle.rights))
    }

    /// The next event: its kind and value, as `struct kite_event` has them.
    pub(crate) fn next_event(&self) -> Option<(u32, u64)> {
        if let Some(handle) = self.next_stale() {
            return Some((bindings::KITE_EVENT_STALE, handle));
        }
        let lmr = self.is_daemon().then(|| self.lmr().ok()).flatten()?;
        let suspect = lmr.cluster.fabric.next_suspect()?;
        Some((bindings::KITE_EVENT_SUSPECT, suspect.into()))
    }

    /// A handle whose mapping ended and that was not reported yet. Many may end at once, so this goes
    /// round instead of beginning anew each time.
    fn next_stale(&self) -> Option<u64> {
        if !self.watch.is_raised() {
            return None;
        }
        let mut handles = self.handles.lock();
        let last = self.reported.load(Relaxed);
        let stale =
            Self::stale_after(&mut handles, last).or_else(|| Self::stale_after(&mut handles, 0))?;
        self.reported.store(stale, Relaxed);
        Some(stale)
    }

    /// The first such handle of a higher number than `last`.
    fn stale_after(handles: &mut RBTree<u64, Arc<Handle>>, last: u64) -> Option<u64> {
        let mut at = handles.cursor_lower_bound_mut(&(last + 1))?;
        while !at.current().1.mapping.report() {
            at = at.move_next()?;
        }
        Some(*at.current().0)
    }

    /// The number of handles.
    pub(crate) fn handle_count(&self) -> usize {
        self.handles.lock().keys().count()
    }

    /// Makes the session the one that speaks for the cluster's daemon.
    pub(crate) fn become_daemon(&self) {
        self.daemon.xchg(1, Full);
    }

    /// Whether it is.
    pub(crate) fn is_daemon(&self) -> bool {
        self.daemon.load(Acquire) != 0
    }

    /// Gives everything back.
    pub(crate) fn close(&self) {
        let Ok(rnic) = self.rnic() else { return };
        self.end_queues();
        self.end_vqps();
        rnic.stats.sessions.sub(1);
        let handles = core::mem::replace(&mut *self.handles.lock(), RBTree::new());
        // They end with their handles.
        drop(core::mem::replace(&mut *self.locks.lock(), RBTree::new()));
        self.spares.clear();
        let Ok(rpc) = rnic.enter() else { return };
        self.abandon_calls(&rpc, None);
        for handle in handles.values() {
            self.give_back(&rpc, handle);
        }
        if self.is_daemon() {
            rpc.lmr.cluster.fabric.daemon.listen(None);
            if let Ok(services) = rnic.services() {
                services.leave();
            }
        }
    }
}
