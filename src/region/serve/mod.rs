// SPDX-License-Identifier: GPL-2.0

//! Serves the control requests of other nodes and of this node.
//!
//! # Operation
//!
//! Requests of peers are copied and served on a workqueue. Requests that take long have their own, so that no
//! others wait for them. [`ControlServer`] serves one request. It selects the role in which this node serves
//! the request: [`lender`], [`home`], [`mapper`] or [`name_owner`]. All requests are idempotent or executed
//! at most once by sequence number, since a requester retries a request until the reply arrives. No request
//! waits for another node.
//!
//! # Recovery
//!
//! A request that cannot be served yet fails with `EAGAIN` or `EINPROGRESS`, and the requester retries it.
//! The epoch in the header detects that requester and server act on different views.
//!
//! # Locking
//!
//! At-most-once requests run inside [`Peer::execute_once`], which holds the peer's reply cache (mutex).
//! Nested inside are the mutexes of the region, the mappings, the chunk maps and the loans that a request
//! uses.

mod home;
mod lender;
mod mapper;
mod name_owner;

use super::{kernel_atomic::MrWord, MemoryService};
use crate::{
    errno::{TryError, TryResult},
    fabric::peer::Peer,
    verbs::log::rnic_debug,
};
use kernel::{alloc::AllocError, prelude::*, sync::Arc};
use kite_core::{
    atomic::AtomicOp,
    layout::StripeShare,
    wire::{
        self, targets::DirectoryEntry, ControlBody, ControlHeader, ControlKind, ControlReply,
        ControlRequest, MAX_CONTROL_BYTES, PUSH_SEQUENCE_FLAG,
    },
};

/// Returns the reply to a request without result.
fn to_done((): ()) -> ControlReply<'static> {
    ControlReply::Done
}

/// Returns the reply to a request for an old value.
fn to_old_value(word: u64) -> ControlReply<'static> {
    ControlReply::OldValue { word }
}

/// Encodes the reply to the request with this header. Returns its length.
pub(crate) fn encode_reply(
    header: &ControlHeader,
    answer: Result<ControlReply<'static>>,
    out: &mut [u8],
) -> usize {
    let reply = answer.unwrap_or_else(|error| ControlReply::Failed {
        errno: error.to_errno().unsigned_abs(),
    });
    wire::encode_reply(&reply_header(header), &reply, out).unwrap_or(0)
}

fn reply_header(header: &ControlHeader) -> ControlHeader {
    ControlHeader {
        kind: ControlKind::Reply,
        ..*header
    }
}

impl MemoryService {
    /// Queues a peer's request to its workqueue. The caller has checked the format of the request. `serve`
    /// encodes the reply to a request of a node and returns its length.
    pub(crate) fn serve_deferred(
        self: &Arc<Self>,
        from: Arc<Peer>,
        header: ControlHeader,
        bytes: &[u8],
        serve: impl FnOnce(u32, &ControlHeader, &ControlRequest<'_>, &mut [u8]) -> usize
            + Send
            + 'static,
    ) {
        let Ok((_, ControlBody::Request(request))) = wire::decode_control(bytes) else {
            return;
        };
        let received = ReceivedRequest::new(self, &from, header, bytes);
        let queued = received.and_then(|received| {
            self.queue_for(&request)
                .try_spawn(GFP_KERNEL, move || received.serve(serve))
        });
        // On failure, the peer retries the request or times out.
        if queued.is_err() {
            from.complete_request(&header);
        }
    }

    /// Serves a request of `node`. Encodes the reply into `out` and returns its length.
    pub(crate) fn serve(
        self: &Arc<Self>,
        node: u32,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
        out: &mut [u8],
    ) -> usize {
        let server = ControlServer {
            service: self,
            node,
            header,
        };
        server.serve(request, out)
    }
}

/// Copy of a peer's request, until a worker serves the request.
struct ReceivedRequest {
    service: Arc<MemoryService>,
    from: Arc<Peer>,
    header: ControlHeader,
    bytes: KVec<u8>,
}

impl ReceivedRequest {
    fn new(
        service: &Arc<MemoryService>,
        from: &Arc<Peer>,
        header: ControlHeader,
        bytes: &[u8],
    ) -> Result<Self, AllocError> {
        let mut copy = KVec::new();
        copy.extend_from_slice(bytes, GFP_KERNEL)?;
        Ok(Self {
            service: service.clone(),
            from: from.clone(),
            header,
            bytes: copy,
        })
    }

