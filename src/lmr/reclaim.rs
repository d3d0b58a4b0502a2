// SPDX-License-Identifier: GPL-2.0

//! Giving memory back: errands to other nodes.
//!
//! Each insists until the other node has answered or is out of the view. Memory is never reused while
//! anybody may still reach it, so a region ends in steps: first its name and all mappings of it, on
//! whichever nodes they are; then its memory; then the region itself.

use super::{
    alloc::Retired, errands::Errands, lease::Key, mapping::Mapping, region::Region, Lmr, CONTROL_MS,
};
use crate::{errno, sys::deadline::Deadline};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    name::Name,
    view::Life,
    wire::{List, Reason, Request, MESSAGE_SIZE},
};

/// Time between attempts to reach a node that does not answer.
pub(super) const INSIST_MS: i64 = 100;

/// Whether a node that refused a request for this reason may do it later.
fn is_temporary(error: Error) -> bool {
    error == EAGAIN || error == ENOMEM || error == errno::inprogress()
}

/// Time between looks whether something can still come late. Others in the line wait for it.
pub(super) const LATE_MS: i64 = 10;

/// Tries again and again while there is no memory.
pub(super) fn patiently<T>(mut f: impl FnMut() -> Result<T>) -> T {
    loop {
        match f() {
            Ok(done) => return done,
            Err(_) => fsleep(Delta::from_millis(INSIST_MS)),
        }
    }
}

/// Whether somebody waits for an errand. What programs leave behind them may be very much, and those who
/// wait do not stand in line behind it.
#[derive(Clone, Copy)]
pub(crate) enum Haste {
    /// By who waits for a lock or at a barrier, which is not to wait for what takes long.
    Turn,
    Awaited,
    Idle,
}

/// A step of a region's end.
type Step = fn(&Arc<Lmr>, &Arc<Region>, Haste);

/// Holds up the next step of a region's end until an errand of this one is done, or dropped.
struct Hold {
    lmr: Arc<Lmr>,
    region: Arc<Region>,
    haste: Haste,
    next: Step,
}

impl Hold {
    fn new(lmr: &Arc<Lmr>, region: &Arc<Region>, haste: Haste, next: Step) -> Self {
        region.hold();
        Self {
            lmr: lmr.clone(),
            region: region.clone(),
            haste,
            next,
        }
    }
}

impl Clone for Hold {
    fn clone(&self) -> Self {
        Self::new(&self.lmr, &self.region, self.haste, self.next)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.region.let_go() {
            (self.next)(&self.lmr, &self.region, self.haste);
        }
    }
}

impl Lmr {
    fn lines(&self, haste: Haste) -> &Errands {
        match haste {
            Haste::Turn => &self.turns,
            Haste::Awaited => &self.errands,
            Haste::Idle => &self.leftovers,
        }
    }

    /// Has `f` done in the background, in a line of `node`. If the node is not in the view there is
    /// nothing to do.
    pub(crate) fn errand(
        self: &Arc<Self>,
        node: u32,
        haste: Haste,
        f: impl FnOnce(&Arc<Self>, Life) + Send + 'static,
    ) {
        if let Ok(life) = self.cluster.life_of(node) {
            let lmr = self.clone();
            let is_there = || self.cluster.has(life);
            self.lines(haste).add(life, is_there, move || f(&lmr, life));
        }
    }

    /// Begins the line of a node for errands that somebody waits for: who must not wait adds some.
    pub(crate) fn begin_errands(&self, life: Life) {
        self.errands.begin(life, || self.cluster.has(life));
    }

    /// Makes a request until it is done or refused for good, or the node is out of the view.
    pub(crate) fn insist(self: &Arc<Self>, to: Life, request: &Request<'_>) {
        self.insist_while(to, request, || true);
    }

    /// As [`Self::insist`], for as long as it is wanted.
    pub(super) fn insist_while(
        self: &Arc<Self>,
        to: Life,
        request: &Request<'_>,
        wanted: impl Fn() -> bool,
    ) {
        while self.cluster.has(to) && wanted() {
            if let Ok(answer) = self.ask_once(to.node, request, Deadline::after_ms(CONTROL_MS)) {
                match answer.reply() {
                    Err(error) if is_temporary(error) => {}
                    _ => return,
                }
            }
            fsleep(Delta::from_millis(INSIST_MS));
        }
    }

    /// Whether nothing that was sent by a mapping that is in use no more can come late. A node that is out of
    /// the view counts only as of the present epoch, so look at that after this.
    pub(crate) fn is_quiet(&self, mapping: &Mapping) -> bool {
        mapping.is_quiet(|life| self.cluster.has(life))
    }

