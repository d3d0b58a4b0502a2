// SPDX-License-Identifier: GPL-2.0

//! Bytes that the node that lends them writes to another node's memory, for a third (LITE: `LT_memcpy` is
//! executed at the source).
//!
//! To answer a request no other node is asked, so the bytes go in the background, in the line of the node that
//! they go to, and who asks is told to ask again until they are there. What is still under way when a queue pair
//! fails is waited for: when the answer comes, nothing comes after it. And as nobody else knows of what is pushed
//! for a node that has died, nobody hears from us of that death before it is over.

use super::loan::LentChunk;
use crate::{
    errno,
    fabric::{
        conn::credit::StaleQp,
        peer::Peer,
        qos::tenant::Tenant,
        send::{
            inflight::{Direction, InflightGuard, Segment, SegmentPoster},
            transfer::{ResumeState, Transfer, TransferStop},
        },
    },
    region::{
        home::reclaim::{retry_alloc, WorkPriority, DRAIN_POLL_MS},
        serve::{errno_of, result_from_errno},
        MemoryService, CONTROL_TIMEOUT_MS,
    },
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

/// What a push has left behind that may come late.
#[pin_data]
struct PushFailures {
    #[pin]
    qp_failures: Mutex<KVec<StaleQp>>,
}

impl InflightGuard for &PushFailures {
    fn add_stale_qp(&self, failure: StaleQp) {
        retry_alloc(|| Ok(self.qp_failures.lock().push(failure.clone(), GFP_KERNEL)?));
    }
}

/// Who is concerned by a push: who asked for it, and the home of where it goes.
type PushParties = (NodeInstance, NodeInstance);

/// Whom pushes that are under way concern.
#[pin_data]
pub(in crate::region) struct ActivePushes {
    #[pin]
    active: Mutex<KVec<PushParties>>,
}

impl ActivePushes {
    /// None.
    pub(in crate::region) fn new() -> impl PinInit<Self> {
        pin_init!(Self { active <- new_mutex!(KVec::new()) })
    }

    /// Whether one concerns a node that `has` does not know.
    pub(in crate::region) fn involves_removed(
        &self,
        is_member: impl Fn(NodeInstance) -> bool,
    ) -> bool {
        let active = self.active.lock();
        active
            .iter()
            .any(|(requester, home)| !is_member(*requester) || !is_member(*home))
    }
}

/// A push for a peer, which hears that nothing was done if this is dropped before it is over.
struct PushJob {
    memory_service: Arc<MemoryService>,
    peer: Arc<Peer>,
    home: NodeInstance,
    sequence: u64,
    /// 0, or the errno.
    result: Option<u64>,
}

impl PushJob {
    fn new(
        memory_service: &Arc<MemoryService>,
        peer: Arc<Peer>,
        home: NodeInstance,
        sequence: u64,
    ) -> Result<Self> {
        let mut active = memory_service.active_pushes.active.lock();
        active.push((peer.instance(), home), GFP_KERNEL)?;
        Ok(Self {
            memory_service: memory_service.clone(),
            peer,
            home,
            sequence,
            result: None,
        })
    }

    fn parties(&self) -> PushParties {
        (self.peer.instance(), self.home)
    }
}

impl Drop for PushJob {
    fn drop(&mut self) {
        self.peer.complete_once(self.sequence, self.result);
        let mut active = self.memory_service.active_pushes.active.lock();
        if let Some(index) = active.iter().position(|parties| *parties == self.parties()) {
            let _ = active.remove(index);
        }
    }
}

impl MemoryService {
    /// Begins to push memory that this node lends, for a peer, or says how far that is. It begins only when the peer
    /// acts on the same view as we do: either may know of an end that the other does not.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS`; those of [`Self::find_lent`]; `EHOSTDOWN` if the other node is not in the view; `ERANGE`,
    /// `ETIMEDOUT`, `EIO`.
    pub(in crate::region) fn serve_push(
        self: &Arc<Self>,
        node: u32,
        sequence: u64,
        source: LentChunkAddr,
        (home, destination): (NodeInstance, ChunkLocation),
        len: u32,
        views_match: bool,
    ) -> Result {
        let peer = self.fabric().peer(node)?;
        match peer.admit_once(sequence)? {
            RequestState::New if views_match => {}
            RequestState::New => {
                peer.complete_once(sequence, None);
                return Err(errno::inprogress());
            }
            RequestState::InProgress => return Err(errno::inprogress()),
            RequestState::Indeterminate => return Err(ETIMEDOUT),
            RequestState::Done(answer) => return result_from_errno(answer),
        }
        let started = self.start_push(&peer, sequence, source, (home, destination), len);
        // A copy that comes late is to be refused, too.
        started.inspect_err(|error| peer.complete_once(sequence, Some(errno_of(*error))))?;
        Err(errno::inprogress())
    }

    fn start_push(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        sequence: u64,
        source: LentChunkAddr,
        (home, destination): (NodeInstance, ChunkLocation),
        len: u32,
    ) -> Result {
        let chunk = self.find_lent_chunk(source.home, source.region, source.chunk_addr)?;
        if !self.cluster.is_member(home) || !self.cluster.is_member(destination.instance) {
            return Err(errno::hostdown());
        }
        let mut job = PushJob::new(self, peer.clone(), home, sequence)?;
        self.defer(
            destination.instance.node,
            WorkPriority::Foreground,
            move |memory_service, _| {
                let (requester, home) = job.parties();
                job.result = Some(
                    if memory_service.cluster.is_member(requester)
                        && memory_service.cluster.is_member(home)
                    {
                        let pushed =
                            memory_service.push_chunk(&chunk, source.offset, destination, len);
                        pushed.err().map_or(0, errno_of)
                    } else {
                        errno_of(errno::hostdown())
                    },
                );
            },
        );
        Ok(())
    }

    /// Writes `len` bytes of a chunk of ours to another node. When this returns, nothing of it can come late.
    ///
    /// # Errors
    ///
    /// `ERANGE` if they are not all in the chunk; `EHOSTDOWN`, `ETIMEDOUT`, `EIO`, `ENOMEM`.
    pub(in crate::region) fn push_chunk(
        &self,
        chunk: &Arc<LentChunk>,
        offset: u32,
        destination: ChunkLocation,
        len: u32,
    ) -> Result {
        let (offset, len) = (offset as usize, len as usize);
        if offset > chunk.len() || len > chunk.len() - offset {
            return Err(ERANGE);
        }
        // SAFETY: So many bytes are there from `offset` on, and stay while `chunk` does.
        let memory = unsafe { Buffer::from_kernel(chunk.as_ptr().add(offset), len) };
        let failures = KBox::pin_init(
            pin_init!(PushFailures { qp_failures <- new_mutex!(KVec::new()) }),
            GFP_KERNEL,
        )?;
        let tenant = KBox::pin_init(Tenant::new(self.fabric().qos.clone(), None), GFP_KERNEL)?;
        let segment = Segment {
            instance: destination.instance,
            addr: destination.addr,
            len,
            buffer_offset: 0,
        };
        let poster = SegmentPoster {
            fabric: self.fabric(),
            direction: Direction::Write,
            buffer: &memory,
            tenant: &tenant,
        };
        let deadline = Deadline::after_ms(CONTROL_TIMEOUT_MS);
        let mut resume_state = ResumeState::default();
        let mut transfer = Transfer::new(poster, deadline, || Ok(&*failures), &mut resume_state);
        let pushed = transfer
            .add_segment(segment)
            .and_then(|()| transfer.drain());
        drop(transfer);
        while !failures.qp_failures.lock().iter().all(StaleQp::is_fenced)
            && self.cluster.is_member(destination.instance)
        {
            fsleep(Delta::from_millis(DRAIN_POLL_MS));
        }
        pushed.map_err(|stop| match stop {
            TransferStop::Failed(error) if error != EIO => error,
            // The kernel's memory is present, and so is its permission. The RNIC may not let go of it: better lost than
            // used again.
            _ => {
                core::mem::forget(chunk.clone());
                EIO
            }
        })
    }
}
