// SPDX-License-Identifier: GPL-2.0

//! Having all nodes that map a region pause, so that it can move ([`super::migrate`]), and go on.
//!
//! Who has paused uses the region no more, and nothing that was sent can come late. Either is asked for exactly once,
//! however often the message comes: one that came late would keep users waiting for ever, or let them go on too
//! early.

use super::{
    reclaim::{WorkPriority, DRAIN_POLL_MS, RETRY_MS},
    Region,
};
use crate::{
    errno,
    fabric::peer::{session::SequenceGuard, Peer},
    region::{
        locks::is_gone_error,
        map::{chunk_map::MappedChunk, Mapping},
        MemoryService, CONTROL_TIMEOUT_MS,
    },
    sys::deadline::{retry_until, Deadline},
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
    view::NodeInstance,
    wire::{ChunkLocation, ControlHeader, ControlRequest, WireList, MAX_CONTROL_BYTES},
};

/// How long all nodes that map a region may take to pause: meanwhile nobody uses it.
pub(in crate::region) const QUIESCE_TIMEOUT_MS: u32 = 2_000;

/// Time between looks whether all have resumed.
const LATCH_POLL_US: i64 = 200;

/// A node that was asked to pause.
pub(in crate::region) struct QuiescedNode {
    instance: NodeInstance,
    /// Unless the node is this one.
    peer: Option<Arc<Peer>>,
    /// The request, if it was not answered.
    unacked: Option<SequenceGuard>,
}

/// A node that is to go on.
struct PendingResume {
    peer: Arc<Peer>,
    /// As in [`Paused`].
    unacked: Option<SequenceGuard>,
    region: u64,
    moved: Arc<KVec<(u32, ChunkLocation)>>,
    _latch_guard: LatchGuard,
}

/// Things that somebody waits for the end of.
pub(in crate::region) struct Latch(Arc<Atomic<u32>>);

impl Latch {
    /// Nothing to wait for, yet.
    pub(in crate::region) fn new() -> Result<Self> {
        Ok(Self(Arc::new(Atomic::new(0u32), GFP_KERNEL)?))
    }

    /// One more.
    pub(in crate::region) fn add(&self) -> LatchGuard {
        self.0.fetch_add(1u32, Full);
        LatchGuard(self.0.clone())
    }

    /// Waits for all of them.
    pub(in crate::region) fn wait(&self) {
        while self.0.load(Acquire) != 0 {
            fsleep(Delta::from_micros(LATCH_POLL_US));
        }
    }
}

/// One of them, which ends when this is dropped.
pub(in crate::region) struct LatchGuard(Arc<Atomic<u32>>);

impl Drop for LatchGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1u32, Full);
    }
}

/// At the home.
impl MemoryService {
    /// Has all who map a region pause, and waits until nothing of the dead can come late either. Says whom it asked
    /// in any case.
    pub(in crate::region) fn quiesce_all(
        self: &Arc<Self>,
        region: &Region,
        quiesced: &mut KVec<QuiescedNode>,
        deadline: Deadline,
    ) -> Result {
        let quiesce_deadline = Deadline::after_ms(QUIESCE_TIMEOUT_MS.min(deadline.remaining_ms()));
        for node in region.mapper_nodes() {
            // One that is gone is no mapper any more.
            if let Ok(instance) = self.cluster.instance_of(node) {
                self.quiesce_node(region, instance, quiesced, quiesce_deadline)?;
            }
        }
        self.wait_view_synced(quiesce_deadline).map_err(|_| EAGAIN)
    }

    /// Waits until all have heard of the death of whoever died: nothing comes late of them.
    pub(in crate::region) fn wait_view_synced(&self, deadline: Deadline) -> Result {
        retry_until(deadline, || {
            self.cluster.local_node()?;
            self.cluster.synced_epoch().map(drop).ok_or(EAGAIN)
        })
    }

    fn quiesce_node(
        self: &Arc<Self>,
        region: &Region,
        instance: NodeInstance,
        quiesced: &mut KVec<QuiescedNode>,
        deadline: Deadline,
    ) -> Result {
        quiesced.reserve(1, GFP_KERNEL)?;
        let mut quiesced_node = QuiescedNode {
            instance,
            peer: None,
            unacked: None,
        };
        if self.cluster.local_node()? == instance.node {
            let _ = quiesced.push(quiesced_node, GFP_KERNEL);
            return retry_until(deadline, || self.quiesce_local(instance.node, region.id))
                .map_err(|_| EAGAIN);
        }
        let peer = self
            .fabric()
            .peer_by_instance(instance)
            .map_err(|_| EAGAIN)?;
        let seq_guard = retry_until(deadline, || peer.assign_sequence(0)).map_err(|_| EAGAIN)?;
        let request = ControlRequest::QuiesceRegion {
            sequence: seq_guard.sequence,
            region: region.id,
        };
        let send = || self.request_peer(&peer, &request, deadline)?.expect_done();
        let answered = retry_until(deadline, send).map_err(|_| EAGAIN);
        quiesced_node.peer = Some(peer.clone());
        // Else what asked for it could come late.
        quiesced_node.unacked = answered.is_err().then_some(seq_guard);
        let _ = quiesced.push(quiesced_node, GFP_KERNEL);
        answered
    }