    /// Has `f` done in a line of `node` when a mapping that was given back is quiet. Others in the line do not
    /// wait for that.
    pub(super) fn when_quiet(
        self: &Arc<Self>,
        node: u32,
        haste: Haste,
        retired: Retired,
        f: impl FnOnce(&Arc<Self>, Life, Retired) + Send + 'static,
    ) {
        let line = if self.is_quiet(&retired) {
            haste
        } else {
            Haste::Idle
        };
        self.errand(node, line, move |lmr, life| {
            if lmr.is_quiet(&retired) {
                return f(lmr, life, retired);
            }
            fsleep(Delta::from_millis(LATE_MS));
            lmr.when_quiet(node, haste, retired, f);
        });
    }

    /// Takes a region apart that nobody can map any more, in the background.
    pub(super) fn reclaim_later(self: &Arc<Self>, region: &Arc<Region>, haste: Haste) {
        let hold = Hold::new(self, region, haste, Self::give_back_all);
        if let Some(name) = region.spec.name {
            self.unregister(name, hold.clone());
        }
        for node in region.mapper_nodes() {
            self.end_mappings(node, hold.clone());
        }
    }

    /// Takes a name back from whoever keeps it, also if that changes meanwhile.
    fn unregister(self: &Arc<Self>, name: Name, hold: Hold) {
        let epoch = self.cluster.epoch();
        let Ok(keeper) = self.cluster.keeper(&name) else {
            return;
        };
        self.errand(keeper, hold.haste, move |lmr, life| {
            let region = hold.region.id;
            lmr.insist(life, &Request::Unregister { name, region });
            if lmr.cluster.epoch() != epoch {
                lmr.unregister(name, hold);
            }
        });
    }

    /// Ends the mappings that a node has of a region. Others in the line do not wait for those that cannot
    /// be ended yet.
    fn end_mappings(self: &Arc<Self>, node: u32, hold: Hold) {
        self.errand(node, hold.haste, move |lmr, life| {
            let mut next = 0;
            while let Some(mapping) = hold.region.mapping_of(life.node, next) {
                if lmr.try_end(life, mapping, Reason::Freed) {
                    hold.region.unmap(life.node, mapping);
                }
                next = mapping + 1;
            }
            if hold.region.mapping_of(life.node, 0).is_some() {
                fsleep(Delta::from_millis(INSIST_MS));
                lmr.end_mappings(node, hold);
            }
        });
    }

    /// Asks a node once to end a mapping. Returns whether that is done with.
    pub(super) fn try_end(self: &Arc<Self>, life: Life, mapping: u64, why: Reason) -> bool {
        let request = Request::Invalidate { mapping, why };
        match self.ask_once(life.node, &request, Deadline::after_ms(CONTROL_MS)) {
            Ok(answer) => !matches!(answer.reply(), Err(error) if is_temporary(error)),
            Err(_) => !self.cluster.has(life),
        }
    }

    /// Gives the memory of a region back that nobody reaches any more, when all have heard of the death of whoever
    /// died: others may still write to it for them.
    fn give_back_all(self: &Arc<Self>, region: &Arc<Region>, haste: Haste) {
        let (hold, me) = (
            Hold::new(self, region, haste, Self::forget),
            self.cluster.node(),
        );
        if self.cluster.synced_epoch().is_none() {
            let Ok(me) = me else { return };
            let region = region.clone();
            return self.errand(me, Haste::Idle, move |lmr, _| {
                fsleep(Delta::from_millis(LATE_MS));
                lmr.give_back_all(&region, haste);
                drop(hold);
            });
        }
        for lease in region.leases() {
            let hold = hold.clone();
            self.give_back_later(lease, haste, move || drop(hold));
        }
    }

    /// Gives leased memory back to its lender, in the background; `then` is called, or dropped, after it.
    pub(super) fn give_back_later(
        self: &Arc<Self>,
        (node, lease): Key,
        haste: Haste,
        then: impl FnOnce() + Send + 'static,
    ) {
        self.errand(node, haste, move |lmr, life| {
            lmr.insist(life, &Request::Release { lease });
            then();
        });
    }

    /// Gives some chunks of a lease back to its lender, in the background; `then` is called, or dropped, after it.
    pub(super) fn trim_later(
        self: &Arc<Self>,
        (node, lease): Key,
        chunks: KVVec<u32>,
        then: impl FnOnce() + Send + 'static,
    ) {
        self.errand(node, Haste::Awaited, move |lmr, life| {
            let mut room = [0; MESSAGE_SIZE / 2];
            for some in chunks.chunks(room.len() / size_of::<u32>()) {
                let chunks = List::collect(some.iter().copied(), &mut room);
                lmr.insist(life, &Request::Trim { lease, chunks });
            }
            then();
        });
    }

    fn forget(self: &Arc<Self>, region: &Arc<Region>, _: Haste) {
        if self.regions.remove(region.id).is_some() {
            self.stats.regions.sub(1);
        }
    }
}