    /// Serves the request and sends the reply. A view change waits for requests being served
    /// ([`MemoryService::set_view`]). So nothing is done for a removed node after its state was cleared.
    fn serve(
        self,
        serve: impl FnOnce(u32, &ControlHeader, &ControlRequest<'_>, &mut [u8]) -> usize,
    ) {
        let (reply, fabric) = (self.build_reply(serve), self.service.fabric());
        let channel = self.from.complete_request(&self.header);
        let answer = reply.zip(channel).ok_or(ENOMEM);
        let sent = answer.and_then(|(reply, channel)| self.from.send_reply(channel, &reply));
        if let Err(error) = sent {
            rnic_debug!(
                fabric.device(),
                "node {}: request without reply: {error:?}\n",
                self.from.node()
            );
        }
    }

    /// Returns the reply, or `None` if out of memory, or if the sender was fenced since.
    fn build_reply(
        &self,
        serve: impl FnOnce(u32, &ControlHeader, &ControlRequest<'_>, &mut [u8]) -> usize,
    ) -> Option<KVec<u8>> {
        let Ok((header, ControlBody::Request(request))) = wire::decode_control(&self.bytes) else {
            return None;
        };
        let mut reply = KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL).ok()?;
        let from = self.from.instance();
        if self.from.is_closed() {
            return None;
        }
        let len = serve(from.node, &header, &request, &mut reply);
        reply.truncate(len);
        self.service.stats.ctrl_requests_served.add(1);
        Some(reply)
    }
}

/// Part of this node that serves a request.
enum Role {
    /// Memory of this node that is lent to the home of a region.
    Lender,
    /// Regions of which this node is the home.
    Home,
    /// Mappings of this node.
    Mapper,
    /// Names that this node owns.
    NameOwner,
    /// State that belongs to no region.
    Peer,
    /// Requests with a list as reply, by [`ControlServer::serve_list`].
    List,
    /// Ring requests, which [`crate::rpc`] serves.
    RpcServer,
}

/// Returns the role that serves a request. The match is exhaustive: a new request needs a role.
fn role_of(request: &ControlRequest<'_>) -> Role {
    match request {
        ControlRequest::ReleaseLoan { .. }
        | ControlRequest::ShrinkLoan { .. }
        | ControlRequest::RegionAtomic { .. }
        | ControlRequest::Fill { .. }
        | ControlRequest::Copy { .. }
        | ControlRequest::PushCopy { .. } => Role::Lender,
        ControlRequest::MapRegion { .. }
        | ControlRequest::UnmapRegion { .. }
        | ControlRequest::FreeRegion { .. }
        | ControlRequest::EnqueueWaiter { .. }
        | ControlRequest::RemoveWaiter { .. }
        | ControlRequest::MigrateRegion { .. }
        | ControlRequest::RenameRegion { .. }
        | ControlRequest::ChangeStatus { .. }
        | ControlRequest::GrantRights { .. }
        | ControlRequest::RevokeStatus { .. } => Role::Home,
        ControlRequest::InvalidateMapping { .. }
        | ControlRequest::QuiesceRegion { .. }
        | ControlRequest::ResumeRegion { .. }
        | ControlRequest::NotifyGranted { .. } => Role::Mapper,
        ControlRequest::RegisterName { .. }
        | ControlRequest::UnregisterName { .. }
        | ControlRequest::LookupName { .. }
        | ControlRequest::SyncNames { .. } => Role::NameOwner,
        ControlRequest::CancelRequest { .. }
        | ControlRequest::PublishAddress { .. }
        | ControlRequest::Probe
        | ControlRequest::MrAtomic { .. } => Role::Peer,
        ControlRequest::AllocLoan { .. }
        | ControlRequest::GetLoanChunks { .. }
        | ControlRequest::LocateChunks { .. }
        | ControlRequest::ListRegions { .. } => Role::List,
        ControlRequest::AttachRing { .. } | ControlRequest::DetachRing { .. } => Role::RpcServer,
    }
}

/// Server of one request of a node.
struct ControlServer<'a> {
    service: &'a Arc<MemoryService>,
    /// Node that sent the request. May be this node.
    node: u32,
    header: &'a ControlHeader,
}

impl ControlServer<'_> {
    /// Serves the request. Encodes the reply into `out` and returns its length.
    fn serve(&self, request: &ControlRequest<'_>, out: &mut [u8]) -> usize {
        match self.serve_list(request, out) {
            None => encode_reply(self.header, self.dispatch(request), out),
            Some(Ok(len)) => len,
            Some(Err(error)) => encode_reply(self.header, Err(error), out),
        }
    }

