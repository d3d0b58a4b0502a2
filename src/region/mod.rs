// SPDX-License-Identifier: GPL-2.0

//! Local memory regions (LMRs): memory of any nodes, by name, used through handles (LITE, section 4).
//!
//! A node plays up to four parts in a region: it *lends* memory to it ([`lease`]), it is its *home*
//! ([`region`]), it *keeps* its name ([`crate::cluster`]), and it has it *mapped* ([`mapping`]). They
//! talk by the requests of `kite_core::wire`; a node that plays several talks to itself in the same
//! way ([`Lmr::ask`]).
//!
//! To answer a request no other node is ever asked ([`serve`]). What needs others, such as freeing a
//! region, is done by errands that nobody waits for with a lock or a credit held ([`errands`], [`reclaim`],
//! [`view`]).

pub(crate) mod alloc;
pub(crate) mod grant;
pub(crate) mod home;
pub(crate) mod kernel_atomic;
pub(crate) mod lend;
pub(crate) mod locks;
pub(crate) mod map;
pub(crate) mod serve;
pub(crate) mod view_change;
pub(crate) mod workqueues;

use self::{
    home::{
        reclaim::{WorkPriority, DRAIN_POLL_MS},
        RegionTable,
    },
    lend::{
        loan::{LendLimits, LoanTable},
        push::ActivePushes,
    },
    locks::{is_gone_error, LocalWaiters},
    map::MappingTable,
    workqueues::PeerWorkqueues,
};
use crate::{
    bindings,
    cluster::Cluster,
    errno,
    fabric::{
        peer::{session::SequenceGuard, Peer},
        Fabric,
    },
    stats::Stats,
    sys::{
        deadline::{retry_until, Deadline},
        workqueue::OwnedQueue,
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::NodeInstance,
    wire::{
        self, ControlBody, ControlHeader, ControlKind, ControlReply, ControlRequest,
        MAX_CONTROL_BYTES, PUSH_SEQUENCE_FLAG,
    },
};

/// How long control requests may take that the caller set no deadline for.
pub(crate) const CONTROL_TIMEOUT_MS: u32 = 10_000;

/// Requests answered at a time.
const REQUESTS_MAX_ACTIVE: c_int = 32;

/// Regions of a node that move at a time.
const MOVES_MAX_ACTIVE: c_int = 8;

/// The memory service of one RNIC.
#[pin_data]
pub(crate) struct MemoryService {
    #[pin]
    pub(crate) cluster: Cluster,
    #[pin]
    loans: LoanTable,
    #[pin]
    regions: RegionTable,
    #[pin]
    mappings: MappingTable,
    #[pin]
    waiters: LocalWaiters,
    /// Source of numbers for regions, leases and mappings.
    next_id: Atomic<u64>,
    #[pin]
    active_pushes: ActivePushes,
    /// Held while the view changes.
    #[pin]
    view_change_lock: Mutex<()>,
    /// Answers requests; nothing on it waits for another node.
    request_queue: OwnedQueue,
    /// Moves regions of ours.
    move_queue: OwnedQueue,
    /// Work that asks other nodes, and that somebody waits for.
    #[pin]
    foreground_queues: PeerWorkqueues,
    /// Such work for who waits for a lock or at a barrier.
    #[pin]
    lock_queues: PeerWorkqueues,
    /// Such work that nobody waits for.
    #[pin]
    background_queues: PeerWorkqueues,
    /// Tells names: nobody's wish for memory or names is granted before, so it waits behind no other work.
    #[pin]
    announce_queues: PeerWorkqueues,
    pub(crate) stats: Arc<Stats>,
}

/// The answer to a request.
pub(crate) struct ReplyMessage(KVec<u8>);

impl ReplyMessage {
    /// What it says.
    ///
    /// # Errors
    ///
    /// That of the node asked, if it failed; `EIO` if the answer is malformed.
    pub(crate) fn decode(&self) -> Result<ControlReply<'_>> {
        match wire::decode_control(&self.0) {
            Ok((_, ControlBody::Reply(ControlReply::Failed { errno }))) => {
                Err(Error::from_errno(-(errno as c_int)))
            }
            Ok((_, ControlBody::Reply(reply))) => Ok(reply),
            _ => Err(EIO),
        }
    }

    /// Of a request that is either done or refused.
    ///
    /// # Errors
    ///
    /// As for [`Self::reply`].
    fn expect_done(&self) -> Result {
        match self.decode()? {
            ControlReply::Done => Ok(()),
            _ => Err(EIO),
        }
    }

    /// What a word was that was to be changed.
    ///
    /// # Errors
    ///
    /// As for [`Self::reply`].
    fn old_value(&self) -> Result<u64> {
        match self.decode()? {
            ControlReply::OldValue { word } => Ok(word),
            _ => Err(EIO),
        }
    }

    /// Where the directory is of who was told a target.
    ///
    /// # Errors
    ///
    /// As for [`Self::reply`].
    fn directory_addr(&self) -> Result<(u64, u32)> {
        match self.decode()? {
            ControlReply::DirectoryAddr {
                addr,
                bucket_count: buckets,
            } => Ok((addr, buckets)),
            _ => Err(EIO),
        }
    }
}

