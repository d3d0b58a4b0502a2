// SPDX-License-Identifier: GPL-2.0

//! Pushes: this node writes bytes that it lends to the memory of another node, on behalf of a third node
//! (LITE executes `LT_memcpy` at the source).
//!
//! # Operation
//!
//! Serving a request must not wait for another node. So a push runs in the background on the workqueue of the
//! target node. The requester receives `EINPROGRESS` and repeats the request until the push is complete.
//!
//! # Recovery
//!
//! If a QP fails, the push waits until packets of that QP can no longer arrive. So no byte arrives after the
//! reply. If the requester or the home of the target dies or is fenced, no other node can detect the push.
//! Therefore this node does not send its names for the new view before such pushes are complete
//! ([`ActivePushes::involves_fenced`]).
//!
//! # Locking
//!
//! `ActivePushes::active` and `PushFailures::qp_failures` (mutexes) protect one list each. The connection's
//! state lock nests inside `qp_failures`.

use super::loan::LentChunk;
use crate::{
    cluster::Cluster,
    control::{
        client::ControlClient,
        priority::WorkPriority,
        reply_code::{errno_of, result_from_errno},
        retry::{retry_alloc, CONTROL_TIMEOUT_MS, DRAIN_POLL_MS},
    },
    errno::{self, TryError},
    fabric::{
        conn::credit::StaleQp,
        peer::Peer,
        qos::tenant::Tenant,
        send::{
            inflight::{Direction, InflightGuard, Segment, SegmentPoster},
            transfer::{ResumeState, Transfer, TransferStop},
        },
    },
    region::MemoryService,
    sys::{buffer::Buffer, deadline::Deadline},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
    time::{delay::fsleep, Delta},
};
use kite_core::{
    proto::once::RequestState,
    view::NodeInstance,
    wire::{ChunkLocation, LentChunkAddr},
};

/// Failed QPs of a push. Their packets may still arrive.
#[pin_data]
struct PushFailures {
    #[pin]
    qp_failures: Mutex<KVec<StaleQp>>,
}

impl PushFailures {
    /// Returns `true` if no packet of a failed QP can arrive any longer.
    fn is_drained(&self, service: &MemoryService) -> bool {
        let failures = self.qp_failures.lock();
        failures
            .iter()
            .all(|stale_qp| service.is_stale_qp_drained(stale_qp))
    }
}

impl InflightGuard for &PushFailures {
    fn add_stale_qp(&self, failure: StaleQp) {
        retry_alloc(|| Ok(self.qp_failures.lock().push(failure.clone(), GFP_KERNEL)?));
    }
}

/// Nodes involved in a push, the requester and the home of the target region, each with the admission at the
/// start of the push.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PushParties([(NodeInstance, u64); 2]);

impl PushParties {
    /// Returns `true` if neither node was fenced since the start of the push.
    fn are_connected(&self, cluster: &Cluster) -> bool {
        self.0
            .iter()
            .all(|(instance, admission)| cluster.is_connected(*instance, *admission))
    }
}

/// Nodes involved in the pushes in progress. One entry per push.
#[pin_data]
pub(in crate::region) struct ActivePushes {
    #[pin]
    active: Mutex<KVec<PushParties>>,
}

impl ActivePushes {
    /// Creates an empty list.
    pub(in crate::region) fn new() -> impl PinInit<Self> {
        pin_init!(Self { active <- new_mutex!(KVec::new(), "ActivePushes::active") })
    }

    fn add(&self, parties: PushParties) -> Result {
        Ok(self.active.lock().push(parties, GFP_KERNEL)?)
    }

    fn remove(&self, removed: PushParties) {
        let mut active = self.active.lock();
        if let Some(index) = active.iter().position(|parties| *parties == removed) {
            // Cannot fail: the index is that of an entry.
            let _ = active.remove(index);
        }
    }

    /// Returns `true` if a push involves a node that was removed or fenced since the start of the push.
    pub(in crate::region) fn involves_fenced(&self, cluster: &Cluster) -> bool {
        let active = self.active.lock();
        active.iter().any(|parties| !parties.are_connected(cluster))
    }
}

/// Push for a peer. Dropping it records the result. If the push has not run, the request is recorded as not
/// executed.
struct PushJob {
    service: Arc<MemoryService>,
    peer: Arc<Peer>,
    parties: PushParties,
    sequence: u64,
    /// 0 on success, else the errno. `None` until the push has run.
    result: Option<u64>,
}

impl PushJob {
    fn new(
        service: &Arc<MemoryService>,
        peer: Arc<Peer>,
        home: NodeInstance,
        sequence: u64,
    ) -> Result<Self> {
        let requester = (peer.instance(), peer.identity.admission);
        let home = (home, service.cluster.admission_of(home)?);
        let parties = PushParties([requester, home]);
        service.active_pushes().add(parties)?;
        Ok(Self {
            service: service.clone(),
            peer,
            parties,
            sequence,
            result: None,
        })
    }

    /// Runs the push, unless the requester or the home of the target region was removed or fenced.
    fn run(&mut self, push: &ChunkPush) {
        let pushed = if self.parties.are_connected(&self.service.cluster) {
            push.run(&self.service)
        } else {
            Err(errno::hostdown())
        };
        self.result = Some(pushed.err().map_or(0, errno_of));
    }
}

impl Drop for PushJob {
    fn drop(&mut self) {
        self.peer.complete_once(self.sequence, self.result);
        self.service.active_pushes().remove(self.parties);
    }
}

