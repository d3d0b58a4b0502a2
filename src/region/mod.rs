// SPDX-License-Identifier: GPL-2.0

//! Local memory regions (LMRs): named memory that any set of nodes lends, used through handles (LITE, section
//! 4).
//!
//! # Operation
//!
//! A node has up to four roles for a region. As *lender* it lends memory ([`lend::loan`]). As *home* it
//! manages the region ([`home`]). As *name owner* it resolves the name ([`crate::cluster`]). As *mapper* it
//! accesses the region ([`map`]). The roles exchange the control requests of `kite_core::wire`. A node with
//! several roles calls [`MemoryService::serve`] directly ([`MemoryService::request_with_retry`]).
//!
//! # Recovery
//!
//! Serving a request never waits for another node ([`serve`]). Work that needs other nodes, such as freeing a
//! region, runs on workqueues ([`workqueues`], [`home::reclaim`], [`view_change`]). No thread waits for that
//! work while it holds a lock or a credit.
//!
//! # Locking
//!
//! - `view_change_lock` (mutex) serializes view changes and leaving. The holder flushes `request_queue` and
//!   destroys workqueues, so no work item may take the lock.
//! - The tables have their own locks, described in their modules.

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

/// Timeout of control requests for which the caller sets no deadline, in ms.
pub(crate) const CONTROL_TIMEOUT_MS: u32 = 10_000;

/// Maximum number of requests served concurrently.
const REQUESTS_MAX_ACTIVE: c_int = 32;

/// Maximum number of regions of this node that move concurrently.
const MOVES_MAX_ACTIVE: c_int = 8;

/// Memory service of one RNIC.
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
    /// Next number for a region, loan or mapping.
    next_id: Atomic<u64>,
    #[pin]
    active_pushes: ActivePushes,
    /// Serializes view changes and leaving the cluster.
    #[pin]
    view_change_lock: Mutex<()>,
    /// Serves requests. No item on this queue waits for another node.
    request_queue: OwnedQueue,
    /// Moves regions whose home is this node.
    move_queue: OwnedQueue,
    /// Requests to other nodes for which a caller waits.
    #[pin]
    foreground_queues: PeerWorkqueues,
    /// Requests to other nodes for locks and barriers.
    #[pin]
    lock_queues: PeerWorkqueues,
    /// Requests to other nodes for which no caller waits.
    #[pin]
    background_queues: PeerWorkqueues,
    /// Announcements of names and addresses. No member grants memory or names before these arrive, so they
    /// have separate queues.
    #[pin]
    announce_queues: PeerWorkqueues,
    pub(crate) stats: Arc<Stats>,
}

/// Encoded reply to a control request.
pub(crate) struct ReplyMessage(KVec<u8>);

impl ReplyMessage {
    /// Decodes the reply.
    ///
    /// # Errors
    ///
    /// - `EIO`: the reply is malformed.
    /// - Other errors: the serving node failed the request with this error.
    pub(crate) fn decode(&self) -> Result<ControlReply<'_>> {
        match wire::decode_control(&self.0) {
            Ok((_, ControlBody::Reply(ControlReply::Failed { errno }))) => {
                Err(Error::from_errno(-(errno as c_int)))
            }
            Ok((_, ControlBody::Reply(reply))) => Ok(reply),
            _ => Err(EIO),
        }
    }

    /// Checks the reply to a request without result.
    ///
    /// # Errors
    ///
    /// See [`Self::decode`].
    fn expect_done(&self) -> Result {
        match self.decode()? {
            ControlReply::Done => Ok(()),
            _ => Err(EIO),
        }
    }

    /// Returns the old value from the reply to an atomic operation.
    ///
    /// # Errors
    ///
    /// See [`Self::decode`].
    fn old_value(&self) -> Result<u64> {
        match self.decode()? {
            ControlReply::OldValue { word } => Ok(word),
            _ => Err(EIO),
        }
    }

    /// Returns the address and the number of buckets of the directory replica that stored the address of this
    /// node.
    ///
    /// # Errors
    ///
    /// See [`Self::decode`].
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
    /// Creates the service.
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
                // Start at a random number: numbers of an earlier incarnation of this node must not be
                // reused.
                //
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

    /// Returns the workqueues of all kinds.
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

    /// Sends a request to `node`, which may be this node, and repeats it while the node replies `EAGAIN` or
    /// `EINPROGRESS`.
    ///
    /// # Errors
    ///
    /// Those of [`Self::request`] and [`retry_until`], and the error of the reply if the node failed the
    /// request.
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

    /// Sends a request to one incarnation of another node, which executes it at most once. `request` receives
    /// the sequence number (`kite_core::proto::once`), whose sequence space is `kind`: 0 or
    /// [`PUSH_SEQUENCE_FLAG`].
    ///
    /// If the outcome is unknown, the request is cancelled in the background, and `request_guard` is dropped
    /// afterwards. So no request of a mapping takes effect after the mapping has drained.
    ///
    /// # Errors
    ///
    /// See [`Fabric::send_control_request_to`]. If the node failed the request, [`ReplyMessage::decode`]
    /// returns the error.
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

    /// Cancels a request with unknown outcome in the background, until the request can no longer be executed.
    fn cancel_deferred<A: Send + 'static>(
        self: &Arc<Self>,
        seq_guard: SequenceGuard,
        request_guard: A,
    ) {
        // Cancelling a push may wait for a third node and must not delay lock requests.
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
                // Requeue, so that other work of the queue does not wait for a request in execution.
                fsleep(Delta::from_millis(DRAIN_POLL_MS));
                if memory_service.cluster.is_member(instance) {
                    memory_service.cancel_deferred(seq_guard, request_guard);
                }
            },
        );
    }

    /// Sends one cancellation. Returns `true` if the request is not executed any longer.
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
            // A view without the peer's incarnation means that no packet of the request is delivered any
            // longer.
            Err(error) => {
                is_gone_error(error) && !self.cluster.is_member(seq_guard.peer.instance())
            }
        }
    }

    /// Sends a request to a peer. Fails when either node restarts or leaves.
    ///
    /// # Errors
    ///
    /// See [`Fabric::send_control_request_to`]. If the node failed the request, [`ReplyMessage::decode`]
    /// returns the error.
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

    /// Sends a request to `node`, which may be this node.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the node is joining.
    /// - Other errors: see [`Fabric::send_control_request`]. If the node failed the request,
    ///   [`ReplyMessage::decode`] returns the error.
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
                // The node is in the view, but not a peer yet or again.
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
