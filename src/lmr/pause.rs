// SPDX-License-Identifier: GPL-2.0

//! Having all nodes that map a region pause, so that it can move ([`super::migrate`]), and go on.
//!
//! Who has paused uses the region no more, and nothing that was sent can come late. Either is asked for exactly once,
//! however often the message comes: one that came late would keep users waiting for ever, or let them go on too
//! early.

use super::{
    mapping::Mapping,
    places::Chunk,
    reclaim::{Haste, INSIST_MS, LATE_MS},
    region::Region,
    tickets::is_over,
    Lmr, CONTROL_MS,
};
use crate::{
    errno,
    fabric::{contact::Numbered, peer::Peer},
    sys::deadline::{settle, Deadline},
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full, Release},
        Arc,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::Life,
    wire::{Header, List, Place, Request, MESSAGE_SIZE},
};

/// How long all nodes that map a region may take to pause: meanwhile nobody uses it.
pub(super) const PAUSE_MS: u32 = 2_000;

/// Time between looks whether all have resumed.
const LOOK_US: i64 = 200;

/// A node that was asked to pause.
pub(super) struct Paused {
    life: Life,
    /// Unless the node is this one.
    peer: Option<Arc<Peer>>,
    /// The request, if it was not answered.
    asked: Option<Numbered>,
}

/// A node that is to go on.
struct Resuming {
    peer: Arc<Peer>,
    /// As in [`Paused`].
    asked: Option<Numbered>,
    region: u64,
    moved: Arc<KVec<(u32, Place)>>,
    _pending: Awaited,
}

/// Things that somebody waits for the end of.
pub(super) struct Pending(Arc<Atomic<u32>>);

impl Pending {
    /// Nothing to wait for, yet.
    pub(super) fn none() -> Result<Self> {
        Ok(Self(Arc::new(Atomic::new(0u32), GFP_KERNEL)?))
    }

    /// One more.
    pub(super) fn another(&self) -> Awaited {
        self.0.fetch_add(1u32, Full);
        Awaited(self.0.clone())
    }

    /// Waits for all of them.
    pub(super) fn wait(&self) {
        while self.0.load(Acquire) != 0 {
            fsleep(Delta::from_micros(LOOK_US));
        }
    }
}

/// One of them, which ends when this is dropped.
pub(super) struct Awaited(Arc<Atomic<u32>>);

impl Drop for Awaited {
    fn drop(&mut self) {
        self.0.fetch_sub(1u32, Full);
    }
}

/// At the home.
impl Lmr {
    /// Has all who map a region pause, and waits until nothing of the dead can come late either. Says whom it asked
    /// in any case.
    pub(super) fn pause_all(
        self: &Arc<Self>,
        region: &Region,
        paused: &mut KVec<Paused>,
        deadline: Deadline,
    ) -> Result {
        let by = Deadline::after_ms(PAUSE_MS.min(deadline.left_ms()));
        for node in region.mapper_nodes() {
            // One that is gone is no mapper any more.
            if let Ok(life) = self.cluster.life_of(node) {
                self.pause(region, life, paused, by)?;
            }
        }
        self.await_synced(by).map_err(|_| EAGAIN)
    }

    /// Waits until all have heard of the death of whoever died: nothing comes late of them.
    pub(super) fn await_synced(&self, deadline: Deadline) -> Result {
        settle(deadline, || {
            self.cluster.node()?;
            self.cluster.synced_epoch().map(drop).ok_or(EAGAIN)
        })
    }

    fn pause(
        self: &Arc<Self>,
        region: &Region,
        life: Life,
        paused: &mut KVec<Paused>,
        deadline: Deadline,
    ) -> Result {
        paused.reserve(1, GFP_KERNEL)?;
        let mut node = Paused {
            life,
            peer: None,
            asked: None,
        };
        if self.cluster.node()? == life.node {
            let _ = paused.push(node, GFP_KERNEL);
            return settle(deadline, || self.pause_ours(life.node, region.id)).map_err(|_| EAGAIN);
        }
        let peer = self.fabric().peer_in(life).map_err(|_| EAGAIN)?;
        let numbered = settle(deadline, || peer.number(0)).map_err(|_| EAGAIN)?;
        let request = Request::Pause {
            number: numbered.number,
            region: region.id,
        };
        let ask = || self.ask_peer(&peer, &request, deadline)?.done();
        let answered = settle(deadline, ask).map_err(|_| EAGAIN);
        node.peer = Some(peer.clone());
        // Else what asked for it could come late.
        node.asked = answered.is_err().then_some(numbered);
        let _ = paused.push(node, GFP_KERNEL);
        answered
    }

