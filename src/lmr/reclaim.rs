// SPDX-License-Identifier: GPL-2.0

//! Giving memory back: work that asks other nodes.
//!
//! It runs on a workqueue of its own, in no hurry, and insists until the other node has answered or is
//! out of the view. Memory is never reused while anybody may still reach it.

use super::{lease::Key, region::Region, Lmr, CONTROL_MS};
use crate::{errno, sys::deadline::Deadline};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{name::Name, wire::Request};

/// Time between attempts to reach a node that does not answer.
pub(super) const INSIST_MS: i64 = 100;

/// Whether a node that refused a request for this reason may do it later.
fn is_temporary(error: Error) -> bool {
    error == EAGAIN || error == ENOMEM || error == errno::inprogress()
}

impl Lmr {
    /// Runs `f` in the background.
    pub(super) fn later(self: &Arc<Self>, f: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let lmr = self.clone();
        self.background.spawn(move || f(&lmr));
    }

    /// Makes a request until it is done or refused for good, or the node is out of the view.
    pub(super) fn insist(self: &Arc<Self>, node: u32, request: &Request<'_>) {
        let Ok(life) = self.cluster.life_of(node) else {
            return;
        };
        while self.cluster.has(life) {
            if let Ok(answer) = self.ask(node, request, Deadline::after_ms(CONTROL_MS)) {
                match answer.reply() {
                    Err(error) if is_temporary(error) => {}
                    _ => return,
                }
            }
            fsleep(Delta::from_millis(INSIST_MS));
        }
    }

    /// Takes a region apart that nobody can map any more.
    pub(super) fn reclaim_later(self: &Arc<Self>, region: Arc<Region>) {
        self.later(move |lmr| lmr.reclaim(&region));
    }

    fn reclaim(self: &Arc<Self>, region: &Region) {
        if let Some(name) = region.spec.name {
            self.unregister(name, region.id);
        }
        while let Some(mapper) = region.any_mapper() {
            self.insist(
                mapper.node,
                &Request::Invalidate {
                    mapping: mapper.mapping,
                },
            );
            region.unmap(mapper.node, mapper.mapping);
        }
        self.give_back(&region.spec.leases);
        if self.regions.remove(region.id).is_some() {
            self.stats.regions.sub(1);
        }
    }

    /// Takes a name back from whoever keeps it, also if that changes meanwhile.
    fn unregister(self: &Arc<Self>, name: Name, region: u64) {
        loop {
            let epoch = self.cluster.epoch();
            let Ok(keeper) = self.cluster.keeper(&name) else {
                return;
            };
            self.insist(keeper, &Request::Unregister { name, region });
            if self.cluster.epoch() == epoch {
                return;
            }
        }
    }

    /// Gives leased memory back to its lenders, in the background.
    pub(super) fn give_back_later(self: &Arc<Self>, leases: KVec<Key>) {
        self.later(move |lmr| lmr.give_back(&leases));
    }

    /// Gives leased memory back to its lenders.
    pub(super) fn give_back(self: &Arc<Self>, leases: &[Key]) {
        for &(node, lease) in leases {
            self.insist(node, &Request::Release { lease });
        }
    }
}
