// SPDX-License-Identifier: GPL-2.0

//! Quiescing a region on all nodes that map it, so that it can move ([`super::migrate`]), and resuming.
//!
//! # Operation
//!
//! [`Quiesce`] sends `QuiesceRegion` to every node with a mapping. When a node has replied, it does not
//! access the region, and no packet it has sent can arrive late. After the move [`Quiesce::resume`] sends
//! `ResumeRegion` with the new locations.
//!
//! # Recovery
//!
//! Both requests are executed at most once, however often the message arrives. A delayed quiesce would block
//! users forever, and a delayed resume would resume them too early. An unacknowledged quiesce is canceled
//! before the resume is sent.

use super::{
    latch::{Latch, LatchGuard},
    Region,
};
use crate::{
    control::{
        client::ControlClient,
        priority::WorkPriority,
        reply_code::is_gone_error,
        retry::{CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    },
    errno::{TryError, TryResult},
    fabric::peer::{session::SequenceGuard, Peer},
    region::{map::local_mappings::LocalMappings, MemoryService},
    sys::deadline::{retry_until, Deadline},
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::NodeInstance,
    wire::{ChunkLocation, ControlRequest, WireList, MAX_CONTROL_BYTES},
};

/// Maximum time in ms for all mapping nodes to quiesce. Meanwhile all accesses to the region are blocked.
pub(in crate::region) const QUIESCE_TIMEOUT_MS: u32 = 2_000;

/// Chunks of a region that have moved, with their new locations.
pub(in crate::region) type MovedLocations = Arc<KVec<(u32, ChunkLocation)>>;

/// Node to which a quiesce request was sent.
struct QuiescedNode {
    instance: NodeInstance,
    /// `None` if the node is this node.
    peer: Option<Arc<Peer>>,
    /// Sequence number of the quiesce request, if no reply was received.
    unacked: Option<SequenceGuard>,
}

/// Quiesce of all nodes that map a region.
pub(in crate::region) struct Quiesce<'a> {
    service: &'a Arc<MemoryService>,
    region: &'a Region,
    deadline: Deadline,
    /// Nodes to resume.
    nodes: KVec<QuiescedNode>,
}

impl<'a> Quiesce<'a> {
    /// Prepares a quiesce of at most [`QUIESCE_TIMEOUT_MS`], and not beyond `deadline`. The caller must call
    /// [`Self::resume`] after [`Self::quiesce_all`], also on error.
    pub(in crate::region) fn new(
        service: &'a Arc<MemoryService>,
        region: &'a Region,
        deadline: Deadline,
    ) -> Self {
        Self {
            service,
            region,
            deadline: Deadline::after_ms(QUIESCE_TIMEOUT_MS.min(deadline.remaining_ms())),
            nodes: KVec::new(),
        }
    }

    /// Quiesces all nodes that map the region, and waits until nothing sent by fenced nodes can arrive late.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: not all nodes quiesced in time, or not all members synchronized the view
    ///   in time.
    /// - Other errors: this node has left the cluster, or out of memory.
    pub(in crate::region) fn quiesce_all(&mut self) -> TryResult {
        let (region, cluster) = (self.region, &self.service.cluster);
        for node in region.mapper_nodes() {
            // A node that is not reachable has no mapping any longer.
            if let Ok(instance) = cluster.instance_of(node) {
                self.nodes.reserve(1, GFP_KERNEL)?;
                if cluster.local_node()? == instance.node {
                    self.quiesce_local(instance)?;
                } else {
                    self.quiesce_peer(instance)?;
                }
            }
        }
        cluster
            .wait_view_synced(self.deadline)
            .map_err(|_| TryError::WouldBlock)
    }

    fn quiesce_local(&mut self, instance: NodeInstance) -> TryResult {
        self.add_node(instance, None, None);
        let mappings = LocalMappings::new(self.service, instance.node, self.region.id);
        let quiesced = retry_until(self.deadline, || mappings.try_quiesce());
        quiesced.map_err(|_| TryError::WouldBlock)
    }