    /// Has a node go on that was asked to pause, in the background.
    pub(super) fn resume(
        self: &Arc<Self>,
        region: &Region,
        node: Paused,
        moved: Arc<KVec<(u32, Place)>>,
        pending: Awaited,
    ) {
        let id = region.id;
        let Some(peer) = node.peer else {
            return self.resume_ours(node.life.node, id, moved.iter().copied());
        };
        let asked = node.asked;
        self.resume_later(Resuming {
            peer,
            asked,
            region: id,
            moved,
            _pending: pending,
        });
    }

    /// Has another node go on, in the background. Others in the line do not wait for numbers, which end in it.
    fn resume_later(self: &Arc<Self>, mut resuming: Resuming) {
        self.errand(resuming.peer.node(), Haste::Turn, move |lmr, _| {
            if lmr.try_resume(&mut resuming) || !lmr.cluster.has(resuming.peer.life()) {
                return;
            }
            fsleep(Delta::from_millis(LATE_MS));
            lmr.resume_later(resuming);
        });
    }

    /// Asks it to go on. Returns whether it did.
    fn try_resume(&self, resuming: &mut Resuming) -> bool {
        // Else what asked it to pause could come late.
        if resuming
            .asked
            .as_ref()
            .is_some_and(|asked| !self.try_cancel(asked))
        {
            return false;
        }
        resuming.asked = None;
        let Ok(numbered) = resuming.peer.number(0) else {
            return false;
        };
        let mut room = [0; MESSAGE_SIZE];
        let request = Request::Resume {
            number: numbered.number,
            region: resuming.region,
            moved: List::collect(resuming.moved.iter().copied(), &mut room),
        };
        let ask = || self.ask_peer(&resuming.peer, &request, Deadline::after_ms(CONTROL_MS));
        // Until it is answered: another number would be another request.
        while ask().is_err_and(|error| !is_over(error)) && self.cluster.has(resuming.peer.life()) {
            fsleep(Delta::from_millis(INSIST_MS));
        }
        true
    }
}

/// At a node that maps it.
impl Lmr {
    /// Lets nobody use a region of `node` here.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` while somebody does, or something that was sent can come late. A lender of which we know that it
    /// is out of the view counts for that until the home knows it, too.
    pub(super) fn serve_pause(&self, node: u32, header: &Header, region: u64) -> Result {
        self.pause_ours(node, region)?;
        self.check_late(header)
    }

    fn pause_ours(&self, home: u32, region: u64) -> Result {
        let all = Atomic::new(1u32);
        self.mappings_of(home, region, |mapping| {
            if mapping.pause().is_err() || !self.is_quiet(mapping) {
                all.store(0, Release);
            }
        });
        let all = all.load(Acquire) != 0;
        all.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Lets all use a region of `node` again.
    pub(super) fn resume_ours(
        &self,
        home: u32,
        region: u64,
        moved: impl Iterator<Item = (u32, Place)> + Clone,
    ) {
        self.mappings_of(home, region, |mapping| {
            let shift = mapping.layout().map_or(0, |layout| layout.shift());
            mapping.resume(|chunks| {
                for (i, place) in moved.clone() {
                    if let Some(chunk) = chunks.get_mut(i as usize) {
                        let found = self.chunk((home, region), place, 1 << shift);
                        // What the view does not have says so when it is used.
                        *chunk = found.unwrap_or(Chunk::Remote(place));
                    }
                }
            });
        });
    }

    fn mappings_of(&self, home: u32, region: u64, f: impl Fn(&Mapping)) {
        self.mappings.for_each(|mapping| {
            if (mapping.home, mapping.region) == (home, region) {
                f(mapping);
            }
        });
    }
}