impl MemoryService {
    /// Makes the service.
    pub(crate) fn new(fabric: Arc<Fabric>, limits: LendLimits) -> Result<Arc<Self>> {
        let (device, stats) = (fabric.device(), fabric.stats.clone());
        Arc::pin_init(
            try_pin_init!(Self {
                cluster <- Cluster::new(fabric),
                loans <- LoanTable::new(device, limits, stats.clone()),
                regions <- RegionTable::new(),
                mappings <- MappingTable::new(),
                waiters <- LocalWaiters::new(),
                active_pushes <- ActivePushes::new(),
                // Numbers of a former life of this node must not be taken for those of this one.
                // SAFETY: The function has no preconditions.
                next_id: Atomic::new(u64::from(unsafe { bindings::get_random_u32() } >> 1) << 32 | 1),
                view_change_lock <- new_mutex!(()),
                request_queue: OwnedQueue::new(c"kite_requests", REQUESTS_MAX_ACTIVE)?,
                move_queue: OwnedQueue::new(c"kite_moves", MOVES_MAX_ACTIVE)?,
                foreground_queues <- PeerWorkqueues::new(c"kite_errands"),
                lock_queues <- PeerWorkqueues::new(c"kite_turns"),
                background_queues <- PeerWorkqueues::new(c"kite_leftovers"),
                announce_queues <- PeerWorkqueues::new(c"kite_names"),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    fn fabric(&self) -> &Fabric {
        &self.cluster.fabric
    }

    /// All lines of work that asks other nodes.
    fn all_workqueues(&self) -> [&PeerWorkqueues; 4] {
        [
            &self.lock_queues,
            &self.foreground_queues,
            &self.background_queues,
            &self.announce_queues,
        ]
    }

    fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1u64, Relaxed)
    }

    /// Asks `node`, which may be this one, until it says something else than that it cannot answer yet.
    ///
    /// # Errors
    ///
    /// That of the answer, if it is a failure; those of [`Fabric::call`] and [`Self::settle`].
    pub(crate) fn request_with_retry(
        self: &Arc<Self>,
        node: u32,
        request: &ControlRequest<'_>,
        deadline: Deadline,
    ) -> Result<ReplyMessage> {
        retry_until(deadline, || {
            let answer = self.request(node, request, deadline)?;
            answer.decode().map(drop)?;
            Ok(answer)
        })
    }

    /// Asks another node, in this life of it, for what it must not do twice. `request` is given the number of
    /// the request (`kite_core::proto::once`), which is of that kind: 0, or [`wire::PUSH`]. Where it is not known what came of it, that is cancelled in the
    /// background, and `asking` dropped after that: nothing is done any more by a mapping that has ended.
    ///
    /// # Errors
    ///
    /// As for [`Fabric::call_peer`]; that the answer is a failure is seen by [`Answer::reply`].
    fn request_exactly_once<'a, A: Send + 'static>(
        self: &Arc<Self>,
        request_guard: A,
        (instance, kind): (NodeInstance, u64),
        deadline: Deadline,
        request: impl FnOnce(u64) -> ControlRequest<'a>,
    ) -> Result<ReplyMessage> {
        let peer = self.fabric().peer_by_instance(instance)?;
        let seq_guard = retry_until(deadline, || peer.assign_sequence(kind))?;
        let request = request(seq_guard.sequence);
        let answer = retry_until(deadline, || {
            let answer = self.request_peer(&peer, &request, deadline)?;
            match answer.decode() {
                Err(error) if error == errno::inprogress() => Err(error),
                _ => Ok(answer),
            }
        });
        answer.inspect_err(|_| self.cancel_deferred(seq_guard, request_guard))
    }

    /// Sees to it that a request of which nobody knows whether it was done is not done any more.
    fn cancel_deferred<A: Send + 'static>(
        self: &Arc<Self>,
        seq_guard: SequenceGuard,
        request_guard: A,
    ) {
        // Those who wait for locks do not wait for what waits for a third node.
        let priority = match seq_guard.sequence & PUSH_SEQUENCE_FLAG {
            0 => WorkPriority::Lock,
            _ => WorkPriority::Background,
        };
        self.defer(
            seq_guard.peer.node(),
            priority,
            move |memory_service, instance| {
                if memory_service.request_cancel(&seq_guard) {
                    return drop(request_guard);
                }
                // Others in the line do not wait for what is being done.
                fsleep(Delta::from_millis(DRAIN_POLL_MS));
                if memory_service.cluster.is_member(instance) {
                    memory_service.cancel_deferred(seq_guard, request_guard);
                }
            },
        );
    }

    /// Asks once for a request not to be done any more. Returns whether nothing is done any more.
    fn request_cancel(&self, seq_guard: &SequenceGuard) -> bool {
        let request = ControlRequest::CancelRequest {
            sequence: seq_guard.sequence,
        };
        match self.request_peer(
            &seq_guard.peer,
            &request,
            Deadline::after_ms(CONTROL_TIMEOUT_MS),
        ) {
            Ok(answer) => answer.decode().err() != Some(errno::inprogress()),
            // Either life is over, when all that is known of it says so.
            Err(error) => {
                is_gone_error(error) && !self.cluster.is_member(seq_guard.peer.instance())
            }
        }
    }

    /// Asks a peer, for as long as its life and ours last.
    ///
    /// # Errors
    ///
    /// As for [`Fabric::call_peer`]; that the answer is a failure is seen by [`Answer::reply`].
    fn request_peer(
        &self,
        peer: &Arc<Peer>,
        request: &ControlRequest<'_>,
        deadline: Deadline,
    ) -> Result<ReplyMessage> {
        let epoch = self.cluster.epoch();
        let answer = self
            .fabric()
            .send_control_request_to(peer, request, epoch, deadline);
        answer.map(ReplyMessage)
    }

    /// Asks `node`, which may be this one.
    ///
    /// # Errors
    ///
    /// As for [`Fabric::call`], and `EAGAIN` while the node is joining; that the answer is a failure is
    /// seen by [`Answer::reply`].
    fn request(
        self: &Arc<Self>,
        node: u32,
        request: &ControlRequest<'_>,
        deadline: Deadline,
    ) -> Result<ReplyMessage> {
        let epoch = self.cluster.epoch();
        if node != self.cluster.local_node()? {
            let answer = self
                .fabric()
                .send_control_request(node, request, epoch, deadline);
            return answer.map(ReplyMessage).map_err(|error| {
                // In the view and not yet, or not again, a peer.
                let joining = error == errno::hostdown() && self.cluster.instance_of(node).is_ok();
                if joining {
                    EAGAIN
                } else {
                    error
                }
            });
        }
        let mut bytes = KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL)?;
        let header = ControlHeader {
            kind: ControlKind::Request,
            request_id: 0,
            epoch,
            low_watermark: 0,
        };
        let len = self.serve(node, &header, request, &mut bytes);
        bytes.truncate(len);
        Ok(ReplyMessage(bytes))
    }
}