/// Push that a peer requests.
pub(in crate::region) struct PushRequest {
    pub(in crate::region) source: LentChunkAddr,
    /// Home of the target region.
    pub(in crate::region) home: NodeInstance,
    pub(in crate::region) destination: ChunkLocation,
    pub(in crate::region) len: u32,
}

impl PushRequest {
    /// Starts the push, or returns its progress. A push starts only if the peer has applied the same view as
    /// this node (`views_match`): otherwise either may count a dead node as member.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the push is not complete, or the views differ.
    /// - `ESTALE`, `EHOSTDOWN`: see [`MemoryService::find_lent_chunk`].
    /// - `EHOSTDOWN`: the target node or the home of the target region is not reachable.
    /// - `ERANGE`: the bytes are not all in the chunk.
    /// - `ETIMEDOUT`: the push timed out, or the peer does not wait for the result any longer.
    /// - `EIO`: the RNIC or the target node failed the write.
    pub(in crate::region) fn serve(
        &self,
        service: &Arc<MemoryService>,
        peer: Arc<Peer>,
        sequence: u64,
        views_match: bool,
    ) -> Result {
        match peer.admit_once(sequence)? {
            RequestState::New if views_match => {}
            RequestState::New => {
                peer.complete_once(sequence, None);
                return Err(TryError::InTransition.into());
            }
            RequestState::InProgress => return Err(TryError::InTransition.into()),
            RequestState::Indeterminate => return Err(ETIMEDOUT),
            RequestState::Done(answer) => return result_from_errno(answer),
        }
        let started = self.start(service, &peer, sequence);
        // Record the error, so that a delayed copy of the request fails, too.
        started.inspect_err(|error| peer.complete_once(sequence, Some(errno_of(*error))))?;
        Err(TryError::InTransition.into())
    }

    fn start(&self, service: &Arc<MemoryService>, peer: &Arc<Peer>, sequence: u64) -> Result {
        let region = (self.source.home, self.source.region);
        let push = ChunkPush {
            chunk: service.find_lent_chunk(region, self.source.chunk_addr)?,
            offset: self.source.offset,
            destination: self.destination,
            len: self.len,
        };
        let (cluster, target) = (&service.cluster, self.destination.instance);
        if !cluster.is_reachable(self.home) || !cluster.is_reachable(target) {
            return Err(errno::hostdown());
        }
        let mut job = PushJob::new(service, peer.clone(), self.home, sequence)?;
        service.defer(target.node, WorkPriority::Foreground, move |_, _| {
            job.run(&push)
        });
        Ok(())
    }
}

/// Write of bytes of a lent chunk to another node.
pub(in crate::region) struct ChunkPush {
    pub(in crate::region) chunk: Arc<LentChunk>,
    /// First byte in the chunk.
    pub(in crate::region) offset: u32,
    pub(in crate::region) destination: ChunkLocation,
    pub(in crate::region) len: u32,
}

impl ChunkPush {
    /// Writes the bytes. On return, no packet of the push can arrive any longer.
    ///
    /// # Errors
    ///
    /// - `ERANGE`: the bytes are not all in the chunk.
    /// - `EHOSTDOWN`: the target node is not reachable.
    /// - `ETIMEDOUT`: the write did not complete within [`CONTROL_TIMEOUT_MS`].
    /// - `EIO`: the RNIC or the target node failed the write.
    /// - `ENOMEM`: out of memory.
    pub(in crate::region) fn run(&self, service: &MemoryService) -> Result {
        let (chunk, offset, len) = (&self.chunk, self.offset as usize, self.len as usize);
        if offset > chunk.len() || len > chunk.len() - offset {
            return Err(ERANGE);
        }
        // SAFETY: The range check above proves that `len` bytes exist from `offset` on. They stay allocated
        // while `chunk` exists.
        let memory = unsafe { Buffer::from_kernel(chunk.as_ptr().add(offset), len) };
        let failures = KBox::pin_init(
            pin_init!(PushFailures { qp_failures <- new_mutex!(KVec::new(), "PushFailures::qp_failures") }),
            GFP_KERNEL,
        )?;
        let tenant = KBox::pin_init(Tenant::new(service.fabric().qos.clone(), None), GFP_KERNEL)?;
        let poster = SegmentPoster {
            fabric: service.fabric(),
            direction: Direction::Write,
            buffer: &memory,
            tenant: &tenant,
        };
        let pushed = self.transfer(poster, &failures);
        while !failures.is_drained(service) {
            fsleep(Delta::from_millis(DRAIN_POLL_MS));
        }
        pushed.map_err(|stop| match stop {
            TransferStop::Failed(error) if error != EIO => error,
            // Kernel memory is always present, and the guard is always granted. So only `EIO` remains. The
            // RNIC may still access the chunk: leak the chunk rather than reuse its memory.
            _ => {
                core::mem::forget(chunk.clone());
                EIO
            }
        })
    }

    fn transfer(
        &self,
        poster: SegmentPoster<'_>,
        failures: &PushFailures,
    ) -> Result<(), TransferStop> {
        let segment = Segment {
            instance: self.destination.instance,
            addr: self.destination.addr,
            len: self.len as usize,
            buffer_offset: 0,
        };
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let mut resume_state = ResumeState::default();
        let mut transfer = Transfer::new(poster, deadline, || Ok(failures), &mut resume_state);
        transfer
            .add_segment(segment)
            .and_then(|()| transfer.drain())
    }
}