    /// Has a node go on that was asked to pause, in the background.
    pub(in crate::region) fn resume_node(
        self: &Arc<Self>,
        region: &Region,
        quiesced_node: QuiescedNode,
        moved: Arc<KVec<(u32, ChunkLocation)>>,
        latch_guard: LatchGuard,
    ) {
        let id = region.id;
        let Some(peer) = quiesced_node.peer else {
            return self.resume_local(quiesced_node.instance.node, id, moved.iter().copied());
        };
        let unacked = quiesced_node.unacked;
        self.resume_deferred(PendingResume {
            peer,
            unacked,
            region: id,
            moved,
            _latch_guard: latch_guard,
        });
    }

    /// Has another node go on, in the background. Others in the line do not wait for numbers, which end in it.
    fn resume_deferred(self: &Arc<Self>, mut pending_resume: PendingResume) {
        self.defer(
            pending_resume.peer.node(),
            WorkPriority::Lock,
            move |memory_service, _| {
                if memory_service.request_resume(&mut pending_resume)
                    || !memory_service
                        .cluster
                        .is_member(pending_resume.peer.instance())
                {
                    return;
                }
                fsleep(Delta::from_millis(DRAIN_POLL_MS));
                memory_service.resume_deferred(pending_resume);
            },
        );
    }

    /// Asks it to go on. Returns whether it did.
    fn request_resume(&self, pending_resume: &mut PendingResume) -> bool {
        // Else what asked it to pause could come late.
        if pending_resume
            .unacked
            .as_ref()
            .is_some_and(|unacked| !self.request_cancel(unacked))
        {
            return false;
        }
        pending_resume.unacked = None;
        let Ok(seq_guard) = pending_resume.peer.assign_sequence(0) else {
            return false;
        };
        let mut list_buffer = [0; MAX_CONTROL_BYTES];
        let request = ControlRequest::ResumeRegion {
            sequence: seq_guard.sequence,
            region: pending_resume.region,
            moved: WireList::from_items(pending_resume.moved.iter().copied(), &mut list_buffer),
        };
        let send = || {
            self.request_peer(
                &pending_resume.peer,
                &request,
                Deadline::after_ms(CONTROL_TIMEOUT_MS),
            )
        };
        // Until it is answered: another number would be another request.
        while send().is_err_and(|error| !is_gone_error(error))
            && self.cluster.is_member(pending_resume.peer.instance())
        {
            fsleep(Delta::from_millis(RETRY_MS));
        }
        true
    }
}

/// At a node that maps it.
impl MemoryService {
    /// Lets nobody use a region of `node` here.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` while somebody does, or something that was sent can come late. A lender of which we know that it
    /// is out of the view counts for that until the home knows it, too.
    pub(in crate::region) fn serve_quiesce(
        &self,
        node: u32,
        header: &ControlHeader,
        region: u64,
    ) -> Result {
        self.quiesce_local(node, region)?;
        self.check_requester_view(header)
    }

    fn quiesce_local(&self, home: u32, region: u64) -> Result {
        let all_quiesced = Atomic::new(1u32);
        self.for_each_mapping_of(home, region, |mapping| {
            if mapping.try_quiesce().is_err() || !self.is_drained(mapping) {
                all_quiesced.store(0, Release);
            }
        });
        let all_quiesced = all_quiesced.load(Acquire) != 0;
        all_quiesced.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Lets all use a region of `node` again.
    pub(in crate::region) fn resume_local(
        &self,
        home: u32,
        region: u64,
        moved: impl Iterator<Item = (u32, ChunkLocation)> + Clone,
    ) {
        self.for_each_mapping_of(home, region, |mapping| {
            let shift = mapping.layout().map_or(0, |layout| layout.shift());
            mapping.resume(|chunks| {
                for (i, location) in moved.clone() {
                    if let Some(chunk) = chunks.get_mut(i as usize) {
                        let found = self.resolve_chunk((home, region), location, 1 << shift);
                        // What the view does not have says so when it is used.
                        *chunk = found.unwrap_or(MappedChunk::Remote(location));
                    }
                }
            });
        });
    }

    fn for_each_mapping_of(&self, home: u32, region: u64, f: impl Fn(&Mapping)) {
        self.mappings.for_each(|mapping| {
            if (mapping.home, mapping.region) == (home, region) {
                f(mapping);
            }
        });
    }
}