    /// Serves a request for a list. Encodes the list into `out` and returns its length. Returns `None` for
    /// any other request.
    fn serve_list(&self, request: &ControlRequest<'_>, out: &mut [u8]) -> Option<Result<usize>> {
        Some(match *request {
            ControlRequest::AllocLoan {
                loan,
                region,
                shift,
                chunk_count,
                last_chunk_len,
            } => {
                let stripe = StripeShare {
                    chunk_count,
                    last_chunk_len,
                };
                self.serve_alloc_loan(loan, region, (shift, stripe), out)
            }
            ControlRequest::GetLoanChunks { loan, first_chunk } => {
                self.write_addresses(loan, first_chunk, out)
            }
            ControlRequest::LocateChunks {
                region,
                first_chunk,
            } => self.write_locations(region, first_chunk, out),
            ControlRequest::ListRegions {
                cursor,
                max_entries,
            } => Ok(self.write_region_list(cursor, max_entries, out)),
            _ => return None,
        })
    }

    /// Serves a request that has no list as reply.
    fn dispatch(&self, request: &ControlRequest<'_>) -> Result<ControlReply<'static>> {
        let served = match role_of(request) {
            Role::Lender => self.serve_as_lender(request),
            Role::Home => self.serve_as_home(request),
            Role::Mapper => self.serve_as_mapper(request),
            Role::NameOwner => self.serve_as_name_owner(request),
            Role::Peer => self.serve_as_peer(request),
            Role::List | Role::RpcServer => None,
        };
        served.unwrap_or(Err(EINVAL))
    }

    /// Serves a request that concerns no region. Returns `None` for any other request.
    fn serve_as_peer(&self, request: &ControlRequest<'_>) -> Option<Result<ControlReply<'static>>> {
        Some(match *request {
            ControlRequest::CancelRequest { sequence } => self.serve_cancel(sequence).map(to_done),
            ControlRequest::PublishAddress { ref entry } => self.serve_publish_address(entry),
            ControlRequest::Probe => Ok(ControlReply::Done),
            ControlRequest::MrAtomic {
                sequence,
                mr_key,
                uid,
                addr,
                op,
            } => {
                let word = MrWord { mr_key, uid, addr };
                self.serve_mr_atomic(sequence, word, op).map(to_old_value)
            }
            _ => return None,
        })
    }

    /// Cancels a request of a peer that was not executed yet.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the request is in execution, or see [`Self::check_requester_view`].
    fn serve_cancel(&self, sequence: u64) -> Result {
        let canceled = self.peer()?.execute_once(sequence, || Ok(0));
        // Any other result means that the request is completed and will not be executed later.
        if canceled == Err(TryError::InTransition) {
            return Err(TryError::InTransition.into());
        }
        if sequence & PUSH_SEQUENCE_FLAG != 0 {
            self.check_requester_view()?;
        }
        Ok(())
    }

    /// Stores the directory entry of a peer in the replica of this node.
    fn serve_publish_address(&self, entry: &DirectoryEntry) -> Result<ControlReply<'static>> {
        let (addr, bucket_count) = self.service.cluster.publish_entry(self.node, entry)?;
        Ok(ControlReply::DirectoryAddr { addr, bucket_count })
    }

    /// Executes an atomic operation on an MR of a local process. Returns the old value.
    ///
    /// # Errors
    ///
    /// See [`MrWord::request_atomic`].
    fn serve_mr_atomic(&self, sequence: u64, word: MrWord, op: AtomicOp) -> Result<u64> {
        let update = || word.update(self.service.fabric(), op);
        Ok(self.peer()?.execute_once_unordered(sequence, update)?)
    }

    /// Returns the peer that sent the request.
    fn peer(&self) -> Result<Arc<Peer>> {
        self.service.fabric().peer(self.node)
    }

    fn reply_header(&self) -> ControlHeader {
        reply_header(self.header)
    }

    /// Checks that this node has applied all views that the requester has applied.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the requester may have removed a node that can still access memory through
    ///   this node.
    fn check_own_view(&self) -> TryResult {
        let is_reached = self.header.epoch <= self.service.cluster.epoch();
        is_reached.then_some(()).ok_or(TryError::WouldBlock)
    }

    /// Checks that the requester has applied all views that this node has applied.
    ///
    /// # Errors
    ///
    /// - [`TryError::InTransition`]: this node has fenced a node that the requester may still count as
    ///   reachable. Packets sent to the fenced node may arrive late, and that node may not have been notified
    ///   either.
    fn check_requester_view(&self) -> TryResult {
        let is_reached = self.header.epoch >= self.service.cluster.epoch();
        is_reached.then_some(()).ok_or(TryError::InTransition)
    }
}
