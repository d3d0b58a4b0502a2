// SPDX-License-Identifier: GPL-2.0

//! Calls and messages to whoever serves a region (LITE, section 5).
//!
//! A session at the home of a region *serves* it ([`service`]); whoever has it mapped with the right to write
//! may call. Name, rights and life of a service are those of its region. A node that calls has one [`link`]
//! to a service for all its processes: a ring for calls at the home, and one for replies at the caller, each
//! of them a region that the other maps. So the rules of regions see to it that nothing is written to a ring
//! that is gone.
//!
//! A message is one write with an immediate, of which the poller of the receiver hears. Calls wait in their
//! ring until a server takes them, and hold up nobody but who calls the same service from the same node;
//! replies are taken from theirs at once ([`call`]). Data that are too [`long`] for a ring go by relays.

pub(crate) mod attach;
pub(crate) mod call;
mod kept;
pub(crate) mod link;
pub(crate) mod long;
pub(crate) mod open;
pub(crate) mod reception;
pub(crate) mod sending;
pub(crate) mod service;

use crate::{fabric::notice::Content, lmr::Lmr, sys::watch::Watch};
use call::Calls;
use kernel::{
    alloc::Flags,
    new_mutex,
    prelude::*,
    rbtree::RBTree,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
    time::{delay::fsleep, Delta},
    xarray::{AllocKind, XArray},
};
use kite_core::{
    view::Life,
    wire::ring::{Immediate, Line, Relays, LINE_SIZE},
};
use link::Link;
use service::Service;

/// The user that kernels act as towards each other.
pub(crate) const ROOT: u32 = 0;

/// Time between looks whether the other end of a link is still there.
pub(crate) const NAP_MS: u32 = 50;

/// Time between attempts at what has to be done.
const AGAIN_MS: i64 = 100;

/// A message that has its data and is yet to get its place.
pub(crate) struct Message {
    pub(crate) line: Line,
    /// Room for the line, and the data.
    bytes: KVec<u8>,
    /// Somebody of high priority waits for it.
    pub(crate) high: bool,
}

impl Message {
    /// What is to be written.
    fn content(&self) -> Content<'_> {
        Content {
            bytes: &self.bytes,
            high: self.high,
        }
    }

    /// A message without relays, whose data are written by `fill`.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; those of `fill`.
    pub(crate) fn new(line: Line, fill: impl FnOnce(&mut [u8]) -> Result) -> Result<Self> {
        Self::new_in(GFP_KERNEL, line, Relays::default(), fill)
    }

    /// A message with the relays that its line needs, in memory of that kind. The data that are in the message
    /// itself, if any are, are written by `fill`.
    ///
    /// # Errors
    ///
    /// As for [`Self::new`].
    pub(crate) fn new_in(
        flags: Flags,
        line: Line,
        relays: Relays,
        fill: impl FnOnce(&mut [u8]) -> Result,
    ) -> Result<Self> {
        let mut bytes = KVec::from_elem(0u8, LINE_SIZE + line.payload(), flags)?;
        let payload = &mut bytes[LINE_SIZE..];
        fill(&mut payload[..line.inline_len()])?;
        relays.encode(&line, payload);
        Ok(Self {
            line,
            bytes,
            high: false,
        })
    }
}

/// The calls and services of one RNIC.
#[pin_data]
pub(crate) struct Rpc {
    /// Links by the number of the ring at this node, for immediates.
    #[pin]
    rings: XArray<Arc<Link>>,
    next_ring: Atomic<u32>,
    /// Links to services, by the home and the region.
    #[pin]
    clients: Mutex<RBTree<(Life, u64), Arc<Link>>>,
    /// What this node serves, by region.
    #[pin]
    services: Mutex<RBTree<u64, Arc<Service>>>,
    #[pin]
    calls: Calls,
    /// Hears of rings and relays that end, and nobody listens to it: who uses one looks.
    pub(crate) watch: Arc<Watch>,
    pub(crate) lmr: Arc<Lmr>,
}

impl Rpc {
    /// Nothing served or called.
    pub(crate) fn new(lmr: Arc<Lmr>) -> Result<Arc<Self>> {
        Arc::pin_init(
            try_pin_init!(Self {
                rings <- XArray::new(AllocKind::Alloc),
                next_ring: Atomic::new(0u32),
                clients <- new_mutex!(RBTree::new()),
                services <- new_mutex!(RBTree::new()),
                calls <- Calls::new(),
                watch: Watch::new()?,
                lmr,
            }),
            GFP_KERNEL,
        )
    }

    /// Numbers a link that `make` makes, so that immediates find it.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, also if there are too many; those of `make`.
    fn number(&self, make: impl Fn(u16) -> Result<Arc<Link>>) -> Result<Arc<Link>> {
        for _ in 0..=u16::MAX {
            let number = self.next_ring.fetch_add(1u32, Relaxed) as u16;
            if self.ring(number).is_some() {
                continue;
            }
            let link = make(number)?;
            let mut rings = self.rings.lock();
            if rings.get(number.into()).is_none() {
                let stored = rings.store(number.into(), link.clone(), GFP_ATOMIC);
                return stored.map(|_| link).map_err(|error| error.error);
            }
        }
        Err(ENOMEM)
    }

    /// The link of that number.
    fn ring(&self, number: u16) -> Option<Arc<Link>> {
        self.rings.lock().get(number.into()).map(Into::into)
    }

    /// Makes immediates find the link no more.
    fn forget(&self, link: &Link) {
        let removed = self.rings.lock().remove(link.number.into());
        drop(removed);
    }

    /// A peer, or this node itself, wrote to a ring of ours.
    pub(crate) fn on_immediate(self: &Arc<Self>, from: Life, immediate: Immediate) {
        let link = self.ring(immediate.ring);
        let Some(link) = link.filter(|link| link.peer == from) else {
            return self.lmr.stats.stray_completions.add(1);
        };
        if link.arrive(self, immediate.unit).is_err() {
            self.lmr.stats.bad_messages.add(1);
        }
    }

    /// The view changed: ends what was between this node and those who left.
    pub(crate) fn prune(self: &Arc<Self>) {
        let mut next = 0;
        while let Some(service) = self.service_from(next) {
            next = service.region + 1;
            service.part_with(self, |client| !self.lmr.cluster.has(client.life));
        }
    }

    /// Leaves the cluster: all services end, and what we have of others.
    pub(crate) fn leave(self: &Arc<Self>) {
        self.lmr.leave();
        while let Some(service) = self.service_from(0) {
            let removed = self.services.lock().remove(&service.region);
            drop(removed);
            service.end();
            service.drop_clients(self);
        }
    }

    fn service_from(&self, region: u64) -> Option<Arc<Service>> {
        let services = self.services.lock();
        let cursor = services.cursor_lower_bound(&region)?;
        Some(cursor.current().1.clone())
    }
}

/// Lets time pass before something is tried again.
fn wait_a_little() {
    fsleep(Delta::from_millis(AGAIN_MS));
}