    fn quiesce_peer(&mut self, instance: NodeInstance) -> TryResult {
        let found = self.service.fabric().peer_by_instance(instance);
        let peer = found.map_err(|_| TryError::WouldBlock)?;
        let seq_guard = retry_until(self.deadline, || peer.assign_sequence(0))
            .map_err(|_| TryError::WouldBlock)?;
        let request = ControlRequest::QuiesceRegion {
            sequence: seq_guard.sequence,
            region: self.region.id,
        };
        let send = || {
            let reply = self.service.request_peer(&peer, &request, self.deadline)?;
            Ok(reply.expect_done()?)
        };
        let answered = retry_until(self.deadline, send).map_err(|_| TryError::WouldBlock);
        // Keep the sequence number for the cancellation: otherwise the request could arrive late.
        let unacked = answered.is_err().then_some(seq_guard);
        self.add_node(instance, Some(peer), unacked);
        answered
    }

    /// Adds a node to resume. Cannot fail: the caller has reserved the capacity.
    fn add_node(
        &mut self,
        instance: NodeInstance,
        peer: Option<Arc<Peer>>,
        unacked: Option<SequenceGuard>,
    ) {
        let node = QuiescedNode {
            instance,
            peer,
            unacked,
        };
        let _ = self.nodes.push(node, GFP_KERNEL);
    }

    /// Resumes all nodes: this node at once, other nodes in the background. `latch` counts the latter.
    pub(in crate::region) fn resume(self, moved: &MovedLocations, latch: &Latch) {
        for node in self.nodes {
            let Some(peer) = node.peer else {
                let home = node.instance.node;
                let mappings = LocalMappings::new(self.service, home, self.region.id);
                mappings.resume(moved.iter().copied());
                continue;
            };
            let pending = PendingResume {
                peer,
                unacked: node.unacked,
                region: self.region.id,
                moved: moved.clone(),
                _latch_guard: latch.add(),
            };
            pending.send_deferred(self.service);
        }
    }
}

/// Node to resume in the background.
struct PendingResume {
    peer: Arc<Peer>,
    /// Sequence number of the quiesce request, if no reply was received. See [`QuiescedNode`].
    unacked: Option<SequenceGuard>,
    region: u64,
    moved: MovedLocations,
    _latch_guard: LatchGuard,
}

impl PendingResume {
    /// Resumes the node in the background. Requeues if no sequence number is free: the numbers may become
    /// free by items of the same queue.
    fn send_deferred(mut self, service: &Arc<MemoryService>) {
        let node = self.peer.node();
        let send = move |service: &Arc<MemoryService>, _| {
            if self.try_send(service) || !service.is_peer_connected(&self.peer) {
                return;
            }
            fsleep(Delta::from_millis(DRAIN_POLL_MS));
            self.send_deferred(service);
        };
        service.defer(node, WorkPriority::Lock, send);
    }

    /// Sends the resume request. Returns `true` if the node has resumed or is gone.
    fn try_send(&mut self, service: &Arc<MemoryService>) -> bool {
        // Cancel the quiesce request first: otherwise it could arrive late.
        let mut unacked = self.unacked.iter();
        if unacked.any(|unacked| !service.request_cancel(unacked)) {
            return false;
        }
        self.unacked = None;
        let Ok(seq_guard) = self.peer.assign_sequence(0) else {
            return false;
        };
        let mut list_buffer = [0; MAX_CONTROL_BYTES];
        let request = ControlRequest::ResumeRegion {
            sequence: seq_guard.sequence,
            region: self.region,
            moved: WireList::from_items(self.moved.iter().copied(), &mut list_buffer),
        };
        let send = || {
            let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
            service.request_peer(&self.peer, &request, deadline)
        };
        // Repeat with the same sequence number: another number would be another request.
        while send().is_err_and(|error| !is_gone_error(error))
            && service.is_peer_connected(&self.peer)
        {
            fsleep(Delta::from_millis(RETRY_MS));
        }
        true
    }
}
