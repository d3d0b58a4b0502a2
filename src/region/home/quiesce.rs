// SPDX-License-Identifier: GPL-2.0

//! Quiescing a region on all nodes that map it, so that it can move ([`super::migrate`]), and resuming.
//!
//! # Operation
//!
//! The home sends `QuiesceRegion` to every node with a mapping. When a node has replied, it does not access
//! the region, and no packet it has sent can arrive late. After the move the home sends `ResumeRegion` with
//! the new locations.
//!
//! # Recovery
//!
//! Both requests are executed exactly once, however often the message arrives. A delayed quiesce would block
//! users forever, and a delayed resume would resume them too early. An unacknowledged quiesce is cancelled
//! before the resume is sent.

use super::{latch::LatchGuard, Region};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        reply_code::is_gone_error,
        retry::{CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    errno::{TryError, TryResult},
    fabric::peer::{session::SequenceGuard, Peer},
    region::{
        map::{chunk_map::MappedChunk, Mapping},
        MemoryService,
    },
    sys::deadline::{retry_until, Deadline},
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::NodeInstance,
    wire::{ChunkLocation, ControlRequest, WireList, MAX_CONTROL_BYTES},
};

/// Maximum time in ms for all mapping nodes to quiesce. Meanwhile all accesses to the region are blocked.
pub(in crate::region) const QUIESCE_TIMEOUT_MS: u32 = 2_000;

/// Node to which a quiesce request was sent.
pub(in crate::region) struct QuiescedNode {
    instance: NodeInstance,
    /// `None` if the node is this node.
    peer: Option<Arc<Peer>>,
    /// Sequence number of the quiesce request, if no reply was received.
    unacked: Option<SequenceGuard>,
}

/// Node to resume.
struct PendingResume {
    peer: Arc<Peer>,
    /// Sequence number of the quiesce request, if no reply was received. See [`QuiescedNode`].
    unacked: Option<SequenceGuard>,
    region: u64,
    moved: Arc<KVec<(u32, ChunkLocation)>>,
    _latch_guard: LatchGuard,
}

/// Requests sent by the home.
impl MemoryService {
    /// Quiesces all nodes that map a region, and waits until nothing sent by removed nodes can arrive late.
    /// `quiesced` receives all nodes to which a request was sent, also on error.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: not all nodes quiesced in time, or not all members synchronized the view in time.
    /// - Other errors: this node has left the cluster, or out of memory.
    pub(in crate::region) fn quiesce_all(
        self: &Arc<Self>,
        region: &Region,
        quiesced: &mut KVec<QuiescedNode>,
        deadline: Deadline,
    ) -> TryResult {
        let quiesce_deadline = Deadline::after_ms(QUIESCE_TIMEOUT_MS.min(deadline.remaining_ms()));
        for node in region.mapper_nodes() {
            // A node outside the view has no mapping any longer.
            if let Ok(instance) = self.cluster.instance_of(node) {
                self.quiesce_node(region, instance, quiesced, quiesce_deadline)?;
            }
        }
        self.wait_view_synced(quiesce_deadline)
            .map_err(|_| TryError::WouldBlock)
    }

    /// Waits until all members have synchronized the view. After that, nothing sent by removed nodes arrives.
    pub(in crate::region) fn wait_view_synced(&self, deadline: Deadline) -> Result {
        retry_until(deadline, || {
            self.cluster.local_node()?;
            self.cluster
                .synced_epoch()
                .map(drop)
                .ok_or(TryError::WouldBlock)
        })
    }

    fn quiesce_node(
        self: &Arc<Self>,
        region: &Region,
        instance: NodeInstance,
        quiesced: &mut KVec<QuiescedNode>,
        deadline: Deadline,
    ) -> TryResult {
        quiesced.reserve(1, GFP_KERNEL)?;
        let mut quiesced_node = QuiescedNode {
            instance,
            peer: None,
            unacked: None,
        };
        if self.cluster.local_node()? == instance.node {
            // Cannot fail: the capacity was reserved.
            let _ = quiesced.push(quiesced_node, GFP_KERNEL);
            return retry_until(deadline, || self.quiesce_local(instance.node, region.id))
                .map_err(|_| TryError::WouldBlock);
        }
        let peer = self
            .fabric()
            .peer_by_instance(instance)
            .map_err(|_| TryError::WouldBlock)?;
        let seq_guard =
            retry_until(deadline, || peer.assign_sequence(0)).map_err(|_| TryError::WouldBlock)?;
        let request = ControlRequest::QuiesceRegion {
            sequence: seq_guard.sequence,
            region: region.id,
        };
        let send = || {
            Ok(self
                .request_peer(&peer, &request, deadline)?
                .expect_done()?)
        };
        let answered = retry_until(deadline, send).map_err(|_| TryError::WouldBlock);
        quiesced_node.peer = Some(peer.clone());
        // Keep the sequence number for the cancellation: otherwise the request could arrive late.
        quiesced_node.unacked = answered.is_err().then_some(seq_guard);
        // Cannot fail: the capacity was reserved.
        let _ = quiesced.push(quiesced_node, GFP_KERNEL);
        answered
    }

    /// Resumes a quiesced node: this node at once, another node in the background.
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

    /// Resumes another node in the background. Requeues if no sequence number is free: the numbers may become
    /// free by items of the same queue.
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

    /// Sends the resume request to a node. Returns `true` if the node has resumed or is gone.
    fn request_resume(&self, pending_resume: &mut PendingResume) -> bool {
        // Cancel the quiesce request first: otherwise it could arrive late.
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
        // Repeat with the same sequence number: another number would be another request.
        while send().is_err_and(|error| !is_gone_error(error))
            && self.cluster.is_member(pending_resume.peer.instance())
        {
            fsleep(Delta::from_millis(RETRY_MS));
        }
        true
    }
}

/// Requests served by a node that maps the region.
impl MemoryService {
    /// Blocks accesses of this node to a region of `home`.
    ///
    /// # Errors
    ///
    /// - [`TryError::InTransition`]: an access is in progress, or a sent packet may still arrive.
    pub(in crate::region) fn quiesce_local(&self, home: u32, region: u64) -> TryResult {
        let all_quiesced = Atomic::new(1u32);
        self.for_each_mapping_of(home, region, |mapping| {
            if mapping.try_quiesce().is_err() || !self.is_drained(mapping) {
                all_quiesced.store(0, Release);
            }
        });
        let all_quiesced = all_quiesced.load(Acquire) != 0;
        all_quiesced.then_some(()).ok_or(TryError::InTransition)
    }

    /// Resumes accesses to a region of this home on this node, with the new locations `moved`.
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
                        // If the location cannot be resolved, accesses to the chunk fail with an error.
                        *chunk = found.unwrap_or(MappedChunk::Remote(location));
                    }
                }
            });
        });
    }

    fn for_each_mapping_of(&self, home: u32, region: u64, f: impl Fn(&Mapping)) {
        let is_of = |mapping: &Arc<Mapping>| (mapping.home, mapping.region) == (home, region);
        for mapping in self.mappings().filter(is_of) {
            f(&mapping);
        }
    }
}
